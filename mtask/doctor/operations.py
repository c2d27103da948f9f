"""Operations for `mtask show` and `mtask doctor`. They only read, except for one write that matches no document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bson import ObjectId
from bson.timestamp import Timestamp

from mtask.database import setup
from mtask.database.schema import LAYOUTS
from mtask.database.schema import misfits as misfits_filter
from mtask.errors import NotInStableApi, OperationFailed, TaskNotFound
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.indexes import DISCOVERY_INDEX, STATUS_INDEX, head_index
from mtask.kernel.driver.operation import Collection, Operation, command, tasks
from mtask.kernel.driver.operation import server_time as server_time
from mtask.kernel.driver.roles import ROLES, Role, lacking
from mtask.kernel.operations import workers
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters

Document = dict[str, Any]

#: Time limit of a query that examines every document, in ms.
SCAN_MS = 5_000
MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
#: The room, in bytes, that a document needs for one more run with a short reason of its end.
LEAST_ROOM_BYTES = 1_024
_NO_COLLECTION = 26
#: The most waiting tasks of a queue that are looked through for one of no tenant.
_LOOKED_THROUGH = 20_000


def greeting() -> Operation[Document]:
    """Return the server's reply to `hello`."""
    answer: Document = yield command("hello")
    return answer


@dataclass(frozen=True, slots=True)
class Inspection:
    """A task's stored document, the documents of all workers, and the server's time."""

    document: Document
    workers: list[Document]
    now: datetime


def inspect(task_id: str) -> Operation[Inspection]:
    """Return the data that explains why a task waits; raise TaskNotFound.

    `task_id` may also be the text of an ObjectId.
    """
    wanted: list[Any] = [task_id, ObjectId(task_id)] if ObjectId.is_valid(task_id) else [task_id]
    document = yield tasks("find_one", {"_id": {"$in": wanted}})
    if document is None:
        raise TaskNotFound(task_id)
    on_record = yield from workers.every()
    return Inspection(document, on_record, (yield from server_time()))


def version(hello: Mapping[str, Any]) -> Operation[str]:
    """Return the server's version, or its release if the client is restricted to the Stable API."""
    try:
        build = yield command("buildInfo")
    except NotInStableApi:
        return setup.release_of(hello)
    return str(build["version"])


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The parts of serverStatus that doctor needs."""

    storage_engine: str
    uptime_s: float
    ttl_passes: int | None
    oplog_first: datetime | None
    oplog_last: datetime | None


def server_status() -> Operation[ServerStatus]:
    """Return the server's status; raise AccessDenied."""
    status = yield command("serverStatus", oplog=1)
    oplog = status.get("oplog") or {}
    return ServerStatus(
        storage_engine=str(status.get("storageEngine", {}).get("name", "")),
        uptime_s=float(status.get("uptime", 0)),
        ttl_passes=status.get("metrics", {}).get("ttl", {}).get("passes"),
        oplog_first=_instant(oplog.get("earliestOptime")),
        oplog_last=_instant(oplog.get("latestOptime")),
    )


def _instant(timestamp: Any) -> datetime | None:
    return timestamp.as_datetime() if isinstance(timestamp, Timestamp) and timestamp.time else None


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights that the user lacks, by role of mtask. A right is a text such as "insert on tasks".

    `user` is None if the server does not control access.
    """

    user: str | None
    lacking: Mapping[Role, list[str]]

    @property
    def roles(self) -> list[Role]:
        """The roles for which the user has every right, no matter how the rights were granted."""
        return [role for role, missing in self.lacking.items() if not missing]


def rights(database: str) -> Operation[Rights]:
    """Return the rights on this database that the user lacks."""
    status = yield command("connectionStatus", showPrivileges=True)
    users = status["authInfo"].get("authenticatedUsers", [])
    if not users:
        return Rights(None, {})
    granted = status["authInfo"].get("authenticatedUserPrivileges", [])
    missing = {role: lacking(role, database, granted) for role in ROLES}
    return Rights(f"{users[0].get('user')}@{users[0].get('db')}", missing)


def try_read_and_write() -> Operation[None]:
    """Try one read and one write; raise AccessDenied. Neither matches a document."""
    yield tasks("find_one", {"_id": {"$in": []}})
    yield tasks("update_one", {"_id": {"$in": []}}, {"$set": {"queue": "default"}})


def collection_options() -> Operation[dict[str, Document]]:
    """Return the options of each existing collection of mtask, by name."""
    listed = yield command("listCollections", filter={"name": {"$in": list(LAYOUTS)}})
    return {found["name"]: found.get("options", {}) for found in listed["cursor"]["firstBatch"]}


@dataclass(frozen=True, slots=True)
class IndexState:
    """The names of mtask's missing indexes, and of its indexes with wrong keys or options."""

    missing: list[str]
    differing: list[str]


def index_state(collection: Collection) -> Operation[IndexState]:
    """Compare a collection's indexes with the indexes that this version of mtask makes."""
    made = list(LAYOUTS[collection].indexes())
    # A collection that is sharded by another field cannot have the index of heads. So a sharded cluster may lack it.
    if collection == "tasks" and (yield from greeting()).get("msg") != "isdbgrid":
        made.append(head_index())
    wanted = [index.document for index in made]
    try:
        listed = yield command("listIndexes", collection)
    except OperationFailed as error:
        if error.code != _NO_COLLECTION:
            raise
        return IndexState([str(index["name"]) for index in wanted], [])
    found = {index["name"]: index for index in listed["cursor"]["firstBatch"]}
    missing = [str(index["name"]) for index in wanted if index["name"] not in found]
    differing = [
        str(index["name"])
        for index in wanted
        if index["name"] in found and _essence(found[index["name"]]) != _essence(index)
    ]
    return IndexState(missing, differing)


