"""An app whose handlers fork: on the event loop, in a thread, and in an executor."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from mtask import App

app = App()
_forking = multiprocessing.get_context("fork")
_is_hasty = False
_wakeups = socket.socketpair()


def _die_early() -> None:
    if _is_hasty:  # as if its parent had been faster than the start of the child
        os.kill(os.getpid(), signal.SIGTERM)


os.register_at_fork(after_in_child=_die_early)


@app.on_start
async def take_wakeups() -> None:
    """Set a wake-up descriptor, as event loops do that handle signals."""
    _wakeups[1].setblocking(False)
    signal.set_wakeup_fd(_wakeups[1].fileno())


def _tell(told: Connection) -> None:
    told.send([signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1)])
    time.sleep(600)


def _fork(is_hasty: bool) -> list[Any]:
    """Fork a process and terminate it; return what it says of its signals, and the code with which it has ended."""
    global _is_hasty
    ours, theirs = _forking.Pipe()
    child = _forking.Process(target=_tell, args=(theirs,))
    _is_hasty = is_hasty
    child.start()
    _is_hasty = False
    told = [] if is_hasty else ours.recv()
    if not is_hasty:
        child.terminate()
    child.join(10.0)
    code = child.exitcode
    child.kill()
    child.join()
    return [*told, code]


@app.task
async def on_the_loop(is_hasty: bool) -> list[Any]:
    """Fork in an async handler."""
    return _fork(is_hasty)


@app.task
def in_a_thread(is_hasty: bool) -> list[Any]:
    """Fork in a thread."""
    return _fork(is_hasty)


@app.task(isolation="process")
def in_an_executor(is_hasty: bool) -> list[Any]:
    """Fork in an executor."""
    return _fork(is_hasty)


async def _end_as(how: str) -> None:
    """End the child of a fork."""
    match how:
        case "exits":
            sys.exit(3)
        case "raises":
            raise ValueError(how)
        case "waits":
            await asyncio.sleep(0)


@app.task
async def forks_on_the_loop() -> list[int]:
    """Fork processes that return, exit, raise and wait; return the codes with which they have ended."""
    codes = []
    for how in ("returns", "exits", "raises", "waits"):
        if (child := os.fork()) == 0:
            await _end_as(how)
            return []
        codes.append(_code_of(child))
    return codes


@app.task
def forks_in_a_thread() -> list[int]:
    """Do the same in a thread."""
    codes = []
    for how in ("returns", "exits", "raises"):
        if (child := os.fork()) == 0:
            asyncio.run(_end_as(how))
            return []
        codes.append(_code_of(child))
    return codes


def _code_of(child: int) -> int:
    """Return the code with which this process has ended; end it if it goes on."""
    until = time.monotonic() + 20.0
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
