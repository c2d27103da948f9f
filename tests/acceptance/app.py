"""The app of the acceptance tests. Each handler does one thing, and records its start and its end.

What they note goes into a file of its own, so that it tells what ran independently of the task documents.
Each is told what to do by the task's params.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtask import App, Context, Fail, Retry

#: The environment variable that holds the path of the file of events.
EVENTS_VARIABLE = "MTASK_TEST_EVENTS"
#: How often a handler looks whether its gate is open, or whether it is to end, in seconds.
_LOOK = 0.01

app = App()


def note(context: Context, event: str, **more: Any) -> None:
    """Write down what a handler does, at once and whole: the process may be killed right after."""
    entry = {
        "event": event,
        "task_id": context.task.id,
        "run_id": context.run_id,
        "attempt": context.attempt,
        "worker_id": context.worker_id,
        "pid": os.getpid(),
        "monotonic": time.monotonic(),  # one clock for all processes of this machine, and never a false one
        **more,
    }
    with open(os.environ[EVENTS_VARIABLE], "ab", buffering=0) as file:  # appends: each write is whole
        file.write(json.dumps(entry).encode() + b"\n")


@contextmanager
def noted(context: Context) -> Iterator[None]:
    """Note the start and how it ended: "end", "cancelled" or "raised"; none of them if the process died."""
    note(context, "start")
    try:
        yield
    except asyncio.CancelledError:
        note(context, "cancelled")
        raise
    except BaseException as error:
        note(context, "raised", kind=type(error).__name__)
        raise
    note(context, "end")


@app.task
async def noop(context: Context, value: Any = None) -> Any:
    """Do nothing and return the value."""
    with noted(context):
        return value


@app.task
def noop_plain(context: Context, value: Any = None) -> Any:
    """Do nothing in a thread and return the value."""
    with noted(context):
        return value


@app.task
async def sleep(context: Context, seconds: float) -> str:
    """Take that long, without holding the event loop; return the worker's id."""
    with noted(context):
        await asyncio.sleep(seconds)
    return context.worker_id


@app.task
def sleep_plain(context: Context, seconds: float) -> str:
    """Take that long in a thread; end early when told to."""
    note(context, "start")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if context.is_cancelled:
            note(context, "cancelled")
            raise RuntimeError("told to end")
        time.sleep(_LOOK)
    note(context, "end")
    return context.worker_id


@app.task
def stubborn_plain(context: Context, seconds: float) -> str:
    """Take that long in a thread, deaf to its context."""
    with noted(context):
        time.sleep(seconds)
    return context.worker_id


@app.task
async def hold(context: Context, gate: str) -> str:
    """Go on until there is a file of that path; return the worker's id."""
    with noted(context):
        while not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 the test opens it from another process
            await asyncio.sleep(_LOOK)
    return context.worker_id


@app.task
def hold_plain(context: Context, gate: str) -> str:
    """Do as `hold`, in a thread; end early when told to."""
    note(context, "start")
    while not Path(gate).exists():
        if context.is_cancelled:
            note(context, "cancelled")
            raise RuntimeError("told to end")
        time.sleep(_LOOK)
    note(context, "end")
    return context.worker_id


@app.task
def hold_deaf(context: Context, gate: str) -> str:
    """Do as `hold`, in a thread and deaf to the context."""
    with noted(context):
        while not Path(gate).exists():
            time.sleep(_LOOK)
    return context.worker_id


@app.task
async def hold_blocking(context: Context, gate: str) -> str:
    """Do as `hold`, and block the event loop meanwhile."""
    with noted(context):
        while not Path(gate).exists():  # noqa: ASYNC240
            time.sleep(_LOOK)  # noqa: ASYNC251 it is meant to
    return context.worker_id


