"""What judges the values that handlers return: for workers and for their executors."""

from __future__ import annotations

from collections.abc import Mapping

from mtask.features.flows.chains import Chains
from mtask.kernel.document.handlers import Handler
from mtask.kernel.worker.running.outcomes import Successes


def successes(handlers: Mapping[str, Handler]) -> Successes:
    """Return what judges the values that these handlers return."""
    return Successes(Chains(handlers))
