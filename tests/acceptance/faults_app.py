"""Handlers of the fault tests, beside those of the other acceptance tests: they misbehave, each in one way."""

from __future__ import annotations

import asyncio
import decimal
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pymongo.errors import AutoReconnect
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
    register,
)

from mtask import App, Context
from tests.acceptance import app as common
from tests.acceptance.app import note, noted

_LOOK = 0.01

app = App()
app.include(common.app)

#: An app without the handlers of the other.
other_app = App()


@other_app.task
async def only_here(context: Context) -> str:
    """Do nothing; return the worker's id."""
    with noted(context):
        return context.worker_id


class _Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no text of it")

    __str__ = __repr__


class _UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text of it")


class _OwnBaseError(BaseException):
    pass


class _BrokenModel(BaseModel):
    value: Any = None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        raise RuntimeError("cannot be dumped")


def _nested(levels: int) -> Any:
    value: Any = "core"
    for _ in range(levels):
        value = {"inner": value}
    return value


def _circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


UNSTORABLE: dict[str, Callable[[], Any]] = {
    "an object": object,
    "an integer of 65 bits": lambda: 1 << 64,
    "a lone surrogate": lambda: "\ud800",
    "a key that is no text": lambda: {1: "one"},
    "a key with a zero byte": lambda: {"a\0b": 1},
    "a decimal": lambda: decimal.Decimal("1.5"),
    "a function": lambda: _nested,
    "a circle": _circle,
    "too many levels": lambda: _nested(5000),
    "more levels than MongoDB takes": lambda: _nested(150),
    "a model that cannot be dumped": _BrokenModel,
    "what has no text": _Unreadable,
    "17 MB": lambda: b"x" * (17 << 20),
}


def _causes_in_a_circle() -> BaseException:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    return one


RAISED: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("no luck"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": lambda: StopIteration(5),
    "StopAsyncIteration": lambda: StopAsyncIteration(5),
    "TimeoutError": TimeoutError,
    "MemoryError": MemoryError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("x")]),
    "AutoReconnect": lambda: AutoReconnect("connection closed"),
    "_OwnBaseError": lambda: _OwnBaseError("its own kind"),
    "_UnreadableError": _UnreadableError,
    "RecursionError": lambda: RecursionError("too deep"),
    "RuntimeError of 10 MB": lambda: RuntimeError("x" * (10 << 20)),
    "RuntimeError with a surrogate": lambda: RuntimeError("\ud800\0"),
    "RuntimeError with a circle of causes": _causes_in_a_circle,
}


@app.task
async def blocks_beside(gate: str) -> None:
    """Block the event loop in an asyncio task of its own."""

    async def block_for() -> None:
        while not Path(gate).exists():  # noqa: ASYNC240
            time.sleep(_LOOK)  # noqa: ASYNC251 it is meant to

    await asyncio.create_task(block_for())


@app.task
async def returns(context: Context, kind: str) -> Any:
    """Return what BSON cannot hold, in one of many ways."""
    with noted(context):
        return UNSTORABLE[kind]()


@app.task
def returns_plain(context: Context, kind: str) -> Any:
    """Do as `returns`, in a thread."""
    with noted(context):
        return UNSTORABLE[kind]()


@app.task
async def raises(context: Context, kind: str) -> None:
    """Raise one of many things."""
    with noted(context):
        raise RAISED[kind]()


@app.task
def raises_plain(context: Context, kind: str) -> None:
    """Do as `raises`, in a thread."""
    with noted(context):
        raise RAISED[kind]()


async def _stops_the_loop() -> str:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)
    return "stopped"


async def _cancels_all() -> str:
    """Cancel all asyncio tasks that can be seen: as libraries do that were meant for a process of their own."""

    async def wait() -> None:
        await asyncio.sleep(3600)

    own = asyncio.create_task(wait())
    await asyncio.sleep(0)
    seen = asyncio.all_tasks()
    for task in seen:
        task.cancel()
    await asyncio.wait([own])
    return "only its own" if seen == {own} else f"{len(seen)} tasks"


SEIZED = {"stops_the_loop": _stops_the_loop, "cancels_all": _cancels_all}
for _name, _function in SEIZED.items():
    app.task(name=_name)(_function)
    app.task(name=f"{_name}_isolated", isolation="process")(_function)


_left_behind: set[asyncio.Task[None]] = set()


