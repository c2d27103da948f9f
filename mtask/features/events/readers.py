"""The requests that a reader of events sends. They open a change stream, and read a document as it was at a change."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Self

from bson.timestamp import Timestamp

from mtask.errors import DatabaseError, DatabaseUnavailable, EventsLost, OperationFailed
from mtask.features.events.changes import IS_EXACT
from mtask.kernel.document.identity import prefix_of
from mtask.kernel.document.status import FINAL
from mtask.kernel.driver import roles as rights
from mtask.kernel.driver.operation import Operation, command
from mtask.kernel.driver.stores import TASKS, AsyncStore, SyncStore, bounded
from mtask.kernel.statements.filters import LONGEST_PATTERN, RUNS

Document = dict[str, Any]
#: The longest time that the server waits for a change in one request, in ms.
_MAX_AWAIT_MS = 1_000
_BATCH = 500
_RUN_FIELDS = (
    "run_id",
    "worker_id",
    "attempt",
    "status",
    "claim_time",
    "ping_expire_time",
    "success_time",
    "fail_time",
    "fail_reason",
    "progress",
)
#: The fields that events report, and the fields that prove to which task a document belongs.
_VIEW = (
    "queue",
    "tenant",
    "sealed",
    "quiet_time",
    "task_state.status",
    "task_state.finish_time",
    "task_state.queue_time",
    "flow.release_time",
    *(f"{RUNS}.{field}" for field in _RUN_FIELDS),
)


#: Matches the changes that set a final status, or remove a task.
_IS_END: Document = {
    "$or": [
        {"operationType": "delete"},
        {
            "$expr": {
                "$in": [
                    {
                        "$getField": {
                            "field": {"$literal": "task_state.status"},
                            "input": "$updateDescription.updatedFields",
                        }
                    },
                    FINAL,
                ]
            }
        },
        # A change may also write task_state whole: then the reader looks for the status in it.
        {"updateDescription.updatedFields.task_state": {"$exists": True}},
    ]
}


class Detail(IntEnum):
    """The detail of the changes that the server sends. A change must not exceed MongoDB's limit for a document."""

    FULL = 0
    WITHOUT_DOCUMENT = 1  #: only the changed fields; the document is read separately
    NAME = 2  #: only that there was a change


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tasks whose changes a reader wants. A criterion that is None admits any task."""

    names: Sequence[str] | None = None
    queues: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    task_id: str | None = None
    task_ids: Sequence[str] | None = None
    #: The key of a flow. It selects the tasks whose keys begin with this key and a slash.
    flow_key: str | None = None
    #: A tenant. It selects the tasks whose keys begin with it and a colon: of a removed task, only the id is known.
    tenant: str | None = None
    #: Whether only changes count that end a task, or remove it.
    ends_only: bool = False
    #: Whether the reader needs fields of the document that a change does not name.
    needs_document: bool = True

    def pipeline(self, detail: Detail = Detail.FULL) -> list[Document]:
        """Return the pipeline stages with which the change stream is opened.

        The stages drop the changes of other tasks, and the large fields of documents. Some changes of other
        queues still come through, because only `events.events_of` can determine the queue.
        """
        matched: Document = {"ns.coll": TASKS, "documentKey._id": {"$type": "string"}}
        if self.task_id is not None:
            matched["documentKey._id"] = self.task_id
        elif self.task_ids is not None:
            matched["documentKey._id"] = {"$in": list(self.task_ids)}
        if self.flow_key is not None:
            # A regular expression cannot hold the character NUL, except as an escape.
            steps = re.escape(f"{self.flow_key}/").replace("\0", r"\x00")
            matched["documentKey._id"] = {"$regex": f"^[^:]+:{steps}"}
        is_long = False
        if self.names is not None or self.tenant is not None:
            alternatives = "|".join(map(re.escape, self.names or ()))
            is_long = len(alternatives) > LONGEST_PATTERN
            names = "[^:]+" if self.names is None or is_long else f"(?:{alternatives})"
            of_tenant = "" if self.tenant is None else re.escape(prefix_of(self.tenant))
            matched["documentKey._id"] = {"$regex": f"^{names}:{of_tenant}"}
        stages: list[Document] = [{"$match": matched}]
        if is_long:
            name = {"$arrayElemAt": [{"$split": [_id(), ":"]}, 0]}
            stages.append({"$match": {"$expr": {"$in": [name, {"$literal": list(self.names or ())}]}}})
        if self.ends_only:
            stages.append({"$match": _IS_END})
        if self.keys is not None:
            key = {"$substrBytes": [_id(), {"$add": [{"$indexOfBytes": [_id(), ":"]}, 1]}, -1]}
            stages.append({"$match": {"$expr": {"$in": [key, {"$literal": list(self.keys)}]}}})
        if self.queues is not None:
            wanted = {"$in": list(self.queues)}
            paths = ("fullDocument.queue", "fullDocument.task_state.former_queues")
            known = [{path: wanted} for path in paths]
            unknown = [{"operationType": "update"}] if detail is not Detail.FULL else []
            stages.append({"$match": {"$or": [*known, *unknown]}})
        kept = ["operationType", "ns", "documentKey", "wallTime", "clusterTime"]
        if detail is not Detail.NAME:
            kept += ["updateDescription", *(f"fullDocument.{field}" for field in _VIEW)]
        return [*stages, {"$project": dict.fromkeys(kept, 1)}]


@dataclass(frozen=True, slots=True)
class Opening:
    """The settings of a change stream: the tasks to follow, the detail of the changes, and where the stream begins."""

    wanted: Wanted
    detail: Detail = Detail.FULL
    #: The text of the resume token after which the stream begins. If `after` is None, the stream begins at `since`, a
    #: position in the oplog. If both are None, the stream begins now.
    after: str | None = None
    since: Timestamp | None = None

    @property
    def pipeline(self) -> list[Document]:
        """The pipeline stages with which the change stream is opened."""
        return self.wanted.pipeline(self.detail)

    def options(self) -> dict[str, Any]:
        """Return the other arguments with which the change stream is opened."""
        options: dict[str, Any] = {"max_await_time_ms": _MAX_AWAIT_MS, "batch_size": _BATCH}
        if self.detail is not Detail.FULL:
            options["batch_size"] = 1
        elif self.wanted.needs_document:
            options["full_document"] = "updateLookup"
        if self.after is not None:
            options["start_after"] = {"_data": self.after}
        elif self.since is not None:
            options["start_at_operation_time"] = self.since
        return options


def _id() -> Document:
    """Return the task's id, or ":" if the id is no string.

    An earlier stage drops ids that are no strings. But the server may reorder stages, so this expression must not fail.
    """
    return {"$cond": [{"$eq": [{"$type": "$documentKey._id"}, "string"]}, "$documentKey._id", ":"]}


def in_oplog(instant: datetime) -> Timestamp:
    """Return an instant as a timestamp of the oplog; raise ValueError or OverflowError."""
    return Timestamp(instant, 0)


def place_in_oplog(seconds: int, ordinal: int) -> Timestamp:
    """Return a change's position in the oplog; raise ValueError."""
    return Timestamp(seconds, ordinal)


