"""Make sure of the database: a recent replica set, our validators and indexes, nobody else's documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from pymongo import IndexModel

from mtask.errors import AccessDenied, NotReplicaSet, OperationFailed, SchemaMismatch, ServerTooOld
from mtask.model.documents import SCHEMA_REVISION, SCHEMA_VERSION
from mtask.store.driver import COLLECTIONS
from mtask.store.operation import Call, Operation, command, controls, schedules, tasks, workers
from mtask.store.schema import (
    control_validator,
    schedule_indexes,
    schedule_validator,
    schema_title,
    task_indexes,
    task_validator,
    worker_indexes,
    worker_validator,
)

MIN_SERVER = (6, 0)
_TITLE = re.compile(r"^mtask (?P<collection>\w+), schema_version (?P<version>\d+), revision (?P<revision>\d+)$")
_NAMESPACE_EXISTS = 48
#: Building an index of a large collection takes its time.
_INDEX_TIMEOUT = timedelta(hours=1)
_INDEX_CONFLICTS = frozenset({85, 86})
#: Documents already there that break the validator may still be changed: the worker marks them FAIL.
_VALIDATION_LEVEL = "moderate"


def check_server() -> Operation[datetime]:
    """Return the server's time; raise NotReplicaSet or ServerTooOld."""
    hello = yield command("hello")
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise NotReplicaSet(str(hello.get("me") or "this address"))
    build = yield command("buildInfo")
    if tuple(build["versionArray"][:2]) < MIN_SERVER:
        raise ServerTooOld(build["version"], ".".join(map(str, MIN_SERVER)))
    now: datetime = hello["localTime"]
    return now


def ensure(*, repair: bool = False) -> Operation[datetime]:
    """Check the server and make sure of the collections; return the server's time.

    Costs six reads where everything is in place. With `repair`, validators and indexes are made anew even
    then. A user who may only read and write passes, where an administrator ran `mtask init` before.
    """
    now = yield from check_server()
    options = yield from _listed()
    for collection, target, validator, indexes in (
        ("tasks", tasks, task_validator(), task_indexes()),
        ("workers", workers, worker_validator(), worker_indexes()),
        ("schedules", schedules, schedule_validator(), schedule_indexes()),
        ("controls", controls, control_validator(), []),
    ):
        state = yield from _check_collection(collection, options.get(collection))
        # A process that died, or is still at work, between the two leaves a validator without indexes.
        if state == "current" and not repair and (yield from _has_indexes(collection, indexes)):
            continue
        try:
            if state != "current" or repair:
                yield from _set_validator(collection, validator, exists=collection in options)
            if indexes:
                yield from _make_indexes(collection, target("create_indexes", indexes))
        except AccessDenied:
            if repair or collection not in options:
                raise
    return now


def is_there() -> Operation[bool]:
    """Return whether all collections exist, whoever made them and however."""
    return len((yield from _listed())) == len(COLLECTIONS)


def _listed() -> Operation[dict[str, dict[str, Any]]]:
    """Return what the server says of each of the collections that exists."""
    listed = yield command("listCollections", filter={"name": {"$in": list(COLLECTIONS)}})
    return {found["name"]: found for found in listed["cursor"]["firstBatch"]}


def _check_collection(collection: str, found: dict[str, Any] | None) -> Operation[str]:
    """Return "absent", "current" or "outdated"; raise SchemaMismatch."""
    if found is None:
        return "absent"
    if found.get("type", "collection") != "collection":
        raise SchemaMismatch(collection, f"it is a {found['type']}", "Use another --database.")
    title = found.get("options", {}).get("validator", {}).get("$jsonSchema", {}).get("title", "")
    ours = _TITLE.match(str(title))
    if ours and int(ours["version"]) > SCHEMA_VERSION:
        raise SchemaMismatch(
            collection,
            f"it has schema_version {ours['version']}, and this mtask knows {SCHEMA_VERSION}",
            "Upgrade mtask.",
        )
    if title == schema_title(collection):
        return "current"
    if ours and int(ours["revision"]) > SCHEMA_REVISION:
        return "current"  # a newer mtask of the same schema_version made it: left as it is
    if not ours:
        yield from _CHECKS[collection]()
    return "outdated"


def _check_documents() -> Operation[None]:
    newer = yield tasks("find_one", {"schema_version": {"$gt": SCHEMA_VERSION}}, {"schema_version": 1})
    if newer is not None:
        raise SchemaMismatch(
            "tasks",
            f"document {newer['_id']!r} has schema_version {newer['schema_version']!r}, and this mtask knows "
            f"{SCHEMA_VERSION}",
            "Upgrade mtask.",
        )
    foreign = yield tasks("find_one", {"schema_version": {"$exists": False}}, {"_id": 1})
    if foreign is not None:
        raise SchemaMismatch(
            "tasks",
            f"document {foreign['_id']!r} is not a task of mtask (it has no schema_version)",
            "Use another --database, or move the foreign documents away.",
        )


def _check_workers() -> Operation[None]:
    foreign = yield workers("find_one", {"incarnation": {"$exists": False}}, {"_id": 1})
    if foreign is not None:
        raise SchemaMismatch(
            "workers",
            f"document {foreign['_id']!r} is not a worker of mtask (it has no incarnation)",
            "Use another --database, or move the foreign documents away.",
        )


def _check_schedules() -> Operation[None]:
    foreign = yield schedules("find_one", {"schedule_state": {"$exists": False}}, {"_id": 1})
    if foreign is not None:
        raise SchemaMismatch(
            "schedules",
            f"document {foreign['_id']!r} is not a schedule of mtask (it has no schedule_state)",
            "Use another --database, or move the foreign documents away.",
        )


def _check_controls() -> Operation[None]:
    foreign = yield controls("find_one", {"revision": {"$exists": False}}, {"_id": 1})
    if foreign is not None:
        raise SchemaMismatch(
            "controls",
            f"document {foreign['_id']!r} is not a control of mtask (it has no revision)",
            "Use another --database, or move the foreign documents away.",
        )


_CHECKS = {
    "tasks": _check_documents,
    "workers": _check_workers,
    "schedules": _check_schedules,
    "controls": _check_controls,
}


def _has_indexes(collection: str, indexes: Sequence[IndexModel]) -> Operation[bool]:
    if not indexes:
        return True
    listed = yield command("listIndexes", collection)
    names = {found["name"] for found in listed["cursor"]["firstBatch"]}
    return all(index.document["name"] in names for index in indexes)


def _set_validator(collection: str, validator: dict[str, Any], *, exists: bool) -> Operation[None]:
    settings = {"validator": validator, "validationLevel": _VALIDATION_LEVEL, "validationAction": "error"}
    if not exists:
        try:
            yield command("create", collection, **settings)
        except OperationFailed as error:
            if error.code != _NAMESPACE_EXISTS:  # another process was faster
                raise
        else:
            return
    yield command("collMod", collection, **settings)


def _make_indexes(collection: str, make_indexes: Call) -> Operation[None]:
    try:
        yield make_indexes.within(_INDEX_TIMEOUT)
    except OperationFailed as error:
        if error.code in _INDEX_CONFLICTS:
            raise SchemaMismatch(
                collection,
                f"an index of ours exists with other keys or options ({error.reason})",
                "Drop that index, then run `mtask init`.",
            ) from error
        raise
