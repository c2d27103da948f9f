"""Since when a task was due when a run claimed it: what a wait is measured from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask.kernel.document.task import StoredTask
from mtask.kernel.worker.process.counts import due_since
from tests import build

CREATED = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return CREATED + timedelta(seconds=seconds)


def run(status: str, claim: float, **given: Any) -> dict[str, Any]:
    return build.run(status, at(claim), at(claim + 30), run_id=f"r{claim}") | given


def task(*runs: dict[str, Any], **state: Any) -> StoredTask:
    made = {"status": "RUNNING", "next_preempt_time": at(999), **state}
    return StoredTask.model_validate(build.task("n:k", *runs, time=CREATED, state=made))


NOW = run("RUNNING", 100)
PAST = {"past": True}


@pytest.mark.parametrize(
    ("made", "since"),
    [
        pytest.param(task(NOW), 0, id="from its creation"),
        pytest.param(task(NOW, start_time=at(60)), 60, id="from its start_time"),
        pytest.param(task(run("FAIL", 10, fail_time=at(20), retry_time=at(50)), NOW), 50, id="after the retry delay"),
        pytest.param(task(run("CANCELED", 10, fail_time=at(20)), NOW), 20, id="after it was handed back"),
        pytest.param(task(run("TIMEOUT", 10, fail_time=at(90)), NOW), 40, id="from the end of the lapsed lease"),
        pytest.param(task(run("SUCCESS", 10, success_time=at(90)), NOW), 0, id="not from another worker's success"),
        pytest.param(task(run("FAIL", 10, fail_time=at(20), **PAST), NOW), None, id="a retry by hand leaves no time"),
        pytest.param(
            task(run("SUCCESS", 10, success_time=at(20), **PAST), NOW, start_time=at(70)), 70, id="the next round"
        ),
        pytest.param(
            task(run("FAIL", 1, fail_time=at(2), **PAST), run("FAIL", 30, fail_time=at(40)), NOW),
            40,
            id="the second run after a retry by hand",
        ),
        pytest.param(task(NOW, clean_cnt=1), None, id="a publish has dropped the runs"),
    ],
)
def test_a_task_is_due_since(made: StoredTask, since: float | None) -> None:
    assert due_since(made) == (None if since is None else at(since))
