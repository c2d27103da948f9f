"""The worker's change stream: it lets through only the changes that concern the worker.

Each worker process has one stream over the database, on a client of its own. `stream_filter.pipeline` tells which
changes concern the worker.

On the server, each write wakes every waiting stream, even if the stream's filter then drops the change. Each wake-up
costs 30 us or more. So when writes are dense, the worker does not wait in the stream, but reads it every 20 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from bson import Timestamp
from pymongo.asynchronous.change_stream import AsyncDatabaseChangeStream
from pymongo.asynchronous.client_session import AsyncClientSession

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import CONTROLS, PLACES, SCHEDULES, WORKERS, AsyncStore, bounded
from mtask.kernel.operations import stream_filter as concerns
from mtask.kernel.statements.filters import Shares

# --- traffic ---------------------------------------------------------------------------------------------

# Estimates the density of writes on a server from its replies.
#
# The cost of waiting in a change stream depends on this density.

#: Rates of writes per second, by all clients. Traffic becomes dense when the rate reaches DENSE_FROM. It stays dense
#: until the rate falls below DENSE_UNTIL.
DENSE_FROM, DENSE_UNTIL = 1_000.0, 500.0
#: The lowest rate at which traffic counts as `SOME`, in writes per second.
SOME_FROM = 50.0
#: Traffic counts as dense until DENSE_LASTS seconds after its rate was last dense. It counts as `SOME` until SOME_LASTS
#: seconds after its rate last reached SOME_FROM, or after the last event. Load comes in bursts, so these times bridge
#: pauses.
DENSE_LASTS, SOME_LASTS = 2.0, 5.0
#: The least time between two replies that are compared, in seconds.
WINDOW = 0.2


class Density(Enum):
    """The rate of writes to a server, by all clients."""

    STILL = "still"  #: almost no writes
    SOME = "some"
    DENSE = "dense"


class Traffic:
    """Estimates the density of writes on a server. The estimate begins with `SOME`.

    MongoDB numbers the writes within each second. So the numbers in two replies tell how many writes came in between.
    If a new second has begun in between, the number in the later reply is a lower bound.
    """

    def __init__(self, now: float) -> None:
        """Begin the estimate. In each method, `now` is a monotonic time, in seconds."""
        self._second, self._number = -1, 0
        self._seen_at = -inf
        self._dense_at, self._some_at = -inf, now
        self.density = Density.SOME

    @property
    def is_dense(self) -> bool:
        """Whether writes are so dense that waiting in a change stream costs the server too much."""
        return self.density is Density.DENSE

    def note(self, second: int, number: int, now: float, *, is_news: bool = False) -> None:
        """Record the server's last write from a reply: its second, and its number in that second.

        `is_news` says that the reply contained an event.
        """
        if is_news:
            self._some_at = now
        passed = now - self._seen_at
        if passed >= WINDOW:
            if self._second >= 0:
                self._compare(number - self._number if second == self._second else number, passed, now)
            self._second, self._number, self._seen_at = second, number, now
        if now - self._dense_at < DENSE_LASTS:
            self.density = Density.DENSE
        else:
            self.density = Density.SOME if now - self._some_at < SOME_LASTS else Density.STILL

    def _compare(self, written: int, passed: float, now: float) -> None:
        if written >= passed * (DENSE_UNTIL if self.density is Density.DENSE else DENSE_FROM):
            self._dense_at = now
        if written >= passed * SOME_FROM:
            self._some_at = now


# --- change stream ---------------------------------------------------------------------------------------

Document = dict[str, Any]
_OPEN_TIMEOUT = timedelta(seconds=10)
_BATCH = 1000
#: The longest wait of the server before it answers without an event, in ms, by density. With some traffic, the wait is
#: short, because the answers show the rate of writes. A second is no multiple of 700 ms, so the answers come at
#: different moments within a second.
MAX_AWAIT_MS = {Density.STILL: 10_000, Density.SOME: 700, Density.DENSE: 1}
#: The pause between two reads when writes are dense, in seconds.
_REST = 0.02


class EventKind(Enum):
    """The kind of an event."""

    TASK_INSERTED = "inserted"  #: a new task is due within the horizon, or is malformed
    TASK_CHANGED = "changed"  #: a task becomes due within the horizon, or the worker that holds it must read it
    WORKER_ORDER = "control"  #: a client gave this worker an order
    APPEAL = "appeal"  #: due tasks wait for which some worker has no room
    PEERS_CHANGED = "peers"  #: a worker came, went or changed its concurrency
    SCHEDULES_CHANGED = "schedules"  #: a schedule was added, changed or removed; a firing is no event
    CONTROLS_CHANGED = "rules"  #: a control of a queue or a task name changed
    CALLED = "call"  #: a document in `places` calls this worker: tasks that wait in it may pass the gate
    COLLECTION_LOST = "lost"  #: the collection was dropped or renamed


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the worker's stream."""

    kind: EventKind
    task_id: Any = None
    #: Name, queue, data key, priority, status and next_preempt_time of an inserted task. A malformed task may lack one.
    document: Document | None = None
    #: Whether an inserted task looks simple, so that the short statements may suffice.
    is_simple: bool = False
    #: Whether an inserted task is the first step of a flow.
    begins_flow: bool = False
    #: Whether an inserted task is one that this worker may take soon, or malformed. A first step may be neither.
    is_wanted: bool = True
    #: The new next_preempt_time of a changed task, or None if this field did not change.
    preempt_time: datetime | None = None
    #: Whether a worker holds the task now, or None if the task's status did not change.
    is_begun: bool | None = None
    #: Whether the worker that holds the task must read it, because options changed or a client requested its end.
    concerns_holder: bool = False
    #: The stored `call`, if this worker is called.
    call: Any = None


