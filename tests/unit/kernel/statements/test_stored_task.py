"""A task as the engine takes it: options that were seen before are taken for good only where they are the same."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from bson import Int64
from pydantic import ValidationError

from mtask.app.middleware import FinishCall
from mtask.kernel.document.options import DEFAULT_OPTION
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.statements.publish import task_document

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _task(**options: Any) -> StoredTask:
    fixed = {
        "_id": "work:1",
        "name": "work",
        "key": "1",
        "queue": "default",
        "params": None,
        "task_option": DEFAULT_OPTION.model_dump() | options,
    }
    return StoredTask.model_validate(task_document(fixed, None, NOW))


@pytest.mark.parametrize("wrong", [True, "1", 1.5, [1], None])
def test_what_equals_good_options_or_comes_near_is_refused_after_them(wrong: object) -> None:
    assert _task(priority=1).task_option.priority == 1
    with pytest.raises(ValidationError, match=r"task_option\.priority"):
        _task(priority=wrong)


@pytest.mark.parametrize("same", [1.0, Int64(1)])
def test_other_drivers_ways_to_write_a_number_are_taken_after_it(same: object) -> None:
    assert _task(priority=1).task_option == _task(priority=same).task_option


def test_an_option_that_is_missing_is_missed_after_complete_ones() -> None:
    complete = _task().model_dump(by_alias=True)
    del complete["task_option"]["retry_scope"]
    with pytest.raises(ValidationError, match="it lacks retry_scope"):
        StoredTask.model_validate(complete)


def test_what_a_handler_does_to_its_options_is_its_own() -> None:
    before, changed = _task(), _task().with_own_options()
    changed.task_option.specific_worker_ids.append("w1")
    assert before.task_option.specific_worker_ids == _task().task_option.specific_worker_ids == []
    named = _task(specific_worker_ids=["w2"]).with_own_options()
    named.task_option.specific_worker_ids.append("w1")
    assert _task(specific_worker_ids=["w2"]).task_option.specific_worker_ids == ["w2"]


def test_what_middleware_does_to_options_at_the_finish_is_its_own_and_nothing_is_copied_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[StoredTask] = []
    copy = StoredTask.with_own_options

    def noting(task: StoredTask) -> StoredTask:
        copies.append(copy(task))
        return copies[-1]

    monkeypatch.setattr(StoredTask, "with_own_options", noting)
    finish = FinishCall(_task(), "run", 1, "w1", RunStatus.SUCCESS, None, None)
    assert finish.stored_task.queue == "default"
    assert copies == []
    finish.task.task_option.specific_worker_ids.append("w1")
    assert finish.task.task_option.specific_worker_ids == ["w1"]
    assert len(copies) == 1
    assert finish.stored_task.task_option.specific_worker_ids == []


def test_options_of_any_size_and_depth_are_taken_or_refused_alike() -> None:
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    assert _task(beside="x" * 100_000).task_option == _task(beside=deep).task_option == DEFAULT_OPTION
