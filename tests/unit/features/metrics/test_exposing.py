"""The text of metrics: it is used again for the same counts of tasks, or for two seconds."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtask.errors import MtaskError
from mtask.features.metrics import prometheus as exposition
from mtask.features.metrics import serving
from mtask.features.metrics.client import FleetMetrics, QueueMetrics
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.worker.process.counts import Tally
from mtask.search.counts import Count
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


@pytest.mark.parametrize(
    ("header", "is_own"),
    [
        ("127.0.0.1:9465", True),
        ("localhost:9000", True),
        ("[::1]:9465", True),
        ("[2001:db8::1]", True),
        ("10.1.2.3:9465", True),
        ("worker-1:9465", True),
        ("metrics.example.org:9465", True),
        ("metrics.example.org", True),
        ("other.example.org:9465", True),
        ("other.example.org:9466", False),
        ("evil.example:9465", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("a:b:c", False),
        ("", False),
    ],
)
def test_port_of_metrics_answers_to_names_that_no_other_site_can_have(header: str, is_own: bool) -> None:
    assert serving.is_own(header, ["metrics.example.org", "other.example.org:9465"]) is is_own


def test_port_of_metrics_refuses_a_page_of_another_site() -> None:
    with serving.serving("127.0.0.1", 0, lambda: b"mtask 1\n", "text/plain") as port:
        url = f"http://127.0.0.1:{port}/metrics"
        assert httpx.get(url, trust_env=False).text == "mtask 1\n"
        rebound = httpx.get(url, headers={"Host": f"evil.example:{port}"}, trust_env=False)
        assert (rebound.status_code, "mtask 1" in rebound.text) == (421, False)


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
