"""What each operation of the store makes of a task at one instant: its guard, and the change behind it.

Each function returns a prediction: given the document before (None: there is none) and the server's now, it
returns the document after, or raises the error that the caller is told. `changes` holds the pipelines' twins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from mtask.errors import TaskExists, TaskNotFinished, TaskNotFound, TaskRunning
from mtask.kernel.document import rules
from mtask.kernel.document.options import TaskOption, build_option
from mtask.kernel.operations.publish import NewTask, Policy
from mtask.kernel.statements.finish import Outcome
from tests.parity import changes
from tests.parity.cases import Document, parsed

Prediction = Callable[[Document | None, datetime], Document | None]
_FINAL = ("SUCCESS", "FAIL", "CANCELED")


def after(milliseconds: int, now: datetime) -> datetime:
    return now + timedelta(milliseconds=milliseconds)


def is_live(run: Document, now: datetime) -> bool:
    is_held: bool = run["status"] == "RUNNING" and run["ping_expire_time"] > now
    return is_held


def holds(document: Document | None, run_ids: list[str], now: datetime) -> bool:
    """Whether one of these runs holds the task under a live lease: the fence."""
    if document is None:
        return False
    return any(run["run_id"] in run_ids and is_live(run, now) for run in document["task_state"]["worker_states"])


def published(new: NewTask, policy: Policy) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        start = now + new.start if isinstance(new.start, timedelta) else new.start
        fixed = {"queue": new.queue, "params": new.params, "task_option": dict(new.task_option)}
        if before is None:
            return _new_document(new, fixed, start, now)
        if policy.if_exists == "reject":
            raise TaskExists(new.task_id)
        if policy.if_exists == "keep" and not policy.clean_failed and not policy.clean_success:
            return before
        runs = before["task_state"]["worker_states"]
        if policy.not_update_running and any(is_live(run, now) for run in runs):
            raise TaskRunning(new.task_id)
        replacement = fixed if policy.if_exists == "update" else None
        change = changes.republish(
            replacement, start, clean_failed=policy.clean_failed, clean_success=policy.clean_success
        )
        return changes.changed(before, change, now)

    return prediction


def _new_document(new: NewTask, fixed: Document, start: datetime | None, now: datetime) -> Document:
    state: Document = {
        "status": "INIT",
        "create_time": now,
        "next_preempt_time": start or now,
        "failed_cnt": 0,
        "cancel_requested": False,
        "worker_states": [],
    }
    if start is not None:
        state["start_time"] = start
    return {
        "_id": f"{new.name}:{new.key}",
        "name": new.name,
        "key": new.key,
        **fixed,
        "task_state": state,
        "schema_version": 1,
    }


def claimed(worker_id: str, run_ids: Mapping[str, str]) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None:
            return None
        due = before["task_state"].get("next_preempt_time")
        if due is None or due > now:
            # The guard must never hide what the rules would let this worker take.
            assert not rules.may_take(parsed(before), worker_id, now)
            return before
        return changes.changed(before, changes.claim(worker_id, run_ids), now)

    return prediction


def finished(outcomes: Mapping[str, Outcome]) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None or not holds(before, [outcomes[before["_id"]].run_id], now):
            return before
        return changes.changed(before, changes.finish(outcomes), now)

    return prediction


def pinged(run_ids: list[str], lease_ms: int) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None or not holds(before, run_ids, now):
            return before
        return changes.changed(before, changes.ping(run_ids, lease_ms), now, closes_lapsed=False)

    return prediction


def settled(before: Document | None, now: datetime) -> Document | None:
    return None if before is None else changes.changed(before, changes.nothing, now)


def settled_if_lapsed(grace_ms: int) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None or before["task_state"]["status"] != "RUNNING":
            return before
        limit = after(-grace_ms, now)
        runs = before["task_state"]["worker_states"]
        has_lapsed = any(run["status"] == "RUNNING" and run["ping_expire_time"] <= limit for run in runs)
        return settled(before, now) if has_lapsed else before

    return prediction


def canceled(task_id: str) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None:
            raise TaskNotFound(task_id)
        return changes.changed(before, changes.cancel, now)

    return prediction


def run_again(task_id: str, *, everything: bool) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None:
            raise TaskNotFound(task_id)
        status = before["task_state"]["status"]
        if status not in (_FINAL if everything else _FINAL[1:]):
            raise TaskNotFinished(task_id, status)
        return changes.changed(before, changes.run_again(everything=everything), now)

    return prediction


def with_option(task_id: str, wanted: Mapping[str, Any]) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None:
            raise TaskNotFound(task_id)
        option: TaskOption = build_option(before["task_option"], wanted)
        return changes.changed(before, changes.update_option(option), now)

    return prediction


def removed(before: Document | None, now: datetime) -> Document | None:
    return None


def unchanged(before: Document | None, now: datetime) -> Document | None:
    return before


def with_returns(run_id: str, returns: Any) -> Prediction:
    def prediction(before: Document | None, now: datetime) -> Document | None:
        if before is None:
            return None
        runs = before["task_state"]["worker_states"]
        if not any(run["run_id"] == run_id and run["status"] == "SUCCESS" for run in runs):
            return before
        added = [run | {"returns": returns} if run["run_id"] == run_id else run for run in runs]
        return before | {"task_state": before["task_state"] | {"worker_states": added}, "quiet_time": now}

    return prediction
