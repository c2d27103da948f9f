"""The registry of workers: their registrations, heartbeats and orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import ReturnDocument

from mtask.errors import DuplicateKey, WorkerIdInUse, WorkerNotFound
from mtask.kernel.document.parts import KNOWN_SINCE
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.document.task import FLOWS_REVISION, SCHEMA_REVISION, TENANTS_REVISION
from mtask.kernel.driver.operation import Operation, workers
from mtask.kernel.statements import expressions as x

Document = dict[str, Any]
_RACES = 5
_STOPPED = WorkerStatus.STOPPED.value
#: A batch for all workers: the usual one has 101 documents, and each further one is a command.
_ALL_AT_ONCE = 10_000
_LIVE: dict[str, Any] = {
    "status": {"$ne": _STOPPED},
    "heartbeat_expire_time": {"$type": "date"},
    "$expr": {"$gt": ["$heartbeat_expire_time", x.NOW]},
}


@dataclass(frozen=True, slots=True)
class Registration:
    """The data with which a worker registers."""

    worker_id: str
    incarnation: str
    host: str
    pid: int
    pid_scope: str | None
    queues: Sequence[str]
    names: Sequence[str]
    concurrency: int
    version: str
    heartbeat_timeout: timedelta


def _expiry(timeout: timedelta) -> x.Expression:
    return x.add_ms(x.NOW, int(timeout / timedelta(milliseconds=1)))


def register(me: Registration, dead_incarnation: str | None = None) -> Operation[Document]:
    """Register this worker under its worker_id; raise WorkerIdInUse if another live process has this worker_id.

    `dead_incarnation` is an incarnation that has certainly ended. If the document still names it, this worker takes
    over the document at once.
    """
    fresh = {
        "_id": x.literal(me.worker_id),
        "incarnation": me.incarnation,
        "host": x.literal(me.host),
        "pid": me.pid,
        "pid_scope": x.literal(me.pid_scope),
        "status": WorkerStatus.READY.value,
        "started_time": x.NOW,
        "heartbeat_time": x.NOW,
        "heartbeat_expire_time": _expiry(me.heartbeat_timeout),
        "queues": x.literal(list(me.queues)),
        "names": x.literal(list(me.names)),
        "unserved_names": [],
        "unusable_keys": [],
        "controls_seen": [],
        "appeal_cnt": 0,
        "was_silent": False,
        "concurrency": me.concurrency,
        "running_cnt": 0,
        "version": me.version,
        "schema_revision": SCHEMA_REVISION,
        "control": {"stop": False, "concurrency": x.literal(None)},
    }
    is_free = {
        "$or": [
            {"$eq": [{"$type": "$incarnation"}, "missing"]},
            {"$eq": ["$status", _STOPPED]},
            {"$lte": ["$heartbeat_expire_time", x.NOW]},
            {"$ne": [{"$type": "$heartbeat_expire_time"}, "date"]},
            {"$eq": ["$incarnation", x.literal(dead_incarnation or "")]},
        ]
    }
    pipeline = [{"$replaceWith": {"$cond": [is_free, fresh, "$$ROOT"]}}]
    for _ in range(_RACES):
        try:
            document: Document = yield workers(
                "find_one_and_update",
                {"_id": me.worker_id},
                pipeline,
                upsert=True,
                return_document=ReturnDocument.AFTER,
                projection={"now": x.NOW, **dict.fromkeys(fresh, 1)},
            )
        except DuplicateKey:
            continue
        if document["incarnation"] == me.incarnation:
            return document
        raise _in_use(document)
    found = yield workers("find_one", {"_id": me.worker_id}, {"now": x.NOW, **dict.fromkeys(fresh, 1)})
    raise _in_use(found or {"_id": me.worker_id})


def _in_use(document: Mapping[str, Any]) -> WorkerIdInUse:
    now, expiry, pid = document.get("now"), document.get("heartbeat_expire_time"), document.get("pid")
    left = expiry - now if isinstance(now, datetime) and isinstance(expiry, datetime) else timedelta(0)
    return WorkerIdInUse(document["_id"], str(document.get("host")), pid if isinstance(pid, int) else 0, left)


def find(worker_id: str) -> Operation[Document | None]:
    """Return a worker's document, or None if it does not exist."""
    document: Document | None = yield workers("find_one", {"_id": worker_id})
    return document


def too_old(revision: int = FLOWS_REVISION) -> dict[str, Any]:
    """Match live workers of a version before this revision; by default, of one that knows no flows and no gathering."""
    live = {"status": {"$ne": _STOPPED}, "$expr": {"$gt": ["$heartbeat_expire_time", x.NOW]}}
    return {**live, "schema_revision": {"$not": {"$gte": revision}}}


def without_flows(limit: int) -> Operation[list[str]]:
    """Return live workers of a version that does not know flows."""
    return (yield from older(FLOWS_REVISION, limit))


def without_field(name: str, limit: int = 5) -> Operation[list[str]]:
    """Return live workers of a version that does not know this field of tasks."""
    return (yield from older(KNOWN_SINCE[name][0], limit))


def without_tenants(limit: int) -> Operation[list[str]]:
    """Return live workers of a version that does not know the limits, pauses and turns of tenants."""
    return (yield from older(TENANTS_REVISION, limit))


