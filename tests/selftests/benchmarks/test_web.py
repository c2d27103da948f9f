"""The benchmark of the web process: its collection holds real tasks, and its times are those of the right addresses."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.cases.web import FILTERS
from benchmarks.measuring.server import Scratch
from benchmarks.measuring.variety import documents
from benchmarks.measuring.web import Asked
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import StoredTask
from tests.integration.web.test_bounds import on_page, query_of

NOW = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


def test_tasks_of_a_large_collection_are_valid_and_of_all_kinds() -> None:
    scratch = cast(Scratch, SimpleNamespace(now=NOW))
    made = [StoredTask.model_validate(each) for first in range(4) for each in documents(scratch, first, 900, 400)]
    assert len({task.id for task in made}) == 1_300
    statuses = [task.status for task in made]
    assert [statuses.count(s) for s in (TaskStatus.SUCCESS, TaskStatus.FAIL, TaskStatus.INIT)] == [882, 18, 400]
    assert len({task.queue for task in made}) == 70
    assert len({(task.queue, task.name) for task in made}) == 630, "each name in each queue"
    finished = [task.task_state.finish_time for task in made if task.status.is_final]
    assert len(set(finished)) == 3, "many of one instant"
    assert all(task.lookups["user_id"] == [task.params["user"]["id"]] for task in made)


def test_the_page_is_asked_for_what_the_api_is_asked_for() -> None:
    for of_api, of_page in FILTERS.items():
        criteria: dict[str, Any] = {}
        for pair in filter(None, of_api.split("&")):
            name, _, value = pair.partition("=")
            criteria.setdefault(name, []).append(value.replace("%2F", "/"))
        single = {name: values[0] if len(values) == 1 else values for name, values in criteria.items()}
        assert query_of(on_page(single)) == of_page


def test_the_slowest_address_is_that_with_the_greatest_percentile() -> None:
    asked = Asked({"/a": [1.0] * 99 + [50.0], "/b": [2.0, 3.0], "/c": [1.0]})
    assert asked.slowest()[0] == "/b"
    assert asked.count == 103
    assert sorted(asked.of(["/b", "/c", "/d"])) == [1.0, 2.0, 3.0]
