"""The app of the acceptance tests in a worker that dies between the finish of a step and the release of its dependents.

The finish is written and acknowledged. The first thing that the worker would do for the dependents is to die.
"""

from __future__ import annotations

import os
import signal

from mtask.kernel.worker.discovery.relays import Settler
from tests.acceptance.app import app

__all__ = ["app"]


def _die(self: Settler, task_id: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Settler.submit = _die  # type: ignore[method-assign]
