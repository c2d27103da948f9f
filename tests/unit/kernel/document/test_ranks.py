"""The rank of a task: interrupted ones first, then the higher priority, then the earlier next_preempt_time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask.kernel.document import rules
from mtask.kernel.document.task import StoredTask
from tests import build

Document = dict[str, Any]
NOW = datetime(2024, 1, 1, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def task(key: str, due: float, *runs: Document, priority: int = 0) -> StoredTask:
    """Return a task that was due so many seconds ago."""
    document = build.task(f"noop:{key}", *runs, option={"priority": priority}, state={"next_preempt_time": ago(due)})
    return StoredTask.model_validate(document)


def run(number: int, status: str, claimed: float, ended: float, **given: Any) -> Document:
    """Return a run that was claimed and that ended, or whose lease ended, so many seconds ago."""
    ends = {} if status == "RUNNING" else {"fail_time": ago(ended)}
    return build.run(status, ago(claimed), ago(ended), number, **ends, **given)


def order(*tasks: StoredTask) -> str:
    """Return the keys of the tasks, the best rank first. Each key is a letter."""
    return "".join(each.key for each in sorted(tasks, key=lambda each: rules.rank(each, NOW)))


def test_tasks_go_by_their_stored_times_whenever_they_are_seen() -> None:
    assert order(task("c", 1), task("a", 9), task("b", 5)) == "abc"


def test_higher_priority_goes_before_age() -> None:
    assert order(task("b", 100), task("a", 1, priority=1)) == "ab"


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([run(1, "RUNNING", 9, 2)], id="lapsed"),
        pytest.param([run(1, "TIMEOUT", 9, 2)], id="lapsed and closed"),
        pytest.param([run(1, "CANCELED", 9, 2)], id="handed back"),
        pytest.param([run(1, "FAIL", 20, 15, retry_time=ago(14)), run(2, "TIMEOUT", 9, 2)], id="after a failure"),
    ],
)
def test_interrupted_task_goes_before_any_priority(runs: list[Document]) -> None:
    assert order(task("b", 100, priority=99), task("a", 1, *runs)) == "ab"


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([run(1, "FAIL", 9, 2, retry_time=ago(1))], id="failed"),
        pytest.param([run(1, "CANCELED", 9, 2, retry_time=ago(1))], id="asked to be tried again"),
        pytest.param([run(1, "TIMEOUT", 9, 8), run(2, "FAIL", 7, 2, retry_time=ago(1))], id="had its turn since"),
        pytest.param([run(1, "CANCELED", 9, 2, past=True)], id="of an earlier round"),
        pytest.param([run(1, "RUNNING", 9, -5)], id="runs"),
    ],
)
def test_task_that_was_not_interrupted_has_no_precedence(runs: list[Document]) -> None:
    assert order(task("b", 1, *runs), task("a", 1, priority=1)) == "ab"
