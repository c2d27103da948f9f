"""The app whose handlers run in executors, in tests. Each executor imports this module.

What handlers note goes into files, whose folder is in the params: the executors are other processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtask import App, Context, Fail, Next, Retry
from mtask.app.middleware import FinishCall, RunCall
from tests.integration.kernel.worker.hostile import ENDS

#: If this variable is set, executors cannot start. If it holds a path, its file is written at their stop.
BROKEN_VARIABLE, STOPPED_VARIABLE = "MTASK_TEST_BROKEN", "MTASK_TEST_STOPPED"
#: If this variable is set, executors take for ever to start.
SLOW_VARIABLE = "MTASK_TEST_SLOW"
_LOOK = 0.01
#: The signal disposition SIG_IGN, for `signal` of the C library: in threads, Python's own sets none.
_IGNORE = 1

app = App()
log = logging.getLogger("tests.isolated")


@app.on_start
async def pool() -> AsyncIterator[dict[str, int]]:
    """Give a value to handlers."""
    if BROKEN_VARIABLE in os.environ:
        raise RuntimeError("no pool today")
    if SLOW_VARIABLE in os.environ:
        path = Path(os.environ[SLOW_VARIABLE])
        note(str(path.parent), path.name, str(os.getpid()))
        await asyncio.sleep(3600)
    yield {"made by": os.getpid()}
    if STOPPED_VARIABLE in os.environ:
        path = Path(os.environ[STOPPED_VARIABLE])
        note(str(path.parent), path.name, str(os.getpid()))


#: What the middleware around "run" has seen in this process, and that around "finish".
around_runs: list[str] = []
around_finishes: list[str] = []


@app.middleware
async def around_run(call: RunCall) -> AsyncIterator[None]:
    around_runs.append(call.run_id)
    yield


@app.middleware("finish")
def around_finish(call: FinishCall) -> Iterator[None]:
    around_finishes.append(call.run_id)
    yield


def note(folder: str, name: str, text: str = "") -> None:
    """Write a file at once and whole."""
    draft = Path(folder) / f".{name}"
    draft.write_text(text)
    draft.rename(Path(folder) / name)


def _told(folder: str, context: Context) -> None:
    note(folder, f"started-{context.task.key}", str(os.getpid()))


# --- results ----------------------------------------------------------------------------------------------


@app.task(isolation="process")
def echo(context: Context, value: Any = None) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "value": value,
        "hook": context.value(pool)["made by"],
        "runs": len(around_runs),
        "attempt": context.attempt,
        "worker": context.worker_id,
        "run": context.run_id,
    }


@app.task(isolation="process")
async def echo_async(context: Context, value: Any = None) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"pid": os.getpid(), "value": value, "hook": context.value(pool)["made by"]}


@app.task(isolation="process")
def raises(kind: str) -> Any:
    if kind == "retry":
        raise Retry(delay=3600, reason="later")
    if kind == "fail":
        raise Fail("never")
    if kind == "exit":
        raise SystemExit(7)
    if kind == "unstorable":
        return object()
    if kind == "goes on":
        return Next("echo", {"value": 5}, returns="went on")
    if kind in ENDS:
        return ENDS[kind][0]()
    log.warning("about to fail")
    raise ValueError("a bad value")


@app.task(isolation="process")
def step(context: Context) -> list[Any]:
    added = context.add_child("child", "echo", {"value": 1}).get()
    return [added.created, dict(context.results())]


@app.task(isolation="process")
async def results(context: Context) -> list[str]:
    return sorted(await context.results())


@app.task(isolation="process")
def tell(context: Context, folder: str) -> None:
    context.progress(0.5, "half")
    _wait(folder)


@app.task
async def here() -> int:
    return os.getpid()


@app.task
def thread_or_not() -> int:
    return os.getpid()


@app.task(isolation="thread")
def thread() -> int:
    return os.getpid()


# --- handlers that go on ----------------------------------------------------------------------------------


def _wait(folder: str) -> None:
    while not (Path(folder) / "gate").exists():
        time.sleep(_LOOK)


async def _wait_async(folder: str) -> None:
    while not (Path(folder) / "gate").exists():  # noqa: ASYNC110 another process opens it
        await asyncio.sleep(_LOOK)


@app.task(isolation="process")
def hold(context: Context, folder: str) -> int:
    """Go on until the gate opens, and never look whether to end."""
    _told(folder, context)
    _wait(folder)
    return os.getpid()


@app.task(isolation="process")
def sees(context: Context, folder: str) -> list[bool]:
    """Go on until the gate opens, and tell what is known of the lease then."""
    _told(folder, context)
    _wait(folder)
    return [context.is_lease_valid, context.is_cancelled]


@app.task(isolation="process")
async def stubborn(context: Context, folder: str) -> None:
    """Go on although it is cancelled."""
    _told(folder, context)
    while True:
        try:
            await asyncio.sleep(_LOOK)
        except asyncio.CancelledError:
            note(folder, f"cancelled-{context.task.key}")


@app.task(isolation="process")
async def hold_async(context: Context, folder: str) -> int:
    _told(folder, context)
    try:
        await _wait_async(folder)
    except asyncio.CancelledError:
        note(folder, f"cancelled-{context.task.key}", str(os.getpid()))
        raise
    return os.getpid()


@app.task
async def hold_here(folder: str) -> None:
    await _wait_async(folder)


@app.task(isolation="process")
def looks(context: Context, folder: str) -> None:
    _told(folder, context)
    while not context.is_cancelled:
        time.sleep(_LOOK)
    note(folder, f"cancelled-{context.task.key}", str(os.getpid()))


@app.task(isolation="process")
def stuck(context: Context, folder: str, how: str) -> None:
    """Go on for good, in ways that leave Python no say."""
    if how == "ignores SIGTERM":
        ctypes.CDLL(None).signal(signal.SIGTERM, _IGNORE)
    if how == "forks":
        children = [subprocess.Popen(["sleep", "1000"]).pid, os.fork()]
        if children[1] == 0:
            time.sleep(1000)
            os._exit(0)
        note(folder, f"children-{context.task.key}", " ".join(map(str, children)))
    _told(folder, context)
    if how == "spins in C":
        sum(range(10**15))  # the interpreter's lock is held all the time
    while True:
        time.sleep(_LOOK)


# --- handlers that die ------------------------------------------------------------------------------------


def _die(how: str) -> None:
    if how == "SIGSEGV":
        ctypes.string_at(0)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "memory":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1024)) * 1024 * 4)  # written to, so it is resident
            time.sleep(0.001)


@app.task(isolation="process")
def die(context: Context, folder: str, how: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    note(folder, f"children-{context.task.key}", str(child.pid))
    _told(folder, context)
    _die(how)


@app.task(isolation="process")
async def die_async(context: Context, folder: str, how: str) -> None:
    _told(folder, context)
    _die(how)


@app.task(isolation="process", on_exception="fail")
def die_for_good() -> None:
    _die("exit")


@app.task(isolation="process")
def breaks(context: Context, folder: str, how: str) -> None:
    """Spoil the connection to the worker, and go on."""
    _told(folder, context)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and how == "closes all files":
            with suppress(OSError):
                os.close(descriptor)
        elif how == "writes to the socket" and _is_socket(descriptor):
            os.write(descriptor, b"\x05\0\0\0garbage")
    while True:
        time.sleep(_LOOK)


def _is_socket(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False


@app.task(isolation="process")
def walks(context: Context, folder: str) -> None:
    """Start a process that forks and exits, and so does each that comes of it: it is never where it was seen."""
    if os.fork() == 0:
        while True:
            if os.fork() != 0:
                os._exit(0)
    _told(folder, context)
    while True:
        time.sleep(_LOOK)


@app.task(isolation="process")
def inherited(context: Context) -> list[str]:
    """Return the files that a command has which a handler runs without a thought of files."""
    found = subprocess.run(
        ["sh", "-c", "ls -l /proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
    )
    return [line.rpartition("-> ")[2] for line in found.stdout.splitlines() if "socket:" in line]


# --- transactions -----------------------------------------------------------------------------------------


_kept: list[Any] = []


@app.task(isolation="process")
def commit(context: Context, folder: str, effects: str, then: str = "return") -> str:
    if then == "stay inside":
        kept = context.transaction().__enter__()
        kept.client[effects]["effects"].insert_one({"_id": context.task.id}, session=kept)
        _kept.append(kept)  # else the collection of garbage would abort the transaction
        return "inside"
    with context.transaction() as session:
        session.client[effects]["effects"].insert_one({"_id": context.task.id}, session=session)
        if then == "die inside":
            _told(folder, context)
            _die("SIGKILL")
        if then == "wait inside":
            _told(folder, context)
            _wait(folder)
        if then == "fail inside":
            raise Fail("changed its mind")
        if then == "go on":
            context.set_result(Next("echo", {"value": 6}))
    if then == "die after":
        _die("SIGKILL")
    if then == "fail after":
        raise ValueError("too late")
    return "committed"


@app.task(isolation="process")
async def commit_async(context: Context, folder: str, effects: str, then: str = "return") -> str:
    async with context.transaction() as session:
        await session.client[effects]["effects"].insert_one({"_id": context.task.id}, session=session)
        if then == "die inside":
            _told(folder, context)
            _die("SIGKILL")
    if then == "die after":
        _die("SIGKILL")
    return "committed"
