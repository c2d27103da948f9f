"""What judges the values that handlers return: for workers and for their executors."""

from __future__ import annotations

from collections.abc import Mapping

from mtask.arguments.publish import Declarations
from mtask.features.flows.chains import Chains
from mtask.kernel.document.handlers import Handler
from mtask.kernel.worker.running.outcomes import Successes


def successes(handlers: Mapping[str, Handler], known: Declarations | None = None) -> Successes:
    """Return what judges the values that these handlers return. `known` tells what handlers of other apps declare."""
    return Successes(Chains(handlers, known))
