"""The App class. An app registers handlers by name, and also schedules, middleware and hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from mtask.app.hooks import Hooks
from mtask.app.middleware import Kind, Middleware, Tracer
from mtask.arguments.publish import TaskRef
from mtask.errors import AppNotFound, HandlerError, InvalidInput, MtaskError, shown
from mtask.features.encryption.settings import Encryption
from mtask.features.rollout.rules import Upcasts
from mtask.features.schedules.client import Definition, FiringArguments, ScheduleSpec, When, trigger_of
from mtask.kernel.document.handlers import (
    HANDLER_ATTRIBUTE,
    Breaker,
    Handler,
    IsolationKind,
    NextNames,
    OnException,
    Unknown,
    make_handler,
)
from mtask.kernel.document.identity import check_text
from mtask.kernel.document.options import TaskOptions, check_option_names, with_new_names
from mtask.kernel.document.task import MAX_APP_VERSION

Function = TypeVar("Function", bound=Callable[..., Any])


class App:
    """A set of handlers. A worker process serves one app: `mtask-worker package.module:app`."""

    def __init__(self, *, encryption: Encryption | None = None, version: str | None = None) -> None:
        """`encryption` holds the keys with which the workers of this app decrypt its tasks: see `Encryption`.

        `version` is the version of your code, such as "2026.11.3". `mtask handlers` shows which versions are running.
        Raises InvalidInput.
        """
        self.encryption = encryption
        self.version = None if version is None else _checked_version(version)
        self._handlers: dict[str, Handler] = {}
        self._schedules: list[Callable[[], ScheduleSpec]] = []
        self._upcasts = Upcasts()
        #: The middleware of this app, for the steps publish, run and finish.
        self.around = Middleware()
        #: The functions that a worker calls before its first run and after its last run.
        self.hooks = Hooks()
        #: What traces this app. `mtask.otel.instrument` sets it.
        self.tracer: Tracer | None = None

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
        lookup: Sequence[str] = (),
        next: NextNames | None = None,
        isolation: IsolationKind | None = None,
        expires: timedelta | float | None = None,
        breaker: Breaker | None = None,
        version: int = 1,
        unknown: Unknown = "refuse",
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
        lookup: Sequence[str] = (),
        next: NextNames | None = None,  # noqa: A002 it says what comes next
        isolation: IsolationKind | None = None,
        expires: timedelta | float | None = None,
        breaker: Breaker | None = None,
        version: int = 1,
        unknown: Unknown = "refuse",
        **options: Unpack[TaskOptions],
    ) -> Any:
        """Register an async or sync function as the handler of tasks. Your code can still call the function itself.

        `name` defaults to the function's name. `queue` and the options are defaults for publishing tasks of this name.
        With on_exception="fail", every exception of the handler is final: no retry follows. `lookup` names parameters.
        A task's values for them are stored with the task, so that `client.find(lookup=...)` finds it by an index.

        With `next`, each task goes on as a task of that name after its success, with the same params; the handler of
        that task gets the returned value from `context.results()`. A mapping gives the name by the part of the flow's
        key before the first slash; a task of another flow, or of none, does not go on. See `Next`.

        With isolation="process", the handler runs in an executor: a child process of the worker, which can be killed.
        "thread" keeps it in the worker's process. Without it, the worker's `--isolation` decides for a sync handler.

        With `expires`, a time after the publish (a timedelta or seconds), no run of a task starts later: the task ends
        as CANCELED, or as FAIL if it has failed before. With `breaker`, failures in a row hold back all tasks of this
        name for a while: see `Breaker`.
        `version` is the version of the params: raise it when a deploy changes them so that old code cannot run new
        tasks. Tasks store it, and workers with a lower one never claim them. See `upcast` for tasks of earlier
        versions. With unknown="drop", params that the handler does not have are ignored; they stay stored.

        Raises HandlerError, InvalidName, UnknownOption or InvalidOption.
        """

        def register(target: Any) -> Any:
            handler = make_handler(
                target,
                name=name,
                queue=queue,
                on_exception=on_exception,
                options=dict(options),
                lookup=lookup,
                next_names=next,
                isolation=isolation,
                expires=expires,
                breaker=breaker,
                version=version,
                unknown=unknown,
            )
            if handler.name in self._handlers:
                raise HandlerError(handler.name, "this name is registered already; give another with name=...")
            self._handlers[handler.name] = handler
            with suppress(AttributeError):  # a bound method or builtin takes no attribute: publish it by name
                setattr(target, HANDLER_ATTRIBUTE, handler)
            return target

        return register if function is None else register(function)

    def upcast(self, task: TaskRef, /, *, from_version: int) -> Callable[[Function], Function]:
        """Register a function that turns the params of `from_version` into those of the next version.

        The function takes the params as they are stored, and returns new ones. `task` is the handler or its name. A
        worker calls one function for each step up to the `version` of the handler, and then checks the type hints. The
        task keeps its stored params. An exception of the function is a final failure.

        Raises HandlerError. A worker that starts raises it, too, if a step between the first one and the handler's
        version is missing.
        """

        def register(function: Function) -> Function:
            self._upcasts.add(task, from_version, function)
            return function

        return register

    def schedule(
        self,
        when: When,
        /,
        *,
        id: str | None = None,  # noqa: A002 as in the document
        params: Any = None,
        **given: Unpack[FiringArguments],
    ) -> Callable[[Function], Function]:
        """Publish the task of this handler on a schedule.

        Put this decorator above or below `@app.task`. A handler may have several schedules.

        `when` is a timedelta, an aware datetime, a Cron(...), or the five fields of a crontab line. An example is
        "*/5 * * * *". `timezone` applies to these fields. `id` defaults to the task's name. Each firing publishes one
        task, under the key `id/instant`, however many processes run.

        Firings are missed while no process runs. `catch_up` says which missed firings are made later: "none", the
        "last", or "all". With "all", at most the newest `catch_up_limit` firings are made.

        With overlap="skip", a firing is left out if the task of the previous firing has not finished. Each task starts
        after a random delay. `jitter` is the longest delay, as a timedelta or in seconds. `lookup` holds the
        lookups of the tasks.

        Raises InvalidInput. Errors that concern the handler are raised later, when a worker starts.
        """
        trigger = trigger_of(when, given.pop("timezone", None))
        arguments = with_new_names(given)

        def register(target: Any) -> Any:
            def spec() -> ScheduleSpec:
                handler = getattr(target, HANDLER_ATTRIBUTE, None)
                if not isinstance(handler, Handler) or self._handlers.get(handler.name) is not handler:
                    raise HandlerError(shown(target), "it has a schedule and is no task: add @app.task")
                check_option_names(dict.fromkeys(arguments.keys() - FiringArguments.__annotations__.keys()))
                return ScheduleSpec(handler.name if id is None else id, target, trigger, params, **arguments)

            self._schedules.append(spec)
            return target

        return register

    @overload
    def middleware(self, function: Function, /) -> Function: ...

    @overload
    def middleware(self, step: Kind, /) -> Callable[[Function], Function]: ...

    def middleware(self, step: Any, /) -> Any:
        """Compose a generator function around a step: "run" (the default), "publish" or "finish".

        See `mtask.app.middleware`. A client calls the functions around "publish" only if they are passed to it:
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
        """Register a function that each worker process calls before its first run.

        The function takes no arguments. It may be async. Handlers get its return value from `context.value(function)`.

        The function may also be a generator function with one `yield`. Then handlers get the yielded object, and the
        code after the `yield` runs when the worker stops.

        An exception before the first run ends the worker.

        Raises HandlerError.
        """
        self.hooks.add_start(function)
        return function

    def on_stop(self, function: Function, /) -> Function:
        """Register a function that each worker process calls after its last run.

        The function takes no arguments. If it raises an exception, the exception is logged.

        Raises HandlerError.
        """
        self.hooks.add_stop(function)
        return function

    @property
    def schedules(self) -> list[Definition]:
        """The schedules that are declared for handlers. Raises HandlerError or InvalidInput."""
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

    def complete(self) -> None:
        """Give the handlers their upcasts. Raises HandlerError if a step is missing."""
        self._upcasts.give(self._handlers)

    @property
    def queues(self) -> list[str]:
        """The queues that the handlers name, and "default".

        A worker serves these queues unless its options name other queues.
        """
        return sorted({"default", *(handler.queue for handler in self._handlers.values())})

    def include(self, other: App) -> None:
        """Add everything that another app has registered; raise HandlerError if both apps have a task of one name."""
        for name, handler in other._handlers.items():
            if self._handlers.get(name, handler) is not handler:
                raise HandlerError(name, "both apps register this name")
            self._handlers[name] = handler
        self._schedules += [spec for spec in other._schedules if spec not in self._schedules]
        self._upcasts.include(other._upcasts)
        self.around.include(other.around)
        self.hooks.include(other.hooks)
        self.tracer = self.tracer or other.tracer

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._handlers.values()))

    def __repr__(self) -> str:
        return f"App({', '.join(sorted(self._handlers))})"


