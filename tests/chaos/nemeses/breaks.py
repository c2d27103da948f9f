"""What goes wrong in the database itself: its servers die, freeze, give up their role or fail commands, and kill
cursors. Each break tells what it did; one that lasts is a context manager, and all is mended at its end.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from pymongo.errors import PyMongoError

from mtask.local import ReplicaSet
from mtask.local.folder import Deadline
from mtask.local.node import Node
from mtask.local.replica_set import START_TIMEOUT, ask, direct_client, is_member_ready, launch_all
from tests.chaos.nemeses import wire
from tests.mongo import Client, Document, eventually

PATIENCE = 60.0
#: How often each member is asked whether it is primary, in seconds.
_LOOK = 0.01
#: How long a server may take to answer before it counts as frozen.
_ANSWER = timedelta(seconds=5)


@dataclass
class Break:
    """What was done to the servers, and when another primary was there. Instants are on the monotonic clock."""

    nodes: list[Node]  #: those that were broken
    began: float
    primary: Node | None = None  #: the one elected since
    elected: float | None = None  #: when it first said so

    @property
    def seconds(self) -> float:
        """How long there was no primary."""
        assert self.elected is not None, "nobody has been elected yet"
        return self.elected - self.began


# --- servers ------------------------------------------------------------------------------------------------------


@contextmanager
def killed_primary(replica_set: ReplicaSet) -> Iterator[Break]:
    """SIGKILL the primary; the block begins with the next one. At its end the former takes part again."""
    former = replica_set.primary()
    try:
        with _election(replica_set, [former]) as broken:
            replica_set.kill(former)
        yield broken
    finally:
        replica_set.restart(former)


@contextmanager
def frozen_primary(replica_set: ReplicaSet) -> Iterator[Break]:
    """SIGSTOP the primary; the block begins with the next one. At its end the former goes on, and learns of it."""
    former = replica_set.primary()
    try:
        with _election(replica_set, [former]) as broken:
            replica_set.pause(former)
        yield broken
    finally:
        replica_set.resume(former)
        eventually(lambda: _is_following(former, replica_set), PATIENCE, f"{former.address} follows")


def step_down(replica_set: ReplicaSet, seconds: float = 5.0) -> Break:
    """Have the primary give up its role for so long; return when another has it."""
    former = replica_set.primary()
    with _election(replica_set, [former]) as broken:
        replica_set.step_down(timedelta(seconds=seconds))
    return broken


@contextmanager
def killed_servers(replica_set: ReplicaSet) -> Iterator[Break]:
    """SIGKILL all servers at once. At the block's end they are started, and all take part again."""
    nodes = list(replica_set.nodes)
    with _election(replica_set, nodes) as broken:
        with ThreadPoolExecutor(len(nodes)) as threads:
            list(threads.map(replica_set.kill, nodes))
        try:
            yield broken
        finally:
            launch_all(nodes, Deadline(START_TIMEOUT), accept_taken_port=False)
    for node in nodes:
        eventually(lambda node=node: is_member_ready(node), PATIENCE, f"{node.address} takes part")  # type: ignore[misc]


@contextmanager
def _election(replica_set: ReplicaSet, broken: list[Node]) -> Iterator[Break]:
    """Watch from before the block until after it for the next primary, and note when it was there."""
    told = eventually(lambda: ask(broken[0] if len(broken) == 1 else replica_set.primary(), "hello"), PATIENCE)
    assert told is not None
    with ThreadPoolExecutor(1) as thread:
        watch = thread.submit(asyncio.run, _elected(replica_set.nodes, told.get("electionId")))
        done = Break(broken, time.monotonic())
        yield done
        done.primary, done.elected = watch.result()


async def _elected(nodes: Sequence[Node], before: Any) -> tuple[Node, float]:
    """Wait for a primary of another election, and return it with the instant."""
    looks = [asyncio.create_task(_look_at(node, before)) for node in nodes]
    first, others = await asyncio.wait(looks, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert first, f"no other primary within {PATIENCE:g} s"
    return first.pop().result()


async def _look_at(node: Node, before: Any) -> tuple[Node, float]:
    question = wire.command(1, {"hello": 1, "$db": "admin"})
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            try:
                while True:
                    writer.write(question)
                    size = await reader.readexactly(4)
                    told = wire.body(size + await reader.readexactly(int.from_bytes(size, "little") - 4))
                    if told.get("isWritablePrimary") and told["electionId"] != before:
                        return node, time.monotonic()
                    await asyncio.sleep(_LOOK)
            finally:
                writer.transport.abort()
        await asyncio.sleep(_LOOK)


def _is_following(node: Node, replica_set: ReplicaSet) -> bool:
    """Tell whether the node knows who is primary: itself or, if it is a secondary, another."""
    told = ask(node, "hello")
    primary = ask(replica_set.primary(), "hello")
    return told is not None and primary is not None and told.get("primary") == primary["me"]


# --- commands -----------------------------------------------------------------------------------------------------

Operation = Literal["claim", "ping", "write", "read", "commit", "publish", "open stream", "stream"]

#: The commands of the engine's operations on its tasks. A fail point tells commands apart by their names alone. A claim
#: or a ping of one task is a findAndModify; of several it is an update, as every finish is, and a find follows. Where
#: one of those is meant, give tasks that can only have that one, or lose replies by what is in the command
#: (`ReplicaSetProxy.drop_replies`).
OPERATIONS: dict[Operation, tuple[str, ...]] = {
    "claim": ("findAndModify",),
    "ping": ("findAndModify",),
    "write": ("update",),
    "read": ("find",),
    "commit": ("commitTransaction",),
    "publish": ("update", "insert"),  # one, and many
    "open stream": ("aggregate",),
    "stream": ("getMore",),
}
#: These are not of the collection.
_OF_DATABASE = ("open stream", "stream", "commit")

FAILURES: dict[str, Document] = {
    "shutting down": {"errorCode": 91},
    "interrupted at shutdown": {"errorCode": 11600},
    "interrupted": {"errorCode": 11601},
    "stepped down": {"errorCode": 189},
    "write conflict": {"errorCode": 112},
    "connection closed": {"closeConnection": True},
    "done, then shutting down": {"writeConcernError": {"code": 91, "errmsg": "shutting down"}},
    "done, then stepped down": {"writeConcernError": {"code": 189, "errmsg": "stepped down"}},
    "done, not replicated in time": {
        "writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out", "errInfo": {"wtimeout": True}}
    },
    "late": {"blockConnection": True, "blockTimeMS": 300},
}


