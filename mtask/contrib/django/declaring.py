"""What is declared beside Django's `@task`, and the apps of mtask that hold the handlers of the declared tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, Unpack

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules

from mtask.app.app import App
from mtask.contrib.django.api import Task
from mtask.contrib.django.running import handler_of, params_of
from mtask.contrib.django.targets import backends
from mtask.errors import InvalidInput
from mtask.features.schedules.client import FiringArguments, When
from mtask.kernel.document.handlers import HANDLER_ATTRIBUTE, Handler, IsolationKind, OnException
from mtask.kernel.document.options import TaskOptions, option_of

Function = TypeVar("Function", bound=Callable[..., Any])
_OPTIONS, _SCHEDULES = "__mtask_django_options__", "__mtask_django_schedules__"
_RETRIES = frozenset({"max_retries", "max_unexpected_retries"})  # the second one was its name before 0.3


class _Scheduled(NamedTuple):
    when: When
    kwargs: Mapping[str, Any] | None
    given: Mapping[str, Any]


class DeclarationOptions(TaskOptions, total=False):
    """The keyword arguments of `options`."""

    isolation: IsolationKind


def options(**given: Unpack[DeclarationOptions]) -> Callable[[Function], Function]:
    """Give a task options of mtask. Put this decorator below `@task`.

    They are those of `App.task`: a task that raises an exception is tried again only if the number of retries is given.
    `isolation` says where the function runs. The priority is given to `@task`.

    Raises UnknownOption, InvalidOption or InvalidInput.
    """
    if "priority" in given:
        raise InvalidInput("give the priority to @task, or to using().", field="priority")
    option_of({}, {name: value for name, value in given.items() if name != "isolation"})
    return _noting(_OPTIONS, lambda function: dict(given))


def schedule(
    when: When,
    /,
    *,
    id: str | None = None,  # noqa: A002 as in the document
    kwargs: Mapping[str, Any] | None = None,
    **given: Unpack[FiringArguments],
) -> Callable[[Function], Function]:
    """Enqueue a task again and again. Put this decorator below `@task`; a task may have several schedules.

    `kwargs` are the keyword arguments of the task. The rest is as in `App.schedule`. The workers of the task's backend
    fire it.
    """
    named = {} if id is None else {"id": id}
    made = _Scheduled(when, kwargs, {**named, **given})
    return _noting(_SCHEDULES, lambda function: [*getattr(function, _SCHEDULES, ()), made])


def _noting(attribute: str, value: Callable[[Any], Any]) -> Callable[[Function], Function]:
    def note(function: Any) -> Any:
        if isinstance(function, Task):
            raise InvalidInput("put this decorator below @task: it takes the function.", field="task")
        setattr(function, attribute, value(function))
        return function

    return note


def is_retried_by(given: Mapping[str, Any]) -> bool:
    """Whether these options say how often a task that raises an exception is tried again."""
    return not _RETRIES.isdisjoint(given)


def register(app: App, task: Task[..., Any]) -> Handler:
    """Register the handler of a task. Raises subclasses of InvalidInput and HandlerError."""
    given = dict(getattr(task.func, _OPTIONS, {}))
    is_retried = is_retried_by(given)
    on_exception: OnException = "retry" if is_retried else "fail"
    function, path = handler_of(task, is_retried=is_retried), task.module_path
    app.task(name=path, queue=task.queue_name, priority=task.priority, on_exception=on_exception, **given)(function)
    for when, kwargs, arguments in getattr(task.func, _SCHEDULES, ()):
        app.schedule(when, params=params_of((), kwargs or {}), **arguments)(function)
    handler: Handler = getattr(function, HANDLER_ATTRIBUTE)
    return handler


class Declared:
    """The tasks that are declared for one backend, by their paths. They stay: their modules are imported once."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task[..., Any]] = {}
        self._app = App()
        self._handlers: dict[str, Handler] = {}

    def handler(self, task: Task[..., Any]) -> Handler:
        """Return the handler of a task. The first call declares the task. Raises InvalidInput or HandlerError."""
        path = task.module_path
        if path not in self._handlers:
            self._handlers[path] = register(self._app, task)
            self.tasks[path] = task
        return self._handlers[path]


_declared: dict[str, Declared] = {}


def declared_for(alias: str) -> Declared:
    """Return what is declared for the backend of this alias."""
    return _declared.setdefault(alias, Declared())


def worker_app(alias: str) -> App:
    """Import all modules of tasks; return the app with the tasks of a backend, and of those with the same target.

    Raises ImproperlyConfigured.
    """
    mine = {backend.alias: backend for backend in backends()}
    if alias not in mine:
        known = ", ".join(mine) or "none"
        raise ImproperlyConfigured(f"TASKS[{alias!r}] is no mtask.contrib.django.MtaskBackend; those that are: {known}")
    autodiscover_modules("tasks")
    app = App()
    for backend in mine.values():
        if backend.target != mine[alias].target:
            continue
        for module in backend.modules:
            try:
                import_module(module)
            except ModuleNotFoundError as error:
                raise ImproperlyConfigured(f'TASKS[{backend.alias!r}]: OPTIONS["MODULES"]: {error}') from error
        for path, task in declared_for(backend.alias).tasks.items():
            if path not in app.handlers:
                register(app, task)
    return app
