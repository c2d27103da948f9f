"""Sets up the database: checks the server, makes validators and indexes, and refuses foreign documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from mtask.database.schema import LAYOUTS, schema_title
from mtask.errors import AccessDenied, NotReplicaSet, OperationFailed, SchemaMismatch, ServerTooOld
from mtask.kernel.document.task import SCHEMA_REVISION, SCHEMA_VERSION
from mtask.kernel.driver.indexes import FINISHED_INDEX, finished_index, head_index
from mtask.kernel.driver.operation import Call, Collection, Operation, admin_command, command, on, tasks
from mtask.kernel.driver.roles import ROLES, Role, privileges, role_name

#: The collections that every use needs. The others are made before the first write to them.
ESSENTIAL: Sequence[Collection] = ("tasks", "workers")
EVERY: Sequence[Collection] = tuple(LAYOUTS)
MIN_RELEASE = "6.0"
#: The server's release, by its newest wire version. `hello` reports the wire version to any client. `buildInfo` reports
#: the release itself, but a client that is restricted to the Stable API may not call it.
_RELEASES = {7: "4.0", 8: "4.2", 9: "4.4", 13: "5.0", 17: "6.0", 21: "7.0", 25: "8.0"}
_MIN_WIRE_VERSION = next(number for number, release in _RELEASES.items() if release == MIN_RELEASE)
_TITLE = re.compile(r"^mtask (?P<collection>\w+), schema_version (?P<version>\d+), revision (?P<revision>\d+)$")
_NAMESPACE_EXISTS = 48
#: Time limit of building indexes. Building takes long in a large collection.
_INDEX_TIMEOUT = timedelta(hours=1)
_INDEX_CONFLICTS = frozenset({85, 86})
#: The code of an index that the server cannot make: here, a unique one in a collection that is sharded otherwise.
_CANNOT_MAKE_INDEX = 67
#: With this level, the server still accepts changes of existing documents that break the validator. So workers can mark
#: such documents FAIL.
_VALIDATION_LEVEL = "moderate"


def check_server() -> Operation[datetime]:
    """Return the server's time; raise NotReplicaSet or ServerTooOld."""
    hello = yield command("hello")
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise NotReplicaSet(str(hello.get("me") or "this address"))
    if not is_recent(hello):
        raise ServerTooOld(release_of(hello), MIN_RELEASE)
    now: datetime = hello["localTime"]
    return now


def is_recent(hello: Mapping[str, Any]) -> bool:
    """Whether the server's release has the features that the engine needs."""
    return int(hello.get("maxWireVersion", 0)) >= _MIN_WIRE_VERSION


def release_of(hello: Mapping[str, Any]) -> str:
    """Return the server's release. If the table lacks it, return the newest release in the table before it."""
    spoken = int(hello.get("maxWireVersion", 0))
    return next((release for number, release in reversed(_RELEASES.items()) if number <= spoken), "before 4.0")


def ensure(collections: Sequence[Collection] = ESSENTIAL, *, repair: bool = False) -> Operation[datetime]:
    """Check the server and set up the collections; return the server's time.

    If everything is in place, this takes two round trips, and one more per collection. With `repair`, validators and
    indexes are made again even if they are in place.

    After an administrator has run `mtask init`, a user who may only read and write can call this, too.
    """
    now = yield from check_server()
    yield from make_sure(collections, repair=repair)
    return now


def ensure_with_roles(database: str) -> Operation[datetime]:
    """Make the database's roles, then set up all collections again; return the server's time."""
    yield from check_server()
    yield from make(database)
    return (yield from ensure(EVERY, repair=True))


def make_sure(collections: Sequence[Collection], *, repair: bool = False) -> Operation[None]:
    """Make the validators and indexes of these collections.

    Raises SchemaMismatch if a collection holds foreign documents.
    """
    options = yield from _listed(collections)
    for collection in collections:
        layout = LAYOUTS[collection]
        state = yield from _check_collection(collection, options.get(collection))
        # The validator is made before the indexes. So a process may have died before it made the indexes, or may still
        # be making them.
        if state == "current" and not repair and (yield from _has_indexes(collection, layout.index_names)):
            continue
        try:
            if state != "current" or repair:
                yield from _set_validator(collection, layout.validator(), exists=collection in options)
            if collection == "tasks":
                # This index is none of `index_names`, as not every collection can have it. It is made first: whoever
                # finds the others finds this one, too.
                yield from _make_head_index()
            if layout.index_names:
                yield from _make_indexes(collection, on(collection, "create_indexes", layout.indexes()))
        except AccessDenied:
            if repair or collection not in options:
                raise


def make_finished_index() -> Operation[None]:
    """Make the index that finds the newest finished tasks of a queue, if a database of an earlier mtask lacks it."""
    if not (yield from _has_indexes("tasks", [FINISHED_INDEX])):
        yield from _make_indexes("tasks", tasks("create_indexes", [finished_index()]))