def _essence(index: Mapping[str, Any]) -> Any:
    keys = [(name, float(direction)) for name, direction in index["key"].items()]
    return keys, index.get("partialFilterExpression"), index.get("expireAfterSeconds"), bool(index.get("unique"))


@dataclass(frozen=True, slots=True)
class Misfit:
    """A document in `tasks` that breaks the schema."""

    document_id: Any
    schema_version: Any
    #: Whether the document is already marked FAIL. Workers no longer find such a document.
    is_marked: bool


def misfits(limit: int) -> Operation[list[Misfit]]:
    """Return documents in `tasks` that cannot be read as tasks. Documents that are not marked FAIL come first.

    Raises DatabaseUnavailable if the search takes too long.
    """
    marked = {"task_state.status": TaskStatus.FAIL.value, filters.NEXT: {"$exists": False}}
    found: list[Misfit] = []
    for is_marked, among in ((False, {"$nor": [marked]}), (True, marked)):
        left = limit - len(found)
        if left:
            rows = yield tasks(
                "find", {"$and": [among, misfits_filter()]}, {"schema_version": 1}, limit=left, max_time_ms=SCAN_MS
            )
            found += [Misfit(row["_id"], row.get("schema_version"), is_marked) for row in rows]
    return found


def oversized(limit: int) -> Operation[list[Document]]:
    """Return tasks that are too large for a worker to write the end of a run. Each comes with its `status`."""
    matched = {"$expr": {"$gt": [{"$bsonSize": "$$ROOT"}, MAX_DOCUMENT_BYTES - LEAST_ROOM_BYTES]}}
    kept = {"status": "$task_state.status"}
    found: list[Document] = yield tasks("find", matched, kept, limit=limit, max_time_ms=SCAN_MS)
    return found


def is_newer(misfit: Misfit) -> bool:
    """Whether a newer version of mtask wrote the document."""
    version_found = misfit.schema_version
    return isinstance(version_found, int | float) and SCHEMA_VERSION < version_found < math.inf


def due_groups(limit: int) -> Operation[list[Document]]:
    """Count the due INIT tasks by queue, name, specific_worker_ids, data key and version, the longest due first."""
    due = {
        "task_state.status": "INIT",
        filters.NEXT: {"$exists": True},
        "$expr": {"$lte": [f"${filters.NEXT}", x.NOW]},
    }
    group = {
        "_id": {
            "queue": "$queue",
            "name": "$name",
            "worker_ids": "$task_option.specific_worker_ids",
            "sealed": "$sealed",
            "version": "$version",
        },
        "count": {"$sum": 1},
        "oldest": {"$min": f"${filters.NEXT}"},
        "task_id": {"$first": "$_id"},
    }
    stages = [{"$match": due}, {"$group": group}, {"$sort": {"oldest": 1}}, {"$limit": limit}]
    found: list[Document] = yield tasks("rows", stages, hint=STATUS_INDEX, maxTimeMS=SCAN_MS, allowDiskUse=True)
    return found


def lapsed_tasks(grace_ms: int, limit: int) -> Operation[list[Document]]:
    """Return tasks with a run that lapsed at least `grace_ms` ago and that nobody has closed since."""
    found: list[Document] = yield tasks("find", filters.lapsed(grace_ms), {"name": 1}, limit=limit, max_time_ms=SCAN_MS)
    return found


def held_by(worker_ids: Sequence[str]) -> Operation[dict[str, int]]:
    """Return the number of RUNNING runs of each of these workers, by worker_id."""
    held = {"worker_id": {"$in": list(worker_ids)}, "status": "RUNNING"}
    stages = [
        {"$match": {"task_state.status": "RUNNING", filters.RUNS: {"$elemMatch": held}}},
        {"$unwind": f"${filters.RUNS}"},
        {"$match": {f"{filters.RUNS}.{field}": wanted for field, wanted in held.items()}},
        {"$group": {"_id": f"${filters.RUNS}.worker_id", "count": {"$sum": 1}}},
    ]
    rows = yield tasks("rows", stages, maxTimeMS=SCAN_MS)
    return {row["_id"]: row["count"] for row in rows if isinstance(row["_id"], str)}


def overdue_expiry(grace_ms: int) -> Operation[int]:
    """Count the tasks that retention should have removed more than `grace_ms` ago. The count stops at 1000."""
    late = {
        "expire_time": {"$exists": True},
        "$expr": {"$lt": ["$expire_time", {"$subtract": [x.NOW, grace_ms]}]},
    }
    counted: int = yield tasks("count_documents", late, limit=1000, maxTimeMS=SCAN_MS)
    return counted


def open_of_no_tenant(queue: str) -> Operation[str | None]:
    """Return a task of no tenant that waits in a queue, if one is among the first of them. None: there is none."""
    stages: list[dict[str, Any]] = [
        {"$match": {"queue": queue, filters.NEXT: {"$exists": True}}},
        {"$limit": _LOOKED_THROUGH},
        {"$match": {"tenant": None}},
        {"$limit": 1},
        {"$project": {"_id": 1}},
    ]
    rows = yield tasks("rows", stages, hint=DISCOVERY_INDEX)
    return str(rows[0]["_id"]) if rows else None
