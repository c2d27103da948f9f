"""Flows as clients return them: the state of a flow with all its steps, and short rows for lists of flows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtask.kernel.document.status import FAILED, FINAL, TaskStatus

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class StepRun:
    """The last run of a step in its present round, without what it returned."""

    worker_id: str | None
    status: str
    attempt: int | None
    claim_time: datetime | None
    ping_expire_time: datetime | None
    fraction: float | None  #: the progress that the handler reported
    message: str | None  #: the message that the handler reported


@dataclass(frozen=True, slots=True)
class StepState:
    """A step of a flow: its place among the other steps, its status and its times. It holds no params and returns.

    The document was not checked. A field of a type that does not fit is None, or empty.
    """

    task_id: str
    step: str  #: the step's name in the flow
    status: str
    after: tuple[str, ...]  #: the ids of its dependencies
    on_failed: str
    #: The task that added this one to the flow while it ran. For a next task: the first task of its chain. None: it was
    #: published with the flow.
    parent: str | None
    #: While the step is WAITING: an open task for which it waits. If the step is FAIL or CANCELED: the task that caused
    #: it.
    held_by: str | None
    cancel_requested: bool
    create_time: datetime | None
    release_time: datetime | None  #: the time since which it waits for no other task
    next_preempt_time: datetime | None  #: the time at which it is due, or at which its lease ends
    finish_time: datetime | None
    #: Why it ended as FAIL or CANCELED, or why its last run failed: at most the first 1,000 characters.
    reason: str | None
    run: StepRun | None  #: None: no worker has taken the step in its present round
    continues: str | None = None  #: the task that went on as this one. None: this is no next task

    @property
    def is_ended(self) -> bool:
        """Whether the step is SUCCESS, FAIL or CANCELED."""
        return self.status in FINAL

    @property
    def has_failed(self) -> bool:
        """Whether the step is FAIL or CANCELED."""
        return self.status in FAILED


@dataclass(frozen=True, slots=True)
class FlowState:
    """A flow as it was at one read."""

    key: str
    #: Each step comes after the steps on which it depends.
    steps: tuple[StepState, ...]
    counts: dict[str, int]  #: the numbers of steps by status; a status that no step has is left out
    head: str | None  #: the id of the flow's first task. None: it was removed
    create_time: datetime | None
    #: Whether all steps have ended, and each end has been told to the steps that depend on it.
    is_ended: bool
    end_time: datetime | None  #: the time at which the last step ended. None: the flow has not ended
    now: datetime | None  #: the server's time at the read

    @property
    def ended_cnt(self) -> int:
        """The number of steps that are SUCCESS, FAIL or CANCELED."""
        return sum(count for status, count in self.counts.items() if status in FINAL)

    @property
    def progress(self) -> float:
        """The ended part of the steps, from 0 to 1."""
        return self.ended_cnt / len(self.steps)

    @property
    def failed(self) -> list[StepState]:
        """The steps that are FAIL or CANCELED."""
        return [step for step in self.steps if step.has_failed]

    def __getitem__(self, step: str) -> StepState:
        """Return the step with this name; raise KeyError."""
        for found in self.steps:
            if found.step == step:
                return found
        raise KeyError(step)


@dataclass(frozen=True, slots=True)
class FlowRow:
    """A flow in a list of flows."""

    key: str
    head: str  #: the id of the flow's first task
    create_time: datetime | None
    counts: dict[str, int]  #: the numbers of steps by status; a status that no step has is left out

    @property
    def step_cnt(self) -> int:
        """The number of steps."""
        return sum(self.counts.values())

    @property
    def ended_cnt(self) -> int:
        """The number of steps that are SUCCESS, FAIL or CANCELED."""
        return sum(count for status, count in self.counts.items() if status in FINAL)

    @property
    def is_ended(self) -> bool:
        """Whether no step is open."""
        return self.ended_cnt == self.step_cnt


def state_of(key: str, rows: Sequence[Mapping[str, Any]]) -> FlowState:
    """Return the state of a flow. `rows` holds at least one step."""
    steps = sorted_steps([_step_of(row) for row in rows])
    is_ended = all(step.is_ended for step in steps) and not any(row.get("owes") for row in rows)
    ends = [step.finish_time for step in steps if step.finish_time is not None]
    heads = [str(row["_id"]) for row in rows if row.get("head") is not None]
    created = [step.create_time for step in steps if step.create_time is not None]
    return FlowState(
        key,
        tuple(steps),
        counted(Counter(step.status for step in steps)),
        heads[0] if heads else None,
        min(created, default=None),
        is_ended,
        max(ends, default=None) if is_ended else None,
        _instant(rows[0].get("now")),
    )


def counted(found: Mapping[str, int]) -> dict[str, int]:
    """Return the counts in the order of a task's life. Statuses of malformed documents come last."""
    known = [status.value for status in TaskStatus]
    return {status: found[status] for status in (*known, *sorted(found.keys() - set(known))) if found.get(status)}


