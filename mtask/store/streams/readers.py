"""What a reader of events asks of the server: its stream of changes, and a task's document as it was at a change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any

from bson.timestamp import Timestamp

from mtask.errors import DatabaseError, DatabaseUnavailable
from mtask.store.driver.operation import Operation, command
from mtask.store.driver.stores import TASKS
from mtask.store.statements.filters import RUNS
from mtask.store.streams.lookup import IS_EXACT

Document = dict[str, Any]
#: How long one request waits for events on the server, in ms.
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
#: What an event may tell of a document, and what proves that it is the document of the change.
_VIEW = (
    "queue",
    "quiet_time",
    "task_state.finish_time",
    "task_state.queue_time",
    *(f"{RUNS}.{field}" for field in _RUN_FIELDS),
)


class Detail(IntEnum):
    """How much of a change is sent. No change may be larger than a document may be."""

    FULL = 0
    WITHOUT_DOCUMENT = 1  #: what was changed alone; the document is looked up apart
    NAME = 2  #: that there was a change


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose changes a reader wants; None: anybody's."""

    names: Sequence[str] | None = None
    queues: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    task_id: str | None = None
    #: Whether it needs to know of the document what the change does not say.
    needs_document: bool = True

    def pipeline(self, detail: Detail = Detail.FULL) -> list[Document]:
        """Return the stages that leave other tasks' changes out, and of the documents what can be large.

        Of the changes in other queues some are let through: which queue it was is decided by `events.events_of`.
        """
        matched: Document = {"ns.coll": TASKS, "documentKey._id": {"$type": "string"}}
        if self.task_id is not None:
            matched["documentKey._id"] = self.task_id
        if self.names is not None:
            matched["documentKey._id"] = {"$regex": f"^(?:{'|'.join(map(re.escape, self.names))}):"}
        stages: list[Document] = [{"$match": matched}]
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
    """How to open a change stream of tasks: whose changes, in how much detail, and from where on."""

    wanted: Wanted
    detail: Detail = Detail.FULL
    #: The text of the resume token after which it begins; else where in the oplog; None: now.
    after: str | None = None
    since: Timestamp | None = None

    @property
    def pipeline(self) -> list[Document]:
        """The stages with which to open it."""
        return self.wanted.pipeline(self.detail)

    def options(self) -> dict[str, Any]:
        """Return the other arguments with which to open it."""
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
    """Return the task's id where it is text: stages may be reordered."""
    return {"$cond": [{"$eq": [{"$type": "$documentKey._id"}, "string"]}, "$documentKey._id", ":"]}


def in_oplog(instant: datetime) -> Timestamp:
    """Return an instant as the oplog counts; raise ValueError or OverflowError."""
    return Timestamp(instant, 0)


def place_in_oplog(seconds: int, ordinal: int) -> Timestamp:
    """Return a change's place in the oplog; raise ValueError."""
    return Timestamp(seconds, ordinal)


def with_document_then(change: Mapping[str, Any]) -> Operation[Document]:
    """Return the change with the document as it was then, without it where the server does not keep it so long."""
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
        pass  # five minutes later, by default, and where the collection was made or changed since
    return {**change, "fullDocument": found[0] if found else None, IS_EXACT: bool(found)}