@app.task
async def hold_uncancellable(context: Context, gate: str) -> str:
    """Do as `hold`, and swallow every cancellation."""
    note(context, "start")
    while not Path(gate).exists():  # noqa: ASYNC240
        try:
            await asyncio.sleep(_LOOK)
        except asyncio.CancelledError:
            note(context, "cancelled")
    note(context, "end")
    return context.worker_id


@app.task
async def block(context: Context, seconds: float) -> str:
    """Block the event loop for that long."""
    with noted(context):
        time.sleep(seconds)  # noqa: ASYNC251 it is meant to
    return context.worker_id


@app.task
async def fail(context: Context, reason: str = "no luck") -> None:
    """Fail, always."""
    with noted(context):
        raise RuntimeError(reason)


@app.task
async def fail_on(context: Context, worker_ids: list[str]) -> str:
    """Fail on these workers, succeed on others."""
    with noted(context):
        if context.worker_id in worker_ids:
            raise RuntimeError(f"not on {context.worker_id}")
    return context.worker_id


@app.task
async def fail_times(context: Context, times: int) -> int:
    """Fail that many times, then succeed; return the attempt."""
    with noted(context):
        if context.attempt <= times:
            raise RuntimeError(f"attempt {context.attempt}")
    return context.attempt


@app.task(on_exception="fail")
async def fragile(context: Context) -> None:
    """Raise what would be tried again, were it not for on_exception."""
    with noted(context):
        raise ValueError("broken")


@app.task
async def fail_for_good(context: Context, reason: str) -> None:
    """Fail finally."""
    with noted(context):
        raise Fail(reason)


@app.task
async def retry_until(context: Context, attempt: int, delay: float = 0.0) -> int:
    """Go back, not counted, until this attempt."""
    with noted(context):
        if context.attempt < attempt:
            raise Retry(delay, "not yet")
    return context.attempt


@app.task
async def die(context: Context) -> None:
    """Take the whole process along."""
    note(context, "start")
    os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(60)


@app.task
async def die_on(context: Context, worker_ids: list[str]) -> str:
    """Take the process along on these workers, succeed on others."""
    note(context, "start")
    if context.worker_id in worker_ids:
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(60)
    note(context, "end")
    return context.worker_id


@app.task
async def raise_exit(context: Context) -> None:
    """Call sys.exit."""
    with noted(context):
        sys.exit(3)


@app.task
def raise_exit_plain(context: Context) -> None:
    """Call sys.exit in a thread."""
    with noted(context):
        sys.exit(3)


@app.task
async def unstorable(context: Context) -> Any:
    """Return what BSON cannot hold."""
    with noted(context):
        return object()


@app.task
async def too_large(context: Context, size: int) -> bytes:
    """Return that many bytes."""
    with noted(context):
        return b"x" * size


@app.task
async def deposit(
    context: Context,
    database: str,
    seconds: float = 0.0,
    gate: str | None = None,
    fail_on_attempts: list[int] = [],  # noqa: B006 a default that pydantic copies
    die_on_attempts: list[int] = [],  # noqa: B006
) -> str:
    """Write one document into `effects` in the task's own transaction.

    Between the write and the commit it takes `seconds`, waits for the gate, fails, or is killed, as told.
    """
    with noted(context):
        async with context.transaction() as session:
            effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
            await session.client[database]["effects"].insert_one(effect, session=session)
            note(context, "written")
            if context.attempt in die_on_attempts:
                os.kill(os.getpid(), signal.SIGKILL)
            if context.attempt in fail_on_attempts:
                raise RuntimeError(f"attempt {context.attempt}")
            await asyncio.sleep(seconds)
            while gate is not None and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(_LOOK)
    return context.worker_id


@app.task
def deposit_plain(context: Context, database: str, seconds: float = 0.0) -> str:
    """Do as `deposit`, in a thread."""
    with noted(context), context.transaction() as session:
        effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
        session.client[database]["effects"].insert_one(effect, session=session)
        note(context, "written")
        time.sleep(seconds)
    return context.worker_id
