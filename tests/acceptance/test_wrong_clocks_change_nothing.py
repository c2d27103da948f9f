"""A worker's or a publisher's clock is wrong by ten minutes: nothing starts early, nothing is taken from
a live lease, nothing is delayed."""

from __future__ import annotations

import itertools
import sys
from datetime import datetime, timedelta

import pytest

from mtask.kernel.document.options import TaskOptions
from tests import faketime
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE
from tests.workers import ROOT, Stage, WorkerProcess, end_of, milliseconds, runs_of

APP = "tests.acceptance.faults_app:app"
TEN_MINUTES = timedelta(minutes=10)
AHEAD = timedelta(seconds=3)
#: A right clock shows 3 ms on a quiet machine, and seconds on a busy one. The wrong clocks are wrong by ten minutes.
GENEROUS = timedelta(minutes=1)
LEASE: TaskOptions = {"ping_interval": 0.7, "worker_timeout": 3}

_SLOW = pytest.param(-TEN_MINUTES, id="slow", marks=pytest.mark.long)
wrong = pytest.mark.parametrize("offset", [pytest.param(TEN_MINUTES, id="fast"), _SLOW])


def start(stage: Stage, worker_id: str, offset: timedelta = timedelta(0), *flags: str) -> WorkerProcess:
    """Start a worker whose clock is off by that much, and make sure that it is."""
    environment = faketime.environment(offset) if offset else None
    worker = stage.launch(worker_id, *flags, environment=environment, app=APP)
    stage.wait_running(worker)
    asked = stage.client.publish("read_clock", key=worker_id, specific_worker_ids=[worker_id])
    (run,) = runs_of(stage.wait_status(asked.task_id, "SUCCESS"))
    is_off_by = run["returns"] - run["claim_time"].timestamp()
    assert abs(is_off_by - offset.total_seconds()) < 30, "its clock is as wrong as it is to be"
    return worker


@wrong
def test_worker_with_a_wrong_clock_starts_nothing_early_and_nothing_late(
    stage: Stage, offset: timedelta, report: Report, request: pytest.FixtureRequest
) -> None:
    waited = stage.client.publish("noop", key="waited", delay=AHEAD)
    came = stage.wait_running(start(stage, "A", offset))["started_time"]
    told = stage.client.publish("noop", key="told", delay=AHEAD)
    at_once = stage.client.publish("noop", key="at-once")

    for published in (waited, told, at_once):
        state = stage.wait_status(published.task_id, "SUCCESS")["task_state"]
        begin: datetime = state.get("start_time", state["create_time"])
        claimed: datetime = state["worker_states"][0]["claim_time"]
        assert claimed >= begin
        late = claimed - max(begin, came)  # it may have taken its time to start
        assert late < GENEROUS
        assert stage.events.starts(published.task_id)[0].time >= begin
        report(f"{request.node.callspec.id} clock: claim after the time of {published.task_id}, ms", milliseconds(late))


@wrong
def test_worker_with_a_wrong_clock_takes_nothing_from_a_live_lease_and_a_lapsed_one_soon(
    stage: Stage, offset: timedelta, report: Report, request: pytest.FixtureRequest
) -> None:
    holder = start(stage, "A")
    task = stage.client.publish("hold", {"gate": stage.gate()}, key="t", **LEASE)
    first = stage.wait_run(task.task_id, "A")
    start(stage, "B", offset)
    # More than two leases long, it is there and takes nothing: the holder's pings are all that keep it away.
    stage.wait_server_time(first["claim_time"] + timedelta(seconds=6.5))
    (run,) = runs_of(stage.document(task.task_id))
    assert (run["run_id"], run["status"]) == (first["run_id"], "RUNNING")

    holder.kill()
    stage.wait_run(task.task_id, "B")
    stage.open_gate()
    document = stage.wait_status(task.task_id, "SUCCESS")

    lapsed, taken = runs_of(document)
    late = taken["claim_time"] - lapsed["ping_expire_time"]
    assert timedelta(0) <= late < GENEROUS, "never before the lease lapsed, and soon after"
    assert (lapsed["status"], taken["worker_id"]) == ("TIMEOUT", "B")
    report(f"{request.node.callspec.id} clock: preempted after the lease lapsed, ms", milliseconds(late))


@wrong
def test_worker_with_a_wrong_clock_keeps_its_own_lease(stage: Stage, offset: timedelta) -> None:
    start(stage, "A", offset)
    task = stage.client.publish("hold", {"gate": stage.gate()}, key="t", **LEASE)
    first = stage.wait_run(task.task_id, "A")
    start(stage, "B")
    stage.wait_server_time(first["claim_time"] + timedelta(seconds=6.5))
    stage.open_gate()

    document = stage.wait_status(task.task_id, "SUCCESS")

    (run,) = runs_of(document)
    assert run["run_id"] == first["run_id"]
    assert first["claim_time"] + timedelta(seconds=6.5) < end_of(run) < stage.server_now()
    assert document["task_state"]["failed_cnt"] == 0
    assert len(stage.events.starts(task.task_id)) == 1


def test_workers_whose_clocks_differ_by_twenty_minutes_hold_each_other_for_alive_and_keep_retry_delays(
    stage: Stage,
) -> None:
    start(stage, "A", TEN_MINUTES)
    start(stage, "B", -TEN_MINUTES)

    assert [worker.id for worker in stage.client.workers()] == ["A", "B"]
    now = stage.server_now()
    for worker in stage.client.workers():
        assert abs(worker.heartbeat_time - now) < timedelta(seconds=PATIENCE)
        assert worker.is_live(now)

    # The delays are those of the server's clock.
    task = stage.client.publish("fail", key="t", max_retries=3, retry_delay=1)

    runs = runs_of(stage.wait_status(task.task_id, "FAIL"))

    assert len(runs) == 4
    for former, latter in itertools.pairwise(runs):
        gap = latter["claim_time"] - end_of(former)
        assert timedelta(seconds=1) <= gap < timedelta(seconds=1) + GENEROUS


_PUBLISH = """
import sys, time
from datetime import timedelta
from mtask import Client, TaskSpec
uri, database = sys.argv[1:]
with Client(uri, database=database) as client:
    client.publish("noop", key="delayed", delay=timedelta(seconds=3))
    client.publish("noop", key="at-once")
    client.publish_many([TaskSpec("noop", key=f"many/{n}", delay=3.0) for n in range(5)])
print(time.time())
"""


@wrong
def test_publisher_with_a_wrong_clock_neither_hastens_nor_delays_a_task(
    stage: Stage, offset: timedelta, report: Report, request: pytest.FixtureRequest
) -> None:
    start(stage, "A")
    before = stage.server_now()
    printed = faketime.run([sys.executable, "-c", _PUBLISH, stage.uri, stage.database], offset, cwd=ROOT)
    after = stage.server_now()
    assert abs(float(printed) - after.timestamp() - offset.total_seconds()) < 30, "its clock is as wrong as it is to be"

    for key in ("delayed", *(f"many/{number}" for number in range(5))):
        state = stage.wait_status(f"noop:{key}", "SUCCESS")["task_state"]
        assert before + AHEAD <= state["start_time"] <= after + AHEAD
        late = state["worker_states"][0]["claim_time"] - state["start_time"]
        assert timedelta(0) <= late < GENEROUS
    report(f"publisher with a {request.node.callspec.id} clock: claim after the time, ms", milliseconds(late))
    state = stage.wait_status("noop:at-once", "SUCCESS")["task_state"]
    assert before <= state["create_time"] <= after
    assert state["worker_states"][0]["claim_time"] - state["create_time"] < GENEROUS
