"""Statements of flows: the views of the reads that decide, the changes of steps, and their guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from mtask.features.flows.rules import Verdict, end_reason, fail_fast_reason
from mtask.kernel.document.status import FAILED, FINAL, OPEN, TaskStatus
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import outbox
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.derive import Pipeline, close_lapsed, derive
from mtask.kernel.statements.filters import OWES_VALUE, Filter, by_ids, held_runs, in_time
from mtask.kernel.statements.outbox import OWED_TASKS, OwedTask, document, tasks_owed

STATUS = "task_state.status"
#: The tasks that owe tasks, and those that owe a value.
_OWING: list[Filter] = [{"owed_tasks.0": {"$exists": True}}, {OWES_VALUE: {"$exists": True}}]
_WAITING = TaskStatus.WAITING.value
#: The time for which a read may decide on a release, at the first try.
_FRESH = timedelta(seconds=5)


#: What the deciding reads return of WAITING steps: for whom they wait, and the server's time.
STEP_VIEW = {"flow.after": 1, "flow.on_failed": 1, "flow.held_by": 1, "owed_since": 1, "now": x.NOW}


def awaited_view() -> x.Expression:
    """Return what the deciding reads return of a task for which steps wait."""
    return {STATUS: 1, "owes": owes(), "flow.has_children": 1, "flow.ancestors": 1, "flow.unwatched": 1}


def owes() -> x.Expression:
    """Whether a task owes tasks, or its value: its handler goes on after its transaction has committed.

    A malformed document may hold anything there.
    """
    tasks = {"$cond": [{"$isArray": ["$owed_tasks"]}, "$owed_tasks", []]}
    return {"$or": [{"$ne": [tasks, []]}, {"$ne": [{"$ifNull": [x.OWED_VALUES, []]}, []]}]}


def waiting_now(task_ids: Sequence[str]) -> Filter:
    """Match the WAITING tasks among these."""
    return {**by_ids(task_ids), STATUS: _WAITING}


def descendants(parents: Sequence[str]) -> Filter:
    """Match the descendants of these tasks that have not ended as SUCCESS. The index tells which these are."""
    return {"flow.ancestors": {"$in": list(parents)}, STATUS: {"$ne": TaskStatus.SUCCESS.value}}


def owing_descendants(parents: Sequence[str]) -> Filter:
    """Match the descendants of these tasks that ended as SUCCESS, but owe the flow tasks, or their values."""
    return {"flow.ancestors": {"$in": list(parents)}, STATUS: TaskStatus.SUCCESS.value, "$or": _OWING}


def waiting(holders: Mapping[str, str | None]) -> Filter:
    """Match these tasks if they are WAITING and the same tasks hold them as before. None: no task holds it."""
    return {**_held_as_before(holders), STATUS: _WAITING}


def read_at(now: datetime, try_cnt: int) -> Filter:
    """Match only for a while after the read that decided, and longer with each try.

    A release cannot be taken back. A process that stood still since its read must read again. But on a server that
    needs long for each statement, some try must succeed.
    """
    return in_time(now + _FRESH * (try_cnt + 1))


def never_begun() -> Filter:
    """Match the WAITING tasks for which the short release suffices. The caller adds the filter `waiting`."""
    # The conditions are expressions, because a match by field would also match values inside arrays.
    conditions = [
        {"$eq": [x.RUNS, []]},
        {"$eq": [f"{x.STATE}.failed_cnt", 0]},
        {"$eq": [f"{x.STATE}.cancel_requested", False]},
        {"$not": [f"{x.STATE}.finish_time"]},
    ]
    return {"$expr": {"$and": conditions}}


def ended_by(culprits: Mapping[str, str]) -> Filter:
    """Match these tasks if these tasks caused their ends."""
    return {**_held_as_before(culprits), STATUS: {"$in": FAILED}}


def _held_as_before(holders: Mapping[str, str | None]) -> Filter:
    """Match these tasks by `_id` if the same tasks hold them as before."""
    task_ids, distinct = list(holders), {*holders.values()}
    if len(distinct) == 1:
        return {**by_ids(task_ids), "flow.held_by": distinct.pop()}
    same = {"$eq": [{"$ifNull": ["$flow.held_by", None]}, _of_task(holders)]}
    return {**by_ids(task_ids), "$and": [{"$expr": same}]}


def _of_task(values: Mapping[str, Any]) -> x.Expression:
    """Return the value that belongs to the task. `values` holds a value for each task's `_id`."""
    if len({*values.values()}) == 1:
        return x.literal(next(iter(values.values())))
    index = x.index_of_id(list(values))
    return {"$arrayElemAt": [x.literal(list(values.values())), index]}


