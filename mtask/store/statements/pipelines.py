"""Update pipelines: every change the engine makes to a task document.

Each is: close what has lapsed, make the one change, derive. Status, failed_cnt, next_preempt_time, finish_time
and expire_time are computed nowhere else, so they cannot drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache, lru_cache
from typing import Any, Literal

from mtask.model.documents import MAX_FORMER_QUEUES, SCHEMA_VERSION
from mtask.model.options import TaskOption
from mtask.model.rules import HORIZON, KEPT_RUNS
from mtask.model.status import RunStatus, TaskStatus
from mtask.store.driver.encoding import as_sent
from mtask.store.statements import expressions as x

Stage = Mapping[str, Any]
Pipeline = list[Stage]

#: Where a pipeline keeps what its last stage needs; it is gone when that is done.
_DERIVED = "_derived"
#: Twice as far as others look: an update that had to wait is made with an old `$$NOW`.
NEAR_MS = 2 * int(HORIZON / timedelta(milliseconds=1))
_CLOSED_WITHOUT_RESULT = [RunStatus.FAIL.value, RunStatus.TIMEOUT.value, RunStatus.CANCELED.value]
LAPSED_REASON = "the lease lapsed: the worker died, froze or lost the database"


@cache
def _encoded_once(make: Callable[[x.Expression], Sequence[Stage]]) -> tuple[Stage, ...]:
    return tuple(as_sent(stage) for stage in make(x.NOW))


def close_lapsed(now: x.Expression = x.NOW) -> Pipeline:
    """Mark lapsed runs TIMEOUT and count them."""
    return [*_encoded_once(_close_lapsed)] if now == x.NOW else _close_lapsed(now)


def derive(now: x.Expression = x.NOW) -> Pipeline:
    """Compute what follows from the rest of the document."""
    return [*_encoded_once(_derive)] if now == x.NOW else _derive(now)


def _close_lapsed(now: x.Expression) -> Pipeline:
    closed = {
        "$mergeObjects": [
            "$$run",
            {"status": RunStatus.TIMEOUT.value, "fail_time": now, "fail_reason": LAPSED_REASON},
        ]
    }
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [x.is_run_lapsed(now), closed, "$$run"]}}}
    return [{"$set": {"task_state.worker_states": runs, "task_state.failed_cnt": x.failures(now)}}]


def _derive_routinely(now: x.Expression = x.NOW) -> Pipeline:
    """Derive after what workers do all the time: streams leave it out where it is no news to the others."""
    return [*_encoded_once(_derive_quietly)] if now == x.NOW else _derive_quietly(now)


def _derive_quietly(now: x.Expression) -> Pipeline:
    # Whoever is told too much loses a moment, whoever is told too little a task: what changes neither is not marked.
    moment = f"${_DERIVED}.next"
    has_moved = {"$ne": [moment, {"$ifNull": [f"{x.STATE}.next_preempt_time", None]}]}
    is_near = {"$and": [{"$gt": [moment, None]}, {"$lte": [moment, x.add_ms(now, NEAR_MS)]}]}
    has_new_status = {"$ne": [f"${_DERIVED}.status", x.STATUS]}
    is_quiet = {"$cond": [has_moved, {"$not": [is_near]}, has_new_status]}
    return _derive(now, {"quiet_time": {"$cond": [is_quiet, now, "$quiet_time"]}})


def _derive(now: x.Expression, also: Mapping[str, x.Expression] | None = None) -> Pipeline:
    # A stage reads the document as the one before it left it, so what the second computes from goes by `_derived`.
    derived = f"${_DERIVED}"
    final = x.is_final(f"{derived}.status")
    retain = {
        "$cond": [
            {"$eq": [f"{derived}.status", TaskStatus.SUCCESS.value]},
            f"{x.OPTION}.retain_success_ms",
            f"{x.OPTION}.retain_fail_ms",
        ]
    }
    is_kept_for_ever = {"$or": [{"$not": [final]}, {"$eq": [{"$ifNull": [retain, None]}, None]}]}
    return [
        {"$set": {_DERIVED: x.derived(now)}},
        {
            "$set": {
                "task_state.status": f"{derived}.status",
                "task_state.cancel_requested": {"$and": [x.STATE + ".cancel_requested", {"$not": [final]}]},
                "task_state.finish_time": {"$cond": [final, finish_time(now), "$$REMOVE"]},
                "task_state.next_preempt_time": {"$ifNull": [f"{derived}.next", "$$REMOVE"]},
                "expire_time": {"$cond": [is_kept_for_ever, "$$REMOVE", x.add_ms(finish_time(now), retain)]},
                _DERIVED: "$$REMOVE",
                **(also or {}),
            }
        },
    ]


def finish_time(now: x.Expression) -> x.Expression:
    """Return when a task that is finished now was finished first."""
    return {"$ifNull": [f"{x.STATE}.finish_time", now]}


def _trimmed(runs: x.Expression = x.RUNS) -> x.Expression:
    """Drop the oldest closed runs beyond what the document keeps; successes of this round stay."""
    current_failed = {"$and": [{"$in": ["$$run.status", ["FAIL", "TIMEOUT"]]}, {"$ne": ["$$run.past", True]}]}
    current_canceled = {"$and": [{"$eq": ["$$run.status", "CANCELED"]}, {"$ne": ["$$run.past", True]}]}
    past = {"$eq": ["$$run.past", True]}
    groups = [(current_failed, x.kept_runs()), (current_canceled, KEPT_RUNS), (past, KEPT_RUNS)]

    def surplus(condition: x.Expression, keep: x.Expression) -> x.Expression:
        ids = {"$map": {"input": x.runs_where(condition, runs), "as": "run", "in": "$$run.run_id"}}
        count = {"$max": [0, {"$subtract": [{"$size": "$$ids"}, keep]}]}
        return {"$let": {"vars": {"ids": ids}, "in": {"$slice": ["$$ids", count]}}}

    dropped = {"$concatArrays": [surplus(condition, keep) for condition, keep in groups]}
    kept = {
        "$let": {
            "vars": {"dropped": dropped},
            "in": x.runs_where({"$not": [{"$in": ["$$run.run_id", "$$dropped"]}]}, runs),
        }
    }
    return {"$cond": [{"$gt": [{"$size": runs}, KEPT_RUNS]}, kept, runs]}


def claim(worker_id: str, run_id: x.Expression, now: x.Expression = x.NOW) -> Pipeline:
    """Preempt: close lapsed runs, append this worker's run if the rules allow, derive."""
    runs = _encoded_take(worker_id) if now == x.NOW else _take(worker_id, now)
    taken = {"$let": {"vars": {"runId": run_id}, "in": runs}}
    return [*close_lapsed(now), {"$set": {"task_state.worker_states": taken}}, *_derive_routinely(now)]


