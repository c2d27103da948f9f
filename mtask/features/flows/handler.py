"""What a handler does with its flow: it adds children, and reads the results for which its task has waited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar, Unpack, overload

from mtask.arguments.publish import AddedArguments, Call, Declarations, Preparation, TaskRef, copied, spec_of
from mtask.errors import InvalidFlow, MtaskError, NotInFlow, ResultLost, shown
from mtask.features.flows import publish
from mtask.features.flows.next import flow_part, owed
from mtask.kernel.document.handlers import Handler, handler_of
from mtask.kernel.document.identity import own_key
from mtask.kernel.document.lookup import Lookup
from mtask.kernel.document.options import TaskOptions
from mtask.kernel.document.parts import Sealed, is_sealed, refused
from mtask.kernel.document.task import MAX_DEPTH, StoredTask
from mtask.kernel.document.values import Trace
from mtask.kernel.driver.codec import GET_CODEC, Codec, Owner
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import encode
from mtask.kernel.operations.encode import RETURNS
from mtask.kernel.operations.publish import Published
from mtask.kernel.operations.relays import Relay
from mtask.kernel.statements.outbox import OwedTask

T = TypeVar("T")
#: The part of a flow's free room that one run uses before it counts the tasks of the flow again: one in this number.


class HandlerOperations(Protocol):
    """The worker's functions that run a handler's operations in the database."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of the worker's app, by name."""

    @property
    def relays(self) -> Sequence[Relay]:
        """The relays that settle what ends because of other ends."""

    @property
    def known(self) -> Declarations | None:
        """What is known of handlers of other apps."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation for an async handler."""

    def run_sync(self, operation: Operation[T]) -> T:
        """Run an operation for a sync handler in its thread."""


class FamilyRun(Protocol):
    """The part of a run that adding children uses."""

    @property
    def task(self) -> StoredTask:
        """The task as it was at the claim of the run."""

    @property
    def run_id(self) -> str:
        """The run's id."""

    @property
    def is_lease_valid(self) -> bool:
        """Whether the lease still holds, as far as this process knows."""

    @property
    def is_in_transaction(self) -> bool:
        """Whether a transaction of the handler is open."""

    @property
    def stored_trace(self) -> Trace | None:
        """The span of the run, if it is stored with what comes of the run, and children are to link to it."""


def with_handler(task: TaskRef, handlers: Mapping[str, Handler]) -> TaskRef:
    """Return the handler of this name, if the app has it, so that its defaults apply. Else return the task as given."""
    return handlers.get(task, task) if isinstance(task, str) else task


