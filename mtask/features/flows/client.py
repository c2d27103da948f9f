"""Flows: tasks that are published together and that wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, get_args, overload

from mtask.arguments.publish import (
    Call,
    CallbackRef,
    Declarations,
    Preparation,
    PublishMiddleware,
    StepArguments,
    TaskRef,
    TaskSpec,
    copied,
    spec_of,
)
from mtask.errors import (
    DatabaseBusy,
    DocumentTooLarge,
    InvalidFlow,
    InvalidParams,
    MtaskError,
    NotStorable,
    OperationFailed,
    shown,
)
from mtask.features.flows import publish as publishing
from mtask.features.flows.publish import NewFlow, NewStep, PublishedFlow
from mtask.kernel.document.handlers import Begun, enter, leave
from mtask.kernel.document.identity import check_key, check_tenant, check_text, stored_key
from mtask.kernel.document.options import TaskOptions, with_new_names
from mtask.kernel.document.task import MAX_STEPS, OnFailed
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations.publish import Published, check_fields

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
MAX_EDGES = 100_000
MAX_AFTER_BYTES = 4 * 1024 * 1024
#: The server's code TransactionTooLarge.
_TOO_LARGE = 257


@dataclass(frozen=True, slots=True)
class Step(Generic[R_co]):
    """A step of a flow. Pass it as `after` of a later step. `Step[str]` is that of a call that returns text."""

    flow_key: str
    name: str


@dataclass(frozen=True, slots=True)
class _Added:
    spec: TaskSpec
    after: Sequence[str]
    on_failed: OnFailed


class Flow:
    """Tasks that are published together, all or none, once for each key. A task waits until its dependencies end.

    `key` is the flow's key. The key of each task is `key/step`. `options` are the options of all tasks, for example
    `priority=5`; a step may have its own. With `fail_fast`, a task that ends as FAIL cancels the open tasks of the
    flow, except those with on_failed="run". `tenant` is whose tasks they are (default: that of the client).
    """

    def __init__(
        self,
        key: str,
        *,
        queue: str | None = None,
        fail_fast: bool = False,
        tenant: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        self.key = check_key(key)
        self.tenant = None if tenant is None else check_tenant(tenant)
        self.queue = check_text("queue", queue) if queue is not None else None
        self.fail_fast = bool(fail_fast)
        self.options = with_new_names(options)
        self._steps: dict[str, _Added] = {}

    def __repr__(self) -> str:
        return f"Flow({self.key!r}, {len(self._steps)} steps)"

    @overload
    def add(
        self,
        step: str,
        task: Call[R],
        *,
        after: Iterable[Step[Any] | str] = (),
        on_failed: OnFailed = "cancel",
        **arguments: Unpack[StepArguments],
    ) -> Step[R]: ...

    @overload
    def add(
        self,
        step: str,
        task: TaskRef,
        params: Any = None,
        *,
        after: Iterable[Step[Any] | str] = (),
        on_failed: OnFailed = "cancel",
        **arguments: Unpack[StepArguments],
    ) -> Step[Any]: ...

    def add(
        self,
        step: str,
        task: TaskRef | Call[Any],
        params: Any = None,
        *,
        after: Iterable[Step[Any] | str] = (),
        on_failed: OnFailed = "cancel",
        queue: str | None = None,
        start_time: datetime | None = None,
        delay: timedelta | float | None = None,
        callback: CallbackRef | None = None,
        **options: Unpack[TaskOptions],
    ) -> Step[Any]:
        """Add a task; return its step. `step` is its name in the flow, without a slash.

        `task` is a handler or its name, or `call(handler)(...)`, which has the params.

        `after` holds the dependencies: steps, or their names. The task starts when all of them have ended. If one of
        them ended as FAIL or CANCELED, `on_failed` decides: "cancel" cancels the task, "fail" lets it end as FAIL, and
        "run" runs it all the same. `delay` counts from the moment at which the last dependency ended. The other
        arguments mean the same as in `Client.publish`. Raises InvalidFlow; publishing the flow checks the rest.
        """
        if not isinstance(step, str) or not step or "/" in step:
            raise InvalidFlow(self.key, f"{shown(step)} is no step: use non-empty text without a slash")
        if step in self._steps:
            raise InvalidFlow(self.key, f"step {shown(step)} was added already: use another name")
        if on_failed not in get_args(OnFailed):
            raise InvalidFlow(self.key, f'on_failed is "cancel", "run" or "fail", not {shown(on_failed)}')
        if isinstance(after, str | Step):
            raise InvalidFlow(self.key, f"after of step {shown(step)} is a list of steps: write after=[...]")
        merged: TaskOptions = {**self.options, **with_new_names(options)}
        spec = spec_of(
            task,
            params,
            key=f"{self.key}/{step}",
            queue=queue if queue is not None else self.queue,
            start_time=start_time,
            delay=delay,
            callback=callback,
            tenant=self.tenant,
            **merged,
        )
        names = [self._name_of(step, dependency) for dependency in after]
        self._steps[step] = _Added(spec, names, on_failed)
        return Step(self.key, step)

    def _name_of(self, step: str, dependency: object) -> str:
        if isinstance(dependency, Step):
            if dependency.flow_key != self.key:
                reason = f"step {shown(step)} comes after {dependency.name!r} of flow {shown(dependency.flow_key)}"
                raise InvalidFlow(self.key, f"{reason}: dependencies lie in the same flow")
            return dependency.name
        if not isinstance(dependency, str):
            kind = type(dependency).__name__
            raise InvalidFlow(self.key, f"step {shown(step)} comes after a {kind}: give steps, or their names")
        return dependency

    @property
    def specs(self) -> list[TaskSpec]:
        """The tasks, in the order in which they were added."""
        return [added.spec for added in self._steps.values()]

    def prepare(
        self, specs: Sequence[TaskSpec], tenant: str | None = None, known: Declarations | None = None
    ) -> NewFlow:
        """Check the flow with these specs of its steps; return it. Raises InvalidFlow and other InvalidInput errors.

        `tenant` is the tenant of a flow that names none. `known` tells what handlers declare that are not at hand.
        """
        tenant = self.tenant if self.tenant is not None else tenant
        if not self._steps:
            raise InvalidFlow(self.key, "it has no steps: call add")
        if len(self._steps) > MAX_STEPS:
            raise InvalidFlow(self.key, f"it has {len(self._steps)} steps, and {MAX_STEPS} are the most")
        self._check_dependencies()
        prepared = {}
        for name, spec in zip(self._steps, specs, strict=True):
            try:
                prepared[name] = spec.prepare(tenant=tenant, known=known)
            except MtaskError as error:
                error.add_note(f"in step {name!r} of flow {self.key!r}; nothing was published")
                raise
        strange = next((name for name, task in prepared.items() if task.tenant != tenant), None)
        if strange is not None:
            reason = f"step {shown(strange)} is of another tenant than the flow: give the flow the tenant"
            raise InvalidFlow(self.key, reason)
        steps = []
        for name, added in self._steps.items():
            after = [prepared[other].task_id for other in added.after]
            if sum(len(task_id.encode()) for task_id in after) > MAX_AFTER_BYTES:
                raise InvalidFlow(self.key, f"the ids of what step {shown(name)} comes after exceed 4 MB")
            steps.append(NewStep(prepared[name], name, after, added.on_failed))
        return NewFlow(stored_key(tenant, self.key), steps, self.fail_fast)

    def _check_dependencies(self) -> None:
        edges = 0
        for name, added in self._steps.items():
            edges += len(added.after)
            for other in added.after:
                if other not in self._steps:
                    reason = f"step {shown(name)} comes after {shown(other)}, which is no step of the flow"
                    raise InvalidFlow(self.key, f"{reason}: add it")
            if len(set(added.after)) < len(added.after):
                raise InvalidFlow(self.key, f"step {shown(name)} names a dependency twice: name each once")
        if edges > MAX_EDGES:
            raise InvalidFlow(self.key, f"it has {edges} dependencies, and {MAX_EDGES} are the most")
        left = self._in_circles()
        if left:
            raise InvalidFlow(self.key, f"steps wait for each other in a circle: {', '.join(map(shown, left[:5]))}")

    def _in_circles(self) -> list[str]:
        """Return the steps that could never start, because they wait for themselves."""
        missing = {name: len(added.after) for name, added in self._steps.items()}
        dependents: dict[str, list[str]] = {name: [] for name in self._steps}
        for name, added in self._steps.items():
            for other in added.after:
                dependents[other].append(name)
        free = [name for name, count in missing.items() if not count]
        while free:
            for name in dependents[free.pop()]:
                missing[name] -= 1
                if not missing[name]:
                    free.append(name)
        return [name for name, count in missing.items() if count]


class FlowPublication:
    """The publishing of one flow, with the middleware around the publish of each task."""

    def __init__(
        self,
        flow: Flow,
        middleware: PublishMiddleware = (),
        tenant: str | None = None,
        known: Declarations | None = None,
    ) -> None:
        """`known` tells what handlers declare. If `preparation` lacks some, run its `complete` before the operation."""
        if not isinstance(flow, Flow):
            raise InvalidFlow("", f"give a Flow, not {type(flow).__name__}")
        self._begun: list[Begun] = []
        try:
            specs = [copied(spec) for spec in flow.specs] if middleware else flow.specs
            for spec in specs if middleware else ():
                self._begun.append(enter(middleware, spec))
            self.preparation = Preparation(lambda known: flow.prepare(specs, tenant, known), specs, known)
        except BaseException as error:
            self._leave(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        begun, self._begun = self._begun, []
        for one in begun:
            leave(one, None, error)

    def operation(self) -> Operation[PublishedFlow]:
        """Return the operation that publishes the flow. It must run in a transaction, and can be repeated."""
        flow = self.preparation.made
        try:
            yield from check_fields([step.task for step in flow.steps])
            return (yield from publishing.publish(flow))
        except (NotStorable, DocumentTooLarge) as error:
            raise InvalidParams(flow.head.task.name, f"a step cannot be stored: {error.reason}") from error
        except (OperationFailed, DatabaseBusy) as error:
            if isinstance(error, OperationFailed) and error.code != _TOO_LARGE:
                raise
            reason = "the server has no room for so much in one transaction: publish smaller params or fewer steps"
            raise InvalidFlow(flow.key, f"{reason}, and let handlers add the rest as children") from error

    def done(self, published: PublishedFlow) -> PublishedFlow:
        """Tell the middleware of the result; return the result."""
        begun, self._begun = self._begun, []
        for one, task_id in zip(begun, published.task_ids, strict=False):
            leave(one, Published(task_id, created=published.created, updated=False))
        return published
