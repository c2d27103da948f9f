"""A client that holds a transaction open on three tasks delays these three, and none of the others.

MTASK_TEST_LOCK=30 holds it for 30 s beside 500 others with leases of 6 s, and asserts by how much they come later.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import pytest
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mtask import TaskSpec
from mtask.kernel.document.options import TaskOptions
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, Document, eventually
from tests.workers import Stage, runs_of

_LONG = float(os.environ.get("MTASK_TEST_LOCK", "0"))
_SECONDS = _LONG or 8.0
_OTHERS = 500 if _LONG else 60
_LEASE_MS = 6_000 if _LONG else 3_000
_LEASE: TaskOptions = {"ping_interval": _LEASE_MS / 3000, "worker_timeout": _LEASE_MS / 1000}
_LOCKED = ("noop:init", "hold:running", "noop:half")


@dataclass(frozen=True, slots=True)
class _Lateness:
    """By how much the starts and the results of a load came late, each in ms, the latest last."""

    starts: list[float]
    results: list[float]

    def shown(self) -> str:
        median, p99, last = len(self.starts) // 2, int(len(self.starts) * 0.99), -1
        return "; ".join(
            f"{what} {values[median]:.0f}, {values[p99]:.0f}, {values[last]:.0f}"
            for what, values in (("starts", self.starts), ("results", self.results))
        )


def _publish_load(stage: Stage, phase: str) -> None:
    """Publish tasks that begin one after the other, and last longer than their leases."""
    spread, each = 0.5 * _SECONDS, 1.2 * _LEASE_MS / 1000
    stage.client.publish_many(
        TaskSpec("sleep", {"seconds": each}, key=f"{phase}-{n}", delay=spread * n / _OTHERS, **_LEASE)
        for n in range(_OTHERS)
    )


def _of(stage: Stage, phase: str) -> list[Document]:
    return list(stage.mongo[stage.database]["tasks"].find({"key": {"$regex": f"^{phase}-"}}))


def _are_done(stage: Stage, phase: str) -> bool:
    left = {"key": {"$regex": f"^{phase}-"}, "task_state.status": {"$ne": "SUCCESS"}}
    return stage.mongo[stage.database]["tasks"].find_one(left, {"_id": 1}) is None


def _lateness(stage: Stage, phase: str) -> _Lateness:
    ends = {event.run_id: event.time for event in stage.events.all("end")}
    starts, results = [], []
    for document in _of(stage, phase):
        (run,) = runs_of(document)
        starts.append((run["claim_time"] - document["task_state"]["start_time"]) / timedelta(milliseconds=1))
        results.append((run["success_time"] - ends[run["run_id"]]) / timedelta(milliseconds=1))
    return _Lateness(sorted(starts), sorted(results))


@pytest.mark.timeout(300)
def _lock(session: ClientSession, tasks: Collection[Document]) -> bool:
    """Change the tasks in a transaction that stays open; return whether no change of a worker was in the way."""
    session.start_transaction()
    try:
        for task_id in _LOCKED:
            tasks.update_one({"_id": task_id}, {"$set": {"locked": True}}, session=session)
    except OperationFailure as error:
        session.abort_transaction()
        if error.has_error_label("TransientTransactionError"):
            return False
        raise
    return True


def test_no_task_waits_for_a_transaction_on_others(stage: Stage, report: Report) -> None:
    flags = ("--concurrency", "600", "--queues", "default,paused")
    stage.start("A", *flags)
    stage.client.pause(queue="paused")
    stage.client.publish("noop", key="init", queue="paused")
    stage.client.publish("noop", key="half", concurrent_worker_cnt=2)
    stage.wait_document("noop:half", lambda found: len(runs_of(found)) == 1, "one of two")
    stage.client.publish("hold", {"gate": stage.gate()}, key="running", **_LEASE)
    stage.wait_run("hold:running")
    stage.wait_document("noop:half", lambda found: runs_of(found)[0]["status"] == "SUCCESS", "A has succeeded")

    _publish_load(stage, "usual")
    eventually(lambda: _are_done(stage, "usual"), PATIENCE + _SECONDS, "the load without a lock")
    usual = _lateness(stage, "usual")

    tasks = stage.mongo[stage.database]["tasks"]
    with ExitStack() as stack:
        session = stack.enter_context(stage.mongo.start_session())
        eventually(lambda: _lock(session, tasks), PATIENCE, "the lock")
        stack.callback(lambda: session.abort_transaction() if session.in_transaction else None)
        begun = time.monotonic()
        stage.start("B", *flags)
        stage.client.resume(queue="paused")
        _publish_load(stage, "locked")
        eventually(lambda: _are_done(stage, "locked"), PATIENCE + _SECONDS, "the load beside the lock")
        eventually(lambda: time.monotonic() > begun + _SECONDS, PATIENCE + _SECONDS, "the lock has lasted")
        statuses = {task_id: stage.document(task_id)["task_state"]["status"] for task_id in _LOCKED}
        assert "SUCCESS" not in statuses.values(), "the transaction was still open"
        session.abort_transaction()

    beside = _lateness(stage, "locked")
    report(f"usual, {_OTHERS} tasks: late by ms, median, p99, most", usual.shown())
    report(f"beside a lock of {_SECONDS:g} s: late by ms, median, p99, most", beside.shown())
    assert all(run["status"] == "SUCCESS" for document in _of(stage, "locked") for run in runs_of(document))
    if _LONG:
        assert beside.starts[-1] <= usual.starts[-1] + 1_000
        assert beside.results[-1] <= usual.results[-1] + 1_000
    stage.open_gate()
    for task_id in _LOCKED:
        stage.wait_status(task_id, "SUCCESS")
