"""The app of the acceptance tests in a worker that dies while it tells the end of a task: to dependents, or an address.

MTASK_TEST_DIES names the point: right after the finish, which was acknowledged; after the delivery is published and
before the end is crossed off; or after the receiver has taken the message and before the delivery's own finish.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from mtask.features.callbacks import statements
from mtask.features.callbacks.sending import _Pinned
from mtask.kernel.worker.discovery.relays import Settler
from tests.acceptance.app import app

__all__ = ["app"]


def _die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


_POINT = os.environ["MTASK_TEST_DIES"]
if _POINT == "after the finish":
    settler: Any = Settler
    settler.submit = _die
elif _POINT == "before the cross-off":
    module: Any = statements
    module.cross_off = _die
else:
    assert _POINT == "after the answer"
    connection: Any = _Pinned
    connection.close = _die
