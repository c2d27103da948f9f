"""The app of the fault tests: one handler per way of working; each notes what it does in the run's history."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from random import Random
from typing import Any

from mtask import App, Child, Context, Fail, Next, Retry
from tests.chaos.load import release
from tests.chaos.load.notes import HISTORY_VARIABLE, note, noted
from tests.chaos.load.order import FAIRLY, METERED, SHARED
from tests.chaos.load.resting import rest_often
from tests.chaos.load.shifting import BACK, FORWARD
from tests.chaos.load.tasks import ABORTING, ARRIVALS, FORKING, LIMITED, PATIENT, PAUSABLE, PROBE, QUEUE, TICK

_LOOK = 0.01

#: How many of the log records the app's own log handler cannot take.
_UNLOGGED = 0.3

app = App()


class _Failing(logging.Handler):
    """A log handler that raises now and then, whoever logs."""

    def emit(self, record: logging.LogRecord) -> None:
        if Random(record.created).random() < _UNLOGGED:
            raise RuntimeError("this log handler fails now and then")


if HISTORY_VARIABLE in os.environ:  # a worker of a run, and no process that only reads the names
    rest_often()
    logging.getLogger().addHandler(_Failing())


def isolated_names() -> list[str]:
    """Return the names of the handlers that run in executors."""
    return sorted(handler.name for handler in app if handler.isolation == "process")


@app.task(queue=QUEUE)
async def quick(context: Context, value: int = 0) -> int:
    """Return at once."""
    with noted(context):
        return value


@app.task(queue=QUEUE)
def plain(context: Context, value: int = 0) -> int:
    """Return at once, from a thread."""
    with noted(context):
        return value


@app.task(queue=QUEUE)
async def loud(context: Context, value: int = 0) -> int:
    """Log, which may raise."""
    with noted(context):
        logging.getLogger("app").warning("this is loud")
        return value


@app.task(name=FORKING, queue=QUEUE)
def forking(context: Context) -> int:
    """Fork a process that sleeps, and terminate it."""
    with noted(context):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join(30)
        code = child.exitcode
        child.kill()
        if code != -signal.SIGTERM:
            raise Fail(f"the child did not end by SIGTERM: {code}")
    return code


@app.task(name=ABORTING, queue=QUEUE)
def aborting(context: Context, database: str) -> None:
    """Write an effect in the task's own transaction, and abort the transaction."""
    with noted(context), context.transaction() as session:
        effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
        session.client[database]["effects"].insert_one(effect, session=session)
        session.abort_transaction()


@app.task(queue=QUEUE)
async def slow(context: Context, seconds: float) -> float:
    """Take a while."""
    with noted(context):
        await asyncio.sleep(seconds)
    return seconds


@app.task(queue=QUEUE)
def slow_plain(context: Context, seconds: float) -> float:
    """Take a while in a thread; end early when told to."""
    with noted(context):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if context.is_cancelled:
                raise RuntimeError("told to end")
            time.sleep(_LOOK)
    return seconds


@app.task(queue=QUEUE, isolation="process")
def isolated(context: Context, seconds: float) -> float:
    """Take a while in an executor, without a look at the context."""
    with noted(context):
        time.sleep(seconds)
    return seconds


@app.task(queue=QUEUE, isolation="process")
async def isolated_async(context: Context, seconds: float) -> float:
    """Take a while on the event loop of an executor."""
    with noted(context):
        await asyncio.sleep(seconds)
    return seconds


@app.task(queue=QUEUE)
async def team(context: Context, seconds: float) -> str:
    """Be done by several workers."""
    with noted(context):
        await asyncio.sleep(seconds)
    return context.worker_id


@app.task(queue=QUEUE)
async def flaky(context: Context, failures: int, seconds: float = 0.0) -> int:
    """Fail a few times; hand back once in between."""
    with noted(context):
        await asyncio.sleep(seconds)
        if context.attempt == failures and failures > 1:
            raise Retry(0.1, "not yet")
        if context.attempt <= failures:
            raise RuntimeError(f"attempt {context.attempt}")
    return context.attempt


@app.task(queue=QUEUE)
async def doomed(context: Context, is_final: bool = False) -> None:
    """Fail, always."""
    with noted(context):
        if is_final:
            raise Fail("for good")
        raise RuntimeError("as ever")


@app.task(queue=QUEUE)
async def deposit(context: Context, database: str, seconds: float = 0.0, goes_on: bool = False) -> str:
    """Write one effect in the task's own transaction, and the next task if there is to be one."""
    with noted(context):
        async with context.transaction() as session:
            effects = session.client[database]["effects"]
            effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
            await effects.insert_one(effect, session=session)
            if goes_on:
                note(context, "next")
                context.set_result(Next(arrive, returns=1, **PATIENT))
            note(context, "written")
            await asyncio.sleep(seconds)
    return context.worker_id


def _deposit(context: Context, database: str, seconds: float) -> str:
    with noted(context), context.transaction() as session:
        effects = session.client[database]["effects"]
        effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
        effects.insert_one(effect, session=session)
        note(context, "written")
        time.sleep(seconds)
    return context.worker_id