def _checked_version(version: object) -> str:
    checked = check_text("version", version)
    if len(checked) > MAX_APP_VERSION:
        raise InvalidInput(f"version {shown(checked, 40)}: use at most {MAX_APP_VERSION} characters.", field="version")
    return checked


# --- loader ----------------------------------------------------------------------------------------------

# Finds an App by its path, such as `package.module:app`.


def load_app(path: str) -> App:
    """Import the module and return its App; raise AppNotFound with the reason."""
    module_name, colon, attribute = path.partition(":")
    if not module_name or not colon or not attribute:
        raise AppNotFound(path, "it is not of the form package.module:app")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise AppNotFound(path, f"there is no module {missing!r} here or on the Python path") from None
        reason = f"its import needs module {missing!r}, which is not installed"
        raise AppNotFound(path, reason, is_broken=True) from error
    except MtaskError as error:
        raise AppNotFound(path, f"its import failed: {error}", is_broken=True) from error
    except Exception as error:
        raise AppNotFound(path, f"its import failed: {type(error).__name__}: {error}", is_broken=True) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            apps = [name for name, value in vars(found).items() if isinstance(value, App)]
            hint = f"; it has {', '.join(map(repr, apps))}" if apps else ""
            raise AppNotFound(path, f"module {module_name!r} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise AppNotFound(path, f"{attribute!r} is {type(found).__name__}, not an mtask.App")
    return found