def held_or_ended_by(ended: Sequence[str], recovered: Sequence[str]) -> Filter:
    """Match the WAITING tasks that tasks in `ended` hold, and the tasks whose end tasks in `recovered` caused."""
    return {
        "$or": [
            {"flow.held_by": {"$in": list(ended)}, STATUS: _WAITING},
            {"flow.held_by": {"$in": list(recovered)}, STATUS: {"$in": FAILED}},
        ]
    }


def open_in_flow(key: str) -> Filter:
    """Match the open tasks of the flow that a fail-fast end cancels. Tasks that run after failures stay."""
    return {
        "flow.key": key,
        STATUS: {"$in": OPEN},
        "flow.on_failed": {"$ne": "run"},
        "task_state.cancel_requested": False,
    }


def failed_fast(key: str) -> Filter:
    """Match the tasks whose failure cancels the open tasks of the flow."""
    return {"flow.key": key, STATUS: TaskStatus.FAIL.value, "flow.fail_fast": True}


def cancelable(key: str, *, everything: bool) -> Filter:
    """Match the open steps that a cancel of the flow changes.

    Without `everything`, steps stay that depend on others and run also after failures. They stay after their release,
    too: so a cancel that is sent twice does what it does when it is sent once. A step whose run a fail-fast end asked
    to stop is changed, too: from then on, its end is the user's.
    """
    asked_by_none = [{"task_state.cancel_requested": False}, {"flow.held_by": {"$exists": True}}]
    matched: Filter = {"flow.key": key, STATUS: {"$in": OPEN}, "$or": asked_by_none}
    if not everything:
        matched["$nor"] = [{"flow.on_failed": "run", "flow.after": {"$nin": [None, []]}}]
    return matched


def failed_steps() -> Filter:
    """Match the tasks that are FAIL or CANCELED. The caller adds the flow."""
    return {STATUS: {"$in": FAILED}}


def ended_by_any(culprits: Sequence[str]) -> Filter:
    """Match the tasks whose end one of these tasks caused."""
    return {"flow.held_by": {"$in": list(culprits)}, STATUS: {"$in": FAILED}}


def disown() -> Pipeline:
    """Make the end of a step a user's: no other step has caused it."""
    return [{"$unset": "flow.held_by"}]


def owed_as_read(marks: Mapping[str, datetime], statuses: Mapping[str, str]) -> Filter:
    """Match these tasks if their mark and their status are as they were read."""
    groups: dict[tuple[datetime, str], list[str]] = {}
    for task_id, mark in marks.items():
        groups.setdefault((mark, statuses[task_id]), []).append(task_id)
    # Tasks that one statement has changed have the same mark, so there are few groups. Comparing fields costs the
    # server less than an expression.
    same = [{**by_ids(ids), "owed_since": mark, STATUS: status} for (mark, status), ids in groups.items()]
    return {**by_ids(list(marks)), "$or": same}


def owed_before(age_ms: int) -> Filter:
    """Match the tasks of whose last change others have not been told for this time.

    A task that owes a value is left out: others are told when the value is there.
    """
    marked = {"owed_since": {"$exists": True}, OWES_VALUE: {"$exists": False}}
    return {**marked, "$expr": {"$lte": ["$owed_since", {"$subtract": [x.NOW, age_ms]}]}}


def cross_off() -> Mapping[str, Any]:
    """Remove the mark: others have been told. No worker's stream needs to hear of that.

    This is no pipeline, because it is sent for each step, and costs the server less.
    """
    return {"$unset": {"owed_since": ""}, "$currentDate": {"quiet_time": True}}


def cross_off_alone(now: x.Expression = x.NOW) -> Pipeline:
    """Remove the mark of a task of no flow: its next task is published. Its retention, if it has one, begins."""
    return [
        {"$set": {"expire_time": outbox.retention_alone(now)}},
        {"$set": {"owed_since": "$$REMOVE", "quiet_time": now}},
    ]


