"""The app: registers handlers under their names, with their schedules, middleware and hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar, Unpack, overload

from mtask.app.hooks import Hooks
from mtask.app.middleware import Kind, Middleware
from mtask.client.operating.scheduling import Definition, ScheduleSpec, When, trigger_of
from mtask.errors import HandlerError, shown
from mtask.model.handlers import HANDLER_ATTRIBUTE, Handler, OnException, make_handler
from mtask.model.options import TaskOptions
from mtask.model.schedules import CatchUp, Overlap

Function = TypeVar("Function", bound=Callable[..., Any])


class App:
    """A set of handlers. A worker process serves one app: `mtask-worker package.module:app`."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._schedules: list[Callable[[], ScheduleSpec]] = []
        #: The middleware around publishing, running and finishing.
        self.around = Middleware()
        #: The functions that a worker calls before its first run and after its last.
        self.hooks = Hooks()

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
        """Register a function, async or sync, as the handler of a task. The function itself stays callable.

        `name` defaults to the function's name. `queue` and the options are the defaults when tasks of this name are
        published. on_exception="fail" makes every exception final.

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

    def schedule(
        self,
        when: When,
        /,
        *,
        id: str | None = None,  # noqa: A002 as in the document
        params: Any = None,
        timezone: str | None = None,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        jitter: timedelta | float | None = None,
        catch_up: CatchUp = "last",
        catch_up_limit: int = 100,
        overlap: Overlap = "allow",
        queue: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> Callable[[Function], Function]:
        """Publish the task of this handler on a schedule.

        Use this decorator above or below `task`. A handler may have several schedules.

        `when` is a crontab's five fields ("*/5 * * * *", in `timezone`), a timedelta, an aware datetime, or Cron(...).
        `id` defaults to the task's name. Each firing publishes one task, under the key `id/instant`, however many
        processes run. `catch_up` chooses among the firings that were missed because no process ran: "none", the "last",
        or "all". "all" makes at most the newest `catch_up_limit` firings. With overlap="skip" a firing is left out if
        the task of the previous firing has not finished. `jitter` is the longest random delay of each start, as a
        timedelta or in seconds.

        Raises InvalidInput. Errors of the handler are raised when a worker starts.
        """
        trigger = trigger_of(when, timezone)

        def register(target: Any) -> Any:
            def spec() -> ScheduleSpec:
                handler = getattr(target, HANDLER_ATTRIBUTE, None)
                if not isinstance(handler, Handler) or self._handlers.get(handler.name) is not handler:
                    raise HandlerError(shown(target), "it has a schedule and is no task: add @app.task")
                return ScheduleSpec(
                    handler.name if id is None else id,
                    target,
                    trigger,
                    params,
                    start_time=start_time,
                    end_time=end_time,
                    jitter=jitter,
                    catch_up=catch_up,
                    catch_up_limit=catch_up_limit,
                    overlap=overlap,
                    queue=queue,
                    **options,
                )

            self._schedules.append(spec)
            return target

        return register

    @overload
    def middleware(self, function: Function, /) -> Function: ...

    @overload
    def middleware(self, step: Kind, /) -> Callable[[Function], Function]: ...

    def middleware(self, step: Any, /) -> Any:
        """Compose a generator function around a step: "run", which is the default, "publish" or "finish".

        See `mtask.app.middleware`. A client uses the functions around "publish" only if it was given them:
        `Client(uri, middleware=app.around.publish)`.

        Raises HandlerError.
        """
        if not isinstance(step, str):
            self.around.add(step, "run")
            return step

        def register(function: Any) -> Any:
            self.around.add(function, step)  # type: ignore[arg-type]  # checked there
            return function

        return register

    def on_start(self, function: Function, /) -> Function:
        """Call this function in each worker process before its first run.

        Handlers get the function's value from `context.value(function)`. The function takes no arguments. It may be
        async. It may also be a generator function with one `yield`: the yielded object is the value, and the rest runs
        when the worker stops. An exception ends the worker.

        Raises HandlerError.
        """
        self.hooks.add_start(function)
        return function

    def on_stop(self, function: Function, /) -> Function:
        """Call this function in each worker process after its last run. It takes no arguments. An exception is logged.

        Raises HandlerError.
        """
        self.hooks.add_stop(function)
        return function

    @property
    def schedules(self) -> list[Definition]:
        """The schedules that the handlers declare; raises HandlerError or InvalidInput."""
        made: dict[str, Definition] = {}
        for spec in self._schedules:
            definition = spec().prepare()
            if definition.schedule_id in made:
                raise HandlerError(definition.schedule_id, "two schedules have this id; give one another with id=...")
            made[definition.schedule_id] = definition
        return list(made.values())

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by task name."""
        return dict(self._handlers)

    @property
    def queues(self) -> list[str]:
        """The queues that the handlers name, and "default". A worker serves these unless its options name others."""
        return sorted({"default", *(handler.queue for handler in self._handlers.values())})

    def include(self, other: App) -> None:
        """Add everything that is registered with another app; raise HandlerError if a task name is taken."""
        for name, handler in other._handlers.items():
            if self._handlers.get(name, handler) is not handler:
                raise HandlerError(name, "both apps register this name")
            self._handlers[name] = handler
        self._schedules += [spec for spec in other._schedules if spec not in self._schedules]
        self.around.include(other.around)
        self.hooks.include(other.hooks)

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._handlers.values()))

    def __repr__(self) -> str:
        return f"App({', '.join(sorted(self._handlers))})"
