"""The app of the upgrade tests, for either version of mtask. Each handler notes what it does before it goes on.

Only what the former version has may be imported here.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

from mtask import App, Context, Fail

#: Names the folder of the ledgers in a worker's environment.
FOLDER_VARIABLE = "MTASK_UPGRADE_FOLDER"
QUEUE, NARROW = "upgrade", "narrow"
#: The most runs of the queue NARROW at once.
WIDTH = 2

app = App()


@cache
def _ledger() -> int:
    path = Path(os.environ[FOLDER_VARIABLE]) / f"handlers-{os.getpid()}.jsonl"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def _note(context: Context, event: str) -> None:
    entry = {
        "event": event,
        "task_id": context.task.id,
        "run_id": context.run_id,
        "worker_id": context.worker_id,
        "version": os.environ["MTASK_UPGRADE_VERSION"],
        "pid": os.getpid(),
        "at": time.monotonic(),
    }
    os.write(_ledger(), json.dumps(entry).encode() + b"\n")  # one write: SIGKILL cannot cut it short


@contextmanager
def _noted(context: Context) -> Iterator[None]:
    """Note the start and the end of a handler. A process that died notes no end."""
    _note(context, "start")
    try:
        yield
    except BaseException:
        _note(context, "raised")
        raise
    _note(context, "end")


@app.task(queue=QUEUE)
async def quick(context: Context, value: int = 0) -> int:
    """Return at once."""
    with _noted(context):
        return value


@app.task(queue=QUEUE)
def plain(context: Context, value: int = 0) -> int:
    """Return at once, from a thread."""
    with _noted(context):
        return value


@app.task(queue=QUEUE)
async def slow(context: Context, seconds: float) -> float:
    """Take a while."""
    with _noted(context):
        await asyncio.sleep(seconds)
    return seconds


@app.task(queue=QUEUE)
async def flaky(context: Context) -> int:
    """Fail at the first attempt."""
    with _noted(context):
        if context.attempt == 1:
            raise RuntimeError("as the first time always")
    return context.attempt


@app.task(queue=QUEUE)
async def doomed(context: Context) -> None:
    """Fail for good."""
    with _noted(context):
        raise Fail("for good")


@app.task(queue=QUEUE)
async def team(context: Context) -> str:
    """Be done by two workers."""
    with _noted(context):
        return context.worker_id


@app.task(queue=QUEUE)
async def deposit(context: Context, database: str) -> None:
    """Write one effect in the task's own transaction."""
    with _noted(context):
        async with context.transaction() as session:
            effect = {"task_id": context.task.id, "run_id": context.run_id}
            await session.client[database]["effects"].insert_one(effect, session=session)


@app.task(queue=NARROW)
async def narrow(context: Context, seconds: float) -> None:
    """Take a while, beside no more of its kind than its queue allows."""
    with _noted(context):
        await asyncio.sleep(seconds)


@app.schedule(timedelta(seconds=1), catch_up="all", catch_up_limit=1000)
@app.task(queue=QUEUE)
async def tick(context: Context) -> None:
    """Return at once, once a second."""
    with _noted(context):
        return