def move(holders: Mapping[str, str], now: x.Expression = x.NOW) -> Pipeline:
    """Let other open tasks hold these steps. The marks stay until the new holders have been read again."""
    return [
        {
            "$set": {
                "flow.held_by": _of_task(holders),
                "owed_since": x.later_than(x.OWED_SINCE, now),
                "quiet_time": now,
            }
        }
    ]


def still_open(task_ids: Sequence[str]) -> Filter:
    """Match those of these tasks that have not ended. This is the server's form of `rules.is_open`."""
    return {**by_ids(task_ids), "$or": [{STATUS: {"$nin": FINAL}}, *_OWING]}


def watched(task_ids: Sequence[str]) -> Filter:
    """Match those of these tasks whose end will be marked."""
    return {**still_open(task_ids), "flow.unwatched": {"$ne": True}}


def watch(now: x.Expression = x.NOW) -> Pipeline:
    """Let the end of these tasks be marked. Tasks of which that holds already are not written."""
    unwatched = {"$eq": [f"{x.FLOW}.unwatched", True]}
    kept = {"$ifNull": [x.FLOW, "$$REMOVE"]}  # a task of no flow gets no field
    flow = {"$cond": [unwatched, x.without(x.FLOW, "unwatched"), kept]}
    return [{"$set": {"flow": flow, "quiet_time": {"$cond": [unwatched, now, "$quiet_time"]}}}]


def release_unbegun(now: x.Expression = x.NOW) -> Pipeline:
    """Let a step start that matches `never_begun`, with the same change as `release`."""
    start = {"$max": [f"{x.STATE}.start_time", x.add_ms(now, "$flow.delay_ms")]}
    changed = {
        "flow.held_by": "$$REMOVE",
        "flow.release_time": now,
        "task_state.start_time": {"$ifNull": [start, "$$REMOVE"]},
        "task_state.status": TaskStatus.INIT.value,
        "task_state.next_preempt_time": {"$max": [{"$ifNull": [start, f"{x.STATE}.create_time"]}, now]},
        "task_state.reason": "$$REMOVE",
        "expire_time": "$$REMOVE",
    }
    return [{"$set": changed}]


def release(now: x.Expression = x.NOW) -> Pipeline:
    """Let the step start. A delay is counted from now."""
    delayed = {"$max": [f"{x.STATE}.start_time", x.add_ms(now, "$flow.delay_ms")]}
    released = {"$mergeObjects": [_unheld(), {"release_time": now}]}
    return [{"$set": {"flow": released, "task_state.start_time": {"$ifNull": [delayed, "$$REMOVE"]}}}, *derive(now)]


def end(outcome: Verdict, culprits: Mapping[str, str], now: x.Expression = x.NOW) -> Pipeline:
    """End these WAITING steps as CANCELED or FAIL, because other tasks have failed."""
    status = TaskStatus.CANCELED if outcome is Verdict.CANCEL else TaskStatus.FAIL
    return [
        {
            "$set": {
                "flow.held_by": _of_task(culprits),
                "task_state.status": status.value,
                "task_state.reason": _of_task({task_id: end_reason(one) for task_id, one in culprits.items()}),
            }
        },
        *derive(now),
    ]


def reopen(now: x.Expression = x.NOW) -> Pipeline:
    """Open a step again whose end another task caused. A step that was never released is WAITING again."""
    return requests.run_again(everything=False, now=now)


def hold_again(now: x.Expression = x.NOW) -> Pipeline:
    """Open a step again whose dependency is open, too: it is WAITING again, also if it was released before."""
    return requests.run_again(everything=False, waits=True, now=now)


def fail_fast(culprit: str, now: x.Expression = x.NOW) -> Pipeline:
    """Cancel a step because this task has failed. If a run holds the step, the run's worker ends it."""
    return [
        *close_lapsed(now),
        {
            "$set": {
                "flow.held_by": x.literal(culprit),
                "task_state.cancel_requested": True,
                "task_state.reason": x.literal(fail_fast_reason(culprit)),
            }
        },
        *derive(now),
    ]


def _unheld() -> x.Expression:
    return x.without(x.FLOW, "held_by")


def unended() -> Filter:
    """Match the first steps of flows that have not ended. Such a step has the end_time null, not a missing one."""
    return {"flow.end_time": {"$type": "null"}}


def open_steps() -> Filter:
    """Match the tasks that are open. The caller adds the flow."""
    return {STATUS: {"$in": OPEN}}


