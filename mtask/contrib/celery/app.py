"""The app: `Celery`, `shared_task` and `current_app`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

from mtask import App, Client
from mtask.contrib.celery import options as mapped
from mtask.contrib.celery import schedules, words
from mtask.contrib.celery.canvas import Signature, chain, chord, group, send
from mtask.contrib.celery.config import Config
from mtask.contrib.celery.exceptions import NotMapped
from mtask.contrib.celery.result import AsyncResult, revoke
from mtask.contrib.celery.running import APPS, current
from mtask.contrib.celery.tasks import Task
from mtask.errors import HandlerError

Function = TypeVar("Function", bound=Callable[..., Any])
#: The tasks of `shared_task`, by name. Every app has them.
_SHARED: dict[str, Task] = {}


class Celery:
    """An app with the interface of Celery's. `mtask worker proj.celery:app.mtask` runs its tasks.

    `broker` is the URI of MongoDB (default: MTASK_URI and MTASK_DATABASE of the environment, as for workers).
    `include` names modules with tasks, which a worker imports. Raises NotMapped for what has no counterpart.
    """

    def __init__(
        self,
        main: str | None = None,
        *,
        broker: str | None = None,
        backend: str | None = None,
        include: Iterable[str] = (),
        config_source: Any = None,
        namespace: str | None = None,
        set_as_current: bool = True,
        **settings: Any,
    ) -> None:
        self.main = main
        self.conf = Config()
        if config_source is not None:
            self.conf.read_from(config_source, namespace)
        given = {"broker_url": broker, "result_backend": backend, "include": tuple(include)}
        given = {name: value for name, value in given.items() if value}
        if given or settings:
            self.conf.update(given, **settings)
        #: Functions that a worker calls with the app once it is made, before its tasks are registered.
        self.on_after_configure = _Connected("on_after_configure")
        #: Functions that a worker calls with the app once its modules are imported.
        self.on_after_finalize = _Connected("on_after_finalize")
        self.control = Control(self)
        self._mtask = App()
        self._own: dict[str, Task] = {}
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._discovered: list[tuple[Any, str]] = []
        self._scheduled: set[str] = set()
        self._is_complete = False
        #: The process and the client that it uses, and whether it is the app that closes the client.
        self._client: tuple[int, Client] | None = None
        self._owns_client = False
        APPS.insert(len(APPS) if set_as_current else 0, self)

    def __repr__(self) -> str:
        return f"<Celery {self.main or '__main__'} on mtask>"

    def __getattr__(self, name: str) -> Any:
        if name in words.OF_APP:
            raise NotMapped(f"app.{name}", words.OF_APP[name])
        raise AttributeError(f"the app has no attribute {name!r}")

    # --- declare --------------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[..., Any], /) -> Task: ...

    @overload
    def task(self, /, **options: Any) -> Callable[[Callable[..., Any]], Task]: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a task of a function. Raises NotMapped for options that have no counterpart."""

        def make(target: Callable[..., Any]) -> Task:
            return _declare(target, self, self._own, options)

        return make if function is None else make(function)

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by name, also those of `shared_task`."""
        return MappingProxyType({**_SHARED, **self._own})

    def config_from_object(
        self, source: Any, silent: bool = False, force: bool = False, namespace: str | None = None
    ) -> None:
        """Read the settings of an object, or of the module or object of this path, when the first one is needed."""
        self.conf.read_from(source, namespace)

    def autodiscover_tasks(
        self,
        packages: Iterable[str] | Callable[[], Iterable[str]] | None = None,
        related_name: str = "tasks",
        force: bool = False,
    ) -> None:
        """Let workers import the module `related_name` of these packages. None: of Django's installed apps."""
        self._discovered.append((packages, related_name))

    def add_periodic_task(
        self,
        schedule: Any,
        sig: Signature,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> str:
        """Add an entry to `beat_schedule`; return its name."""
        made = sig.clone(args, kwargs, **options)
        entry = {
            "schedule": schedule,
            "task": made.task,
            "args": made.args,
            "kwargs": made.kwargs,
            "options": made.options,
        }
        known = name or repr(sig)
        self.conf.update(beat_schedule={**self.conf.beat_schedule, known: entry})
        return known

    # --- publish and read -----------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client that publishes. A test sets that of its bench. A process that was forked makes its own."""
        if self._client is None or self._client[0] != os.getpid():
            made = Client(self.conf.broker_url, middleware=self._mtask.around.publish)
            self._client, self._owns_client = (os.getpid(), made), True
        return self._client[1]

    @client.setter
    def client(self, client: Client) -> None:
        self.close()
        self._client = os.getpid(), client

    def close(self) -> None:
        """Close the client of this process, if the app made it. The next publish makes another one."""
        if self._client is not None and self._owns_client and self._client[0] == os.getpid():
            self._client[1].close()
        self._client, self._owns_client = None, False

    def send_task(
        self, name: str, args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Publish a task by its name. A name that this process has not takes kwargs only."""
        result: AsyncResult = send(self, name, tuple(args or ()), kwargs or {}, options)
        return result

    def signature(
        self, task: str, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **more: Any
    ) -> Signature:
        """Return the signature of a task by its name."""
        return Signature(task, args, kwargs, app=self, **more)

    def AsyncResult(self, task_id: str) -> AsyncResult:
        """Return the result of a task by its id NAME:KEY."""
        return AsyncResult(task_id, self)

    chain, group, chord = chain, group, chord

    # --- what workers run -----------------------------------------------------------------------------------

    def handler(self, task: Task) -> Callable[..., Any]:
        """Return the handler of mtask for a task; register it at the first call."""
        found = self._handlers.get(task.name)
        if found is None:
            self.conf.handlers_are_made()
            declared, arguments = self._declared(task)
            found = task.handler_for(self)
            if self.conf.is_django:
                found = _with_fresh_connections(found)
            self._mtask.task(name=task.name, on_exception="fail", **arguments, **declared)(found)
            self._handlers[task.name] = found
        return found

    def _declared(self, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of a task, and the other arguments of `App.task`."""
        conf, given = self.conf, task.options
        route = conf.route(task.name)
        options = mapped.task_options(given, task.max_retries, task.default_retry_delay)
        priority = route.get("priority", conf.task_default_priority)
        if priority is not None:
            options.setdefault("priority", priority)
        if conf.retention:
            options |= mapped.kept_for(conf.retention)
        arguments = {"queue": given.get("queue") or route.get("queue") or conf.task_default_queue}
        limit = given.get("time_limit") or conf.task_time_limit
        return options, arguments | (mapped.limited(limit) if limit else {})

    @property
    def mtask(self) -> App:
        """The app of mtask, with all tasks and schedules: what `mtask worker` takes, and `mtask.testing.bench`."""
        if not self._is_complete:
            self._is_complete = True  # also for the modules that are imported now, and read `app.mtask`
            try:
                self.on_after_configure.tell(self)
                for module in self._modules():
                    importlib.import_module(module)
                self.on_after_finalize.tell(self)
            except BaseException:
                self._is_complete = False  # who asks again is told of the fault again
                raise
        for task in self.tasks.values():
            self.handler(task)
        for name, entry in self.conf.beat_schedule.items():
            if name not in self._scheduled:
                self._schedule(name, entry)
                self._scheduled.add(name)
        return self._mtask

    def _modules(self) -> Iterator[str]:
        """Yield the modules with tasks that a worker imports."""
        yield from (*_names(self.conf.include), *_names(self.conf.imports))
        for packages, related_name in self._discovered:
            named = _installed_apps() if packages is None else packages() if callable(packages) else packages
            for package in _names(named):
                module = f"{package}.{related_name}" if related_name else package
                if importlib.util.find_spec(module) is not None:
                    yield module

    def _schedule(self, name: str, entry: Mapping[str, Any]) -> None:
        """Declare the schedule of an entry of `beat_schedule`; raise NotMapped."""
        what = f"beat_schedule[{name!r}]"
        for field in entry.keys() - {"task", "schedule", "args", "kwargs", "options"}:
            raise NotMapped(f"the field {field!r} of {what}", "write task, schedule, args, kwargs and options")
        task = self.tasks.get(entry["task"])
        if task is None:
            instead = "import the module with the task: include=[...], or autodiscover_tasks([...])"
            raise NotMapped(f"{what}, whose task {entry['task']!r} is not registered", instead)
        given = mapped.publish_arguments(task.name, entry.get("options") or {}, self.conf.timezone)
        for option in given.keys() & {"delay", "start_time", "key"}:
            raise NotMapped(f"the option {option!r} of {what}", "each firing has its own instant and its own key")
        when = schedules.trigger(entry["schedule"], self.conf.timezone)
        params = task.params(entry.get("args") or (), entry.get("kwargs") or {})
        self._mtask.schedule(when, id=name, params=params, **given)(self.handler(task))


class Control:
    """What `app.control` has: `revoke`."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def revoke(
        self, task_id: str | Iterable[str], terminate: bool = False, signal: str = "SIGTERM", **idle: Any
    ) -> None:
        """Cancel tasks of which no run has begun. With `terminate`, end their runs, too. Raises TaskNotFound."""
        for each in [task_id] if isinstance(task_id, str) else task_id:
            revoke(self._app, each, terminate=terminate)

    def __getattr__(self, name: str) -> Any:
        if name in words.OF_CONTROL:
            raise NotMapped(f"app.control.{name}", words.OF_CONTROL[name])
        raise AttributeError(f"app.control has no {name!r}")


class _Connected:
    """The functions that are called at one moment: `@app.on_after_configure.connect`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._functions: list[Callable[..., Any]] = []

    def connect(self, function: Function | None = None, **idle: Any) -> Any:
        """Have a function called with the app as `sender`."""

        def add(target: Function) -> Function:
            self._functions.append(target)
            return target

        return add if function is None else add(function)

    def tell(self, app: Celery) -> None:
        """Call the functions."""
        for function in self._functions:
            function(sender=app, signal=self._name)


@overload
def shared_task(function: Callable[..., Any], /) -> Task: ...


@overload
def shared_task(**options: Any) -> Callable[[Callable[..., Any]], Task]: ...


def shared_task(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a task of a function that every app has. Raises NotMapped for options that have no counterpart."""

    def make(target: Callable[..., Any]) -> Task:
        return _declare(target, None, _SHARED, options)

    return make if function is None else make(function)


def _declare(target: Callable[..., Any], app: Celery | None, into: dict[str, Task], options: Mapping[str, Any]) -> Task:
    """Make a task; raise HandlerError if another function has its name."""
    task = Task(target, str(options.get("name") or _name_of(target, app)), app, options)
    former = into.get(task.name)
    if former is not None and (former.__module__, former.__qualname__) != (task.__module__, task.__qualname__):
        raise HandlerError(task.name, "two functions have this name; give one another with name=...")
    into[task.name] = task
    return task


def _name_of(target: Callable[..., Any], app: Celery | None) -> str:
    """Return the name that a task without a name gets: its module and its function."""
    module = target.__module__
    if module == "__main__":
        main = app.main if app is not None else APPS[-1].main if APPS else None  # type: ignore[attr-defined]
        file = getattr(sys.modules["__main__"], "__file__", None) or "__main__"
        module = main or os.path.splitext(os.path.basename(file))[0]
    return f"{module}.{target.__name__}"


def _names(given: Any) -> Iterator[str]:
    yield from [given] if isinstance(given, str) else (str(name) for name in given or ())


def _installed_apps() -> list[str]:
    """Return the packages of Django's installed apps. Set Django up first, as a worker has no manage.py."""
    apps: Any = importlib.import_module("django.apps").apps
    if not apps.ready:
        importlib.import_module("django").setup()
    return [found.name for found in apps.get_app_configs()]


def _with_fresh_connections(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a handler begin and end without connections of Django that are too old."""
    database: Any = importlib.import_module("django.db")

    def run(**given: Any) -> Any:
        database.close_old_connections()
        try:
            return function(**given)
        finally:
            database.close_old_connections()

    run.__dict__.update(vars(function))
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(run, name, getattr(function, name))
    return run


class _CurrentApp:
    """Stands for the app that was made last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current(), name)

    def __repr__(self) -> str:
        return repr(current())


current_app = _CurrentApp()
