"""Operations: requests to the database, written once for the sync and the async driver.

An operation is a generator that yields Calls and receives their results. The stores in `mtask.store.driver.stores` run
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

T = TypeVar("T")
Collection = Literal["tasks", "workers", "schedules", "controls", "places", "actions", "bulks", "metrics", "logs"]
COLLECTIONS: tuple[Collection, ...] = get_args(Collection)
Target = Literal[Collection, "database", "admin", "session", "keys", "names"]
Operation = Generator["Call", Any, T]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a driver's method. The driver lacks these five methods; the stores provide them:

    - `find` returns a list;
    - `find_naive` does the same, and is faster: dates have no time zone. See `mtask.store.driver.dates`;
    - `rows` runs an aggregation and returns a list;
    - `insert_new` inserts many documents. It returns the set of positions of documents whose `_id` existed already;
    - `upserted` writes in bulk. It returns the set of positions of documents that were inserted.

    The target "keys" asks the store itself for its sealer (`get`), or its key vault (any other method). The target
    "names" asks the store for the set of names of tasks that it remembers; the operation may change this set.
    """

    target: Target
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Time limit of the call. None means the usual time limit.
    timeout: timedelta | None = None

    def within(self, timeout: timedelta | None) -> Call:
        """Return the same call with this time limit. If `timeout` is None, the usual limit of an operation applies."""
        return replace(self, timeout=timeout)


def within(operation: Operation[T], time_left: Callable[[], timedelta]) -> Operation[T]:
    """Limit the time of an operation. Each call gets the time that is left when the call is sent."""
    try:
        call = next(operation)
        while True:
            try:
                answer = yield call.within(time_left())
            except Exception as error:
                call = operation.throw(error)
            else:
                call = operation.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def tasks(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection of tasks."""
    return Call("tasks", method, args, kwargs)


def workers(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection of workers."""
    return Call("workers", method, args, kwargs)


def schedules(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection of schedules."""
    return Call("schedules", method, args, kwargs)


def controls(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection of controls."""
    return Call("controls", method, args, kwargs)


def places(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection `places`, which holds permits."""
    return Call("places", method, args, kwargs)


def actions(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection `actions`, which holds the action log."""
    return Call("actions", method, args, kwargs)


def bulks(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection `bulks`, which holds bulk changes."""
    return Call("bulks", method, args, kwargs)


def metrics(method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection `metrics`, which holds the counts of workers and of tasks."""
    return Call("metrics", method, args, kwargs)


def on(collection: Collection, method: str, *args: Any, **kwargs: Any) -> Call:
    """Return a call on the collection with this name."""
    return Call(collection, method, args, kwargs)


def command(name: str, value: Any = 1, **options: Any) -> Call:
    """Return a database command."""
    return Call("database", "command", ({name: value, **options},))


def admin_command(name: str, value: Any = 1, **options: Any) -> Call:
    """Return a command for the database `admin`, which holds users and roles."""
    return Call("admin", "command", ({name: value, **options},))