class Stream:
    """An open change stream. After any error, the caller must close it, open a new stream and scan again."""

    def __init__(self, store: AsyncStore, stages: Callable[[Shares | None], list[Document]], traffic: Traffic) -> None:
        self._store = store
        #: Returns the pipeline stages for some shares.
        self._stages = stages
        self._traffic = traffic
        #: The shares of which the stream tells; None: of all tasks.
        self.shares: Shares | None = None
        #: The density for which the stream was opened.
        self.density = self._traffic.density
        #: The token and the time of the last event.
        self._last: tuple[str, Timestamp] | None = None
        #: The session records the time of the server's last write.
        self._session: AsyncClientSession
        self._cursor: AsyncDatabaseChangeStream[Document]

    @classmethod
    async def open(
        cls,
        store: AsyncStore,
        worker_id: str,
        queues: Sequence[str],
        horizon_ms: int,
        traffic: Traffic | None = None,
    ) -> Stream:
        """Open a stream that begins now. `traffic` is what is known of the server's writes. Raises DatabaseError."""
        stream = cls(store, partial(concerns.pipeline, worker_id, queues, horizon_ms), traffic or Traffic(monotonic()))
        with bounded(_OPEN_TIMEOUT):
            stream._session = store.client.start_session(causal_consistency=False)
            try:
                await stream._watch()
            except BaseException:
                await stream._session.end_session()
                raise
        return stream

    async def _watch(self, token: Mapping[str, Any] | None = None, begin: Timestamp | None = None) -> None:
        self._cursor = await self._store.readable.watch(
            self._stages(self.shares),
            resume_after=token,
            start_at_operation_time=begin,
            max_await_time_ms=MAX_AWAIT_MS[self.density],
            batch_size=_BATCH,
            session=self._session,
        )

    @property
    def is_open(self) -> bool:
        """Whether more events can come."""
        return self._cursor.alive

    @property
    def _inner(self) -> Any:
        """The cursor that the driver keeps to itself, or None with a driver that no longer has one."""
        return getattr(self._cursor, "_cursor", None)

    @property
    def has_more(self) -> bool:
        """Whether further events have come with the last one, so that the next one costs no read.

        The driver tells this only to itself, for the resume token. False with a driver that no longer does.
        """
        has_next = getattr(self._inner, "_has_next", None)
        return has_next is not None and bool(has_next())

    async def hear(self, shares: Shares | None) -> bool:
        """Tell of the inserted tasks of these shares from now on; return whether the stream now tells of more.

        None: of all tasks. While writes are dense, it tells of all tasks. Raises DatabaseError.
        """
        if self._traffic.is_dense:
            shares = None
        if shares == self.shares:
            return False
        token = self._cursor.resume_token  # the driver makes a copy, which takes as long as many events
        if token is None:
            return False
        former, self.shares = self.shares, shares
        begin = None
        if shares is not None and self._last is not None and token["_data"] == self._last[0]:
            # The new shares may leave the last event out, and the server cannot begin behind an event that it does not
            # find. So the events of the same instant come twice.
            token, begin = None, self._last[1]
        await self._reopen(token, begin)
        return former is not None

    async def next(self) -> Event | None:
        """Return the next event, or None if none came for a while. Raises DatabaseError."""
        if self._traffic.density is not self.density and self.is_open:
            await self._turn()
        with bounded(None):  # no limit: the client's socket timeout exceeds the server's wait
            change = await self._cursor.try_next()
        written = self._session.operation_time
        if written is not None:
            self._traffic.note(written.time, written.inc, monotonic(), is_news=change is not None)
        if change is not None:
            self._last = (change["_id"]["_data"], change["clusterTime"])
            return _event(change)
        if self.density is Density.DENSE:
            await asyncio.sleep(_REST)
        return None

    async def _turn(self) -> None:
        """Reopen the stream at its present position, with the server's wait for the new density."""
        token = self._cursor.resume_token
        if token is not None:  # without a token, the new stream would miss changes
            await self._reopen(token)

    async def _reopen(self, token: Mapping[str, Any] | None, begin: Timestamp | None = None) -> None:
        """Open the stream anew. The server's wait and the shares can only be set then."""
        self.density = self._traffic.density
        with bounded(_OPEN_TIMEOUT):
            await self._cursor.close()
            await self._watch(token, begin)

    async def interrupt(self) -> None:
        """End a wait for events, if the server is in one. `next` then raises OperationFailed. Raises DatabaseError."""
        # The driver's own way to end a wait is to close the connection.
        waiting = getattr(self._inner, "cursor_id", None)
        if waiting is not None:
            with bounded(_OPEN_TIMEOUT):
                await self._store.readable.command("killCursors", "$cmd.aggregate", cursors=[waiting])

    async def close(self) -> None:
        """Close the cursor and end the session."""
        with bounded(timedelta(seconds=2)):
            await self._cursor.close()
            await self._session.end_session()


