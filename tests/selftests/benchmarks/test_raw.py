"""The raw ceiling does the engine's own work: whole documents; and the instants of both are matched by key."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks.cases.payload import text_of
from benchmarks.measuring import raw
from benchmarks.measuring.app import Starts, app, count_in, first_starts, moments_in, moments_of, starts_in
from benchmarks.measuring.arrivals import latencies
from benchmarks.measuring.bare import parts_of
from benchmarks.measuring.fleet import Claims
from benchmarks.measuring.server import ids_under
from mtask.database.schema import task_schema
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import StoredTask

NOW = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


def test_bare_document_is_a_complete_task_that_is_due() -> None:
    task = StoredTask.model_validate(raw.document("noop", "run/1", NOW, {"to": "a"}))
    assert task.status is TaskStatus.INIT
    assert task.task_state.next_preempt_time == NOW
    assert set(raw.document("noop", "run/1", NOW)) >= set(task_schema()["required"])


def test_delayed_document_waits_for_its_time() -> None:
    task = StoredTask.model_validate(raw.document("noop", "run/1", NOW, delay=timedelta(days=1)))
    assert task.task_state.next_preempt_time == NOW + timedelta(days=1)
    assert task.task_state.start_time == NOW + timedelta(days=1)


def test_finished_document_is_a_task_that_nobody_takes() -> None:
    task = StoredTask.model_validate(raw.finished_document("noop", "finished/1", NOW))
    assert task.status is TaskStatus.SUCCESS
    assert task.task_state.next_preempt_time is None
    assert len(task.runs) == 1


def test_options_of_a_bare_document_are_those_given_and_the_defaults() -> None:
    option = raw.document("hold", "run/1", NOW, options={"worker_timeout_ms": 20_000, "ping_interval_ms": 10_000})
    assert option["task_option"]["worker_timeout_ms"] == 20_000
    assert option["task_option"]["max_unexpected_retries"] == 3


def test_every_name_that_is_laid_in_has_a_handler() -> None:
    plain = {"noop", "echo", "hold", "note", "note_hold"}
    assert set(app.handlers) == {*plain, "spin", "sync_noop", "sync_hold", "sync_note"}
    assert not app.handlers["sync_noop"].is_async
    assert app.handlers["noop"].is_async


def test_label_is_told_from_one_that_begins_with_it() -> None:
    first, behind = ids_under("noop", "run1")
    assert first <= raw.document("noop", "run1/0000003", NOW)["_id"] < behind
    for other in ("run10/0000003", "run0/0000003", "run1"):
        assert not first <= raw.document("noop", other, NOW)["_id"] < behind


def test_first_start_counts_where_a_task_ran_twice_and_a_line_in_the_making_does_not() -> None:
    assert first_starts("a/1 3.5\na/2 4.25\na/1 3.0\na/3 5.") == {"a/1": 3.0, "a/2": 4.25}
    assert first_starts("") == {}


def test_moments_are_those_of_all_starts_in_order() -> None:
    assert moments_of("a/1 3.5\na/2 4.25\na/1 3.0\na/3 5.") == [3.0, 3.5, 4.25]
    assert moments_of("") == []


def test_noted_starts_are_read_again(tmp_path: Path) -> None:
    assert starts_in(tmp_path) == {}
    assert moments_in(tmp_path) == []
    assert count_in(tmp_path) == 0
    starts = Starts(tmp_path)
    starts.add("run/1", 1.25)
    starts.add("run/2", 2.5)
    assert starts_in(tmp_path) == {"run/1": 1.25, "run/2": 2.5}
    assert moments_in(tmp_path) == [1.25, 2.5]
    assert count_in(tmp_path) == 2


def test_latency_is_from_the_call_to_the_start_in_ms() -> None:
    found = latencies({"a": 10.0, "b": 10.5, "c": 11.0}, {"b": 10.504, "a": 10.002})
    assert found[:2] == pytest.approx([2.0, 4.0])
    assert math.isnan(found[2])


def test_claims_of_a_measurement_are_those_since_it_began() -> None:
    assert Claims(30, 5) - Claims(10, 4) == Claims(20, 1)
    assert Claims(20, 1).attempted == 21


def test_payload_has_its_size_and_differs_from_task_to_task() -> None:
    assert len(text_of(1, 10_241)) == 10_241
    assert text_of(1, 64) == text_of(1, 64)
    assert text_of(1, 64) != text_of(2, 64)


def test_processes_of_the_bare_loop_have_each_task_once_in_parts_of_about_one_size() -> None:
    ids = [f"noop:run/{number:07}" for number in range(4_000)]
    parts = parts_of(ids, 4)
    assert sorted(task_id for part in parts for task_id in part) == ids
    assert all(800 < len(part) < 1_200 for part in parts)