@dataclass
class Armed:
    """A fail point on one server."""

    node: Node
    data: Document
    _client: Client = field(repr=False)
    _before: int
    #: How often it has struck; known at the end.
    count: int = 0

    def wait(self, times: int = 1) -> None:
        """Wait until it has struck so often."""
        self._client.admin.command(
            "waitForFailPoint", "failCommand", timesEntered=self._before + times, maxTimeMS=int(1000 * PATIENCE)
        )

    def disarm(self) -> None:
        """Let commands pass again."""
        with suppress(PyMongoError):  # with the server, its fail point has gone
            self.count = _set_fail_point(self._client, "off") - self._before


@contextmanager
def failing(
    replica_set: ReplicaSet,
    operation: Operation,
    failure: str | Document,
    *,
    app: str,
    database: str,
    times: int | None = None,
) -> Iterator[Armed]:
    """Have the primary fail this operation of one app (its exact name), so many times or during the whole block.

    Servers must run with `tests.mongo.TEST_COMMANDS`, and each has one such fail point at a time. A worker's app is
    `mtask-worker:<worker_id>`, a client's `mtask`. A primary elected meanwhile fails nothing.
    """
    what = FAILURES[failure] if isinstance(failure, str) else failure
    data: Document = {"failCommands": list(OPERATIONS[operation]), "appName": app, **what}
    if operation not in _OF_DATABASE:
        data["namespace"] = f"{database}.tasks"
    node = replica_set.primary()
    with direct_client(node, timedelta(seconds=PATIENCE + 10)) as client:
        armed = Armed(
            node, data, client, _set_fail_point(client, "alwaysOn" if times is None else {"times": times}, data)
        )
        try:
            yield armed
        finally:
            armed.disarm()


def _set_fail_point(client: Client, mode: str | Document, data: Document | None = None) -> int:
    """Arm or disarm; return how often the server's fail point has struck before."""
    command: Document = {"configureFailPoint": "failCommand", "mode": mode}
    return int(client.admin.command(command if data is None else {**command, "data": data})["count"])


# --- cursors and sessions -----------------------------------------------------------------------------------------


def stream_cursors(replica_set: ReplicaSet, database: str, app: str) -> list[tuple[Node, list[int]]]:
    """Return the open change streams on this database of an app, or where it ends with * of all that start so."""
    found = []
    for node, operations in _operations(replica_set, app):
        cursors = [operation["cursor"] for operation in operations if "cursor" in operation]
        ids = [int(cursor["cursorId"]) for cursor in cursors if _is_stream(cursor, database)]
        if ids:
            found.append((node, ids))
    return found


def _is_stream(cursor: Document, database: str) -> bool:
    origin = cursor.get("originatingCommand", {})
    first: Document = next(iter(origin.get("pipeline", ())), {})
    return origin.get("$db") == database and "$changeStream" in first


def kill_streams(replica_set: ReplicaSet, database: str, app: str = "mtask-worker:*") -> list[int]:
    """Kill these change streams; return their cursors."""
    killed: list[int] = []
    for node, cursors in stream_cursors(replica_set, database, app):
        with direct_client(node, _ANSWER) as client, suppress(PyMongoError):
            reply = client[database].command("killCursors", "$cmd.aggregate", cursors=cursors)
            killed += reply["cursorsKilled"]
    return killed


def kill_sessions(replica_set: ReplicaSet, app: str = "mtask-worker:*") -> int:
    """Kill the sessions of what the app does now, and with them its cursors, operations and transactions.

    Return how many there were.
    """
    count = 0
    for node, operations in _operations(replica_set, app):
        sessions = {operation["lsid"]["id"] for operation in operations if "lsid" in operation}
        if sessions:
            with direct_client(node, _ANSWER) as client, suppress(PyMongoError):
                client.admin.command("killSessions", [{"id": session} for session in sessions])
                count += len(sessions)
    return count


def _operations(replica_set: ReplicaSet, app: str) -> list[tuple[Node, list[Document]]]:
    """Return what the servers that answer are doing for the app, idle cursors and sessions included."""
    name: Any = app if not app.endswith("*") else {"$regex": f"^{re.escape(app[:-1])}"}
    pipeline: list[Document] = [
        {"$currentOp": {"allUsers": True, "idleCursors": True, "idleSessions": True}},
        {"$match": {"appName": name}},
    ]
    found = []
    for node in replica_set.nodes:
        with direct_client(node, _ANSWER) as client, suppress(PyMongoError):
            found.append((node, list(client.admin.aggregate(pipeline))))
    return found
