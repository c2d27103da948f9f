"""Signatures, chains, groups and chords: `mtask.contrib.celery.canvas` stands for `celery.canvas`.

A canvas of several tasks becomes a flow. Its tasks are published together or not at all, and each is a step that waits
for the ones before it. What they return is filled in when a step runs: until then, its params hold `{RESULT: steps}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self
from uuid import uuid4

from mtask import Flow
from mtask.contrib.celery import words
from mtask.contrib.celery.exceptions import NotMapped
from mtask.contrib.celery.options import publish_arguments
from mtask.contrib.celery.result import AsyncResult, EagerResult, GroupResult
from mtask.contrib.celery.running import AnyApp, current

#: The only field of a value that stands for the results of other steps.
RESULT = "mtask_result"
#: Only the first tasks of a canvas are delayed. The later ones wait for them.
_OF_THE_FIRST = frozenset({"countdown", "eta"})


class Ends(NamedTuple):
    """The end of a part of a canvas."""

    #: The step whose result goes on, or several, in lists as groups are nested. None: nothing comes before.
    value: Any = None
    #: The steps to wait for.
    after: tuple[str, ...] = ()


def filled(value: Any, results: Mapping[str, Any]) -> Any:
    """Return the value, or the results that it stands for."""
    return _picked(value[RESULT], results) if stands_for_results(value) else value


def stands_for_results(value: object) -> bool:
    """Whether a value of the params stands for the results of other steps."""
    return isinstance(value, Mapping) and value.keys() == {RESULT}


def _picked(steps: Any, results: Mapping[str, Any]) -> Any:
    return results[steps] if isinstance(steps, str) else [_picked(step, results) for step in steps]


class Placing(Protocol):
    """Takes the tasks of a canvas, one after the other."""

    app: AnyApp
    #: The key of the flow.
    key: str

    def place(self, task: Signature, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]) -> AsyncResult:
        """Take a task that comes after `before`; return its result."""


class Canvas:
    """What signatures, chains, groups and chords have in common."""

    def __getattr__(self, name: str) -> Any:
        if name in words.OF_SIGNATURE:
            raise NotMapped(f"{type(self).__name__}.{name}", words.OF_SIGNATURE[name])
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __or__(self, other: Canvas) -> Canvas:
        if not isinstance(other, Canvas):
            return NotImplemented
        return chain(self, other)

    @property
    def app(self) -> AnyApp:
        """The app that publishes it."""
        raise NotImplementedError

    def lay(
        self, on: Placing, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[Ends, AsyncResult | GroupResult]:
        """Place all tasks. `args` go before those of the first ones; return the end and the result."""
        raise NotImplementedError

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Publish it; return its result."""
        return self.apply_async(args, kwargs)

    def apply_async(self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Publish it as a flow; return the result of its end. `args` go before those of its first tasks."""
        if kwargs:
            raise NotMapped(f"keyword arguments of a {type(self).__name__}", "give them to the signatures")
        app = self.app
        if app.conf.task_always_eager:
            return self.apply(args)
        flow = _InFlow(app)
        _, result = self.lay(flow, Ends(), tuple(args or ()), options)
        if flow.flow.specs:
            app.client.publish_flow(flow.flow)
        return result

    def apply(self, args: Iterable[Any] = (), **options: Any) -> Any:
        """Run it in this process; return its result."""
        _, result = self.lay(_Eagerly(self.app), Ends(), tuple(args or ()), options)
        return result

    def __call__(self, *args: Any) -> Any:
        """Publish it with these arguments of its first tasks; return its result."""
        return self.apply_async(args)


class Signature(Canvas):
    """A task with arguments, to be published later: `task.s(...)`, or `signature(name, args, kwargs)`."""

    def __init__(
        self,
        task: Any,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        immutable: bool = False,
        app: AnyApp | None = None,
        **more: Any,
    ) -> None:
        self.task = task if isinstance(task, str) else str(task.name)
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})
        self.options = {**(options or {}), **more}
        self.immutable = immutable
        self._app = app

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.task}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self.task)

    def _parts(self) -> tuple[Any, ...]:
        return self.task, self.args, self.kwargs, self.options, self.immutable

    @property
    def app(self) -> AnyApp:
        """The app that publishes it."""
        return self._app if self._app is not None else current()

    @property
    def type(self) -> Any:
        """The task itself, if this process has it."""
        return self.app.tasks[self.task]

    def clone(self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Signature:
        """Return a copy. `args` go before its own ones, other arguments replace its own."""
        own_args, own_kwargs = self._merged(tuple(args or ()), kwargs or {})
        merged = {**self.options, **options}
        return Signature(self.task, own_args, own_kwargs, merged, immutable=self.immutable, app=self._app)

    def _merged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.immutable:
            return self.args, self.kwargs
        return (*args, *self.args), {**self.kwargs, **kwargs}

    def set(self, immutable: bool | None = None, **options: Any) -> Self:
        """Set options of the call; return the signature itself. Raises NotMapped."""
        publish_arguments(self.task, options, "UTC")
        self.options |= options
        if immutable is not None:
            self.immutable = immutable
        return self

    def set_immutable(self, immutable: bool) -> None:
        """Say whether the result of the task before is left out."""
        self.immutable = immutable

    def apply_async(self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Publish the task; return its result."""
        own_args, own_kwargs = self._merged(tuple(args or ()), kwargs or {})
        return send(self.app, self.task, own_args, own_kwargs, {**self.options, **options})

    def apply(self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Run the task in this process; return its result."""
        own_args, own_kwargs = self._merged(tuple(args or ()), kwargs or {})
        return self.type.apply(own_args, own_kwargs, **{**self.options, **options})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the task."""
        own_args, own_kwargs = self._merged(args, kwargs)
        return self.type(*own_args, **own_kwargs)

    def lay(
        self, on: Placing, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[Ends, AsyncResult | GroupResult]:
        """Place the task."""
        result = on.place(self, before, args, {**self.options, **options})
        step = result.id.rpartition("/")[2]
        return Ends(step, (step,)), result


class chain(Canvas):
    """Tasks that run one after the other. Each gets the result of the one before as its first argument."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks: list[Canvas] = []
        for task in _listed(tasks):
            self.tasks += task.tasks if isinstance(task, chain) else [task]
        if not self.tasks:
            raise ValueError("a chain has at least one task")

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.tasks))

    @property
    def app(self) -> AnyApp:
        """The app that publishes it."""
        return self.tasks[0].app

    def lay(
        self, on: Placing, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[Ends, AsyncResult | GroupResult]:
        """Place all tasks, each after the one before. The options are those of the first one."""
        ends, result = self.tasks[0].lay(on, before, args, options)
        for task in self.tasks[1:]:
            former = result
            ends, result = task.lay(on, ends, (), {})
            _root(result).parent = former
        return ends, result


class group(Canvas):
    """Tasks that run beside each other. Its result is a list, in the order of the tasks."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks: list[Canvas] = []
        for task in _listed(tasks):
            self.tasks += task.tasks if isinstance(task, group) else [task]

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.tasks))})"

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def app(self) -> AnyApp:
        """The app that publishes it."""
        return self.tasks[0].app if self.tasks else current()

    def lay(
        self, on: Placing, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[Ends, AsyncResult | GroupResult]:
        """Place all tasks beside each other. Each gets the options."""
        laid = [task.lay(on, before, args, options) for task in self.tasks]
        after = tuple(step for ends, _ in laid for step in ends.after)
        result = GroupResult(on.key, [result for _, result in laid])
        return Ends([ends.value for ends, _ in laid], after or before.after), result


class chord(Canvas):
    """A group, and a task that gets the list of its results: `chord(header, body)`, or `chord(header)(body)`."""

    def __init__(self, header: Any, body: Canvas | None = None) -> None:
        self.header = header if isinstance(header, group) else group(header)
        self.body = body

    def __repr__(self) -> str:
        return f"chord({self.header!r}, {self.body!r})"

    def __call__(self, body: Canvas | None = None) -> Any:
        """Publish it with this body; return the result of the body."""
        return (self if body is None else chord(self.header, body)).apply_async()

    @property
    def app(self) -> AnyApp:
        """The app that publishes it."""
        return self.header.app if self.header.tasks or self.body is None else self.body.app

    def lay(
        self, on: Placing, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[Ends, AsyncResult | GroupResult]:
        """Place the header, and the body after it."""
        if self.body is None:
            raise ValueError("a chord has a body: chord(header, body), or chord(header)(body)")
        ends, header = self.header.lay(on, before, args, options)
        own = {name: value for name, value in options.items() if name not in _OF_THE_FIRST}
        ends, result = self.body.lay(on, ends, (), own)
        _root(result).parent = header
        return ends, result


def signature(
    task: Any, args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    """Return the signature of a task by its name. A signature is returned as it is."""
    return task if isinstance(task, Canvas) else Signature(task, args, kwargs, **more)


def _listed(tasks: tuple[Any, ...]) -> list[Canvas]:
    """Return the parts of a canvas: they are given one by one, or as one list."""
    given = tasks[0] if len(tasks) == 1 and not isinstance(tasks[0], Canvas) else tasks
    listed = list(given)
    for one in listed:
        if not isinstance(one, Canvas):
            raise TypeError(f"{one!r} is no signature: write task.s(...)")
    return listed


def _root(result: AsyncResult | GroupResult) -> AsyncResult | GroupResult:
    """Return the result of the first task of a part, whose end has this result."""
    while result.parent is not None:
        result = result.parent
    return result


def send(app: AnyApp, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Publish a task by its name; return its result. A task that this process has need not be at hand."""
    task = app.tasks.get(name)
    if task is not None:
        return task.apply_async(args, kwargs, **options)
    if args:
        raise NotMapped(f"positional arguments of a call of task {name}", words.UNKNOWN_ARGS)
    routed = app.conf.route(name)
    given = publish_arguments(name, {**routed, **options}, app.conf.timezone)
    published = app.client.publish(name, dict(kwargs), **given)
    return AsyncResult(f"{published.name}:{published.key}", app)


@dataclass
class _InFlow:
    """Makes each task a step of a flow."""

    app: AnyApp
    key: str = field(default_factory=lambda: f"celery/{uuid4().hex}")
    flow: Flow = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self.flow = Flow(self.key)

    def place(self, task: Signature, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]) -> AsyncResult:
        if options.get("task_id") is not None:
            raise NotMapped(f"the option 'task_id' of task {task.task} in a canvas", "its key is that of the flow")
        self._count += 1
        step = str(self._count)
        given = publish_arguments(task.task, options, self.app.conf.timezone)
        known = self.app.tasks.get(task.task)
        own_args, kwargs = _call_of(task, before, args)
        if known is None:
            if own_args:
                raise NotMapped(f"positional arguments of a call of task {task.task}", words.UNKNOWN_ARGS)
            given = {**self.app.conf.route(task.task), **given}
        self.flow.add(
            step,
            task.task if known is None else self.app.handler(known),
            kwargs if known is None else known.params(own_args, kwargs),
            after=before.after,
            # In Celery, the body of a chord whose header failed is FAILURE, and the rest of a chain never runs.
            on_failed="fail" if isinstance(before.value, list) else "cancel",
            **given,
        )
        return AsyncResult(f"{task.task}:{self.key}/{step}", self.app)


@dataclass
class _Eagerly:
    """Runs each task in this process, when it is placed."""

    app: AnyApp
    key: str = field(default_factory=lambda: f"celery/{uuid4().hex}")
    _ended: dict[str, AsyncResult] = field(default_factory=dict)

    def place(self, task: Signature, before: Ends, args: tuple[Any, ...], options: Mapping[str, Any]) -> AsyncResult:
        step = str(len(self._ended) + 1)
        task_id = f"{task.task}:{self.key}/{step}"
        failed = [self._ended[other] for other in before.after if not self._ended[other].successful()]
        if failed:
            result: AsyncResult = EagerResult(task_id, failed[0].result, "FAILURE")
        else:
            results = {other: result.result for other, result in self._ended.items()}
            own_args, kwargs = _call_of(task, before, args)
            values = [filled(value, results) for value in own_args]
            result = task.type.apply(values, kwargs, **{**options, "task_id": f"{self.key}/{step}"})
        self._ended[step] = result
        return result


def _call_of(task: Signature, before: Ends, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a task that comes after `before`."""
    if task.immutable:
        return task.args, task.kwargs
    former = () if before.value is None else ({RESULT: before.value},)
    return (*former, *args, *task.args), task.kwargs


def __getattr__(name: str) -> Any:
    if name in words.NAMES:
        raise NotMapped(name, words.NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
