"""The rules of flows: pure functions of a step, and of the tasks for which it waits.

A step waits for its dependencies and for all descendants of its dependencies. These tasks together are its *awaited*
tasks. The server's forms are in `mtask.features.flows.statements`. A property test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import OnFailed

_FAILED = frozenset({TaskStatus.FAIL, TaskStatus.CANCELED})


class Verdict(StrEnum):
    """What becomes of a WAITING step."""

    WAIT = "wait"  #: an awaited task is open
    RELEASE = "release"  #: the step may start
    CANCEL = "cancel"  #: the step becomes CANCELED, because an awaited task failed
    FAIL = "fail"  #: the step becomes FAIL, because an awaited task failed


@dataclass(frozen=True, slots=True)
class Awaited:
    """A task for which a step waits."""

    task_id: str
    #: None: the task was removed. A removed dependency counts as CANCELED.
    status: TaskStatus | None
    #: Whether tasks that this task has added to the flow are still to be published, or its value is still to come.
    owes_tasks: bool = False


def is_open(awaited: Awaited) -> bool:
    """Whether the task has not ended: its status is not final, or it owes tasks or its value."""
    return awaited.status is not None and (not awaited.status.is_final or awaited.owes_tasks)


def has_failed(awaited: Awaited) -> bool:
    """Whether the task is FAIL or CANCELED, or was removed."""
    return awaited.status is None or awaited.status in _FAILED


def verdict(on_failed: OnFailed, awaited: Sequence[Awaited]) -> Verdict:
    """Return what becomes of a WAITING step. Its fate is decided when all awaited tasks have ended."""
    if any(map(is_open, awaited)):
        return Verdict.WAIT
    if on_failed == "run" or not any(map(has_failed, awaited)):
        return Verdict.RELEASE
    return Verdict.CANCEL if on_failed == "cancel" else Verdict.FAIL


def holders(awaited: Sequence[Awaited]) -> list[str]:
    """Return the tasks that may hold the step: the open ones."""
    return [one.task_id for one in awaited if is_open(one)]


def culprits(awaited: Sequence[Awaited]) -> list[str]:
    """Return the tasks that may be named as the cause if the step is CANCELED or FAIL: the failed ones."""
    return [one.task_id for one in awaited if has_failed(one)]


def end_reason(culprit: str) -> str:
    """Return the reason of a step that ends because this task failed."""
    return f"{culprit} failed, was canceled or was removed, and this task depends on it"


def fail_fast_reason(culprit: str) -> str:
    """Return the reason of a step that is canceled because this task failed, and its flow is to fail fast."""
    return f"{culprit} failed, and its flow fails fast"
