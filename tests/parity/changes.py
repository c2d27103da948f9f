"""What each change makes of a document, in Python on the pure rules: twin of the pipelines in `mtask.kernel`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.features.flows.rules import Verdict, end_reason, fail_fast_reason
from mtask.kernel.document import rules
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.parts import MAX_OWED
from mtask.kernel.document.status import FINAL_STATUSES, RunStatus, TaskStatus
from mtask.kernel.document.task import MAX_FORMER_QUEUES, Gathering
from mtask.kernel.statements.derive import EXPIRED_REASON, LAPSED_REASON
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from tests.oracles import gathering
from tests.oracles import rules as oracle
from tests.oracles.gathering import Call
from tests.parity.cases import Document, parsed

Change = Callable[[Document, datetime], None]


@dataclass(frozen=True)
class Routine:
    """A change that workers make all the time: marked as quiet where it is no news to the others."""

    change: Change
    #: What follows when the other fields are derived.
    after: Change | None = None

    def __call__(self, document: Document, now: datetime) -> None:
        self.change(document, now)


@dataclass(frozen=True)
class Ping(Routine):
    """A ping holds a live run, so it begins no round."""


def changed(document: Document, change: Change, now: datetime, *, closes_lapsed: bool = True) -> Document:
    """Return the document after closing what lapsed, the change, deriving, and beginning the next round."""
    made = copy.deepcopy(document)
    if closes_lapsed:
        close_lapsed(made, now)
    change(made, now)
    status, former = made["task_state"]["status"], made["task_state"].get("next_preempt_time")
    derive(made, now)
    if isinstance(change, Routine):
        moment = made["task_state"].get("next_preempt_time")
        is_near = moment is not None and moment <= now + 2 * rules.HORIZON
        if not is_near if moment != former else made["task_state"]["status"] != status:
            made["quiet_time"] = now
        if change.after is not None:
            change.after(made, now)
    if not isinstance(change, Ping):
        open_next(made, now)
    return made


def close_lapsed(document: Document, now: datetime) -> None:
    state = document["task_state"]
    state["failed_cnt"] = rules.failures(parsed(document), now)
    for run in state["worker_states"]:
        if run["status"] == "RUNNING" and run["ping_expire_time"] <= now:
            run |= {"status": "TIMEOUT", "fail_time": now, "fail_reason": LAPSED_REASON}


def derive(document: Document, now: datetime) -> None:
    state, option = document["task_state"], document["task_option"]
    status = rules.status(parsed(document), now)
    was_asked = state["cancel_requested"]
    state["status"] = status.value
    state["cancel_requested"] = state["cancel_requested"] and not status.is_final
    finish_time, _ = state.pop("finish_time", None), state.pop("next_preempt_time", None)
    has_expired = status is TaskStatus.CANCELED and rules.is_expired(parsed(document), now)
    if has_expired and finish_time is None and not was_asked and state.get("reason") is None:
        state["reason"] = EXPIRED_REASON
    tell(document, was_final=finish_time is not None, now=now)
    expire_time = document.pop("expire_time", None)
    flow, owed_since = document.get("flow"), document.get("owed_since")
    has_news = flow is not None and status.is_final is not bool(finish_time)
    unwatched, owes = (flow or {}).get("unwatched") is True, "owed_tasks" in document
    if has_news and oracle.must_tell(status, unwatched=unwatched, is_marked=owed_since is not None, owes_tasks=owes):
        document["owed_since"] = max(now, owed_since + timedelta(milliseconds=1)) if owed_since else now
    if not status.is_final:
        state.pop("reason", None)
        if (moment := oracle.next_preempt_time(parsed(document), now)) is not None:
            state["next_preempt_time"] = moment
        return
    state["finish_time"] = finish_time or now
    if document.get("flow") is not None:
        if expire_time and finish_time:
            document["expire_time"] = expire_time
        return
    if document.get("owed_since") is not None or "callback_owed" in document:
        return
    retain = option["retain_success_ms" if status is TaskStatus.SUCCESS else "retain_fail_ms"]
    if retain is not None:
        document["expire_time"] = state["finish_time"] + timedelta(milliseconds=retain)


def tell(document: Document, *, was_final: bool, now: datetime) -> None:
    """Owe a callback, if the task has one and just became final."""
    wanted, status = document.get("callback"), document["task_state"]["status"]
    if wanted is None or not oracle.is_told(wanted["on"], status, was_final=was_final):
        return
    number = document["callback_cnt"] = document.get("callback_cnt", 0) + 1
    lasting = {name: wanted[name] for name in ("url", "secret", "tenant") if name in wanted}
    owed = [*document.get("callback_owed", []), {"number": number, "status": status, "time": now, **lasting}]
    document["callback_owed"] = owed[-MAX_OWED:]


def open_next(document: Document, now: datetime) -> None:
    """Begin the next round if it is ready."""
    task = parsed(document)
    if task.again is not None and gathering.is_ready(task, now):
        following = document.pop("again")
        start = following.get("start_time") or now
        begin(document, {**following, "start_time": start}, gathering.begun(task, task.again), now)


def begin(document: Document, following: Mapping[str, Any], gather: Gathering, now: datetime) -> None:
    """Let the task begin a round with this content."""
    state, has_begun = document["task_state"], gathering.has_begun(parsed(document))
    for field in ("lookup", "expire_time", "quiet_time"):
        document.pop(field, None)
    for field in ("start_time", "not_after", "finish_time", "reason", "next_id"):
        state.pop(field, None)
    if following["queue"] != document["queue"]:
        move(document, now)
    if following.get("start_time") is not None:
        state["start_time"] = following["start_time"]
    state |= {"status": "INIT", "failed_cnt": 0, "cancel_requested": False}
    state["next_preempt_time"] = state.get("start_time") or state["create_time"]
    for run in state["worker_states"] if has_begun else ():
        if run.get("past"):
            run.pop("returns", None)
        run["past"] = True
    document |= {name: following[name] for name in ("params", "queue", "task_option")}
    if "lookup" in following:
        document["lookup"] = following["lookup"]
    document["gather"] = gather.model_dump(exclude_none=True, exclude_defaults=True)


def added(document: Document, change: Change, now: datetime) -> Document:
    """Return the settled document after a publish call."""
    made = copy.deepcopy(document)
    change(made, now)
    return made


def gather(call: Call, size: int) -> Change:
    """Add a publish call. The task has no lapsed runs, and its derived fields are right."""

    def change(document: Document, now: datetime) -> None:
        task = parsed(document)
        following = gathering.gathered(task, call, size, now)
        if following is None:
            return
        made = following.model_dump(exclude_none=True)
        made |= {"params": following.params, "task_option": following.task_option.stored()}
        made["gather"] = following.gather.model_dump(exclude_none=True, exclude_defaults=True)
        if gathering.must_wait(task, now):
            document["again"] = made
            return
        if gathering.base_round(task, now) is not None:
            begin(document, made, following.gather, now)
        else:
            begin(document, {"start_time": now, **made}, gathering.begun(task, following), now)

    return change


def reopen(call: Call) -> Change:
    """Open a task that has ended beside a run, if this call waits for that run."""

    def change(document: Document, now: datetime) -> None:
        task = parsed(document)
        if not gathering.reopens(task, call, now):
            return
        state = gathering.reopened(task).task_state
        for run, opened in zip(document["task_state"]["worker_states"], state.worker_states, strict=True):
            run |= {"past": True} if opened.past else {}
        document["task_state"] |= {"status": state.status.value, "failed_cnt": state.failed_cnt}

    return change


def move(document: Document, now: datetime) -> None:
    """Let the task remember that it leaves its queue."""
    state = document["task_state"]
    others = [queue for queue in state.get("former_queues", []) if queue != document["queue"]]
    state |= {"queue_time": now, "former_queues": [document["queue"], *others][:MAX_FORMER_QUEUES]}


def trim(document: Document) -> None:
    runs = document["task_state"]["worker_states"]
    if len(runs) <= rules.KEPT_RUNS:
        return
    counted = [r for r in runs if r["status"] in ("FAIL", "TIMEOUT") and not r.get("past")]
    canceled = [r for r in runs if r["status"] == "CANCELED" and not r.get("past")]
    past = [r for r in runs if r.get("past")]
    kept = oracle.kept_runs(parsed(document))
    surplus = [*counted[: max(0, len(counted) - kept)], *canceled[: max(0, len(canceled) - 20)]]
    surplus += past[: max(0, len(past) - 20)]
    dropped = {run["run_id"] for run in surplus}
    document["task_state"]["worker_states"] = [run for run in runs if run["run_id"] not in dropped]


def nothing(document: Document, now: datetime) -> None:
    """Settle: nothing between closing and deriving."""


def claim(worker_id: str, run_ids: Mapping[str, str]) -> Change:
    def change(document: Document, now: datetime) -> None:
        task = parsed(document)
        if gathering.is_ready(task, now) or not rules.may_take(task, worker_id, now):
            return
        runs, option = document["task_state"]["worker_states"], document["task_option"]
        of_all = option["retry_scope"] == "task"
        attempts = [run["attempt"] for run in runs if of_all or run["worker_id"] == worker_id]
        trim(document)
        document["task_state"]["worker_states"].append(
            {
                "run_id": run_ids[document["_id"]],
                "worker_id": worker_id,
                "attempt": max(attempts, default=0) + 1,
                "status": "RUNNING",
                "claim_time": now,
                "ping_expire_time": now + timedelta(milliseconds=option["worker_timeout_ms"]),
            }
        )

    return Routine(change)


def _tell(run: Document, progress: Mapping[str, Any], now: datetime) -> None:
    stored = run.get("progress", {})
    if {**progress, "time": stored.get("time")} != stored:
        run["progress"] = {**progress, "time": now}


def ping(
    run_ids: list[str],
    lease_ms: int,
    progress: Mapping[str, Mapping[str, Any]] | None = None,
    session_id: str | None = None,
) -> Change:
    def change(document: Document, now: datetime) -> None:
        for run in document["task_state"]["worker_states"]:
            if run["run_id"] in run_ids and run["status"] == "RUNNING" and run["ping_expire_time"] > now:
                run["ping_expire_time"] = max(run["ping_expire_time"], now + timedelta(milliseconds=lease_ms))
                if progress and run["run_id"] in progress:
                    _tell(run, progress[run["run_id"]], now)
                if session_id is not None:
                    run["session_id"] = session_id

    return Ping(change)


def finish(outcomes: Mapping[str, Outcome]) -> Change:
    asked: dict[str, bool] = {}  # whether somebody wanted to cancel the task before its finish

    def change(document: Document, now: datetime) -> None:
        asked[document["_id"]] = document["task_state"]["cancel_requested"]
        outcome, state = outcomes[document["_id"]], document["task_state"]
        run = next(r for r in state["worker_states"] if r["run_id"] == outcome.run_id)
        task = parsed(document)
        run["status"] = outcome.status.value
        if outcome.progress is not None:
            _tell(run, outcome.progress, now)
        if outcome.status is RunStatus.SUCCESS:
            run |= {"success_time": now, "returns": outcome.returns}
            return
        run |= {"fail_time": now, "fail_reason": outcome.reason}
        if outcome.final:
            run["final"] = True
        delay = outcome.delay_ms
        if outcome.status is RunStatus.FAIL:
            own = rules.worker_failures(task, run["worker_id"], now)
            before = own if task.task_option.retry_scope == "worker" else state["failed_cnt"]
            state["failed_cnt"] += 1
            if delay is None:
                delay = oracle.retry_delay_ms(task.task_option, before + 1, outcome.jitter)
        if delay is not None:
            run["retry_time"] = now + timedelta(milliseconds=delay)

    def go_on(document: Document, now: datetime) -> None:
        owed, state = outcomes[document["_id"]].next, document["task_state"]
        ends_now = state["status"] == "SUCCESS" and state["finish_time"] == now
        if owed is None or not ends_now or "next_id" in state or asked[document["_id"]]:
            return
        state |= {"next_id": owed.task_id, "next_cnt": state.get("next_cnt", 0) + 1}
        document.pop("expire_time", None)
        owe(document, [owed], now)

    return Routine(change, go_on)


def owe(document: Document, owed: Sequence[OwedTask], now: datetime) -> None:
    document["owed_tasks"] = [*document.get("owed_tasks", []), *(owed_document(one, now) for one in owed)]
    mark = document.get("owed_since")
    document["owed_since"] = max(now, mark + timedelta(milliseconds=1)) if mark else now
    if "flow" in document:
        document["flow"]["has_children"] = True


def owed_document(owed: OwedTask, now: datetime) -> Document:
    start = owed.start
    if start is None and owed.delay_ms is not None:
        start = now + timedelta(milliseconds=owed.delay_ms)
    state: Document = {"status": "INIT", "create_time": now, "next_preempt_time": start or now, "failed_cnt": 0}
    if start is not None:
        state["start_time"] = start
    made = {**owed.fixed, "task_state": state | {"cancel_requested": False, "worker_states": []}, "schema_version": 1}
    if "flow" in made:
        made["flow"] = {**made["flow"], "release_time": now, "unwatched": True}
    return made


def add_children(document: Document, owed: Sequence[OwedTask], now: datetime) -> Document:
    """Return the document after its run has added these children."""
    made = copy.deepcopy(document)
    owe(made, owed, now)
    made["quiet_time"] = now
    return made


def cancel(document: Document, now: datetime) -> None:
    is_open = document["task_state"]["status"] not in FINAL_STATUSES
    document["task_state"]["cancel_requested"] = is_open
    document.pop("again", None)
    if is_open:
        document.get("flow", {}).pop("held_by", None)


def run_again(*, everything: bool) -> Change:
    def change(document: Document, now: datetime) -> None:
        state = document["task_state"]
        for run in state["worker_states"]:
            if run["status"] != "RUNNING" and (everything or run["status"] != "SUCCESS"):
                run["past"] = True
        state |= {"failed_cnt": 0, "cancel_requested": False, "status": "INIT"}
        state.pop("not_after", None)
        document.get("flow", {}).pop("held_by", None)
        trim(document)

    return change


def release(document: Document, now: datetime) -> None:
    flow, state = document["flow"], document["task_state"]
    flow.pop("held_by", None)
    flow["release_time"] = now
    moments = [state.pop("start_time", None)]
    if "delay_ms" in flow:
        moments.append(now + timedelta(milliseconds=flow["delay_ms"]))
    if given := [moment for moment in moments if moment is not None]:
        state["start_time"] = max(given)


def end(outcome: Verdict, culprit: str) -> Change:
    def change(document: Document, now: datetime) -> None:
        document["flow"]["held_by"] = culprit
        status = "CANCELED" if outcome is Verdict.CANCEL else "FAIL"
        document["task_state"] |= {"status": status, "reason": end_reason(culprit)}

    return change


def fail_fast(culprit: str) -> Change:
    def change(document: Document, now: datetime) -> None:
        document["flow"]["held_by"] = culprit
        document["task_state"] |= {"cancel_requested": True, "reason": fail_fast_reason(culprit)}

    return change


def update_option(option: TaskOption) -> Change:
    def change(document: Document, now: datetime) -> None:
        document["task_option"] = option.stored()

    return change


def republish(
    replacement: Mapping[str, Any] | None, start: datetime | None, *, clean_failed: bool, clean_success: bool
) -> Change:
    def change(document: Document, now: datetime) -> None:
        state = document["task_state"]
        if replacement is not None:
            if replacement["queue"] != document["queue"]:
                move(document, now)
            document.pop("lookup", None)
            document.pop("callback", None)
            document.pop("again", None)
            document.update(replacement)
            for field in ("kind", "first_time", "debounce_ms", "max_wait_ms", "ids", "full"):
                document.get("gather", {}).pop(field, None)
            state.pop("start_time", None)
            if start is not None:
                state["start_time"] = start
        if replacement is not None or clean_failed or clean_success:
            state.pop("not_after", None)
        dropped: set[str] = set()
        if clean_failed:
            dropped |= {"FAIL", "TIMEOUT", "CANCELED"}
            state["failed_cnt"] = 0
        if clean_success:
            dropped.add("SUCCESS")
            state.pop("next_id", None)
        if any(run["status"] in dropped for run in state["worker_states"]):
            state["clean_cnt"] = state.get("clean_cnt", 0) + 1
        state["worker_states"] = [run for run in state["worker_states"] if run["status"] not in dropped]
        if (clean_failed and state["status"] == "FAIL") or (clean_success and state["status"] == "SUCCESS"):
            state["status"] = "INIT"

    return change