def _make_head_index() -> Operation[None]:
    try:
        yield from _make_indexes("tasks", tasks("create_indexes", [head_index()]))
    except OperationFailed as error:
        if error.code != _CANNOT_MAKE_INDEX:
            raise


def is_there() -> Operation[bool]:
    """Whether the essential collections exist, with or without validators and indexes."""
    return len((yield from _listed(ESSENTIAL))) == len(ESSENTIAL)


def _listed(collections: Sequence[Collection]) -> Operation[dict[str, dict[str, Any]]]:
    """Return the server's descriptions of these collections, by name. Collections that do not exist are left out."""
    listed = yield command("listCollections", filter={"name": {"$in": list(collections)}})
    return {found["name"]: found for found in listed["cursor"]["firstBatch"]}


def _check_collection(collection: Collection, found: dict[str, Any] | None) -> Operation[str]:
    """Return the state of a collection: "absent", "current" or "outdated". Raises SchemaMismatch."""
    if found is None:
        return "absent"
    if found.get("type", "collection") != "collection":
        raise SchemaMismatch(collection, f"it is a {found['type']}", "Use another --database.")
    title = found.get("options", {}).get("validator", {}).get("$jsonSchema", {}).get("title", "")
    ours = _TITLE.match(str(title))
    if ours and int(ours["version"]) > SCHEMA_VERSION:
        raise SchemaMismatch(
            collection,
            f"it has schema_version {ours['version']}, but this mtask knows {SCHEMA_VERSION}",
            "Upgrade mtask.",
        )
    if title == schema_title(collection):
        return "current"
    if ours and int(ours["revision"]) > SCHEMA_REVISION:
        return "current"  # a newer mtask of the same schema_version made this validator, so it stays
    if not ours:
        yield from _check_documents(collection)
    return "outdated"


def _check_documents(collection: Collection) -> Operation[None]:
    if collection == "tasks":
        newer = yield tasks("find_one", {"schema_version": {"$gt": SCHEMA_VERSION}}, {"schema_version": 1})
        if newer is not None:
            raise SchemaMismatch(
                collection,
                f"document {newer['_id']!r} has schema_version {newer['schema_version']!r}, but this mtask knows "
                f"{SCHEMA_VERSION}",
                "Upgrade mtask.",
            )
    mark = LAYOUTS[collection].mark
    foreign = yield on(collection, "find_one", {mark: {"$exists": False}}, {"_id": 1})
    if foreign is not None:
        raise SchemaMismatch(
            collection,
            f"document {foreign['_id']!r} is not a {collection[:-1]} of mtask (it has no {mark})",
            "Use another --database, or move the foreign documents away.",
        )


def _has_indexes(collection: str, names: Sequence[str]) -> Operation[bool]:
    if not names:
        return True
    try:
        listed = yield command("listIndexes", collection)
    except AccessDenied:  # such a user may not make indexes either; the operation itself will name the missing role
        return True
    there = {found["name"] for found in listed["cursor"]["firstBatch"]}
    return there.issuperset(names)


def _set_validator(collection: str, validator: dict[str, Any], *, exists: bool) -> Operation[None]:
    settings = {"validator": validator, "validationLevel": _VALIDATION_LEVEL, "validationAction": "error"}
    if not exists:
        try:
            yield command("create", collection, **settings)
        except OperationFailed as error:
            if error.code != _NAMESPACE_EXISTS:  # this code means that another process made the collection
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


# --- roles -----------------------------------------------------------------------------------------------

# Makes and updates the roles in the database. `mtask.kernel.driver.roles` defines these roles.

_ALREADY_THERE = 51002


def make(database: str) -> Operation[dict[str, str]]:
    """Make or update the roles in `admin`; return "made", "changed" or "in place" for each role.

    The user needs MongoDB's role userAdminAnyDatabase, because none of mtask's own roles may make roles.
    """
    done = {}
    for role in ROLES:
        done[role_name(database, role)] = yield from _make(database, role)
    return done


def _make(database: str, role: Role) -> Operation[str]:
    name, wanted = role_name(database, role), privileges(database, role)
    answer = yield admin_command("rolesInfo", {"role": name, "db": "admin"}, showPrivileges=True)
    if not answer["roles"]:
        try:
            yield admin_command("createRole", name, privileges=wanted, roles=[])
        except OperationFailed as error:
            if error.code != _ALREADY_THERE:
                raise
        else:
            return "made"
    elif not answer["roles"][0]["roles"] and _normal(answer["roles"][0]["privileges"]) == _normal(wanted):
        return "in place"
    yield admin_command("updateRole", name, privileges=wanted, roles=[])
    return "changed"


def _normal(listed: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(str(sorted(each["resource"].items())), action) for each in listed for action in each["actions"]}