def owed_steps() -> Filter:
    """Match the tasks that still owe others something, or whose end is to be told. The caller adds the flow."""
    return {"$or": [{"owed_since": {"$exists": True}}, outbox.owing_ends()]}


def without_retention() -> Filter:
    """Match the tasks whose retention has not begun, although their options ask for it. The caller adds the flow."""
    return {"expire_time": None, "$expr": {"$ne": [outbox.retention(), None]}}


def begin_retention(now: x.Expression = x.NOW) -> Pipeline:
    """Begin the retention of a step, if it has ended. The retention of a flow's steps begins at the flow's end."""
    owes = {"$or": [x.OWED_SINCE, outbox.OWED_ENDS]}
    has_ended = {"$and": [x.is_final(), {"$not": [owes]}, {"$ne": [outbox.retention(), None]}]}
    return [{"$set": {"expire_time": {"$cond": [has_ended, x.add_ms(now, outbox.retention()), "$$REMOVE"]}}}]


def end_flow(now: x.Expression = x.NOW) -> Pipeline:
    """Record in its first step that the flow has ended."""
    return [{"$set": {"flow.end_time": now}}]


# --- owing -----------------------------------------------------------------------------------------------

# Owed tasks: a task owes its children as soon as a handler adds them, and its next task from its success.
#
# Whoever settles the task publishes them, by `_id`, and takes them out of `mtask.kernel.statements.outbox`. So each
# exists once, although a process may die at any point.

#: The most ids of unpublished tasks that a document notes.
MAX_UNPUBLISHED = 100


def may_add(task_id: str, run_id: str) -> Filter:
    """Match the task if this run holds it, nobody wants to cancel it, and no change of it is still to be settled.

    While another run of the task owes its value, the mark stays anyway, so no change is forgotten.
    """
    held = held_runs([task_id], [run_id])
    is_free = [{"owed_since": None}, {OWES_VALUE: {"$exists": True}}]
    return {**held, "task_state.cancel_requested": False, "$or": is_free}


def add(children: Sequence[OwedTask], now: x.Expression = x.NOW) -> Pipeline:
    """Let the task owe these children. Its dependents wait for them from now on."""
    parts = x.literal([child.parts() for child in children])
    made = {"$map": {"input": parts, "as": "new", "in": document("$$new", now)}}
    changed = {
        "owed_tasks": {"$concatArrays": [tasks_owed(), made]},
        "owed_since": x.later_than(x.OWED_SINCE, now),
        "flow.has_children": True,
        "quiet_time": now,
    }
    return [{"$set": changed}]


def take_out(task_ids: Sequence[str]) -> Pipeline:
    """Take these tasks out of the owed ones: they are published."""
    is_left = {"$not": [{"$in": ["$$one._id", x.literal(list(task_ids))]}]}
    left = {"$filter": {"input": tasks_owed(), "as": "one", "cond": is_left}}
    return [
        {"$set": {"owed_tasks": left}},
        {"$set": {"owed_tasks": {"$cond": [_has_none(), "$$REMOVE", OWED_TASKS]}}},
    ]


def note_unpublished(task_ids: Sequence[str]) -> Pipeline:
    """Note which of the owed tasks are not published, because other tasks have their ids."""
    theirs = {
        "$setIntersection": [
            {"$map": {"input": tasks_owed(), "as": "one", "in": "$$one._id"}},
            x.literal(list(task_ids)),
        ]
    }
    noted = {"$setUnion": [{"$ifNull": [f"{x.STATE}.unpublished", []]}, theirs]}
    return [{"$set": {"task_state.unpublished": {"$slice": [noted, -MAX_UNPUBLISHED]}}}]


def added(task_ids: Sequence[str], mark: datetime, now: x.Expression = x.NOW) -> Pipeline:
    """Take out these children: they are published. Remove the mark if it is as read, and nothing else is owed.

    The change concerns no other worker.
    """
    is_done = {"$and": [{"$not": [OWED_TASKS]}, {"$eq": [x.OWED_SINCE, mark]}, {"$eq": [x.OWED_VALUES, []]}]}
    crossed_off = {"$cond": [is_done, "$$REMOVE", x.OWED_SINCE]}
    return [*take_out(task_ids), {"$set": {"owed_since": crossed_off, "quiet_time": now}}]


def _has_none() -> x.Expression:
    return {"$eq": [OWED_TASKS, []]}