def with_document_then(change: Mapping[str, Any]) -> Operation[Document]:
    """Return the change with the document as it was at the time of the change.

    If the server no longer has that state, return the change without a document.
    """
    find = command(
        "find",
        TASKS,
        filter={"_id": change["documentKey"]["_id"]},
        projection=dict.fromkeys(_VIEW, 1),
        limit=1,
        singleBatch=True,
        readConcern={"level": "snapshot", "atClusterTime": change["clusterTime"]},
    )
    found: list[Document] = []
    try:
        answer = yield find
        found = answer["cursor"]["firstBatch"]
    except DatabaseUnavailable:
        raise
    except DatabaseError:
        pass  # the change is too old (five minutes by default), or the collection was made or changed since
    return {**change, "fullDocument": found[0] if found else None, IS_EXACT: bool(found)}


# --- cursors ---------------------------------------------------------------------------------------------

# Sync and async cursors on the change streams that readers of events open.
#
# Motor runs the driver's sync client in threads. If an asyncio reader uses a Motor client, this module also runs the
# sync client in threads.

_OPEN_TIMEOUT, CLOSE_TIMEOUT = timedelta(seconds=10), timedelta(seconds=2)
#: Codes of the errors ChangeStreamHistoryLost and ChangeStreamFatalError. A stream also fails with these errors if it
#: begins at an instant before the first entry of the oplog.
_LOST = frozenset({286, 280})


