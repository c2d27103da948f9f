"""What the contract promises of a task's life, checked on each stored change with counts kept apart from the rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from mtask.kernel.document.rules import KEPT_RUNS
from tests.parity.cases import Document

_FINAL = ("SUCCESS", "FAIL", "CANCELED")
_COUNTED = ("FAIL", "TIMEOUT")
Runs = dict[str, Document]


@dataclass(frozen=True, slots=True)
class Act:
    """What a step asked for, as far as the promises depend on it."""

    kind: str
    worker_id: str = ""
    #: The runs that it names, or that a claim may make.
    run_ids: frozenset[str] = frozenset()
    clean_failed: bool = False
    clean_success: bool = False


def runs_of(document: Document | None) -> Runs:
    return {} if document is None else {run["run_id"]: run for run in document["task_state"]["worker_states"]}


def current(runs: Runs, *statuses: str) -> list[Document]:
    return [run for run in runs.values() if run["status"] in statuses and not run.get("past")]


def live(runs: Runs, now: datetime) -> list[Document]:
    return [run for run in current(runs, "RUNNING") if run["ping_expire_time"] > now]


def taken(runs: Runs, now: datetime) -> int:
    """Return S + R."""
    return len({run["worker_id"] for run in current(runs, "SUCCESS")}) + len(live(runs, now))


@dataclass(slots=True)
class History:
    """One task's life: its own count of failures in this round, and every run_id that it ever had."""

    failed_cnt: int = 0
    seen: set[str] = field(default_factory=set)

    def observe(self, before: Document | None, after: Document | None, now: datetime, act: Act) -> None:
        """Check one step that was not refused; `now` is the server's."""
        if after is None:
            assert before is None or act.kind == "remove", "a task is gone that nobody removed"
            self.failed_cnt = 0
            return
        assert before is not None or act.kind == "publish", "a task is there that nobody published"
        old, new = runs_of(before), runs_of(after)
        if act.kind in ("finish", "ping") and not any(run["run_id"] in act.run_ids for run in live(old, now)):
            assert after == before, f"a {act.kind} by a run that holds nothing has changed the task"
        for run_id, run in old.items():
            made = new.get(run_id)
            if run["status"] == "RUNNING":
                self.failed_cnt += _check_open(run, made, len(old), now, act) in _COUNTED
            else:
                _check_closed(run, made, len(old), act)
        if act.clean_failed or act.kind == "run_again":
            self.failed_cnt = 0
        self._check_new(before, new, [run_id for run_id in new if run_id not in old], now, act)
        _check_places(old, new, after, now)
        _check_state(before, after, new, now, act)
        assert after["task_state"]["failed_cnt"] == self.failed_cnt, "failed_cnt is not the number of counted runs"

    def _check_new(self, before: Document | None, runs: Runs, added: list[str], now: datetime, act: Act) -> None:
        if not added:
            return
        assert before is not None
        assert act.kind == "claim"
        assert added == [list(runs)[-1]], "a claim adds one run, at the end"
        run = runs[added[0]]
        assert run["run_id"] in act.run_ids - self.seen
        self.seen.add(run["run_id"])
        assert run["worker_id"] == act.worker_id
        assert run["status"] == "RUNNING"
        assert run["claim_time"] == now
        state, option = before["task_state"], before["task_option"]
        assert state["status"] not in _FINAL, "a finished task was claimed"
        assert not state["cancel_requested"], "a task whose end is asked for was claimed"
        assert state.get("start_time", now) <= now, "a task was claimed before its start_time"
        assert act.worker_id in (option["specific_worker_ids"] or [act.worker_id]), "another worker was named"
        assert taken(runs, now) <= option["concurrent_worker_cnt"], "a claim without a free place"
        others = {run_id: other for run_id, other in runs.items() if run_id != run["run_id"]}
        own = [other for other in others.values() if other["worker_id"] == act.worker_id and not other.get("past")]
        assert not any(other["status"] in ("RUNNING", "SUCCESS") for other in own), "it holds it, or has succeeded"
        by_worker = option["retry_scope"] == "worker"
        binding = own if by_worker else [other for other in others.values() if not other.get("past")]
        assert all((other.get("retry_time") or now) <= now for other in binding), "a claim within a retry delay"
        assert not any(other.get("final") for other in binding), "a claim after a final failure"
        failures = sum(other["status"] in _COUNTED for other in own) if by_worker else self.failed_cnt
        if option["max_unexpected_retries"] >= 0:
            assert failures <= option["max_unexpected_retries"], "a claim beyond the retry limit"