@lru_cache(maxsize=16)
def _encoded_take(worker_id: str) -> Stage:
    return as_sent(_take(worker_id, x.NOW))


def _take(worker_id: str, now: x.Expression) -> dict[str, Any]:
    """Return the runs with one more, `$$runId` of this worker, where the rules allow it."""
    worker = x.literal(worker_id)
    same_scope = {"$cond": [{"$eq": [f"{x.OPTION}.retry_scope", "worker"]}, {"$eq": ["$$run.worker_id", worker]}, True]}
    attempts = {"$map": {"input": x.runs_where(same_scope), "as": "run", "in": "$$run.attempt"}}
    attempt = {"$add": [{"$ifNull": [{"$max": attempts}, 0]}, 1]}
    run = new_run("$$runId", worker, attempt, now)
    return {"$cond": [x.may_take(worker, now), {"$concatArrays": [_trimmed(), [run]]}, x.RUNS]}


def new_run(
    run_id: x.Expression, worker_id: x.Expression, attempt: x.Expression, now: x.Expression
) -> dict[str, x.Expression]:
    """Return the run that a claim appends."""
    return {
        "run_id": run_id,
        "worker_id": worker_id,
        "attempt": attempt,
        "status": RunStatus.RUNNING.value,
        "claim_time": now,
        "ping_expire_time": x.add_ms(now, f"{x.OPTION}.worker_timeout_ms"),
    }