def row_of(key: str, head: Mapping[str, Any], counts: Mapping[str, int]) -> FlowRow:
    """Return a flow for a list. `head` is the document of its first step."""
    state = head.get("task_state")
    created = state.get("create_time") if isinstance(state, Mapping) else None
    return FlowRow(key, str(head["_id"]), _instant(created), counted(counts))


def _step_of(row: Mapping[str, Any]) -> StepState:
    task_id, run = str(row["_id"]), _run_of(row.get("run"))
    fail_reason = row["run"].get("fail_reason") if run is not None else None
    ancestors = texts(row.get("ancestors"))
    return StepState(
        task_id=task_id,
        step=_text(row.get("step")) or task_id,
        status=str(row.get("status")),
        after=texts(row.get("after")),
        on_failed=_text(row.get("on_failed")) or "cancel",
        parent=ancestors[-1] if ancestors else None,
        held_by=_text(row.get("held_by")),
        cancel_requested=row.get("cancel_requested") is True,
        create_time=_instant(row.get("create_time")),
        release_time=_instant(row.get("release_time")),
        next_preempt_time=_instant(row.get("next_preempt_time")),
        finish_time=_instant(row.get("finish_time")),
        reason=_text(row.get("reason")) or _text(fail_reason),
        run=run,
        continues=_text(row.get("continues")),
    )


def _run_of(found: Any) -> StepRun | None:
    if not isinstance(found, Mapping):
        return None
    reported = found.get("progress")
    progress: Mapping[str, Any] = reported if isinstance(reported, Mapping) else {}
    fraction, attempt = progress.get("fraction"), found.get("attempt")
    return StepRun(
        _text(found.get("worker_id")),
        str(found.get("status")),
        attempt if isinstance(attempt, int) else None,
        _instant(found.get("claim_time")),
        _instant(found.get("ping_expire_time")),
        fraction if isinstance(fraction, int | float) else None,
        _text(progress.get("message")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a list. A malformed document may hold anything there."""
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _instant(value: Any) -> datetime | None:
    return value if isinstance(value, datetime) else None


def sorted_steps(steps: Iterable[StepState]) -> list[StepState]:
    """Return the steps so that each one comes after its dependencies. Numbers in names count as numbers.

    Steps that wait for each other in a circle, which no client publishes, come last.
    """
    by_id = {step.task_id: step for step in steps}
    missing = {task_id: len(known_before(step, by_id)) for task_id, step in by_id.items()}
    dependents: dict[str, list[str]] = {task_id: [] for task_id in by_id}
    for task_id, step in by_id.items():
        for other in known_before(step, by_id):
            dependents[other].append(task_id)
    depth = {task_id: 0 for task_id, count in missing.items() if not count}
    free = list(depth)
    for task_id in free:  # `free` grows while it is read
        for other in dependents[task_id]:
            missing[other] -= 1
            if not missing[other]:
                depth[other] = depth[task_id] + 1
                free.append(other)
    last = len(by_id)
    return sorted(by_id.values(), key=lambda step: (depth.get(step.task_id, last), natural(step.step), step.task_id))


def known_before(step: StepState, by_id: Mapping[str, StepState]) -> list[str]:
    """Return the steps that begin before this one: its dependencies, its parent, or the task that went on as this one.

    Removed steps are left out.
    """
    origin = step.continues if step.continues in by_id else step.parent
    before = dict.fromkeys((*step.after, *((origin,) if origin else ())))
    return [other for other in before if other in by_id and other != step.task_id]


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts "part-2" before "part-10"."""
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() and len(part) < 20 else (1, 0, part)
        for part in _DIGITS.split(text)
    ]
