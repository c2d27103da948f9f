"""Task documents for the parity properties: every option, every kind of run, around one fixed instant."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from mtask.model.documents import Task
from mtask.model.options import MAX_DURATION_MS, STORED_OPTIONS
from mtask.model.status import FINAL_STATUSES, RunStatus, TaskStatus

Document = dict[str, Any]

#: MTASK_TEST_FUZZ=50 takes fifty times as many examples as a usual run.
SCALE = int(os.environ.get("MTASK_TEST_FUZZ", "1"))
#: Far ahead, so that the TTL index leaves alone what the properties write.
NOW = datetime(2100, 1, 1, 12, 0, 0, 500_000, tzinfo=UTC)
WORKERS = ["w1", "w2", "$w3", "w4.5", "worker {6}"]
_RETRIES = [-1, -1, 0, 1, 2, 3]

#: Instants that meet in many cases, the present among them, and a few anywhere.
instants = st.one_of(st.sampled_from([-60_000, -1000, -1, 0, 0, 1, 1000, 60_000]), st.integers(-100_000, 100_000)).map(
    lambda offset: NOW + timedelta(milliseconds=offset)
)
earlier = st.sampled_from([1, 1000, 50_000]).map(lambda offset: NOW - timedelta(milliseconds=offset))
#: What a handler told of its progress; mostly nothing.
progress = st.sampled_from([None, None, {"fraction": 0.5}, {"message": "$name"}, {"fraction": 1.0, "message": "all"}])


@st.composite
def options(draw: st.DrawFn, *, is_ordinary: bool = True) -> Document:
    """Draw a task_option; an ordinary one has durations with which dates stay dates."""
    longest = 600_000 if is_ordinary else MAX_DURATION_MS
    duration = st.one_of(st.sampled_from([0, 1, 1000, 1000]), st.integers(0, longest))
    ping = draw(st.integers(1, 60_000))
    drawn = {
        "priority": draw(st.integers(-3, 3)),
        "concurrent_worker_cnt": draw(st.sampled_from([1, 1, 2, 3, 4])),
        "ping_interval_ms": ping,
        "worker_timeout_ms": ping + draw(st.integers(1, 60_000)),
        "specific_worker_ids": draw(st.one_of(st.just([]), st.lists(st.sampled_from(WORKERS), unique=True))),
        "max_unexpected_retries": draw(st.sampled_from(_RETRIES)),
        "unexpected_retry_delay_ms": draw(duration),
        "retry_backoff": draw(st.sampled_from([1, 1.0, 1.1, 1.5, 2, 2.0, 3.7, 1000])),
        "retry_max_delay_ms": draw(st.one_of(st.just(500_000) if is_ordinary else st.none(), duration)),
        "retry_scope": draw(st.sampled_from(["task", "worker"])),
        "run_timeout_ms": draw(st.sampled_from([None, 1, 5000])),
        "retain_success_ms": draw(st.sampled_from([None, 0, 1, 86_400_000])),
        "retain_fail_ms": draw(st.sampled_from([None, 0, 1, 86_400_000])),
    }
    assert drawn.keys() == set(STORED_OPTIONS)
    return drawn


@st.composite
def runs(draw: st.DrawFn, number: int) -> Document:
    """Draw an entry of worker_states; fields that a run may lack are missing, null or there."""
    status = draw(st.sampled_from(list(RunStatus)))
    drawn: Document = {
        "run_id": f"run-{number}",
        "worker_id": draw(st.sampled_from(WORKERS)),
        "attempt": draw(st.integers(1, 5)),
        "status": status.value,
        "claim_time": draw(earlier),
        "ping_expire_time": draw(instants),
    }
    if status is RunStatus.SUCCESS:
        drawn |= {"success_time": draw(earlier), "returns": draw(st.sampled_from([None, "$name", {"$add": [1, 2]}]))}
    elif status is not RunStatus.RUNNING:
        drawn |= {"fail_time": draw(earlier), "fail_reason": draw(st.sampled_from(["broken", "$key", None]))}
        retry_time = draw(st.one_of(st.just("missing"), st.none(), instants))
        if retry_time != "missing":
            drawn["retry_time"] = retry_time
        if status is not RunStatus.TIMEOUT and draw(st.sampled_from([False, False, False, True])):
            drawn["final"] = True
    told = draw(progress)
    if told is not None:
        drawn["progress"] = {**told, "time": draw(earlier)}
    if draw(st.sampled_from([False, False, True])):
        drawn["session_id"] = draw(st.sampled_from(["6a3f", "$name"]))
    # No live run is ever of an earlier round: run_again leaves it in the round.
    past = draw(st.sampled_from([None, None, False, True]))
    if past is not None:
        drawn["past"] = past and status is not RunStatus.RUNNING
    return drawn


@st.composite
def tasks(draw: st.DrawFn, max_runs: int = 6) -> Document:
    """Draw a document that the validator accepts. Its derived fields are anything: the rules must not lean on them."""
    key = draw(st.sampled_from(["k", "a:b", "$key", "é", "{1}"]))
    status = draw(st.sampled_from([*TaskStatus, TaskStatus.INIT, TaskStatus.RUNNING, TaskStatus.RUNNING]))
    state: Document = {
        "status": status.value,
        "create_time": draw(earlier),
        "failed_cnt": draw(st.integers(0, 4)),
        "cancel_requested": draw(st.sampled_from([False, False, True])),
        "worker_states": [draw(runs(number)) for number in range(draw(st.integers(0, max_runs)))],
    }
    start_time = draw(st.one_of(st.just("missing"), st.none(), instants))
    if start_time != "missing":
        state["start_time"] = start_time
    if status in FINAL_STATUSES:
        if draw(st.booleans()):
            state["finish_time"] = draw(earlier)
    else:
        state["next_preempt_time"] = draw(instants)
    if draw(st.booleans()):
        state |= {"clean_cnt": draw(st.integers(0, 3)), "queue_time": draw(earlier)}
        state["former_queues"] = draw(st.lists(st.sampled_from(["default", "$other", "third"]), unique=True))
    return {
        "_id": f"task:{key}",
        "name": "task",
        "key": key,
        "queue": "default",
        "params": draw(st.sampled_from([None, {"$literal": 1}, ["$name"]])),
        "task_option": draw(options()),
        "task_state": state,
        "schema_version": 1,
    }


def numbered(documents: list[Document]) -> list[Document]:
    """Return the documents with keys that differ."""
    return [
        document | {"key": f"{document['key']}/{place}", "_id": f"{document['_id']}/{place}"}
        for place, document in enumerate(documents)
    ]


def parsed(document: Document) -> Task:
    """Return the document as the pure rules take it."""
    return Task.model_validate(document)