def run_id_in_group(token: str, task_ids: Sequence[str]) -> x.Expression:
    """Return the run_id of each task in a grouped claim: the group's random token and the task's place in it."""
    if len(task_ids) == 1:
        return x.literal(f"{token}-0")
    return {"$concat": [f"{token}-", {"$toString": {"$indexOfArray": [x.literal(list(task_ids)), "$_id"]}}]}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ends, as the worker asks for it; the server's clock and rules do the rest."""

    task_id: str
    run_id: str
    status: Literal[RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED]
    returns: Any = None
    reason: str | None = None
    final: bool = False
    #: Wait before the next try, in ms: None = by the task's options for a FAIL, else none, and it is due as before.
    delay_ms: int | None = None
    jitter: float = 0.0
    #: What the handler told last of its progress, if that is not written yet.
    progress: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return what is merged into the run."""
        if self.status is RunStatus.SUCCESS:
            return {"status": self.status.value, "returns": self.returns}
        merged: dict[str, Any] = {"status": self.status.value, "fail_reason": self.reason}
        if self.final:
            merged["final"] = True
        return merged


def finish(outcomes: Sequence[Outcome], now: x.Expression = x.NOW) -> Pipeline:
    """Close the runs that the outcomes name, each by its run_id, and derive.

    One pipeline serves a group: each task looks its outcome up by `_id` in a literal array. The whole group
    must be successes, or none of it, and holds one outcome per task.
    """
    ids = [outcome.task_id for outcome in outcomes]
    place: x.Expression = 0 if len(ids) == 1 else {"$indexOfArray": [x.literal(ids), "$_id"]}

    def mine(values: list[Any]) -> x.Expression:
        return {"$arrayElemAt": [x.literal(values), "$$place"]}

    closes = {"$and": [{"$eq": ["$$run.run_id", "$$runId"]}, {"$eq": ["$$run.status", RunStatus.RUNNING.value]}]}
    if outcomes[0].status is RunStatus.SUCCESS:
        times: dict[str, Any] = {"success_time": now}
    else:
        delay = {"$ifNull": [mine([o.delay_ms for o in outcomes]), _failure_delay(outcomes, mine, now)]}
        times = {"fail_time": now, "retry_time": {"$ifNull": [x.add_ms(now, delay), "$$REMOVE"]}}
    closed = {"$mergeObjects": ["$$run", mine([o.fields() for o in outcomes]), times, *progress_told(outcomes, now)]}
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [closes, closed, "$$run"]}}}
    change: dict[str, Any] = {
        "task_state.worker_states": {
            "$let": {
                "vars": {"place": place},
                "in": {"$let": {"vars": {"runId": mine([o.run_id for o in outcomes])}, "in": runs}},
            }
        }
    }
    if any(outcome.status is RunStatus.FAIL for outcome in outcomes):
        counted = [int(outcome.status is RunStatus.FAIL) for outcome in outcomes]
        one = {"$let": {"vars": {"place": place}, "in": mine(counted)}}
        change["task_state.failed_cnt"] = {"$add": [f"{x.STATE}.failed_cnt", one]}
    return [*close_lapsed(now), {"$set": change}, *_derive_routinely(now)]


def _failure_delay(outcomes: Sequence[Outcome], mine: Any, now: x.Expression) -> x.Expression:
    """Return the delay of a FAIL by the task's options; null for a run that is handed back: it keeps its place."""
    # Under a name of its own: inside the twin, $$run is each of the runs that it counts.
    own = {"$let": {"vars": {"workerId": "$$run.worker_id"}, "in": x.worker_failures("$$workerId", now)}}
    by_scope = {"$cond": [{"$eq": [f"{x.OPTION}.retry_scope", "worker"]}, own, f"{x.STATE}.failed_cnt"]}
    delay = x.retry_delay_ms({"$add": [by_scope, 1]}, mine([outcome.jitter for outcome in outcomes]))
    is_fail = mine([outcome.status is RunStatus.FAIL for outcome in outcomes])
    return {"$cond": [is_fail, delay, None]}


def ping(
    run_ids: Sequence[str],
    lease_ms: int | Mapping[str, int],
    now: x.Expression = x.NOW,
    progress: Mapping[str, Mapping[str, Any]] | None = None,
    session_id: str | None = None,
) -> Pipeline:
    """Move the leases of these runs to `lease_ms` from now, never back, and derive.

    `lease_ms`: of each run, by run_id, where they differ. `progress`: of some, by run_id. `session_id`: the session of
    a transaction, named by the one run that is about to begin it.
    """
    lease = {"$max": ["$$run.ping_expire_time", x.add_ms(now, _lease_of(lease_ms))]}
    holds = {"$and": [{"$in": ["$$run.run_id", x.literal(list(run_ids))]}, x.is_run_live(now)]}
    changes: list[x.Expression] = ["$$run", {"ping_expire_time": lease}]
    if progress:
        changes.append(_progress_of(progress, now))
    if session_id is not None:
        changes.append({"session_id": x.literal(session_id)})
    moved = {"$mergeObjects": changes}
    runs = {"$map": {"input": x.RUNS, "as": "run", "in": {"$cond": [holds, moved, "$$run"]}}}
    # A count that is none fails the ping, as it fails any other change: or nobody would meet it while the run lasts.
    counted = {"$add": [f"{x.STATE}.failed_cnt", 0]}
    return [{"$set": {"task_state.worker_states": runs, "task_state.failed_cnt": counted}}, *_derive_routinely(now)]


