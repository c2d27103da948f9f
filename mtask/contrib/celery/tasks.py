"""Tasks: what `@app.task` and `@shared_task` make of a function."""

from __future__ import annotations

import functools
import inspect
import random
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter

from mtask import Context, Retry
from mtask.contrib.celery import options as mapped
from mtask.contrib.celery import words
from mtask.contrib.celery.canvas import Signature, filled, stands_for_results
from mtask.contrib.celery.exceptions import MaxRetriesExceededError, NotMapped
from mtask.contrib.celery.result import AsyncResult, EagerResult
from mtask.contrib.celery.running import AnyApp, Request, current, now_running, running

#: The parameter in which mtask gives its context. The function of the task does not see it.
_CONTEXT = "mtask_context"
_DEFAULT_DELAY = 180
_DEFAULT_RETRIES = 3


class Task:
    """A task of an app, or of all apps: call it, or publish it with `delay`, `apply_async` or in a canvas.

    With `bind=True`, the function gets this object as its first argument.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise NotMapped(f"the class {cls.__name__} of tasks", words.REFUSED_TASK_OPTIONS["base"])

    def __init__(self, function: Callable[..., Any], name: str, app: AnyApp | None, options: Mapping[str, Any]) -> None:
        self.name = name
        self._app = app
        self.options = mapped.check_task_options(name, options)
        kept = self.options
        self.is_bound = bool(kept.get("bind", False))
        self.signature_of_function = _parameters(name, function, is_bound=self.is_bound)
        self._function = function
        self._models = _models_of(function) if kept.get("pydantic") else {}
        self._retried_for: tuple[type[BaseException], ...] = tuple(kept.get("autoretry_for") or ())
        self._not_retried_for: tuple[type[BaseException], ...] = (Retry, *(kept.get("dont_autoretry_for") or ()))
        self._retry_kwargs = dict(kept.get("retry_kwargs") or {})
        for option in self._retry_kwargs.keys() - {"max_retries", "countdown"}:
            raise NotMapped(f"retry_kwargs[{option!r}] of task {name}", "give max_retries and countdown")
        #: The number of tries after the first one that may fail; None: no limit.
        self.max_retries: int | None = self._retry_kwargs.get("max_retries", kept.get("max_retries", _DEFAULT_RETRIES))
        self.default_retry_delay: float = kept.get("default_retry_delay", _DEFAULT_DELAY)
        functools.update_wrapper(self, function)

    __name__: str
    __qualname__: str

    def __repr__(self) -> str:
        return f"<@task: {self.name}>"

    def __getattr__(self, name: str) -> Any:
        if name in words.OF_TASK:
            raise NotMapped(f"{name} of task {self.__dict__.get('name')}", words.OF_TASK[name])
        raise AttributeError(f"a task has no attribute {name!r}")

    # --- what a bound task asks -----------------------------------------------------------------------------

    @property
    def app(self) -> AnyApp:
        """The app of the task."""
        return self._app if self._app is not None else current()

    @property
    def request(self) -> Request:
        """What is known of the run that calls the function now."""
        return now_running().request

    @property
    def context(self) -> Context:
        """The context that mtask gives a handler; raise RuntimeError if no worker runs the task."""
        context = now_running().context
        if context is None:
            raise RuntimeError("there is a context only while a worker runs the task")
        return context

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(self, *args, **kwargs) if self.is_bound else self._function(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, in no run of its own."""
        with running(Request(args=args, kwargs=kwargs, task=self.name), now_running().context):
            return self._run(args, kwargs)

    # --- publish --------------------------------------------------------------------------------------------

    def params(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by the names of their parameters; raise TypeError as a call of the function does."""
        try:
            bound = self.signature_of_function.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None
        named: dict[str, Any] = dict(bound.arguments)
        for parameter in self.signature_of_function.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(parameter.name, {})
        return named

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Publish the task with these arguments."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Publish the task; return its result. Raises NotMapped, TypeError, and what `Client.publish` raises.

        `countdown` (seconds), `eta`, `expires` (seconds or an instant), `priority` (higher goes first), `queue`,
        `time_limit` (seconds). `task_id` is the key: a second call with the same one publishes nothing.
        """
        app = self.app
        params = self.params(args or (), kwargs or {})
        if app.conf.task_always_eager:
            return self.apply((), params, throw=app.conf.task_eager_propagates, **options)
        given = mapped.publish_arguments(self.name, options, app.conf.timezone)
        published = app.client.publish(app.handler(self), params, **given)
        return AsyncResult(f"{published.name}:{published.key}", app)

    def apply(
        self,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        throw: bool = False,
        **options: Any,
    ) -> EagerResult:
        """Run the task in this process; return its result. Tries follow each other at once. `throw`: raise errors."""
        given = mapped.publish_arguments(self.name, options, "UTC")
        task_id = f"{self.name}:{given.get('key') or uuid4().hex}"
        params = self.params(args or (), kwargs or {})
        retries = 0
        while True:
            request = Request(
                task_id, self.name, (), params, retries, is_eager=True, called_directly=False, hostname="eager"
            )
            try:
                with running(request):
                    return EagerResult(task_id, self._run((), params), "SUCCESS")
            except Retry:
                retries += 1
            except Exception as error:
                if throw:
                    raise
                return EagerResult(task_id, error, "FAILURE")

    def AsyncResult(self, task_id: str) -> AsyncResult:
        """Return the result of a task by its id."""
        return AsyncResult(task_id, self.app)

    # --- signatures -----------------------------------------------------------------------------------------

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """Return the signature of a call."""
        return Signature(self, args, kwargs, app=self._app)

    def si(self, *args: Any, **kwargs: Any) -> Signature:
        """Return the signature of a call that takes no result of the task before."""
        return Signature(self, args, kwargs, immutable=True, app=self._app)

    def signature(self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Signature:
        """Return the signature of a call with options."""
        immutable = bool(options.pop("immutable", False))
        return Signature(self, args, kwargs, immutable=immutable, app=self._app).set(**options)

    # --- retries --------------------------------------------------------------------------------------------

    def retry(
        self,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Raise mtask's Retry, so that the task runs again after `countdown` seconds, and the try counts as failed.

        After max_retries it raises `exc`, or MaxRetriesExceededError, which is final. Raises NotMapped for arguments
        other than those of the task.
        """
        request = self.request
        for option in options:
            instead = "a task that is tried again stays in its queue, with its options"
            raise NotMapped(f"the option {option!r} of retry in task {self.name}", instead)
        self._check_same(request, args, kwargs)
        if request.called_directly:
            raise exc or _current_error() or Retry(0, "Task can be retried")
        limit = self._limit(max_retries)
        if limit is not None and request.retries >= limit:
            if exc is not None:
                raise exc
            raise MaxRetriesExceededError(f"Can't retry {self.name}[{request.id}]: {request.retries} tries have failed")
        if eta is not None:
            delay = mapped.until(eta, self.app.conf.timezone)
        else:
            delay = mapped.seconds(self.default_retry_delay if countdown is None else countdown)
        cause = exc or _current_error()
        reason = "retry requested" if cause is None else f"{type(cause).__name__}: {cause}"
        retry = Retry(max(delay, timedelta(0)), reason, counted=True)
        if throw:
            raise retry
        return retry

    def _limit(self, asked: int | None) -> int | None:
        own = self.max_retries
        if asked is None or own is None:
            return own if asked is None else asked
        if asked > own:
            what = f"retry(max_retries={asked}) of task {self.name}, whose own is {own}"
            raise NotMapped(what, "give the higher number to the task")
        return asked

    def _check_same(self, request: Request, args: Iterable[Any] | None, kwargs: Mapping[str, Any] | None) -> None:
        if args is None and kwargs is None:
            return
        known = request.kwargs if not request.called_directly else self.params(request.args, request.kwargs)
        asked = self.signature_of_function.bind_partial(*(args or ()), **(kwargs or {})).arguments
        if any(name not in known or known[name] != value for name, value in asked.items()):
            what = f"retry with other arguments in task {self.name}"
            raise NotMapped(what, "call self.apply_async(...) with them, and return")

    def _countdown(self) -> float | None:
        """Return the seconds before the next try that `autoretry_for` asks for; None: the default."""
        backoff = self.options.get("retry_backoff", False)
        if not backoff:
            return self._retry_kwargs.get("countdown")
        longest = int(self.options.get("retry_backoff_max", 600))
        wait = min(longest, int(max(1.0, backoff)) * 2 ** min(self.request.retries, 64))
        return random.randrange(wait + 1) if self.options.get("retry_jitter", True) else wait

    # --- run ------------------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
        """Call the function, and have it tried again after the errors that `autoretry_for` names."""
        models = {
            name: self._models[name].validate_python(params[name]) for name in self._models.keys() & params.keys()
        }
        try:
            return self.run(*args, **{**params, **models})
        except self._not_retried_for:
            raise
        except self._retried_for as error:
            raise self.retry(exc=error, countdown=self._countdown(), throw=False) from error

    def handler_for(self, app: AnyApp) -> Callable[..., Any]:
        """Return the function that a worker calls. Its parameters are those of the task, and take any value."""
        own = self.signature_of_function.parameters.values()
        context = inspect.Parameter(_CONTEXT, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)

        def run(**given: Any) -> Any:
            return self._run_for(app, given.pop(_CONTEXT), given)

        run.__name__, run.__qualname__, run.__module__ = self.__name__, self.__qualname__, self.__module__
        run.__doc__ = self.__doc__
        # Celery does not look at type hints. `object` takes any value, and in no name stands for mtask's context.
        run.__signature__ = inspect.Signature([context, *(each.replace(annotation=object) for each in own)])  # type: ignore[attr-defined]
        run.__annotations__ = {_CONTEXT: Context, **{each.name: object for each in own}}
        return run

    def _run_for(self, app: AnyApp, context: Context, given: dict[str, Any]) -> Any:
        results = dict(context.results()) if any(map(stands_for_results, given.values())) else {}
        params = {name: filled(value, results) for name, value in given.items()}
        task = context.task
        request = Request(
            id=f"{self.name}:{task.own_key}",
            task=self.name,
            kwargs=params,
            retries=task.task_state.failed_cnt,
            hostname=context.worker_id,
            delivery_info={
                "routing_key": task.queue,
                "priority": task.task_option.priority,
                "redelivered": bool(task.runs),
            },
            called_directly=False,
        )
        with running(request, context):
            return self._run((), params)


def _parameters(name: str, function: Callable[..., Any], *, is_bound: bool) -> inspect.Signature:
    """Return the signature of the arguments that are published; raise NotMapped."""
    if inspect.iscoroutinefunction(function):
        raise NotMapped(f"the async function of task {name}", words.ASYNC)
    if inspect.isgeneratorfunction(function):
        raise NotMapped(f"the generator of task {name}", words.GENERATOR)
    own = list(inspect.signature(function).parameters.values())
    if is_bound:
        if not own:
            raise TypeError(f"task {name} has bind=True and no parameter for itself")
        own = own[1:]
    for parameter in own:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise NotMapped(
                f"the parameter {parameter.name!r} of task {name}, which has no name of its own", words.POSITIONAL
            )
    return inspect.Signature(own)


def _models_of(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Return what makes models of the arguments whose type hints are models of pydantic."""
    found = {}
    for name, hint in typing.get_type_hints(function).items():
        kinds = [hint, *typing.get_args(hint)]
        if name != "return" and any(inspect.isclass(kind) and issubclass(kind, BaseModel) for kind in kinds):
            found[name] = TypeAdapter(hint)
    return found


def _current_error() -> BaseException | None:
    return sys.exc_info()[1]
