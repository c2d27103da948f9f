"""Middleware and hooks as they are registered, and how middleware is composed around a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest

from mtask import App
from mtask.errors import HandlerError
from mtask.kernel.document.handlers import enter, leave, watch
from mtask.logs import FIELDS

Said = list[str]
Middle = Generator[None, Any, None]


def naming(said: Said, name: str) -> Callable[[str], Middle]:
    def around(call: str) -> Middle:
        said.append(f"{name} before {call}")
        try:
            result = yield
            said.append(f"{name} after {result}")
        except ValueError as error:
            said.append(f"{name} saw {error}")
            raise

    return around


def test_first_is_the_outermost_and_gets_the_result() -> None:
    said: Said = []
    begun = enter([naming(said, "a"), naming(said, "b")], "it")
    leave(begun, 42)
    assert said == ["a before it", "b before it", "b after 42", "a after 42"]


def test_exception_of_the_step_is_seen_by_each() -> None:
    said: Said = []
    leave(enter([naming(said, "a"), naming(said, "b")], "it"), None, ValueError("oh"))
    assert said[2:] == ["b saw oh", "a saw oh"]


def test_one_that_raises_before_its_yield_ends_those_before_it_and_keeps_the_step_from_being_taken() -> None:
    said: Said = []

    def refusing(call: str) -> Middle:
        if call == "it":
            raise ValueError("no")
        yield

    with pytest.raises(ValueError, match="no"):
        enter([naming(said, "a"), refusing, naming(said, "c")], "it")
    assert said == ["a before it", "a saw no"]


def test_one_that_returns_before_its_yield_takes_no_part() -> None:
    said: Said = []

    def not_interested(call: str) -> Middle:
        if call != "another":
            return
        yield

    leave(enter([not_interested, naming(said, "b")], "it"), 1)
    assert said == ["b before it", "b after 1"]


def test_what_fails_after_its_yield_is_logged_and_keeps_no_other_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    said: Said = []

    def failing(call: str) -> Middle:
        yield
        raise RuntimeError("late")

    def yielding_twice(call: str) -> Middle:
        yield
        yield

    with caplog.at_level(logging.ERROR):
        leave(enter([naming(said, "a"), failing, yielding_twice], "it"), 1)
    assert said == ["a before it", "a after 1"]
    assert ["more than once" in record.getMessage() for record in caplog.records] == [True, False]
    assert "failing" in getattr(caplog.records[1], FIELDS)["middleware"]


def test_step_that_is_taken_in_any_case_goes_on_without_the_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    said: Said = []

    def failing(call: str) -> Middle:
        if call == "it":
            raise RuntimeError("early")
        yield

    leave(watch([failing, naming(said, "b")], "it"), True)
    assert said == ["b before it", "b after True"]
    assert "failing" in getattr(caplog.records[0], FIELDS)["middleware"]


def test_what_is_no_generator_function_is_refused_with_what_to_do() -> None:
    app = App()

    def plain(call: object) -> None: ...

    async def stream(call: object) -> AsyncIterator[None]:
        yield

    with pytest.raises(HandlerError, match="generator function: yield once"):
        app.middleware(plain)
    with pytest.raises(HandlerError, match='around "publish" a middleware is a sync generator: write def'):
        app.middleware("publish")(stream)
    with pytest.raises(HandlerError, match="one of publish, run, finish, not 'sleep'"):
        app.middleware("sleep")(stream)  # type: ignore[call-overload]
    assert app.middleware(stream) is stream
    assert list(app.around.run) == [stream]


def test_hook_that_needs_arguments_is_refused_with_what_to_do() -> None:
    app = App()

    def needs(pool: int) -> None: ...

    def opens() -> Iterator[int]:
        yield 1

    with pytest.raises(HandlerError, match="a hook takes no arguments, but this one needs pool"):
        app.on_start(needs)
    with pytest.raises(HandlerError, match="yield only in a hook of on_start"):
        app.on_stop(opens)
    with pytest.raises(HandlerError, match="a hook is a function"):
        app.on_start(5)  # type: ignore[type-var]


def test_included_app_brings_its_middleware_and_hooks_once() -> None:
    said: Said = []
    app, other = App(), App()
    around: Any = naming(said, "a")
    other.middleware(around)
    other.on_start(said.clear)
    app.include(other)
    app.include(other)
    assert list(app.around.run) == [around]
    started = app.hooks.begin()
    said.append("before")
    asyncio.run(started.start())
    assert (said, dict(started.values)) == ([], {said.clear: None})


async def test_hooks_end_in_the_opposite_order_and_one_that_fails_keeps_no_other_from_its_end() -> None:
    said: Said = []
    app = App()

    @app.on_start
    def first() -> Iterator[str]:
        yield "one"
        said.append("first closed")

    @app.on_start
    async def second() -> AsyncIterator[str]:
        yield "two"
        raise RuntimeError("cannot close")

    @app.on_start
    async def third() -> int:
        return 3

    @app.on_stop
    async def last() -> None:
        said.append("last")

    started = app.hooks.begin()
    await started.start()
    assert dict(started.values) == {first: "one", second: "two", third: 3}
    await started.stop()
    assert said == ["first closed", "last"]


async def test_hook_of_the_start_that_fails_says_which_and_what_was_opened_is_closed() -> None:
    said: Said = []
    app = App()

    @app.on_start
    def opened() -> Iterator[None]:
        yield
        said.append("closed")

    @app.on_start
    async def broken() -> None:
        raise OSError("no such host")

    started = app.hooks.begin()
    with pytest.raises(HandlerError, match=r"broken.*on_start failed: OSError: no such host"):
        await started.start()
    await started.stop()
    assert said == ["closed"]
