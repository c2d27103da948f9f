"""Least-privilege roles of the database: what each may, and which of them a call needs; pure.

The server never says which role a user lacks, only that it is not authorized: this table does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtask.errors import AccessDenied
from mtask.store.driver.operation import COLLECTIONS, Call

Document = dict[str, Any]
Role = Literal["publisher", "worker", "operator", "deployer"]
Actions = tuple[str, ...]

#: In place of a collection: every collection of the database, and the whole server.
EVERY, SERVER = "", "(server)"

_SET_UP = ("find", "createCollection", "collMod", "createIndex", "dropIndex", "listIndexes")
#: Role, then collection, then what it may do there.
PRIVILEGES: Mapping[Role, Mapping[str, Actions]] = {
    "publisher": {
        EVERY: ("listCollections",),
        "tasks": ("find", "insert", "update", "changeStream", "listIndexes"),
        "workers": ("listIndexes",),
    },
    "worker": {
        EVERY: ("listCollections", "find", "changeStream"),
        "tasks": ("insert", "update", "remove", "listIndexes"),
        "workers": ("insert", "update", "listIndexes"),
        "schedules": ("insert", "update", "listIndexes"),
        "places": ("insert", "update", "listIndexes"),
        "controls": ("listIndexes",),
    },
    "operator": {
        EVERY: ("listCollections", "find", "changeStream"),
        "tasks": ("insert", "update", "remove", "listIndexes"),
        "schedules": ("insert", "update", "remove", "listIndexes"),
        "workers": ("update", "listIndexes"),
        "controls": ("insert", "update", "listIndexes"),
        "places": ("listIndexes",),
        SERVER: ("serverStatus",),
    },
    "deployer": {EVERY: ("listCollections",), **dict.fromkeys(COLLECTIONS, _SET_UP)},
}
ROLES: tuple[Role, ...] = tuple(PRIVILEGES)
#: What each is for, in a line.
PURPOSES: Mapping[Role, str] = {
    "publisher": "services that publish tasks, read them, wait for them and follow their events",
    "worker": "mtask-worker: runs tasks, fires schedules, removes what is kept no longer",
    "operator": "people and tools that look after tasks, queues, schedules and workers; mtask doctor",
    "deployer": "mtask init: makes collections, validators and indexes",
}

_READ: Actions = ("find",)
#: What a call of this method does.
_METHODS: Mapping[str, Actions] = {
    **dict.fromkeys(("find", "find_one", "rows", "count_documents", "estimated_document_count"), _READ),
    **dict.fromkeys(("insert_one", "insert_new"), ("insert",)),
    **dict.fromkeys(("update_one", "update_many", "replace_one", "find_one_and_update"), ("update",)),
    **dict.fromkeys(("delete_one", "delete_many"), ("remove",)),
    "upserted": ("insert", "update"),
    "create_indexes": ("createIndex",),
    "watch": ("find", "changeStream"),
}
#: The commands whose right has another name than the command, and those that are about no collection.
_COMMANDS = {"create": "createCollection"}
_ABOUT_NO_COLLECTION = {"listCollections": EVERY, "serverStatus": SERVER}


def role_name(database: str, role: Role) -> str:
    """Return the name of a database's role. It is made in `admin`: only roles there may hold rights on the server."""
    return f"mtask_{database}_{role}"


def privileges(database: str, role: Role) -> list[Document]:
    """Return a role's privileges as the server takes them."""
    return [
        {"resource": _resource(database, collection), "actions": list(actions)}
        for collection, actions in PRIVILEGES[role].items()
    ]


def _resource(database: str, collection: str) -> Document:
    return {"cluster": True} if collection == SERVER else {"db": database, "collection": collection}


@dataclass(frozen=True, slots=True)
class Need:
    """What a call does, and where."""

    collection: str
    actions: Actions

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that may do it."""
        return tuple(role for role in ROLES if set(self.actions) <= _allowed(role, self.collection))

    def __str__(self) -> str:
        where = {EVERY: "the database", SERVER: "the server"}.get(self.collection, self.collection)
        return f"{' and '.join(self.actions)} on {where}"


def _allowed(role: Role, collection: str) -> set[str]:
    everywhere = () if collection == SERVER else PRIVILEGES[role].get(EVERY, ())
    return {*everywhere, *PRIVILEGES[role].get(collection, ())}


#: What it takes to follow the events of tasks.
FOLLOWING = Need("tasks", _METHODS["watch"])


def need_of(call: Call) -> Need | None:
    """Return what a call needs; None where the table does not say."""
    if call.target == "admin" or call.target == "session":
        return None
    if call.method == "command":
        name, value = next(iter(call.args[0].items()))
        collection = _ABOUT_NO_COLLECTION.get(name, value)
        return Need(collection, (_COMMANDS.get(name, name),)) if isinstance(collection, str) else None
    actions = _METHODS.get(call.method)
    if actions is None or call.target == "database":
        return None
    return Need(call.target, (*actions, "insert") if call.kwargs.get("upsert") else actions)


def explained(error: Exception, need: Need | None, database: str) -> Exception:
    """Return the error; where a right was lacking, as one that names the roles which have it."""
    if not isinstance(error, AccessDenied) or not error.is_unauthorized or need is None:
        return error
    made = AccessDenied(
        error.reason,
        is_unauthorized=True,
        need=str(need),
        roles=[role_name(database, role) for role in need.roles],
    )
    made.__cause__ = error.__cause__
    return made


def lacking(role: Role, database: str, granted: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a user with these privileges lacks of a role, such as "insert on tasks"."""
    held = list(granted)
    return [
        str(Need(collection, (action,)))
        for collection, actions in PRIVILEGES[role].items()
        for action in actions
        if not any(_covers(each, database, collection) and action in each.get("actions", ()) for each in held)
    ]


def _covers(privilege: Mapping[str, Any], database: str, collection: str) -> bool:
    resource = privilege.get("resource", {})
    if resource.get("anyResource"):
        return True
    if collection == SERVER:
        return bool(resource.get("cluster"))
    return resource.get("db") in ("", database) and resource.get("collection") in ("", collection)
