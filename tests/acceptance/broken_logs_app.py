"""An app whose logging raises, from warnings on: its handler, a filter of it, or a filter of the engine's logger."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
from typing import Any, NoReturn

from mtask import App
from tests.acceptance import app as common

#: What of the logging raises.
BROKEN_VARIABLE = "MTASK_TEST_BROKEN_LOGS"

app = App()
app.include(common.app)


def _break(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        raise RuntimeError("this logging is broken")
    return True


class _Handler(logging.Handler):
    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        if what == "a filter of the handler":
            self.addFilter(_break)

    def emit(self, record: logging.LogRecord) -> None:
        if self._what == "the handler":
            _break(record)


def _install(what: str) -> None:
    if what == "a filter of the logger":
        logging.getLogger("mtask.worker").addFilter(_break)
    else:
        logging.getLogger().addHandler(_Handler(what))


_install(os.environ.get(BROKEN_VARIABLE, ""))


@app.task
async def raises_on_the_loop() -> NoReturn:
    """Fail."""
    raise ValueError("no luck")


@app.task
def raises_in_a_thread() -> NoReturn:
    """Fail."""
    raise ValueError("no luck")


@app.task(isolation="process")
def raises_in_an_executor() -> NoReturn:
    """Fail."""
    raise ValueError("no luck")


@app.task
async def leaves_a_callback_that_raises() -> None:
    """Leave a call to the event loop, which logs what it raises."""
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)


@app.task
async def ends_the_pinger() -> None:
    """Raise SystemExit in the thread that pings."""
    (pinger,) = (thread for thread in threading.enumerate() if thread.name == "mtask-pinger")
    ended: Any = ctypes.py_object(SystemExit)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(pinger.ident or 0), ended) == 1
