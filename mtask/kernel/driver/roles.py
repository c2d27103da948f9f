"""The least-privilege roles: the rights of each role, and the rights that each call needs. The functions are pure.

The server only says that a user is not authorized. With these tables, an error can name the missing role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtask.errors import AccessDenied
from mtask.kernel.driver.operation import COLLECTIONS, Call

Document = dict[str, Any]
Role = Literal["publisher", "worker", "operator", "deployer"]
Actions = tuple[str, ...]

#: Values in place of a collection's name. EVERY means every collection of the database. SERVER means the whole server.
EVERY, SERVER = "", "(server)"

_SET_UP = ("find", "createCollection", "collMod", "createIndex", "dropIndex", "listIndexes")
#: The actions that each role allows on each collection.
PRIVILEGES: Mapping[Role, Mapping[str, Actions]] = {
    "publisher": {
        EVERY: ("listCollections",),
        "tasks": ("find", "insert", "update", "changeStream", "listIndexes"),
        # Publishing that gathers and publishing flows ask whether all live workers know them.
        "workers": ("find", "listIndexes"),
        # Who may change tasks writes it down, and may not change what is written.
        "actions": ("insert", "listIndexes"),
        "logs": ("find", "listIndexes"),
        # A publish by name asks what the handler declares.
        "handlers": ("find", "listIndexes"),
    },
    "worker": {
        EVERY: ("listCollections", "find", "changeStream"),
        "tasks": ("insert", "update", "remove", "listIndexes"),
        "workers": ("insert", "update", "listIndexes"),
        "schedules": ("insert", "update", "listIndexes"),
        "places": ("insert", "update", "listIndexes"),
        # A handler that raises RateLimited holds others back, and a breaker opens.
        "controls": ("insert", "update", "listIndexes"),
        "actions": ("insert", "listIndexes"),
        "metrics": ("insert", "update", "listIndexes"),
        "logs": ("insert", "update", "listIndexes"),
        "handlers": ("insert", "update", "listIndexes"),
    },
    "operator": {
        EVERY: ("listCollections", "find", "changeStream"),
        "tasks": ("insert", "update", "remove", "listIndexes"),
        "schedules": ("insert", "update", "remove", "listIndexes"),
        "workers": ("update", "listIndexes"),
        "controls": ("insert", "update", "listIndexes"),
        "places": ("listIndexes",),
        "actions": ("insert", "listIndexes"),
        "bulks": ("insert", "update", "listIndexes"),
        # Who reads metrics may have to count the tasks anew, for all that read.
        "metrics": ("insert", "update", "listIndexes"),
        "logs": ("listIndexes",),
        "handlers": ("listIndexes",),
        SERVER: ("serverStatus",),
    },
    "deployer": {EVERY: ("listCollections",), **dict.fromkeys(COLLECTIONS, _SET_UP)},
}
ROLES: tuple[Role, ...] = tuple(PRIVILEGES)
#: The purpose of each role, in one line.
PURPOSES: Mapping[Role, str] = {
    "publisher": "services that publish tasks, read them, wait for them and follow their events",
    "worker": "mtask-worker: runs tasks, fires schedules, removes finished tasks that are no longer kept",
    "operator": "people and tools that look after tasks, queues, schedules and workers; mtask doctor",
    "deployer": "mtask init: makes collections, validators and indexes",
}

_READ: Actions = ("find",)
#: The actions that a user needs, by the method of the call.
_METHODS: Mapping[str, Actions] = {
    **dict.fromkeys(("find", "find_naive", "find_one", "rows", "count_documents", "estimated_document_count"), _READ),
    **dict.fromkeys(("insert_one", "insert_new"), ("insert",)),
    **dict.fromkeys(("update_one", "update_many", "replace_one", "find_one_and_update"), ("update",)),
    **dict.fromkeys(("delete_one", "delete_many"), ("remove",)),
    "upserted": ("insert", "update"),
    "create_indexes": ("createIndex",),
    "watch": ("find", "changeStream"),
}
#: Maps a command to its action, if the two have different names. Below: the commands that concern no collection.
_COMMANDS = {"create": "createCollection", "aggregate": "find"}
_ABOUT_NO_COLLECTION = {"listCollections": EVERY, "serverStatus": SERVER}


def role_name(database: str, role: Role) -> str:
    """Return the name of a role for this database.

    The roles are made in the database `admin`, because only roles in `admin` can have rights on the server.
    """
    return f"mtask_{database}_{role}"


def privileges(database: str, role: Role) -> list[Document]:
    """Return a role's privileges in the form that the server takes."""
    return [
        {"resource": _resource(database, collection), "actions": list(actions)}
        for collection, actions in PRIVILEGES[role].items()
    ]


def _resource(database: str, collection: str) -> Document:
    return {"cluster": True} if collection == SERVER else {"db": database, "collection": collection}


@dataclass(frozen=True, slots=True)
class Need:
    """The right that a call needs: some actions on a collection."""

    collection: str
    actions: Actions

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that allow these actions."""
        return tuple(role for role in ROLES if set(self.actions) <= _allowed(role, self.collection))

    def __str__(self) -> str:
        where = {EVERY: "the database", SERVER: "the server"}.get(self.collection, self.collection)
        return f"{' and '.join(self.actions)} on {where}"


def _allowed(role: Role, collection: str) -> set[str]:
    everywhere = () if collection == SERVER else PRIVILEGES[role].get(EVERY, ())
    return {*everywhere, *PRIVILEGES[role].get(collection, ())}


#: The right that a user needs to follow the events of tasks.
FOLLOWING = Need("tasks", _METHODS["watch"])


def need_of(call: Call) -> Need | None:
    """Return the right that a call needs, or None if it is not known."""
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
    """Return the error. If the user lacked a right, the error names the roles that include the right."""
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
    """Return the rights of a role, such as "insert on tasks", that a user with these privileges lacks."""
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