def _lease_of(lease_ms: int | Mapping[str, int]) -> x.Expression:
    """Return how long `$$run`'s lease lasts: one literal where all last as long."""
    if isinstance(lease_ms, int):
        return lease_ms
    lengths = set(lease_ms.values())
    if len(lengths) == 1:
        return lengths.pop()
    place = {"$indexOfArray": [x.literal(list(lease_ms)), "$$run.run_id"]}
    return {"$arrayElemAt": [x.literal(list(lease_ms.values())), place]}


def progress_told(outcomes: Sequence[Outcome], now: x.Expression) -> list[x.Expression]:
    """Return what is merged into `$$run` of what its handler told last, if any of the handlers told anything."""
    told = {outcome.run_id: outcome.progress for outcome in outcomes if outcome.progress is not None}
    return [_progress_of(told, now)] if told else []


def _progress_of(progress: Mapping[str, Mapping[str, Any]], now: x.Expression) -> x.Expression:
    """Return what is merged into `$$run` of the progress that is told of it."""
    place = {"$indexOfArray": [x.literal(list(progress)), "$$run.run_id"]}
    told = {"$arrayElemAt": [x.literal([dict(value) for value in progress.values()]), "$$place"]}
    # What is there already stays as it is, its time too: its writer may not have heard yet that it was written.
    there, fresh = ({"$mergeObjects": [value, {"time": now}]} for value in ("$$run.progress", told))
    is_known = {"$or": [{"$lt": ["$$place", 0]}, {"$eq": [there, fresh]}]}
    return {"$let": {"vars": {"place": place}, "in": {"$cond": [is_known, {}, {"progress": fresh}]}}}


def settle(now: x.Expression = x.NOW) -> Pipeline:
    """Close lapsed runs and derive, taking nothing."""
    return [*close_lapsed(now), *derive(now)]


def cancel(now: x.Expression = x.NOW) -> Pipeline:
    """Ask for the end: at once where nobody holds it, else through the worker that does."""
    return [
        *close_lapsed(now),
        {"$set": {"task_state.cancel_requested": {"$not": [x.is_final()]}}},
        *derive(now),
    ]


def run_again(*, everything: bool, now: x.Expression = x.NOW) -> Pipeline:
    """Open a finished task for a new round: closed runs become past; successes too if `everything`.

    A finished task can have live runs, where concurrent_worker_cnt was lowered: they belong to the new round.
    """
    staying = [RunStatus.RUNNING.value, *([] if everything else [RunStatus.SUCCESS.value])]
    aged = {"$cond": [{"$in": ["$$run.status", staying]}, "$$run", {"$mergeObjects": ["$$run", {"past": True}]}]}
    return [
        *close_lapsed(now),
        {
            "$set": {
                "task_state.worker_states": {"$map": {"input": x.RUNS, "as": "run", "in": aged}},
                "task_state.failed_cnt": 0,
                "task_state.cancel_requested": False,
                "task_state.status": TaskStatus.INIT.value,
            }
        },
        {"$set": {"task_state.worker_states": _trimmed()}},
        *derive(now),
    ]


def task_document(fixed: Mapping[str, Any], start: x.Expression, now: x.Expression) -> dict[str, Any]:
    """Return a new task's document, or the expression that makes it.

    `fixed` holds _id, name, key, queue, params and task_option; `start` is its start_time, None for at once.
    """
    state: dict[str, Any] = {"status": TaskStatus.INIT.value, "create_time": now}
    if start is not None:
        state["start_time"] = start
    state |= {
        "next_preempt_time": now if start is None else start,
        "failed_cnt": 0,
        "cancel_requested": False,
        "worker_states": [],
    }
    return {**fixed, "task_state": state, "schema_version": SCHEMA_VERSION}


def publish(fixed: Mapping[str, Any], start: x.Expression) -> Pipeline:
    """Insert the task if there is none; leave an existing one exactly as it is (an upsert by `_id`)."""
    is_new = {"$eq": ["$$ROOT", {"_id": "$_id"}]}
    # One literal: the server would parse each value of it apart.
    made = {"$mergeObjects": [x.literal(fixed), task_document({}, start, x.NOW)]}
    return [{"$replaceWith": {"$cond": [is_new, made, "$$ROOT"]}}]


