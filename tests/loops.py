"""The event loop of a test that is a coroutine, and fixtures that need it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def in_loop(make: Callable[..., AsyncIterator[T]]) -> Callable[..., Iterator[T]]:
    """Let pytest take an async generator as a fixture. It runs in the event loop of its test, in another task."""

    def made(*, loop: asyncio.Runner, **given: Any) -> Iterator[T]:
        context = asynccontextmanager(make)(**given)
        yield loop.run(context.__aenter__())
        loop.run(context.__aexit__(None, None, None))

    own = [*inspect.signature(make).parameters.values()]
    with_loop = [*own, inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)]
    made.__signature__ = inspect.Signature(with_loop)  # type: ignore[attr-defined]
    made.__name__, made.__doc__ = make.__name__, make.__doc__
    return made


def run_test(item: pytest.Function) -> None:
    """Run a coroutine to its end, in the loop of its fixtures or in one of its own."""
    loop = item.funcargs.get("loop")
    run = loop.run if isinstance(loop, asyncio.Runner) else asyncio.run
    run(item.obj(**{name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}))
