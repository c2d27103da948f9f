"""Hooks: functions of an app that each worker process calls before its first run and after its last run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any

from mtask.errors import HandlerError, MtaskError
from mtask.kernel.document.handlers import name_of
from mtask.logs import SureLogger, fields

logger = SureLogger("mtask.app")

Hook = Callable[[], Any]


class Hooks:
    """The hooks of an app, in the order in which they were registered."""

    def __init__(self) -> None:
        self._start: list[Hook] = []
        self._stop: list[Hook] = []

    def add_start(self, function: Hook) -> None:
        """Add a hook to call at the start; raise HandlerError if the hook needs arguments."""
        self._start.append(_checked(function))

    def add_stop(self, function: Hook) -> None:
        """Add a hook to call at the stop; raise HandlerError if the hook needs arguments or is a generator function."""
        if _is_generator(function):
            raise HandlerError(name_of(function), "on_stop takes a function: yield only in a hook of on_start")
        self._stop.append(_checked(function))

    def include(self, other: Hooks) -> None:
        """Add the hooks of another app."""
        self._start += [hook for hook in other._start if hook not in self._start]
        self._stop += [hook for hook in other._stop if hook not in self._stop]

    def begin(self) -> Started:
        """Return the hooks for one worker process. No hook has been called yet."""
        return Started(list(self._start), list(self._stop))


class Started:
    """The hooks of one worker process, and the values that the hooks give to the handlers."""

    def __init__(self, start: list[Hook], stop: list[Hook]) -> None:
        self._start = start
        self._stop = stop
        self._values: dict[Hook, Any] = {}
        self._open: list[Generator[Any, None, None] | AsyncGenerator[Any, None]] = []

    @property
    def values(self) -> Mapping[Hook, Any]:
        """The values of the start hooks that have been called, by hook."""
        return self._values

    async def start(self) -> None:
        """Call the start hooks in order; raise HandlerError if a hook fails. Sync hooks run in a thread."""
        for hook in self._start:
            try:
                self._values[hook] = await self._started(hook)
            except Exception as error:
                reason = f"on_start failed: {type(error).__name__}: {error}"
                raise error if isinstance(error, MtaskError) else HandlerError(name_of(hook), reason) from error

    async def _started(self, hook: Hook) -> Any:
        made = await _called(hook)
        if isinstance(made, Generator):
            value = await asyncio.to_thread(_next, made, hook)
        elif isinstance(made, AsyncGenerator):
            value = await _anext(made, hook)
        else:
            return made
        self._open.append(made)
        return value

    async def stop(self) -> None:
        """Run the code after the `yield` of each start hook, the last hook first. Then call the stop hooks."""
        while self._open:
            opened = self._open.pop()
            try:
                if isinstance(opened, Generator):
                    await asyncio.to_thread(next, opened, None)
                else:
                    await anext(opened, None)
            except Exception:
                logger.exception("hook failed at the stop", extra=fields(hook=name_of(opened)))
        for hook in self._stop:
            try:
                await _called(hook)
            except Exception:
                logger.exception("hook failed at the stop", extra=fields(hook=name_of(hook)))


async def _called(hook: Hook) -> Any:
    if _is_generator(hook):
        return hook()
    made = hook() if inspect.iscoroutinefunction(hook) else await asyncio.to_thread(hook)
    return await made if inspect.isawaitable(made) else made


def _next(opened: Generator[Any, None, None], hook: Hook) -> Any:
    try:
        return next(opened)
    except StopIteration:
        raise HandlerError(name_of(hook), "it ended before its yield: a hook yields once") from None


async def _anext(opened: AsyncGenerator[Any, None], hook: Hook) -> Any:
    try:
        return await anext(opened)
    except StopAsyncIteration:
        raise HandlerError(name_of(hook), "it ended before its yield: a hook yields once") from None


def _is_generator(function: Hook) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _checked(function: Hook) -> Hook:
    if not callable(function):
        raise HandlerError(name_of(function), "a hook is a function")
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
    except (TypeError, ValueError):
        return function  # Python may not know the parameters of a builtin
    if needed:
        raise HandlerError(name_of(function), f"a hook takes no arguments, but this one needs {', '.join(needed)}")
    return function