@app.task(queue=QUEUE)
def deposit_plain(context: Context, database: str, seconds: float = 0.0) -> str:
    """Write one effect in the task's own transaction, from a thread."""
    return _deposit(context, database, seconds)


@app.task(queue=QUEUE, isolation="process")
def deposit_isolated(context: Context, database: str, seconds: float = 0.0) -> str:
    """Write one effect in the task's own transaction, from an executor."""
    return _deposit(context, database, seconds)


@app.task(queue=QUEUE)
async def split(context: Context, tree: list[Any], seconds: float = 0.0) -> int:
    """Add a child for each entry of the tree; an entry that is a list itself is a child with children."""
    with noted(context):
        note(context, "added", [child.task_id for child in await context.add_children(_children(context, tree))])
        await asyncio.sleep(seconds)
    return len(tree)


@app.task(queue=QUEUE)
def split_plain(context: Context, tree: list[Any], seconds: float = 0.0) -> int:
    """Do the same in a thread, one child after the other."""
    with noted(context):
        for child in _children(context, tree):
            note(context, "added", [context.add_children([child]).get()[0].task_id])
        time.sleep(seconds)
    return len(tree)


def _children(context: Context, tree: list[Any]) -> list[Child]:
    assert context.task.flow is not None
    step = context.task.flow.step
    return [
        Child(f"{step}-{n}", "split", {"tree": part}, **PATIENT)
        if isinstance(part, list)
        else Child(f"{step}-{n}", part, {"failures": 1} if part == "flaky" else {}, **_options(part))
        for n, part in enumerate(tree)
    ]


def _options(name: str) -> dict[str, Any]:
    # A flaky child fails, and a retry of it succeeds.
    return {**PATIENT, "max_retries": 0} if name == "flaky" else PATIENT


@app.task(queue=QUEUE)
async def relay(context: Context, left: int) -> Next:
    """Go on: as a task like this one, and in the end as one of another queue."""
    with noted(context):
        if context.task.chain is not None and (await context.results()).get("relay") != left + 1:
            raise Fail("what the task before returned is not at hand")
        note(context, "next")
    if left:
        return Next(relay, {"left": left - 1}, returns=left, priority_diff=1, **PATIENT)
    return Next(arrive, returns=1, priority_diff=1, **PATIENT)


@app.task(queue=ARRIVALS)
def arrive(context: Context) -> int:
    """End a chain."""
    with noted(context):
        if list(dict(context.results()).values()) != [1]:
            raise Fail("what the task before returned is not at hand")
    return 1


@app.task(queue=QUEUE)
async def renewed(context: Context, call_id: str, seconds: float) -> str:
    """Note whose params it has; fail now and then."""
    with noted(context, [call_id]):
        await asyncio.sleep(seconds)
        _fail_at_random(context)
    return call_id


@app.task(queue=QUEUE)
async def collected(context: Context, calls: list[dict[str, Any]]) -> int:
    """Do the same with the params of several calls."""
    with noted(context, [call["call_id"] for call in calls]):
        await asyncio.sleep(max(call["seconds"] for call in calls))
        _fail_at_random(context)
    return len(calls)


def _fail_at_random(context: Context) -> None:
    if Random(context.run_id).random() < 0.1:
        raise RuntimeError("now and then")


@app.task(queue=LIMITED)
async def limited(context: Context, seconds: float) -> None:
    """Take a while, beside no more of its kind than its queue allows."""
    with noted(context):
        await asyncio.sleep(seconds)


@app.task(queue=PAUSABLE)
async def pausable(context: Context, seconds: float) -> None:
    """Take a moment, while its queue is not paused."""
    with noted(context):
        await asyncio.sleep(seconds)


@app.task(queue=TICK)
async def tick(context: Context) -> None:
    """Return at once, as often as its schedule says."""
    with noted(context):
        return


app.task(name=FORWARD, queue=TICK)(tick)
app.task(name=BACK, queue=TICK)(tick)


@app.task(queue=PROBE)
async def probe(context: Context) -> None:
    """Tell by its start how busy the machine is."""
    with noted(context):
        return


@app.task(queue=QUEUE)
async def hog(context: Context, seconds: float) -> None:
    """Keep the event loop for itself."""
    with noted(context):
        time.sleep(seconds)  # noqa: ASYNC251 it is meant to


@app.task(queue=QUEUE)
async def killer(context: Context) -> None:
    """Take the whole process along, every time."""
    note(context, "start")
    os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(60)


async def _ordered(context: Context, seconds: float = 0.0, failures: int = 0) -> None:
    """Take a moment, when it is this task's turn."""
    with noted(context):
        await asyncio.sleep(seconds)
        if context.attempt <= failures:
            raise RuntimeError(f"attempt {context.attempt}")


app.task(name="metered", queue=METERED)(_ordered)
app.task(name="fairly", queue=FAIRLY)(_ordered)
app.include(release.deployed())

#: The app of the other workers. Each of the two apps has one handler that the other has not, and they share its queue.
sibling = App()
sibling.include(app)
app.task(name="ours", queue=SHARED)(_ordered)
sibling.task(name="theirs", queue=SHARED)(_ordered)
