"""Only the kernel's driver and operations call the driver: imports are the linter's, the calls are looked at here.

A module may be handed a collection, a session or a cursor without an import. So each module's syntax is searched
for the driver's own words: the names of its methods, and what is reached through a store or through `client.tasks`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pymongo.asynchronous.change_stream import AsyncChangeStream
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.asynchronous.mongo_client import AsyncMongoClient

import mtask

HOUSE = Path(mtask.__file__).parent
_INSIDE = (
    "kernel/driver/",
    "kernel/operations/",
    "local/",
    "features/encryption/vault.py",
    "features/events/readers.py",
    "demo/database.py",
    "contrib/agenda/jobs.py",
)
_DRIVER = (AsyncMongoClient, AsyncDatabase, AsyncCollection, AsyncCursor, AsyncChangeStream, AsyncClientSession)
#: Words of the driver that mean something else in this house as well.
_COMMON = frozenset({
    "HOST", "PORT", "address", "alive", "bind", "clear", "client", "clone", "close", "collection", "comment",
    "database", "explain", "hint", "limit", "max", "min", "name", "next", "nodes", "options", "primary", "session",
    "skip", "sort", "where",
})  # fmt: skip
_WORDS = frozenset(name for cls in _DRIVER for name in dir(cls) if not name.startswith("_")) - _COMMON
#: What a store has of the driver's.
_OF_A_STORE = frozenset({"client", "database", "tasks", "readable", "collections"})

_A_WALK = "our own walk's, which makes an operation"
_OF_HANDLERS = "the worker begins and ends its handlers' transactions"
#: What looks like the driver's and may stay, by module and expression.
_ALLOWED = {
    ("kernel/document/handlers.py", "begun.aclose"): "an async generator's",
    ("cli/workers/command.py", "cli.command"): "Typer's",
    ("cli/workers/command.py", "app.command"): "Typer's",
    ("cli/options.py", "app.command"): "Typer's",
    ("cli/tasks/find.py", "client.find"): "our own client's",
    ("testing/bench.py", "self.client.find"): "our own client's",
    ("contrib/django/testing.py", "self.client.find"): "our own client's",
    ("features/events/rest.py", "stack.aclose"): "an AsyncExitStack's",
    ("features/events/rest.py", "reading.aclose"): "an AsyncExitStack's",
    ("web/bodies.py", "body.find"): "that of bytes",
    ("search/due.py", "walk.find"): _A_WALK,
    ("search/due.py", "along.find"): _A_WALK,
    ("search/walks.py", "walk.find"): _A_WALK,
    ("demo/watch.py", "self._client.find"): "our own client's",
    ("demo/play.py", "self._fleet.find"): "a worker process of the demo",
    ("client/connection_aio.py", "self._store.database.name"): "a name, and no call",
    ("client/connection_sync.py", "self._store.database.name"): "a name, and no call",
    ("kernel/worker/running/transactions.py", "store.client.start_session"): _OF_HANDLERS,
    ("kernel/worker/running/transactions.py", "session.end_session"): _OF_HANDLERS,
    ("kernel/worker/running/transactions.py", "session.abort_transaction"): _OF_HANDLERS,
    ("kernel/worker/running/transactions.py", "session.in_transaction"): _OF_HANDLERS,
}


def uses_of_the_driver(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and expression of whatever a module does with the driver's objects."""
    tree = ast.parse(source)
    imported = set(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_word = node.attr in _WORDS and not (isinstance(node.value, ast.Name) and node.value.id in imported)
            if is_word or _is_driver_object(node.value):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and _is_driver_object(node.value):
            yield node.lineno, ast.unparse(node)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules of the house and of functions from them: `queries.find` is no call of the driver."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


def _is_driver_object(node: ast.expr) -> bool:
    """Whether it is `store.client`, `self._store.readable`, `client.tasks` or the like."""
    if not isinstance(node, ast.Attribute):
        return False
    holder = ast.unparse(node.value)
    return (holder.endswith("store") and node.attr in _OF_A_STORE) or (
        holder.endswith("client") and node.attr == "tasks"
    )


def _found() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for path in sorted(HOUSE.rglob("*.py")):
        place = path.relative_to(HOUSE).as_posix()
        if not place.startswith(_INSIDE):
            for line, expression in uses_of_the_driver(path.read_text()):
                found.setdefault((place, expression), []).append(line)
    return found


def test_only_the_driver_and_operations_of_the_kernel_call_the_driver() -> None:
    found = _found()
    wrong = [
        f"mtask/{path}:{lines[0]}: {text}" for (path, text), lines in found.items() if (path, text) not in _ALLOWED
    ]
    remedy = "give it a named function in mtask/kernel/operations, or say in _ALLOWED why it may stay"
    assert not wrong, "\n".join([remedy, *wrong])
    gone = [f"mtask/{path}: {text}" for path, text in _ALLOWED if (path, text) not in found]
    assert not gone, "\n".join(["it is allowed, and not there any more: remove it from _ALLOWED", *gone])


def test_uses_of_the_driver_are_seen_without_an_import_of_it() -> None:
    source = """
from mtask.kernel.operations import change as queries

def handed(client, store, session, cursor, names):
    found = list(client.tasks.find({}))
    names.find("a")
    client.tasks["other"].x
    watch = self._store.readable.watch
    with store.client.start_session():
        session.with_transaction(names)
    cursor.try_next()
    names.sort()
    client.close()
    return store.run(queries.find({}, 1)), survey.documents(client.tasks, "name"), self._client.tasks.anything
"""
    assert sorted(text for _, text in uses_of_the_driver(source)) == [
        "client.tasks.find",
        "client.tasks['other']",
        "cursor.try_next",
        "names.find",
        "self._client.tasks.anything",
        "self._store.readable.watch",
        "session.with_transaction",
        "store.client.start_session",
    ]


#: What CONTRIBUTING.md says that modules hold beside constants, loggers, caches, routers and the apps of typer.
_STATE = {
    "arguments/publish.py: _TRACE",
    "contrib/django/connections.py: _lock",
    "contrib/django/connections.py: _warned",
    "contrib/celery/running.py: _RUNNING",
    "features/audit_log/client.py: _ACTING",
    "logs.py: RUN",
    "kernel/driver/failover.py: _GIVING_UP",
    "testing/bench.py: _lock",
    "testing/bench.py: _servers",
    "testing/bench.py: _uri",
    "kernel/worker/process/runtime.py: is_forked",
}
_MUTABLE = {"ContextVar", "Counter", "ExitStack", "Lock", "defaultdict", "deque", "dict", "list", "set"}


def _state_of(tree: ast.Module) -> Iterator[str]:
    """The names of a module to which a function may give another value, or whose value can change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            made = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            # A container that is made from others is a constant.
            if made in _MUTABLE and (made in ("ContextVar", "ExitStack", "Lock") or not statement.value.args):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_modules_hold_no_state_but_what_contributing_says() -> None:
    package = Path(mtask.__file__).parent
    found = {
        f"{path.relative_to(package).as_posix()}: {name}"
        for path in package.rglob("*.py")
        for name in _state_of(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == _STATE
