"""`call`: publish a handler's task with arguments that type checkers check."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from mtask.features.calls.call import Caller, caller_of

if TYPE_CHECKING:
    from mtask.app.context import Context
    from mtask.features.flows.next import Next

P = ParamSpec("P")
R = TypeVar("R")


@overload
def call(handler: Callable[Concatenate[Context, P], Coroutine[Any, Any, Next]], /) -> Caller[P, Any]: ...


@overload
def call(handler: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Caller[P, R]: ...


@overload
def call(handler: Callable[Concatenate[Context, P], Next], /) -> Caller[P, Any]: ...


@overload
def call(handler: Callable[Concatenate[Context, P], R], /) -> Caller[P, R]: ...


@overload
def call(handler: Callable[P, Coroutine[Any, Any, Next]], /) -> Caller[P, Any]: ...


@overload
def call(handler: Callable[P, Coroutine[Any, Any, R]], /) -> Caller[P, R]: ...


@overload
def call(handler: Callable[P, Next], /) -> Caller[P, Any]: ...


@overload
def call(handler: Callable[P, R], /) -> Caller[P, R]: ...


def call(handler: Any, /) -> Any:
    """Return a function with the parameters of a handler, without its context: it makes a `Call`, and runs nothing.

    `call(send_email)(to="a@b.c")` is taken wherever a handler and its params are. Type checkers refuse wrong arguments,
    and know what `result()` of the published task returns. The context must be the first parameter, and annotated
    `Context`, for a type checker to leave it out. Arguments are stored by name, also those given by position. Those
    that do not fit the type hints raise InvalidParams where the call is published.

    Raises InvalidInput if `handler` is not registered with `@app.task`. The returned function raises InvalidParams for
    arguments that have no name or two values.
    """
    return caller_of(handler)