def _may_be_trimmed(run_cnt: int, act: Act) -> bool:
    return act.kind in ("claim", "run_again") and run_cnt > KEPT_RUNS


def _check_open(run: Document, made: Document | None, run_cnt: int, now: datetime, act: Act) -> str:
    """Check what became of a run that was RUNNING; return its status."""
    has_lapsed = run["ping_expire_time"] <= now
    if made is None:
        assert has_lapsed, "a live run was dropped"
        assert act.clean_failed or _may_be_trimmed(run_cnt, act), "a lapsed run was dropped"
        return "TIMEOUT"
    status: str = made["status"]
    fixed = ("run_id", "worker_id", "attempt", "claim_time")
    assert all(made[name] == run[name] for name in fixed)
    if status == "RUNNING":
        may_move = act.kind == "ping" and run["run_id"] in act.run_ids and not has_lapsed
        assert made == run or (may_move and made["ping_expire_time"] > run["ping_expire_time"])
    elif status == "TIMEOUT":
        assert has_lapsed, "a live run was taken to be dead"
        assert made["fail_time"] == now
    else:
        assert act.kind == "finish"
        assert run["run_id"] in act.run_ids, "a run was ended by the outcome of another"
        assert not has_lapsed, "a run was ended after its lease"
    return status


def _check_closed(run: Document, made: Document | None, run_cnt: int, act: Act) -> None:
    is_current_success = run["status"] == "SUCCESS" and not run.get("past")
    if made is None:
        is_cleaned = act.clean_success if run["status"] == "SUCCESS" else act.clean_failed
        is_kept = is_current_success and act.kind != "run_again"
        assert is_cleaned or (_may_be_trimmed(run_cnt, act) and not is_kept), "a closed run was dropped"
        return
    allowed = [run]
    if act.kind == "run_again":
        allowed.append(run | {"past": True})
    if act.kind == "set_returns" and run["run_id"] in act.run_ids and run["status"] == "SUCCESS":
        allowed.append(run | {"returns": made["returns"]})
    assert made in allowed, "a closed run was changed"


def _check_places(old: Runs, new: Runs, after: Document, now: datetime) -> None:
    # Where concurrent_worker_cnt was lowered, there may be more than it says, but never one more.
    places = max(after["task_option"]["concurrent_worker_cnt"], taken(old, now))
    assert taken(new, now) <= places, "more live leases than concurrent_worker_cnt leaves room for"
    succeeded = Counter(run["worker_id"] for run in current(new, "SUCCESS"))
    assert max(succeeded.values(), default=0) <= 1, "a worker succeeded twice in one round"
    holding = Counter(run["worker_id"] for run in live(new, now))
    assert max(holding.values(), default=0) <= 1, "a worker holds two runs of one task"


def _check_state(before: Document | None, after: Document, runs: Runs, now: datetime, act: Act) -> None:
    state, option = after["task_state"], after["task_option"]
    status, was = state["status"], before["task_state"]["status"] if before is not None else None
    is_final = status in _FINAL
    opens = act.kind == "run_again" or (was == "FAIL" and act.clean_failed) or (was == "SUCCESS" and act.clean_success)
    if before is not None and was in _FINAL and not opens:
        assert status == was, "a final status was touched"
        assert state["finish_time"] == before["task_state"]["finish_time"]
    assert ("finish_time" in state) is is_final
    assert ("next_preempt_time" in state) is not is_final
    assert not (is_final and state["cancel_requested"])
    retain = option["retain_success_ms" if status == "SUCCESS" else "retain_fail_ms"] if is_final else None
    expires = None if retain is None else state["finish_time"] + timedelta(milliseconds=retain)
    if after == before or act.kind == "set_returns":
        return
    assert after.get("expire_time") == expires
    is_held = bool(live(runs, now))
    if status == "RUNNING":
        assert is_held
    elif status in ("INIT", "FAIL", "CANCELED") and (opens or status != was):
        assert not is_held, f"{status}, but it is held"
    if status == "SUCCESS" and (opens or status != was):
        assert taken(runs, now) - len(live(runs, now)) >= option["concurrent_worker_cnt"]