def older(revision: int, limit: int) -> Operation[list[str]]:
    """Return live workers of a version before this revision."""
    found = yield workers("find", too_old(revision), {"_id": 1}, limit=limit)
    return [str(document["_id"]) for document in found]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The part of a worker's document that each heartbeat updates."""

    status: WorkerStatus
    running_cnt: int
    concurrency: int
    unserved_names: Sequence[str]
    controls_seen: Sequence[Mapping[str, Any]] = ()
    unusable_keys: Sequence[str] = ()
    #: How often this worker has appealed to the others, as due tasks waited for which it had no room.
    appeal_cnt: int = 0
    #: The versions of those handlers that have one above 1, each as name@version.
    handler_versions: Sequence[str] = ()


def heartbeat(me: Registration, beat: Heartbeat) -> Operation[Document | None]:
    """Extend this worker's registration; return its `control` and times, or None if there is no registration.

    In the answer, `was_silent` says that the registration had expired before this heartbeat. Other workers then took
    this worker for dead.
    """
    change = {
        "heartbeat_time": x.NOW,
        "heartbeat_expire_time": _expiry(me.heartbeat_timeout),
        "status": beat.status.value,
        "running_cnt": beat.running_cnt,
        "concurrency": beat.concurrency,
        "unserved_names": x.literal(list(beat.unserved_names)),
        "unusable_keys": x.literal(list(beat.unusable_keys)),
        "controls_seen": x.literal([dict(seen) for seen in beat.controls_seen]),
        "appeal_cnt": beat.appeal_cnt,
        **({"handler_versions": x.literal(list(beat.handler_versions))} if beat.handler_versions else {}),
        "was_silent": {"$not": [{"$gt": ["$heartbeat_expire_time", x.NOW]}]},
    }
    document: Document | None = yield workers(
        "find_one_and_update",
        {"_id": me.worker_id, "incarnation": me.incarnation},
        [{"$set": change}],
        return_document=ReturnDocument.AFTER,
        projection={"control": 1, "heartbeat_time": 1, "heartbeat_expire_time": 1, "was_silent": 1},
    )
    return document


def is_live() -> dict[str, Any]:
    """Match live workers."""
    return dict(_LIVE)


def live() -> Operation[list[Document]]:
    """Return the live workers, each with the server's time as `now`."""
    found: list[Document] = yield workers("rows", [{"$match": _LIVE}, {"$sort": {"_id": 1}}, {"$set": {"now": x.NOW}}])
    return found


def peers(worker_id: str, queues: Sequence[str], former: Iterable[Document] = ()) -> Operation[list[Document]]:
    """Return what this worker must know of the live workers of its queues, with the server's time as `now`.

    What a worker serves does not change while it is registered, and it may be many names. So `former` is what this
    operation has returned before, and names and queues are read only for registrations that are not among these. They
    are missing for this worker itself, and for one that has gone meanwhile.
    """
    light = dict.fromkeys(("incarnation", "status", "concurrency", "appeal_cnt"), 1)
    matched = {**_LIVE, "queues": {"$in": list(queues)}}
    found = yield workers("rows", [{"$match": matched}, {"$project": {**light, "now": x.NOW}}], batchSize=_ALL_AT_ONCE)
    served = {_registration_of(worker): _served_by(worker) for worker in former if "names" in worker}
    ids = [worker["_id"] for worker in found if _registration_of(worker) not in served and worker["_id"] != worker_id]
    if ids:
        shared = {given["names"]: given["names"] for given in served.values()}
        view = dict.fromkeys(("incarnation", "names", "queues"), 1)
        for worker in (yield workers("find", {"_id": {"$in": ids}}, view, batch_size=_ALL_AT_ONCE)):
            given = served[_registration_of(worker)] = _served_by(worker)
            given["names"] = shared.setdefault(given["names"], given["names"])  # workers of one app share one tuple
    return [{**worker, **served.get(_registration_of(worker), {})} for worker in found]


def _served_by(worker: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {field: texts(worker.get(field)) for field in ("names", "queues")}


def _registration_of(worker: Mapping[str, Any]) -> tuple[str, str]:
    """Return what tells a registration from all others. The document may be malformed."""
    return str(worker["_id"]), str(worker.get("incarnation"))


def texts(found: Any) -> tuple[str, ...]:
    """Return the texts of a list in a worker's document, which may be malformed. A tuple has been read before."""
    if isinstance(found, tuple):
        return found
    return tuple(map(str, found)) if isinstance(found, list) else ()


def every() -> Operation[list[Document]]:
    """Return all workers on record, each with `is_live` by the server's clock."""
    is_live = {"$and": [{"$ne": ["$status", _STOPPED]}, {"$gt": ["$heartbeat_expire_time", x.NOW]}]}
    found: list[Document] = yield workers("rows", [{"$set": {"is_live": is_live}}, {"$sort": {"_id": 1}}])
    return found


def signs_of_life(worker_ids: Sequence[str]) -> Operation[list[Document]]:
    """Return the incarnation of each of these workers, and whether it is live or has stopped."""
    is_live = {"$gt": ["$heartbeat_expire_time", x.NOW]}
    view = {"incarnation": 1, "is_stopped": {"$eq": ["$status", _STOPPED]}, "is_live": is_live}
    found: list[Document] = yield workers("find", {"_id": {"$in": list(worker_ids)}}, view)
    return found


def control(worker_id: str, change: Mapping[str, Any]) -> Operation[Document]:
    """Give an order to a live worker; return its document. Raises WorkerNotFound."""
    document: Document | None = yield workers(
        "find_one_and_update",
        {"_id": worker_id, "status": {"$ne": _STOPPED}, "$expr": {"$gt": ["$heartbeat_expire_time", x.NOW]}},
        {"$set": {f"control.{name}": value for name, value in change.items()}},
        return_document=ReturnDocument.AFTER,
    )
    if document is None:
        raise WorkerNotFound(worker_id)
    return document
