"""Handlers with all options, and versions of one handler, as they are deployed one after the other."""

from __future__ import annotations

from datetime import timedelta
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from mtask import App
from mtask.features.registry import operations
from mtask.features.registry.rules import declared_by
from mtask.kernel.driver.stores import SyncStore

#: A value of each option that is not its default, beside which the others are valid.
OPTIONS: dict[str, Any] = {
    "priority": 7,
    "concurrent_worker_cnt": 2,
    "ping_interval": 5,
    "worker_timeout": timedelta(minutes=3),
    "specific_worker_ids": ["a", "b"],
    "max_retries": 9,
    "retry_delay": timedelta(seconds=1.5),
    "retry_backoff": 2.5,
    "retry_max_delay": 60,
    "retry_scope": "worker",
    "run_timeout": timedelta(hours=1),
    "retain_success": 1,
    "retain_fail": None,
    "limit_key": "acme",
}
NAMES = list(OPTIONS)


class Address(BaseModel):
    """A parameter with fields."""

    street: str
    city: str = "Ulm"


async def to_many(to: str, count: int = 1, tags: list[str] | None = None) -> None:
    """Take three parameters."""


async def to_one(to: str) -> None:
    """Take one parameter, so params need be no mapping."""


async def to_address(to: str, address: Address | None = None) -> None:
    """Take an object."""


async def to_anything(to: str, **rest: Any) -> None:
    """Take any further parameters."""


FUNCTIONS = (to_many, to_one, to_address, to_anything)


def thirty() -> App:
    """Return an app with thirty handlers: each option alone, pairs, queues, lookups and kinds of params."""
    app = App(version="1.0")
    for index in range(30):
        options = {name: OPTIONS[name] for name in (NAMES[index % len(NAMES)], NAMES[(index * 3 + 1) % len(NAMES)])}
        given: dict[str, Any] = {"lookup": ["to"]} if index % 2 else {}
        if index % 3:
            given["queue"] = f"queue-{index % 5}"
        if index % 7 == 0:
            options = dict(OPTIONS)
        if index % 4 == 1:
            given |= {"on_exception": "fail", "isolation": "thread", "next": "other"}
        app.task(name=f"handler-{index}", **given, **options)(_copy(FUNCTIONS[index % len(FUNCTIONS)]))
    return app


def _copy(function: Any) -> Any:
    """Return a function of its own: a function is the handler of one name only."""
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__annotations__ = function.__annotations__
    return made


def params_of(index: int) -> Any:
    """Return params for the handler of this index."""
    return "a@b.c" if index % len(FUNCTIONS) == 1 and index % 8 == 1 else {"to": "a@b.c"}


def registered(store: SyncStore, app: App) -> None:
    """Store what the handlers declare, as a worker does that starts."""
    declared = {handler.name: declared_by(handler) for handler in app}
    store.run(operations.start("none", "none", declared))


def first_version() -> App:
    """Return the app as it was deployed first."""
    app = App(version="1.0")

    @app.task(queue="mail", max_retries=1)
    async def send(to: str) -> str:
        return to

    return app


def second_version() -> App:
    """Return the app of the next deploy: the handler takes one more parameter, and its tasks have another queue."""
    app = App(version="2.0")

    @app.task(queue="post", max_retries=2)
    async def send(to: str, subject: str) -> str:
        return f"{to} {subject}"

    return app
