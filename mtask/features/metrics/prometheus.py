"""The metrics in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mtask.features.metrics.client import FleetMetrics
from mtask.kernel.worker.process.counts import BOUNDS, Histogram, Tally

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
#: The slots of a worker by state.
Slots = Mapping[str, Mapping[str, int]]
_BY_PAIR = ("queue", "name")


class _Source(Collector):
    """What is to be exposed, made anew at each scrape."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def text_of(families: Sequence[Metric]) -> bytes:
    """Return metrics in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Source(lambda: families))
    return generate_latest(registry)


class FleetText:
    """Makes the text of each scrape of the metrics of all workers and queues.

    The lines of tasks and queues stay the same until the tasks are counted again. So their text is made once for each
    count: with many queues, they are most of the lines.
    """

    def __init__(self) -> None:
        self._counted: tuple[datetime | None, bytes] = (None, b"")

    def of(self, fleet: FleetMetrics) -> bytes:
        """Return the text. Several threads may call this, with metrics of one database."""
        time, text = self._counted
        if fleet.count_time is None or time != fleet.count_time:
            text = text_of(list(_of_queues(fleet)))
            self._counted = (fleet.count_time, text)
        return text + text_of(list(_of_workers(fleet)))


def of_fleet(fleet: FleetMetrics) -> Iterator[Metric]:
    """Return the metrics of all workers and queues."""
    yield from _of_queues(fleet)
    yield from _of_workers(fleet)


def _of_workers(fleet: FleetMetrics) -> Iterator[Metric]:
    if fleet.count_time is not None:
        yield GaugeMetricFamily(
            "mtask_counts_age_seconds",
            "Time since the tasks were counted for mtask_tasks.",
            value=max(0.0, (fleet.time - fleet.count_time).total_seconds()),
        )
    yield from of_tally(fleet.tally)
    workers = [one.worker for one in fleet.workers]
    slots = {one.worker.worker_id: {"busy": one.busy_cnt, "free": one.free_cnt} for one in fleet.workers}
    yield of_slots(slots)
    by_status = GaugeMetricFamily("mtask_workers", "Live workers by status.", labels=["status"])
    for status in sorted({str(worker.status.value) for worker in workers}):
        by_status.add_metric([status], sum(worker.status.value == status for worker in workers))
    yield by_status
    yield GaugeMetricFamily(
        "mtask_worker_slots",
        "Runs that all live workers can hold at once. Older than mtask_slots, and kept.",
        value=sum(worker.concurrency for worker in workers),
    )
    yield GaugeMetricFamily(
        "mtask_worker_runs",
        "Runs that all live workers hold, as they said last. Older than mtask_slots, and kept.",
        value=sum(worker.running_cnt for worker in workers),
    )


def _of_queues(fleet: FleetMetrics) -> Iterator[Metric]:
    tasks = GaugeMetricFamily(
        "mtask_tasks", "Tasks by queue and status, counted up to a bound.", labels=["queue", "status"]
    )
    bounded = GaugeMetricFamily(
        "mtask_tasks_is_bounded",
        "Whether there may be more tasks than mtask_tasks says.",
        labels=["queue", "status"],
    )
    age = GaugeMetricFamily(
        "mtask_queue_oldest_due_age_seconds",
        "Time for which the oldest due task of a queue has been due; 0: no task is due.",
        labels=["queue"],
    )
    former = GaugeMetricFamily(
        "mtask_oldest_due_seconds", "The former name of mtask_queue_oldest_due_age_seconds, kept.", labels=["queue"]
    )
    for found in fleet.queues:
        for status, count in found.counts.items():
            tasks.add_metric([found.queue, status.value], count.count)
            bounded.add_metric([found.queue, status.value], int(count.is_more))
        seconds = 0.0 if found.oldest_due_age is None else found.oldest_due_age.total_seconds()
        age.add_metric([found.queue], seconds)
        former.add_metric([found.queue], seconds)
    yield from (tasks, bounded, age, former)


def of_tally(tally: Tally) -> Iterator[Metric]:
    """Return the metrics that workers count."""
    runs = CounterMetricFamily(
        "mtask_runs", "Runs that have ended, by the status that was written.", labels=[*_BY_PAIR, "outcome"]
    )
    wait = HistogramMetricFamily(
        "mtask_task_wait_seconds", "Time from when a task was due to its claim.", labels=_BY_PAIR
    )
    run = HistogramMetricFamily(
        "mtask_task_run_seconds", "Time from the begin of a handler to its end.", labels=_BY_PAIR
    )
    for pair, counts in list(tally.pairs.items()):
        for outcome, number in sorted(counts.runs.items()):
            runs.add_metric([pair.queue, pair.name, outcome], number)
        for family, histogram in ((wait, counts.wait), (run, counts.run)):
            family.add_metric([pair.queue, pair.name], _buckets(histogram), histogram.seconds)
    yield from (runs, wait, run)
    yield CounterMetricFamily(
        "mtask_leases_lapsed", "Leases of runs that have lapsed, and that a worker has closed.", tally.leases_lapsed
    )
    yield CounterMetricFamily(
        "mtask_claims_lost",
        "Claims that did not win their task: another worker had it, or it changed.",
        tally.claims_lost,
    )
    lateness = HistogramMetricFamily(
        "mtask_schedule_lateness_seconds", "Time from when a schedule was to fire to when it was fired.", labels=()
    )
    lateness.add_metric((), _buckets(tally.lateness), tally.lateness.seconds)
    yield lateness


def of_slots(slots: Slots) -> Metric:
    """Return the slots of workers."""
    family = GaugeMetricFamily("mtask_slots", "Slots of live workers by state.", labels=["worker", "state"])
    for worker_id, states in slots.items():
        for state, number in states.items():
            family.add_metric([worker_id, state], number)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" if bound % 1 else f"{bound:.1f}" for bound in BOUNDS), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
