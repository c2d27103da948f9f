"""The app: handlers, registered under their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar, Unpack, overload

from mtask.errors import HandlerError
from mtask.model.handlers import HANDLER_ATTRIBUTE, Handler, OnException, make_handler
from mtask.model.options import TaskOptions

Function = TypeVar("Function", bound=Callable[..., Any])


class App:
    """A set of handlers. A worker process is started with one: `mtask-worker package.module:app`."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    @overload
    def task(self, function: Function, /) -> Function: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str | None = None,
        on_exception: OnException = "retry",
        **options: Unpack[TaskOptions],
    ) -> Callable[[Function], Function]: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str | None = None,
        on_exception: OnException = "retry",
        **options: Unpack[TaskOptions],
    ) -> Any:
        """Register a function, async or plain, as the handler of a task; it stays callable as it is.

        `name` defaults to the function's name; `queue` and the options are this handler's defaults at publish;
        on_exception="fail" makes every exception final.

        Raises HandlerError, InvalidName, UnknownOption or InvalidOption.
        """

        def register(target: Any) -> Any:
            handler = make_handler(target, name=name, queue=queue, on_exception=on_exception, options=dict(options))
            if handler.name in self._handlers:
                raise HandlerError(handler.name, "this name is registered already; give another with name=...")
            self._handlers[handler.name] = handler
            with suppress(AttributeError):  # a bound method or builtin: publish it by name
                setattr(target, HANDLER_ATTRIBUTE, handler)
            return target

        return register if function is None else register(function)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by task name."""
        return dict(self._handlers)

    @property
    def queues(self) -> list[str]:
        """The queues that the handlers name, and "default"; what a worker serves unless told otherwise."""
        return sorted({"default", *(handler.queue for handler in self._handlers.values())})

    def include(self, other: App) -> None:
        """Take over the handlers of another app; raise HandlerError where a name is taken."""
        for name, handler in other._handlers.items():
            if self._handlers.get(name, handler) is not handler:
                raise HandlerError(name, "both apps register this name")
            self._handlers[name] = handler

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._handlers.values()))

    def __repr__(self) -> str:
        return f"App({', '.join(sorted(self._handlers))})"