@app.task
async def leave_a_task_that_exits(context: Context, delay: float) -> str:
    """Return, and leave an asyncio task behind that calls sys.exit later."""

    async def exit_later() -> None:
        await asyncio.sleep(delay)
        sys.exit(3)

    with noted(context):
        _left_behind.add(asyncio.create_task(exit_later()))
    return context.worker_id


@app.task
async def add(context: Context, number: int, times: int = 1) -> int:
    """Multiply."""
    with noted(context):
        return number * times


@app.task
async def read_clock(context: Context) -> float:
    """Return this process's wall clock."""
    with noted(context):
        return time.time()


async def _wait_gate(gate: str | None) -> None:
    while gate is not None and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(_LOOK)


@app.task
def deposit_plain_gated(
    context: Context,
    database: str,
    gate: str | None = None,
    fail_on_attempts: list[int] = [],  # noqa: B006
    die_on_attempts: list[int] = [],  # noqa: B006
) -> str:
    """Do as `deposit`, in a thread."""
    with noted(context), context.transaction() as session:
        effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
        session.client[database]["effects"].insert_one(effect, session=session)
        note(context, "written")
        if context.attempt in die_on_attempts:
            os.kill(os.getpid(), signal.SIGKILL)
        if context.attempt in fail_on_attempts:
            raise RuntimeError(f"attempt {context.attempt}")
        while gate is not None and not Path(gate).exists():
            time.sleep(_LOOK)
    return context.worker_id


@app.task
async def count_up(context: Context, database: str, seconds: float = 0.0) -> dict[str, Any]:
    """Count one document up in the task's own transaction, read first and written then, as transfers do."""
    with noted(context):
        async with context.transaction() as session:
            counters = session.client[database]["counters"]
            found = await counters.find_one({"_id": "shared"}, session=session)
            assert found is not None
            await asyncio.sleep(seconds)
            await counters.update_one({"_id": "shared"}, {"$set": {"value": found["value"] + 1}}, session=session)
            note(context, "written")
    return {"before": found["value"], "by": context.worker_id}


@app.task
async def deposit_late(context: Context, database: str, gate: str) -> str:
    """Wait at the gate first, then write and commit: the lease may be lost before the transaction begins."""
    with noted(context):
        await _wait_gate(gate)
        async with context.transaction() as session:
            effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
            await session.client[database]["effects"].insert_one(effect, session=session)
    return context.worker_id


@app.task
async def deposit_and_die_after(context: Context, database: str) -> str:
    """Write an effect in the task's own transaction; die between the commit and the return."""
    with noted(context):
        async with context.transaction() as session:
            effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
            await session.client[database]["effects"].insert_one(effect, session=session)
        os.kill(os.getpid(), signal.SIGKILL)
    return context.worker_id


@app.task
def deposit_and_die_after_plain(context: Context, database: str) -> str:
    """Do as `deposit_and_die_after`, in a thread."""
    with noted(context):
        with context.transaction() as session:
            effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
            session.client[database]["effects"].insert_one(effect, session=session)
        os.kill(os.getpid(), signal.SIGKILL)
    return context.worker_id


class _LastMoment(CommandListener):
    """Kills this process when the doomed transaction is about to send its commit: its SUCCESS is written by then."""

    doomed: str | None = None  #: the session's id, in hex

    def started(self, event: CommandStartedEvent) -> None:
        """Kill on the doomed session's commit, before it is sent."""
        if event.command_name == "commitTransaction" and bytes(event.command["lsid"]["id"]).hex() == self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Do nothing."""


_last_moment = _LastMoment()
register(_last_moment)  # with the clients that are made from now on


@app.task
async def deposit_and_die(context: Context, database: str) -> str:
    """Write an effect in the task's own transaction; at the first attempt die between the SUCCESS and the commit."""
    with noted(context):
        async with context.transaction() as session:
            effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
            await session.client[database]["effects"].insert_one(effect, session=session)
            if context.attempt == 1:
                _last_moment.doomed = bytes(session.session_id["id"]).hex()
    return context.worker_id


@app.task
def deposit_and_die_plain(context: Context, database: str) -> str:
    """Do as `deposit_and_die`, in a thread."""
    with noted(context), context.transaction() as session:
        effect = {"task_id": context.task.id, "run_id": context.run_id, "worker_id": context.worker_id}
        session.client[database]["effects"].insert_one(effect, session=session)
        if context.attempt == 1:
            _last_moment.doomed = bytes(session.session_id["id"]).hex()
    return context.worker_id
