"""Going on: a task that has succeeded goes on as another task, which is published in the same finish."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Unpack, overload

from mtask.arguments.publish import AddedArguments, Call, Declarations, TaskRef, TaskSpec
from mtask.errors import InvalidFlow, InvalidInput, InvalidOption, InvalidParams
from mtask.kernel.document.handlers import handler_of
from mtask.kernel.document.identity import own_key, task_id_of
from mtask.kernel.document.lookup import Lookup
from mtask.kernel.document.options import TaskOptions, with_new_names
from mtask.kernel.document.task import MAX_DEPTH, StoredTask
from mtask.kernel.document.values import Trace
from mtask.kernel.driver.bson import is_readable
from mtask.kernel.operations.publish import NewTask, milliseconds
from mtask.kernel.statements.outbox import OwedTask


class Next:
    """Return this from a handler to go on as another task.

    The run ends as SUCCESS, and the same write holds the next task. So the next task exists once, however often the
    write is sent, and also if the worker dies right afterwards. A rerun does not publish it again.

    `task` is a registered handler or its name, or `call(handler)(...)`. `returns` is the value that this task returns.
    The handler of the next task gets it from `context.results()`. The next task has this task's priority plus
    `priority_diff` (higher goes first), and this task's lookups beside its own. If this task is a step of a flow, so is
    the next one, and steps that depend on this task wait for it, too. The other arguments mean the same as in
    `Client.publish`.

    The next task's key is made from the id of the first task: `@NAME:KEY/next-1`, then `@NAME:KEY/next-2`. It is
    `KEY/next-1` in a flow, and where the next task has the name of the first one. Where a task goes on once more in a
    later round, the key ends in `-round-2`. The next task is of the same tenant.
    """

    __mtask_next__ = True

    @overload
    def __init__(
        self, task: Call[Any], *, returns: Any = None, priority_diff: int = 0, **arguments: Unpack[AddedArguments]
    ) -> None: ...

    @overload
    def __init__(
        self,
        task: TaskRef,
        params: Any = None,
        *,
        returns: Any = None,
        priority_diff: int = 0,
        **arguments: Unpack[AddedArguments],
    ) -> None: ...

    def __init__(
        self,
        task: TaskRef | Call[Any],
        params: Any = None,
        *,
        returns: Any = None,
        priority_diff: int = 0,
        queue: str | None = None,
        start_time: datetime | None = None,
        delay: timedelta | float | None = None,
        lookup: Lookup | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        if isinstance(task, Call):
            task, params = task.parts(params)
        self.task: TaskRef = task
        self.params = params
        self.returns = returns
        self.priority_diff = priority_diff
        self.queue = queue
        self.start_time = start_time
        self.delay = delay
        self.lookup = lookup
        self.options = with_new_names(options)

    def __repr__(self) -> str:
        return f"Next({self.task!r})"

    def prepare(
        self,
        before: StoredTask,
        task: TaskRef | None = None,
        run_id: str | None = None,
        trace: Trace | None = None,
        known: Declarations | None = None,
    ) -> OwedTask:
        """Check the next task of the task `before`, and return it. Raises subclasses of InvalidInput.

        `task` stands for `self.task`: its handler, where only a name was given. `run_id` is the run that goes on,
        and `trace` its span. `known` tells what handlers of other apps declare.
        """
        diff = self.priority_diff
        if isinstance(diff, bool) or not isinstance(diff, int):
            raise InvalidInput("priority_diff is a whole number.", field="priority_diff")
        if "priority" in self.options:
            raise InvalidOption("priority", "a next task takes priority_diff instead")
        options: TaskOptions = {**self.options, "priority": before.task_option.priority + diff}
        first = before.id if before.chain is None else before.chain.first
        number = 1 if before.chain is None else before.chain.number + 1
        rounds = _rounds(before)
        suffix = f"next-{number}{rounds}"
        chosen = self.task if task is None else task
        first_name, _, first_key = first.partition(":")
        first_key = own_key(before.tenant, first_key)
        # Two tasks of different names may have one key, and go on as tasks of one name. In a flow, keys differ.
        handler = handler_of(chosen)
        is_clear = before.flow is not None or (handler.name if handler else chosen) == first_name
        spec = TaskSpec(
            chosen,
            self.params,
            # Without the "@", the key would begin like those of a tenant that is named like the task.
            key=f"{first_key if is_clear else '@' + task_id_of(first_name, first_key)}/{suffix}",
            tenant=before.tenant,
            queue=self.queue,
            start_time=self.start_time,
            delay=self.delay,
            lookup=self._with_lookups_of(before, chosen, known),
            **options,
        )
        prepared = spec.prepare(known=known)
        chain = {"before": before.id, "first": first, "number": number, "run_id": run_id, "rounds": rounds or None}
        fixed = prepared.fixed() | {"chain": {name: value for name, value in chain.items() if value is not None}}
        if before.flow is not None:
            flow = before.flow
            is_first = before.chain is None
            fixed["flow"] = flow_part(
                before,
                step=f"{flow.step if is_first else flow.step.rpartition('/')[0]}/{suffix}",
                # All tasks of the chain are children of the first one, so a long chain is not deep.
                ancestors=[*flow.ancestors, before.id] if is_first else flow.ancestors,
            )
            if len(fixed["flow"]["ancestors"]) > MAX_DEPTH:
                raise InvalidFlow(flow.key, f"a child of children {MAX_DEPTH} levels deep cannot go on")
        return owed(prepared, fixed, trace)

    def _with_lookups_of(self, before: StoredTask, task: TaskRef, known: Declarations | None) -> Lookup | None:
        """Return the lookups that are given here, and those of the task `before` under other names."""
        given: Any = self.lookup
        if given is not None and not isinstance(given, Mapping):
            return given  # type: ignore[no-any-return]  # `TaskSpec` raises the error
        handler = handler_of(task)
        declared = handler if handler or known is None else known.declaration(str(task))
        taken = declared.lookup if declared else ()
        inherited = {name: values for name, values in before.lookups.items() if name not in taken}
        return {**inherited, **(given or {})} or None


def _rounds(before: StoredTask) -> str:
    """Return the part of the next task's key that tells the rounds in which tasks of the chain went on before."""
    former = (before.chain and before.chain.rounds) or ""
    if not before.task_state.next_cnt:
        return former
    of = "" if before.chain is None else f"-of-{before.chain.number}"
    return f"{former}-round-{before.task_state.next_cnt + 1}{of}"


def flow_part(parent: StoredTask, *, step: str, ancestors: list[str]) -> dict[str, Any]:
    """Return the part in the flow of a task that this task adds to it. The task waits for no other."""
    assert parent.flow is not None
    flow = parent.flow
    part: dict[str, Any] = {"key": flow.key, "step": step, "after": [], "on_failed": flow.on_failed}
    if flow.fail_fast:
        part["fail_fast"] = True
    return {**part, "ancestors": ancestors}


def owed(task: NewTask, fixed: dict[str, Any], trace: Trace | None) -> OwedTask:
    """Return the task with these fields, as the server takes it. `trace`: the span of its parent's run.

    Raises InvalidParams.
    """
    if trace is not None:
        fixed["trace"] = dict(trace)
    # Whoever publishes the task must read it first.
    if not is_readable(fixed["params"]):
        raise InvalidParams(fixed["name"], "they hold a value that cannot be read again, such as a UUID of five bytes")
    if isinstance(task.start, timedelta):
        return OwedTask(fixed, delay_ms=milliseconds(task.start))
    return OwedTask(fixed, start=task.start)
