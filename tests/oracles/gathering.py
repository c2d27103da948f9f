"""The rules of publishing that gathers: pure functions of a task, a publish call and the current time.

Calls under one key are ordered by the server's time that each call read before it was sent, then by their ids. So the
result does not depend on the order in which calls arrive, and a call that is sent twice counts once.

- A **round** is the life of a task from its publish, or from a new publish after its end, until its end.
- A call of the kind "latest" gives a round its params if no newer call has. A call of the kind "calls" adds its params
  to the list that the round collects.
- While a run holds the task, calls go to the **next round**, `again`. It begins in the same update that ends the last
  run. A round that collects begins only when the present round has ended, because its tries need the collected calls.

The server's forms are in `mtask.features.gathering.statements`. Only the server decides, so these are the judges of
tests: a property compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.features.gathering.statements import MAX_GATHERED_BYTES
from mtask.kernel.document import rules
from mtask.kernel.document.lookup import LookupEntry
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import MAX_CALLS, CallMark, Gathering, GatherKind, NextRound, Task


@dataclass(frozen=True, slots=True)
class Call:
    """A publish call that gathers."""

    asked_time: datetime
    call_id: str
    kind: GatherKind
    params: Any
    queue: str
    task_option: Mapping[str, Any]
    lookup: Sequence[Mapping[str, Any]] | None = None
    #: The start_time, for a call without debounce.
    start_time: datetime | None = None
    debounce_ms: int | None = None
    max_wait_ms: int | None = None
    #: Whether the caller has chosen the call_id. Then the caller may repeat the call, with a newer asked_time.
    is_own_id: bool = False

    @property
    def mark(self) -> CallMark:
        """The place of the call in the order of all calls."""
        return CallMark(asked_time=self.asked_time, call_id=self.call_id)


def is_newer(mark: CallMark, other: CallMark | None) -> bool:
    """Whether a call comes after another one in the order of calls."""
    return other is None or (mark.asked_time, mark.call_id) > (other.asked_time, other.call_id)


def has_begun(task: Task) -> bool:
    """Whether a claim has consumed the calls of this round."""
    return bool(rules.current_runs(task))


def _collects(task: Task) -> bool:
    return task.gather is not None and task.gather.kind == "calls"


def must_wait(task: Task, now: datetime) -> bool:
    """Whether a call now goes to the next round, `again`."""
    if task.again is not None or rules.live_runs(task, now):
        return True
    return _collects(task) and has_begun(task) and not task.status.is_final


def is_ready(task: Task, now: datetime) -> bool:
    """Whether the next round begins now: no run holds the task, and what this round has collected was tried."""
    if task.again is None or rules.live_runs(task, now):
        return False
    return not _collects(task) or task.status.is_final


def base_round(task: Task, now: datetime) -> NextRound | None:
    """Return the round to which a call is added, or None if the call begins a new one."""
    if must_wait(task, now):
        return task.again
    if has_begun(task) or task.status.is_final:
        return None
    return NextRound(
        params=task.params,
        queue=task.queue,
        task_option=task.task_option,
        lookup=task.lookup,
        start_time=task.task_state.start_time,
        gather=task.gather or Gathering(),
    )


def fits_kind(base: NextRound | None, kind: GatherKind) -> bool:
    """Whether a call of this kind can be added to the round."""
    if base is None:
        return True
    return (base.gather.kind == "calls") == (kind == "calls")


def has_room(count: int, size: int) -> bool:
    """Whether a round can take one more call. It has `count` calls. `size`: its params with that call, in bytes."""
    return count < MAX_CALLS and size <= MAX_GATHERED_BYTES


def start_time(gather: Gathering, given: datetime | None, now: datetime) -> datetime | None:
    """Return the start of a round: debounce after its newest call, at the latest max_wait after its first one.

    No call counts as later than now. So a server clock that was set back delays no task.
    """
    start = given
    if gather.debounce_ms is not None and gather.newest is not None:
        start = min(gather.newest.asked_time, now) + timedelta(milliseconds=gather.debounce_ms)
        if gather.max_wait_ms is not None and gather.first_time is not None:
            start = min(start, gather.first_time + timedelta(milliseconds=gather.max_wait_ms))
    return min(start, now) if gather.full and start is not None else start


def consumed_before(task: Task, now: datetime) -> CallMark | None:
    """Return the newest call of the round before the one that the call joins."""
    if task.gather is None:
        return None
    is_in_place = not must_wait(task, now) and base_round(task, now) is not None
    return task.gather.consumed if is_in_place else task.gather.newest


def is_known(task: Task, call: Call) -> bool:
    """Whether a round has remembered this call already: collected it, or noted the id that the caller chose.

    The newest MAX_CALLS calls of a round, and those of former rounds, are known.
    """
    former = task.gather or Gathering()
    coming = task.again.gather.ids if task.again else []
    return call.call_id in (*former.ids, *former.seen, *coming)


def reopens(task: Task, call: Call, now: datetime) -> bool:
    """Whether this call opens a task that has ended although a run holds it.

    A task can end so if concurrent_worker_cnt is lowered. The call then waits for that run, as after a retry.
    """
    if not task.status.is_final or not rules.live_runs(task, now) or task.flow is not None:
        return False
    if (call.kind == "calls" or call.is_own_id) and is_known(task, call):
        return False
    return call.kind == "calls" or is_newer(call.mark, task.gather.newest if task.gather else None)


def reopened(task: Task) -> Task:
    """Return the task that such a call has opened. The runs that go on belong to the opened round."""
    runs = [
        run if run.status is RunStatus.RUNNING else run.model_copy(update={"past": True})
        for run in task.task_state.worker_states
    ]
    changes = {"status": TaskStatus.INIT, "failed_cnt": 0, "worker_states": runs}
    return task.model_copy(update={"task_state": task.task_state.model_copy(update=changes)})


def gathered(task: Task, call: Call, size: int, now: datetime) -> NextRound | None:
    """Return the round after the call, or None if the call changes nothing.

    `size` is the BSON size of the round's params with this call, if it is collected. The task has no lapsed runs.
    """
    base = base_round(task, now)
    if task.flow is not None or not fits_kind(base, call.kind):
        return None
    if call.kind == "calls":
        return None if is_known(task, call) else _collected(base, call, size, now)
    if not is_newer(call.mark, consumed_before(task, now)) or (call.is_own_id and is_known(task, call)):
        return None
    ids = base.gather.ids if base else []
    return _merged(base, call, now, call.params, [*ids, call.call_id][-MAX_CALLS:] if call.is_own_id else ids)


def _collected(base: NextRound | None, call: Call, size: int, now: datetime) -> NextRound | None:
    ids, params = ([], []) if base is None else (base.gather.ids, base.params["calls"])
    if base is not None and base.gather.full:
        return None
    if base is not None and not has_room(len(ids), size):
        gather = base.gather.model_copy(update={"full": True})
        return base.model_copy(update={"gather": gather, "start_time": start_time(gather, base.start_time, now)})
    return _merged(base, call, now, {"calls": [*params, call.params]}, [*ids, call.call_id])


def _merged(base: NextRound | None, call: Call, now: datetime, params: Any, ids: Sequence[str] = ()) -> NextRound:
    former = base.gather if base else Gathering()
    begun = min(call.asked_time, now)
    first = min(former.first_time, begun) if former.first_time is not None else begun
    changes: dict[str, Any] = {"kind": call.kind, "first_time": first, "ids": list(ids)}
    changes["full"] = call.kind == "calls" and (former.full or len(ids) >= MAX_CALLS)
    if is_newer(call.mark, former.newest):
        changes |= {"newest": call.mark, "debounce_ms": call.debounce_ms, "max_wait_ms": call.max_wait_ms}
        gather = former.model_copy(update=changes)
        return NextRound(
            params=params,
            queue=call.queue,
            task_option=TaskOption.model_validate(call.task_option),
            lookup=None if call.lookup is None else [LookupEntry.model_validate(entry) for entry in call.lookup],
            start_time=start_time(gather, call.start_time, now),
            gather=gather,
        )
    assert base is not None
    kept = params if call.kind == "calls" else base.params
    gather = former.model_copy(update=changes)
    start = start_time(gather, base.start_time, now)
    return base.model_copy(update={"params": kept, "start_time": start, "gather": gather})


def begun(task: Task, following: NextRound) -> Gathering:
    """Return the gathering of a new round, with what the document remembers of the rounds before."""
    former = task.gather or Gathering()
    seen = [*former.seen, *former.ids][-MAX_CALLS:]
    return following.gather.model_copy(update={"consumed": former.newest, "seen": seen})