class Child:
    """A task for `add_children`. The arguments mean the same as in `Client.publish`; `step` is its name in the flow."""

    @overload
    def __init__(self, step: str, task: Call[Any], **arguments: Unpack[AddedArguments]) -> None: ...

    @overload
    def __init__(self, step: str, task: TaskRef, params: Any = None, **arguments: Unpack[AddedArguments]) -> None: ...

    def __init__(
        self,
        step: str,
        task: TaskRef | Call[Any],
        params: Any = None,
        *,
        queue: str | None = None,
        start_time: datetime | None = None,
        delay: timedelta | float | None = None,
        lookup: Lookup | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        self.step = step
        self.spec = spec_of(task, params, queue=queue, start_time=start_time, delay=delay, lookup=lookup, **options)

    def __repr__(self) -> str:
        return f"Child({self.step!r}, {self.spec.task!r})"


class Adding(Generic[T]):
    """The adding of children. An async handler awaits it. In a sync handler, the children are added already."""

    def __init__(self, waiting: Coroutine[Any, Any, T] | None, result: T | None = None) -> None:
        self._waiting = waiting
        self._result = result

    def __await__(self) -> Generator[Any, Any, T]:
        if self._waiting is not None:
            return self._waiting.__await__()
        return _done(self.get()).__await__()

    def get(self) -> T:
        """Return the result, in a sync handler."""
        if self._waiting is not None:
            self._waiting.close()
            raise RuntimeError("await this, in an async handler")
        return self._result  # type: ignore[return-value]


async def _done(result: T) -> T:
    return result


class Family:
    """Adds children to a run's task, and reads the results that its handler may need."""

    def __init__(self, run: FamilyRun, operations: HandlerOperations) -> None:
        self._run = run
        self._operations = operations
        #: The number of tasks that may be added before the tasks of the flow are counted again.

    def do(self, operation: Operation[T]) -> Adding[T]:
        """Run an operation: at once in a sync handler's thread, and when it is awaited in an async handler."""
        if _is_in_loop():
            return Adding(self._operations.run(operation))
        return Adding(None, self._operations.run_sync(operation))

    def add(self, given: Iterable[Child]) -> Operation[list[Published]]:
        """Check the children, and return the operation that adds them. Raises subclasses of InvalidInput."""
        task = self._run.task
        if task.flow is None:
            raise NotInFlow(task.id)
        if self._run.is_in_transaction:
            raise RuntimeError("add children before context.transaction(): in it, the task's document is about to end")
        key, children, handlers = task.flow.key, list(given), self._operations.handlers
        specs = [child.spec for child in children if isinstance(child, Child)]
        others = [spec for spec in specs if isinstance(spec.task, str) and spec.task not in handlers]
        preparation = Preparation(
            lambda known: self._prepared(task, key, children, known), others, self._operations.known
        )
        return self._adding(key, preparation)

    def _prepared(
        self, task: StoredTask, key: str, given: Sequence[Child], known: Declarations | None
    ) -> list[OwedTask]:
        assert task.flow is not None
        ancestors = [*task.flow.ancestors, task.id]
        if len(ancestors) > MAX_DEPTH:
            raise InvalidFlow(key, f"children of children are added {MAX_DEPTH} levels deep at most")
        prepared: dict[str, OwedTask] = {}
        for child in given:
            if not isinstance(child, Child):
                raise InvalidFlow(key, f"add_children takes Child(...), not {type(child).__name__}")
            step = child.step
            if not isinstance(step, str) or not step or "/" in step:
                raise InvalidFlow(key, f"{shown(step)} is no step: use non-empty text without a slash")
            if step in prepared:
                raise InvalidFlow(key, f"step {shown(step)} is added twice: use another name")
            spec = copied(child.spec)
            spec.task = with_handler(spec.task, self._operations.handlers)
            spec.key, spec.tenant = f"{own_key(task.tenant, key)}/{step}", task.tenant
            handler = handler_of(spec.task)
            declared = handler if handler or known is None else known.declaration(str(spec.task))
            if declared is None or "priority" not in declared.options:
                spec.options.setdefault("priority", task.task_option.priority)
            try:
                new = spec.prepare(known=known)
            except MtaskError as error:
                error.add_note(f"in child {step!r} of {task.id}; no child was added")
                raise
            fixed = new.fixed() | {"flow": flow_part(task, step=step, ancestors=ancestors)}
            prepared[step] = owed(new, fixed, self._run.stored_trace)
        return list(prepared.values())

    def _adding(self, key: str, preparation: Preparation[list[OwedTask]]) -> Operation[list[Published]]:
        run = self._run
        added: set[str] = set()
        owed_tasks = yield from encode.owed((yield from preparation.complete()))
        yield from publish.make_room(key, run.task.id, owed_tasks)
        for batch in publish.in_batches(owed_tasks) if owed_tasks else ():
            more = publish.add(run.task.id, run.run_id, batch, lambda: run.is_lease_valid, self._operations.relays)
            added |= set((yield from more))
        return [Published(one.task_id, created=one.task_id in added, updated=False) for one in owed_tasks]

    def results(self) -> Results:
        """Return the results for which the task has waited."""
        return Results(self._run.task, self.do)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@dataclass(slots=True)
class _Reading:
    """Reads the results page by page. It holds what is still to be read."""

    task: StoredTask
    ids: list[str]
    #: The dependencies that have children, as far as they are known; None: they are not wanted.
    parents: list[str] | None

    def page(self) -> Operation[list[tuple[str, Any]] | None]:
        """Return the next results. None: there are no more."""
        while not self.ids:
            if not self.parents:
                return None
            self.ids, self.parents = (yield from publish.descendants(self.parents)), None
        now, self.ids = self.ids[: publish.PAGE], self.ids[publish.PAGE :]
        if self.parents is not None:
            self.parents += yield from publish.parents(now)
        chain = self.task.chain
        if chain is not None and chain.run_id is not None:
            rows = yield from publish.result_of_run(chain.before, chain.run_id)
        else:
            rows = yield from publish.results(now)
        for row in rows:
            if row.get("lost") is not None:
                raise ResultLost(row["_id"], str(row["lost"]))
        yield from _opened(rows)
        if chain is not None:
            return [(row["_id"].partition(":")[0], row.get("returns")) for row in rows]
        return [(row["step"], row.get("returns")) for row in rows]


def _opened(rows: Sequence[dict[str, Any]]) -> Operation[None]:
    """Decode rows of `publish.results` in place. Raises DecryptionFailed if a result is refused or stays closed."""
    codec: Codec = yield GET_CODEC
    closed: list[tuple[dict[str, Any], Owner]] = []
    for row in rows:
        name, _, key = row["_id"].partition(":")
        queues = [queue for queue in row.get("queues") or () if isinstance(queue, str)]
        owner = Owner(name, key, queues, row.get("sealed"))
        if is_sealed(row.get(RETURNS)):
            closed.append((row, owner))
        elif row.get(RETURNS) is not None and codec.is_readable_refused(owner):
            raise refused(owner.task_id, RETURNS).error
    values = [(owner, RETURNS, Sealed(row[RETURNS], task_id=owner.task_id, field=RETURNS)) for row, owner in closed]
    opened = yield from codec.open_values(values)
    for (row, _), value in zip(closed, opened, strict=True):
        if isinstance(value, Sealed):
            raise value.error
        row[RETURNS] = value


class Results:
    """The results for which a task has waited: pairs of a step and the value that its handler returned.

    These are the results of the task's dependencies, and of their children. Tasks that did not succeed are left out.
    For a task as which another one went on, it is the result of that task, under its name instead of a step. A result
    that is lost raises ResultLost.

    The results are read page by page: `async for step, value in context.results()`, or `for` in a sync handler. All of
    them as a mapping: `await context.results()`, or `dict(context.results())` in a sync handler.
    """

    def __init__(self, task: StoredTask, do: Callable[[Operation[Any]], Adding[Any]]) -> None:
        self._task = task
        self._do = do

    def _reading(self) -> _Reading:
        task = self._task
        if task.chain is not None:
            return _Reading(task, [task.chain.before], None)
        after = [] if task.flow is None else list(task.flow.after)
        return _Reading(task, after, [])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        reading = self._reading()
        while (page := self._do(reading.page()).get()) is not None:
            yield from page

    async def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        reading = self._reading()
        while (page := await self._do(reading.page())) is not None:
            for pair in page:
                yield pair

    def __await__(self) -> Generator[Any, Any, dict[str, Any]]:
        return self._all().__await__()

    async def _all(self) -> dict[str, Any]:
        return {step: value async for step, value in self}
