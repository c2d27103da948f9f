"""What the demo reads in the documents about a killed worker's tasks, and the figures made from them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import Task
from mtask.demo.display import rate_of
from mtask.demo.watch import Look, outcome_of, rescue_of
from tests import build

KILLED = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return KILLED + timedelta(seconds=seconds)


def run(worker_id: str, status: str, claimed: float, lease: float = 2.5, **more: Any) -> dict[str, Any]:
    return build.run(
        status, at(claimed), at(claimed + lease), run_id=f"{worker_id}/{claimed}", worker_id=worker_id, **more
    )


def document(*runs: dict[str, Any], status: str = "RUNNING", **state: Any) -> dict[str, Any]:
    return build.task("count:a.py", *runs, time=at(-10), queue="demo", state={"status": status, **state})


def test_a_preempted_task_tells_when_its_lease_lapsed_and_who_took_it_how_soon() -> None:
    lost, taken = run("worker-1", "TIMEOUT", -1), run("worker-2", "SUCCESS", 1.53)
    rescue = rescue_of(Task.model_validate(document(lost, taken, status="SUCCESS")), "worker-1", KILLED)
    assert rescue is not None
    assert (rescue.lapse_time, rescue.preempt_time, rescue.preempted_by) == (at(1.5), at(1.53), "worker-2")
    assert (rescue.delay, rescue.status) == (timedelta(milliseconds=30), "SUCCESS")


def test_a_task_whose_lease_has_not_lapsed_yet_waits() -> None:
    rescue = rescue_of(Task.model_validate(document(run("worker-1", "RUNNING", -1))), "worker-1", KILLED)
    assert rescue is not None
    assert (rescue.preempted_by, rescue.delay, rescue.status) == (None, None, "RUNNING")


@pytest.mark.parametrize(
    "runs",
    [
        [run("worker-1", "SUCCESS", -1)],
        [run("worker-2", "TIMEOUT", -1), run("worker-3", "SUCCESS", 2)],
        [run("worker-1", "TIMEOUT", -9), run("worker-2", "SUCCESS", -5)],
    ],
    ids=["finished in time", "another worker's", "lapsed before"],
)
def test_what_the_killed_worker_did_not_hold_is_not_its_task(runs: list[dict[str, Any]]) -> None:
    assert rescue_of(Task.model_validate(document(*runs)), "worker-1", KILLED) is None


def test_outcome_adds_up_what_the_tasks_returned_and_why_they_failed() -> None:
    counted = {"sha256": "ab", "bytes": 3, "lines": 1, "words": 2, "identifiers": {"x": 2}}
    good = document(
        run("worker-1", "TIMEOUT", -1),
        run("worker-2", "SUCCESS", 2, returns=counted),
        status="SUCCESS",
        finish_time=at(2),
    )
    bad = document(run("worker-2", "FAIL", 0, fail_reason="cannot be read: gone"), status="FAIL", finish_time=at(1))
    bad |= {"_id": "count:b.py", "key": "b.py"}

    outcome = outcome_of(iter([good, bad]))

    assert (outcome.totals.hashes, outcome.totals.failures) == ({"a.py": "ab"}, {"b.py": "cannot be read: gone"})
    assert (outcome.totals.bytes, outcome.totals.lines, outcome.totals.words) == (3, 1, 2)
    assert (outcome.runs, outcome.timeouts, outcome.create_time) == (3, 1, at(-10))
    assert outcome.finish_times == [at(1), at(2)]


def test_rate_leaves_out_the_few_that_waited_for_leases() -> None:
    assert rate_of(at(0), [at(second / 10) for second in range(1, 96)] + [at(60)] * 5) == pytest.approx(10)
    assert rate_of(None, []) == 0


def test_look_counts_what_has_begun_and_what_each_worker_has_ended() -> None:
    look = Look()
    look.tasks.update({"INIT": 5, "RUNNING": 3, "SUCCESS": 2, "FAIL": 1})
    look.runs.update({("worker-1", "RUNNING"): 3, ("worker-1", "SUCCESS"): 2, ("worker-1", "FAIL"): 1})
    assert (look.finished, look.begun) == (3, 6)
    assert (look.running("worker-1"), look.ended("worker-1"), look.ended("worker-2")) == (3, 3, 0)
