"""Operations: requests to the database, written once for the sync and the async driver.

An operation is a generator that yields Calls and receives their results. The stores in `mtask.kernel.driver.stores` run
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
Collection = Literal[
    "tasks", "workers", "schedules", "controls", "places", "actions", "bulks", "metrics", "logs", "handlers"
]
COLLECTIONS: tuple[Collection, ...] = get_args(Collection)
Target = Literal[Collection, "database", "admin", "session", "codec", "names"]
Operation = Generator["Call", Any, T]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a driver's method. The driver lacks these five methods; the stores provide them:

    - `find` returns a list;
    - `find_naive` does the same, and is faster: dates have no time zone. See `mtask.kernel.driver.bson`;
    - `rows` runs an aggregation and returns a list;
    - `insert_new` inserts many documents. It returns the set of positions of documents whose `_id` existed already;
    - `upserted` writes in bulk. It returns the set of positions of documents that were inserted.

    The target "codec" asks the store itself for its codec (`get`), or has the codec answer (any other method). The
    target "names" asks the store for the set of names of tasks that it remembers; the operation may change this set.
    """

    target: Target
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Time limit of the call. None means the usual time limit.
    timeout: timedelta | None = None
    #: Whether the call reads the tasks of all tenants also for a client of one: see `for_everybody`.
    is_for_everybody: bool = False
    #: Whether the call is sent outside of the caller's transaction: see `apart`.
    is_apart: bool = False

    def within(self, timeout: timedelta | None) -> Call:
        """Return the same call with this time limit. If `timeout` is None, the usual limit of an operation applies."""
        return replace(self, timeout=timeout)

    def for_everybody(self) -> Call:
        """Return the same call, to be sent as it is also for a client of one tenant: see the function of this name."""
        return replace(self, is_for_everybody=True)

    def apart(self) -> Call:
        """Return the same call, to be sent outside of the caller's transaction: it reads what is there now."""
        return replace(self, is_apart=True)


def within(operation: Operation[T], time_left: Callable[[], timedelta]) -> Operation[T]:
    """Limit the time of an operation. Each call gets the time that is left when the call is sent."""
    return _changed(operation, lambda call: call.within(time_left()))


def _changed(operation: Operation[T], change: Callable[[Call], Call]) -> Operation[T]:
    try:
        first = next(operation)
    except StopIteration as stop:
        result: T = stop.value
        return result
    return (yield from continued(first, operation, change))


def continued(call: Call, operation: Operation[T], change: Callable[[Call], Call] | None = None) -> Operation[T]:
    """Go on with an operation whose next call was taken already. `change`: what is sent in place of a call."""
    try:
        while True:
            try:
                answer = yield call if change is None else change(call)
            except Exception as error:
                call = operation.throw(error)
            else:
                call = operation.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def for_everybody(operation: Operation[T]) -> Operation[T]:
    """Let an operation see the tasks of all tenants, also for a client of one.

    It is for what concerns all, such as queues, and for what is not told: it may choose how other calls find tasks.
    """
    return _changed(operation, Call.for_everybody)


def apart(operation: Operation[T]) -> Operation[T]:
    """Send an operation outside of the caller's transaction: it does what no transaction can do, or must outlive it."""
    return _changed(operation, Call.apart)


def owned(operation: Operation[T], tenant: str) -> Operation[T]:
    """Keep an operation to the tasks and schedules of one tenant: each call on them gets the tenant as a condition.

    The key alone does not tell whose a task is: who publishes for no tenant may give any key. And the id of a schedule
    does not name its tenant.
    """
    return _changed(operation, lambda call: _owned(call, tenant))


#: The methods whose first argument is a filter.
_BY_FILTER = frozenset(
    {
        "find",
        "find_naive",
        "find_one",
        "find_one_and_update",
        "count_documents",
        "update_one",
        "update_many",
        "replace_one",
        "delete_one",
        "delete_many",
    }
)
#: What is inserted says its tenant itself, also by an upsert, which leaves alone a task that exists. And the server
#: estimates the number of all tasks only.
_UNFILTERED = frozenset({"insert_new", "insert_one", "insert_many", "upserted", "estimated_document_count"})


def _owned(call: Call, tenant: str) -> Call:
    is_insert = call.method in _UNFILTERED or call.kwargs.get("upsert")
    if call.target not in ("tasks", "schedules") or call.is_for_everybody or is_insert:
        return call
    first, *rest = call.args
    if call.method in _BY_FILTER:
        return replace(call, args=(_of_tenant(first, tenant), *rest))
    if call.method == "rows":
        if any(stage.get("$match", {}).get("tenant") == tenant for stage in first):
            return call
        head, *others = first
        if "$match" in head:
            stages = [{"$match": _of_tenant(head["$match"], tenant)}, *others]
        else:
            stages = [{"$match": {"tenant": tenant}}, *first]
        return replace(call, args=(stages, *rest))
    raise NotImplementedError(f"{call.method} on {call.target} has no place for the condition of a tenant")


def _of_tenant(matched: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    if matched.get("tenant", tenant) != tenant:
        return {**matched, "$and": [*matched.get("$and", ()), {"tenant": tenant}]}
    return {**matched, "tenant": tenant}


def on(collection: Collection, method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection with this name."""
    return Call(collection, method, args, kwargs)


def viewed(call: Call, computed: str, gone: Any = None) -> Operation[Any]:
    """Send a `find_one_and_update` whose projection computes the field `computed`; return the document, or None.

    The driver repeats the call after a lost reply. The server then answers with its stored image of the document, which
    lacks computed fields, so the document is read anew. `gone`: the answer if it has been removed by then.
    """
    document = yield call
    if document is None or computed in document:
        return document
    by_id = {"_id": call.args[0]["_id"]}
    again = yield replace(call, method="find_one", args=(by_id, call.kwargs["projection"]), kwargs={})
    return gone if again is None else again


tasks = partial(on, "tasks")
workers = partial(on, "workers")
schedules = partial(on, "schedules")
controls = partial(on, "controls")
places = partial(on, "places")  #: in which a gate counts what passes
actions = partial(on, "actions")  #: the action log
bulks = partial(on, "bulks")  #: bulk changes
metrics = partial(on, "metrics")  #: the counts of workers and of tasks
handlers = partial(on, "handlers")  #: what handlers declare


def command(name: str, value: Any = 1, **options: Any) -> Call:
    """Return a database command."""
    return Call("database", "command", ({name: value, **options},))


def admin_command(name: str, value: Any = 1, **options: Any) -> Call:
    """Return a command for the database `admin`, which holds users and roles."""
    return Call("admin", "command", ({name: value, **options},))


def server_time() -> Operation[datetime]:
    """Return the server's time."""
    hello = yield command("hello")
    now: datetime = hello["localTime"]
    return now