def republish(
    *,
    replacement: Mapping[str, Any] | None,
    start: x.Expression,
    clean_failed: bool,
    clean_success: bool,
    now: x.Expression = x.NOW,
) -> Pipeline:
    """Change an existing task: replace queue, params, task_option and start_time, drop closed runs, derive."""
    pipeline = close_lapsed(now)
    if replacement is not None:
        pipeline.append(
            {
                "$set": {
                    **{name: x.literal(value) for name, value in replacement.items()},
                    "task_state.start_time": "$$REMOVE" if start is None else start,
                    **_moved(replacement["queue"], now),
                }
            }
        )
    dropped = [RunStatus.FAIL.value, RunStatus.TIMEOUT.value, RunStatus.CANCELED.value] if clean_failed else []
    reopened = [TaskStatus.FAIL.value] if clean_failed else []
    if clean_success:
        dropped.append(RunStatus.SUCCESS.value)
        reopened.append(TaskStatus.SUCCESS.value)
    if dropped:
        change: dict[str, Any] = {
            "task_state.worker_states": x.runs_where({"$not": [{"$in": ["$$run.status", dropped]}]}),
            "task_state.status": {"$cond": [{"$in": [x.STATUS, reopened]}, TaskStatus.INIT.value, x.STATUS]},
        }
        if clean_failed:
            change["task_state.failed_cnt"] = 0
        change["task_state.clean_cnt"] = _one_more_if_any(dropped)
        pipeline.append({"$set": change})
    return [*pipeline, *derive(now)]


def _moved(queue: str, now: x.Expression) -> dict[str, x.Expression]:
    """Return what says since when the task is in this queue, and where it was before; nothing where it stays."""
    former = f"{x.STATE}.former_queues"
    others = {"$filter": {"input": former, "as": "former", "cond": {"$ne": ["$$former", "$queue"]}}}
    before = {"$cond": [{"$isArray": [former]}, others, []]}
    is_moved = {"$ne": ["$queue", x.literal(queue)]}

    def if_moved(value: x.Expression, field: str) -> x.Expression:
        return {"$cond": [is_moved, value, {"$ifNull": [f"{x.STATE}.{field}", "$$REMOVE"]}]}

    newest_first = {"$slice": [{"$concatArrays": [["$queue"], before]}, MAX_FORMER_QUEUES]}
    return {
        "task_state.queue_time": if_moved(now, "queue_time"),
        "task_state.former_queues": if_moved(newest_first, "former_queues"),
    }


def _one_more_if_any(dropped: list[str]) -> x.Expression:
    """Return how many publishes have dropped runs, with this one if it drops any of these statuses."""
    count = f"{x.STATE}.clean_cnt"
    one_more = {"$add": [{"$ifNull": [count, 0]}, 1]}
    has_any = {"$gt": [{"$size": x.runs_where({"$in": ["$$run.status", dropped]})}, 0]}
    return {"$cond": [has_any, one_more, {"$ifNull": [count, "$$REMOVE"]}]}


def update_option(option: TaskOption, now: x.Expression = x.NOW) -> Pipeline:
    """Replace the options and derive."""
    return [{"$set": {"task_option": x.literal(option.stored())}}, *settle(now)]


class Kept(Enum):
    """What of a document stays when it is marked FAIL: the less there is room for, the less is added."""

    ALL = "all"
    RESULTS = "results"  #: closed runs without a SUCCESS make room for the reason
    BARE = "bare"  #: not even the reason is added


def quarantine(task_id: str, worker_id: str, reason: str, now: x.Expression = x.NOW, kept: Kept = Kept.ALL) -> Pipeline:
    """Turn a document that cannot be run into a FAIL that says why, keeping all that can be read."""
    run = {
        "run_id": x.literal(f"malformed-{task_id}" if kept is Kept.ALL else "malformed"),
        "worker_id": x.literal(worker_id),
        "attempt": 1,
        "status": RunStatus.FAIL.value,
        "claim_time": now,
        "ping_expire_time": now,
        "fail_time": now,
        "fail_reason": x.literal(reason),
        "final": True,
    }
    former = x.RUNS if kept is Kept.ALL else x.runs_where({"$not": [{"$in": ["$$run.status", _CLOSED_WITHOUT_RESULT]}]})
    runs = {"$cond": [{"$isArray": [x.RUNS]}, {"$concatArrays": [former, [run]]}, [run]]}
    is_object = {"$eq": [{"$type": x.STATE}, "object"]}
    changes: dict[str, Any] = {"status": TaskStatus.FAIL.value, "finish_time": now}
    if kept is not Kept.BARE:
        changes |= {"cancel_requested": False, "failed_cnt": 1, "worker_states": runs}
    state = {
        "$unsetField": {
            "field": "next_preempt_time",
            "input": {"$mergeObjects": [{"$cond": [is_object, x.STATE, {}]}, changes]},
        }
    }
    return [{"$set": {"task_state": state}}]
