"""The text of metrics: it is used again for the same counts of tasks, or for two seconds."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtask.client.exposing import exposition, serving
from mtask.client.reading.metrics import FleetMetrics, QueueMetrics
from mtask.errors import MtaskError
from mtask.model.metrics.tally import Tally
from mtask.model.status import TaskStatus
from mtask.store.lists.counting import Count
from tests.mongo import eventually

NOW = datetime(2030, 1, 1, tzinfo=UTC)
Sample = tuple[str, tuple[tuple[str, str], ...]]


def fleet(count_time: datetime | None, count: int) -> FleetMetrics:
    queue = QueueMetrics("mail", {TaskStatus.INIT: Count(count)}, timedelta(seconds=count))
    return FleetMetrics(NOW, Tally(), [], [] if count_time is None else [queue], count_time)


def parsed(text: bytes) -> dict[Sample, float]:
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in found, f"{series} comes twice"
            found[series] = sample.value
    return found


def whole(metrics: FleetMetrics) -> dict[Sample, float]:
    return parsed(exposition.text_of(list(exposition.of_fleet(metrics))))


def test_text_of_one_count_is_made_once_and_the_rest_anew() -> None:
    text_of = exposition.FleetText()
    first = fleet(NOW - timedelta(seconds=3), 5)
    assert parsed(text_of.of(first)) == whole(first)
    later = replace(first, time=NOW + timedelta(seconds=9), tally=Tally())
    later.tally.of("mail", "send").runs["SUCCESS"] = 7
    found = parsed(text_of.of(later))
    assert found == whole(later)
    assert found["mtask_counts_age_seconds", ()] == 12
    recounted = fleet(NOW + timedelta(seconds=60), 6)
    assert parsed(text_of.of(recounted)) == whole(recounted)


def test_tasks_that_are_not_counted_yet_leave_no_text_behind() -> None:
    text_of = exposition.FleetText()
    uncounted = fleet(None, 0)
    assert parsed(text_of.of(uncounted)) == whole(uncounted)
    counted = fleet(NOW, 4)
    assert parsed(text_of.of(counted)) == whole(counted)
    assert parsed(text_of.of(uncounted)) == whole(uncounted)


def test_answer_is_kept_for_two_seconds_and_a_failure_is_not() -> None:
    made = iter([b"first", b"second"])
    kept = serving.Kept(lambda: next(made))
    assert [kept(), kept()] == [b"first", b"first"]
    eventually(lambda: kept() == b"second", 20, "two seconds have passed")

    def fail() -> bytes:
        raise MtaskError("away")

    broken = serving.Kept(fail)
    for _ in range(2):
        with pytest.raises(MtaskError):
            broken()
