"""Tools for tests with a real MongoDB: they wait for a condition, and make commands fail."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar, overload

from pymongo import MongoClient

from tests.processes import marked

T = TypeVar("T")
Document = dict[str, Any]
Client = MongoClient[Document]

#: Lets a test use fail points.
TEST_COMMANDS = {"enableTestCommands": "1"}
#: This variable marks all processes that a test session starts. At the end, the session looks for marked processes.
SESSION_VARIABLE = "MTASK_TEST_SESSION"


#: How long tests wait for a condition, in seconds. It is long, because tests assert order and state, not speed.
PATIENCE = float(os.environ.get("MTASK_TEST_PATIENCE", "100"))


def eventually(
    condition: Callable[[], T], timeout: float = PATIENCE, message: str = "", *, interval: float | None = None
) -> T:
    """Poll the condition. Return its first true value. At the timeout (in seconds), fail with the message.

    `interval`: seconds between two looks; None: as `pauses` has it.
    """
    end = time.monotonic() + timeout
    for pause in pauses():
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            break
        time.sleep(pause if interval is None else interval)
    raise AssertionError(unfulfilled(message, timeout, value))


@overload
async def until(condition: Callable[[], Awaitable[T]], timeout: float = PATIENCE, message: str = "") -> T: ...


@overload
async def until(condition: Callable[[], T], timeout: float = PATIENCE, message: str = "") -> T: ...


async def until(condition: Callable[[], Any], timeout: float = PATIENCE, message: str = "") -> Any:
    """Wait like `eventually`, on the event loop. The condition may be a coroutine function, too."""
    end = time.monotonic() + timeout
    for pause in pauses():
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() >= end:
            break
        await asyncio.sleep(pause)
    raise AssertionError(unfulfilled(message, timeout, value))


def pauses() -> Iterator[float]:
    """Yield the pauses between two looks, in seconds: from 10 up to 60 ms, because each look costs CPU time."""
    for look in count():
        yield min(0.01 + look * 0.002, 0.06)


def unfulfilled(message: str, timeout: float, value: object) -> str:
    return f"not within {timeout:g} s: {message or 'the condition'} (last seen: {value!r})"


@contextmanager
def fail_command(
    client: Client,
    names: str | Sequence[str],
    *,
    times: int | None = None,
    error_code: int | None = None,
    error_labels: Sequence[str] | None = None,
    write_concern_error: Document | None = None,
    close_connection: bool = False,
    block_ms: int | None = None,
    app_name: str | None = None,
    namespace: str | None = None,
) -> Iterator[None]:
    """Make the server fail or delay these commands during the block: `times` times, or always if that is None.

    `namespace`: only those on this collection, "database.collection". For a first write in a session, the server itself
    sends a find on behalf of the client.

    The server must run with `TEST_COMMANDS`. Several fixtures share one server, so give `app_name`: then only
    clients made with that appname meet the failure.
    """
    what: Document = {"failCommands": [names] if isinstance(names, str) else list(names)}
    if error_code is not None:
        what["errorCode"] = error_code
    if error_labels is not None:
        what["errorLabels"] = list(error_labels)
    if write_concern_error is not None:
        what["writeConcernError"] = write_concern_error
    if close_connection:
        what["closeConnection"] = True
    if block_ms is not None:
        what |= {"blockConnection": True, "blockTimeMS": block_ms}
    if app_name is not None:
        what["appName"] = app_name
    if namespace is not None:
        what["namespace"] = namespace
    mode: str | Document = "alwaysOn" if times is None else {"times": times}
    client.admin.command("configureFailPoint", "failCommand", mode=mode, data=what)
    try:
        yield
    finally:
        client.admin.command("configureFailPoint", "failCommand", mode="off")


def streams(client: Client, database: str) -> int:
    """Return how many change streams are open on the database."""
    found = client.admin.aggregate([{"$currentOp": {"allUsers": True, "idleCursors": True}}])
    return sum(
        1
        for each in found
        if str(each.get("ns", "")).startswith(f"{database}.")
        and "$changeStream" in str(each.get("cursor", {}).get("originatingCommand", {}))
    )


def processes_of_session(session: str) -> list[str]:
    """Return the mongods and supervisors of a test session that are still alive."""
    return [
        f"{pid} {command}"
        for pid, command in marked(SESSION_VARIABLE, session).items()
        if "--dbpath=" in command or "_supervise.py" in command
    ]