async def read_orders(store: AsyncStore, worker_id: str) -> tuple[Any, Timestamp | None]:
    """Return what clients have ordered of this worker, and the time of the server's last write.

    It reads them for a worker whose stream is closed. Raises DatabaseError.
    """
    async with store.client.start_session(causal_consistency=False) as session:
        with bounded(_OPEN_TIMEOUT):
            found = await store.readable[WORKERS].find_one({"_id": worker_id}, {"control": 1}, session=session)
        return None if found is None else found.get("control"), session.operation_time


def _event(change: Any) -> Event:
    kind = change["operationType"]
    if kind in ("drop", "rename", "dropDatabase", "invalidate"):
        return Event(EventKind.COLLECTION_LOST)
    document_id = change.get("documentKey", {}).get("_id")
    if change["ns"]["coll"] == CONTROLS:
        return Event(EventKind.CONTROLS_CHANGED)
    if change["ns"]["coll"] == PLACES:
        return Event(EventKind.CALLED, document_id, call=change.get("call"))
    if change["ns"]["coll"] == SCHEDULES:
        return Event(EventKind.SCHEDULES_CHANGED)
    if change["ns"]["coll"] == WORKERS:
        if change.get("appeals"):
            return Event(EventKind.APPEAL, document_id)
        is_control = kind == "update"
        return Event(EventKind.WORKER_ORDER if is_control else EventKind.PEERS_CHANGED, document_id)
    if kind == "insert":
        inserted = change.get("fullDocument", {})
        return Event(
            EventKind.TASK_INSERTED,
            document_id,
            inserted,
            is_simple=change.get("is_simple") is True,
            begins_flow=change.get("begins_flow") is True,
            is_wanted=change.get("is_wanted") is not False,
        )
    return Event(
        EventKind.TASK_CHANGED,
        document_id,
        preempt_time=change.get("preempt_time"),
        is_begun=change["status"] == TaskStatus.RUNNING if "status" in change else None,
        concerns_holder=kind == "replace" or bool(change.get("concerns_holder")),
    )
