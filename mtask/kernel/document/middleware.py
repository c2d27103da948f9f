"""Runs middleware: functions around a step. `mtask.app.middleware` explains how users write middleware.

A middleware is a generator function. Its only argument, the call, describes the step. Before the step, the middleware
runs up to its only `yield`. After the step, the `yield` returns the step's result or raises the step's exception. Then
the middleware runs to its end. A middleware cannot change the step's result or exception.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from mtask.logs import SureLogger, fields

logger = SureLogger("mtask.middleware")

Call = TypeVar("Call")
Begun = list[Generator[None, Any, None]]
Around = Callable[[Call], Generator[None, Any, None]]


def enter(middleware: Sequence[Around[Call]], call: Call) -> Begun:
    """Run each middleware up to its yield, the outermost first; return the generators that wait for the step.

    A middleware that returns before its yield takes no part in this call.

    If a middleware raises an error, each middleware that already waits gets the error at its yield. Then this function
    raises the error, and the caller must not take the step.
    """
    begun: Begun = []
    try:
        for around in middleware:
            generator = around(call)
            try:
                next(generator)
            except StopIteration:
                continue
            begun.append(generator)
    except BaseException as error:
        leave(begun, None, error)
        raise
    return begun


def watch(middleware: Sequence[Around[Call]], call: Call) -> Begun:
    """Do the same as `enter`, but only log an error of a middleware: the step is taken in any case."""
    begun: Begun = []
    for around in middleware:
        try:
            begun += enter((around,), call)
        except BaseException:  # a SystemExit must end nothing, either
            logger.exception("middleware failed, the step goes on", extra=fields(middleware=name_of(around)))
    return begun


def leave(begun: Begun, result: Any, error: BaseException | None = None) -> None:
    """Give the step's result or error to each waiting middleware, the innermost first.

    If a middleware then raises an error of its own, the error is only logged, because the step is over.
    """
    for generator in reversed(begun):
        try:
            if error is None:
                generator.send(result)
            else:
                generator.throw(error)
        except StopIteration:
            continue
        except BaseException as other:
            if other is not error:
                tell_of_failure(generator, other)
        else:
            generator.close()
            logger.error("middleware yields more than once, it is ended", extra=fields(middleware=name_of(generator)))


def tell_of_failure(middleware: object, error: BaseException) -> None:
    """Log the error that a middleware raised after its yield."""
    logger.error("middleware failed after its yield", extra=fields(middleware=name_of(middleware)), exc_info=error)


def name_of(middleware: object) -> str:
    """Return a middleware's name for a log message."""
    name: str = getattr(middleware, "__qualname__", type(middleware).__qualname__)
    return name