class _Cursor:
    """The common part of the two cursors."""

    def __init__(self, store: AsyncStore | SyncStore, stream: Any) -> None:
        self._store: Any = store
        self._stream = stream

    @property
    def is_alive(self) -> bool:
        """Whether more changes can come."""
        return bool(self._stream.alive)

    @property
    def token(self) -> str | None:
        """The text of the resume token. A stream that starts with it continues after all changes read so far."""
        token = self._stream.resume_token
        return None if token is None else str(token["_data"])


class SyncCursor(_Cursor):
    """An open change stream of tasks. After any error, the caller must close it and open another."""

    @classmethod
    def open(cls, store: SyncStore, opening: Opening) -> Self:
        """Open the stream; raise a kind of DatabaseError."""
        try:
            with bounded(_OPEN_TIMEOUT):
                return cls(store, store.readable[TASKS].watch(opening.pipeline, **opening.options()))
        except Exception as error:
            raise _told(error, store) from error.__cause__

    def next(self) -> Document | None:
        """Return the next change, or None if no change came for a while; raise a kind of DatabaseError."""
        try:
            with bounded(None):
                change: Document | None = self._stream.try_next()
                return change
        except Exception as error:
            raise _told(error) from error.__cause__

    def with_document_then(self, change: Document) -> Document:
        """Return the change with the task's document as it was at the time of the change."""
        found: Document = self._store.run(with_document_then(change))
        return found

    def close(self) -> None:
        """Close the stream; raise a kind of DatabaseError."""
        with bounded(CLOSE_TIMEOUT):
            self._stream.close()


class AsyncCursor(_Cursor):
    """An open change stream of tasks, for asyncio. After any error, the caller must close it and open another."""

    @classmethod
    async def open(cls, store: AsyncStore | SyncStore, opening: Opening) -> Self:
        """Open the stream; raise a kind of DatabaseError."""
        try:
            with bounded(_OPEN_TIMEOUT):
                watch = store.readable[TASKS].watch
                return cls(store, await _called(store, watch, opening.pipeline, **opening.options()))
        except Exception as error:
            raise _told(error, store) from error.__cause__

    async def next(self) -> Document | None:
        """Return the next change, or None if no change came for a while; raise a kind of DatabaseError."""
        try:
            with bounded(None):
                change: Document | None = await _called(self._store, self._stream.try_next)
                return change
        except Exception as error:
            raise _told(error) from error.__cause__

    async def with_document_then(self, change: Document) -> Document:
        """Return the change with the task's document as it was at the time of the change."""
        found: Document = await _called(self._store, self._store.run, with_document_then(change))
        return found

    async def close(self) -> None:
        """Close the stream; raise a kind of DatabaseError."""
        with bounded(CLOSE_TIMEOUT):
            await _called(self._store, self._stream.close)


async def _called(store: AsyncStore | SyncStore, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the driver. For a Motor client, call its sync client in a thread."""
    if isinstance(store, SyncStore):
        return await asyncio.to_thread(method, *args, **kwargs)
    return await method(*args, **kwargs)


def _told(error: Exception, store: AsyncStore | SyncStore | None = None) -> Exception:
    """Return the error. If the token is too old or a right is missing, return an error with a remedy instead."""
    if isinstance(error, OperationFailed) and error.code in _LOST:
        return EventsLost(error.reason)
    return error if store is None else rights.explained(error, rights.FOLLOWING, store.database.name)
