"""Metrics: exact over kills, stops and restarts; and a hundred scrapes a minute cost next to nothing."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask import Client
from mtask.database import setup
from mtask.features.metrics import prometheus as exposition
from mtask.features.metrics.client import FleetMetrics
from mtask.kernel.driver.stores import SyncStore
from mtask.local import ReplicaSet
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, eventually
from tests.mongo import Client as Mongo
from tests.spread import tasks_of_all_kinds
from tests.workers import Stage, runs_of

LEASE: dict[str, Any] = {"ping_interval": 0.5, "worker_timeout": 1.5, "retry_delay": 0}
Series = tuple[str, ...]


class Prometheus:
    """Reads counters as Prometheus does: a value below the one before is a restart, and counts from 0."""

    def __init__(self) -> None:
        self.increase: Counter[Series] = Counter()
        self._last: dict[Series, float] = {}

    def scrape(self, metrics: FleetMetrics) -> dict[Series, float]:
        """Read all counters; return their values."""
        found = dict(counters(metrics))
        for series, value in found.items():
            before = self._last.get(series, 0.0)
            self.increase[series] += int(value - before if value >= before else value)
        for series, before in self._last.items():
            assert found.get(series, 0.0) >= before, f"{series} has fallen"
        self._last = found
        return found


def counters(metrics: FleetMetrics) -> Iterator[tuple[Series, float]]:
    for family in exposition.of_fleet(metrics):
        for sample in family.samples:
            if sample.name.endswith(("_total", "_count")):
                yield (sample.name, *sample.labels.values()), sample.value


def read(stage: Stage) -> FleetMetrics:
    """Read the metrics, with counts of tasks that are made now."""
    stage.mongo[stage.database]["metrics"].update_one({"_id": "counts"}, {"$unset": {"fresh_until": 1}})
    return stage.client.metrics()


def documented(stage: Stage) -> Counter[Series]:
    """Return what the documents tell of all ended runs."""
    return Counter(
        ("mtask_runs_total", task["queue"], task["name"], run["status"])
        for task in stage.mongo[stage.database]["tasks"].find()
        for run in runs_of(task)
    )


def stop(stage: Stage, worker_id: str) -> None:
    [worker] = [each for each in stage.started if each.worker_id == worker_id]
    worker.terminate()
    assert worker.wait() == 0


def test_counters_of_the_fleet_are_exact_while_workers_are_killed_stopped_and_replaced(stage: Stage) -> None:
    prometheus, client = Prometheus(), stage.client
    workers = {worker.worker_id: worker for worker in stage.start_all("AB")}
    for number in range(6):
        client.publish("hold", {"gate": stage.gate()}, key=str(number), **LEASE)
    holders = [stage.wait_run(f"hold:{number}")["worker_id"] for number in range(6)]
    prometheus.scrape(read(stage))
    stage.kill(workers[holders[0]])  # it holds some runs, and has ended none
    left = "B" if holders[0] == "A" else "A"
    for number in range(6):
        stage.wait_run(f"hold:{number}", left)
        client.update_option("hold", str(number), worker_timeout=60)
    stage.open_gate()
    for number in range(20):
        client.publish("noop", key=str(number))
    client.publish("fail_times", {"times": 2}, key="k", retry_delay=0)
    client.publish("retry_until", {"attempt": 3}, key="k")
    client.publish("fail", key="k", max_retries=0)
    client.publish("sleep", {"seconds": 600.0}, key="late", run_timeout=0.1, max_retries=0)
    wait_all(stage, 6 + 20 + 4)
    stop(stage, left)
    found = prometheus.scrape(read(stage))
    truth = documented(stage)
    assert truth["mtask_runs_total", "default", "hold", "TIMEOUT"] == holders.count(holders[0])
    assert {series: value for series, value in found.items() if series[0] == "mtask_runs_total"} == truth
    assert found["mtask_leases_lapsed_total",] == holders.count(holders[0])
    assert found["mtask_task_run_seconds_count", "default", "noop"] == 20

    # Their successor folds what they have left, and runs its handlers in executors.
    stage.start("C", "--isolation", "process", "--executors", "1")
    totals = stage.mongo[stage.database]["metrics"]
    eventually(lambda: totals.count_documents({"_id": "totals"}), PATIENCE, "folded")
    prometheus.scrape(read(stage))
    for number in range(40):
        client.publish("noop_plain", key=str(number))
    wait_all(stage, 6 + 20 + 4 + 40)
    before = Counter(prometheus.increase)
    stop(stage, "C")
    found = prometheus.scrape(read(stage))
    assert prometheus.increase["mtask_runs_total", "default", "noop_plain", "SUCCESS"] == 40
    assert found["mtask_task_run_seconds_count", "default", "noop_plain"] == 40
    assert {series: value for series, value in found.items() if series[0] == "mtask_runs_total"} == documented(stage)
    assert prometheus.increase.total() - before.total() == 3 * 40 + claims_lost(prometheus, before)
    assert prometheus.increase == found, "no restart was ever seen"


def claims_lost(prometheus: Prometheus, before: Counter[Series]) -> int:
    lost = ("mtask_claims_lost_total",)
    return prometheus.increase[lost] - before[lost]


def wait_all(stage: Stage, count: int) -> None:
    ended = {"task_state.status": {"$in": ["SUCCESS", "FAIL", "CANCELED"]}}
    tasks = stage.mongo[stage.database]["tasks"]
    eventually(lambda: tasks.count_documents(ended) == count, PATIENCE, f"{count} tasks ended")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
def test_a_hundred_scrapes_a_minute_at_many_tasks(single_set: ReplicaSet, report: Report) -> None:
    """With MTASK_TEST_TASKS tasks, 200,000 by default; half a minute, so fifty scrapes of a rate of a hundred."""
    wanted, scrapes, pause = int(os.environ.get("MTASK_TEST_TASKS", "200000")), 50, 0.6
    with Mongo(single_set.uri, tz_aware=True) as mongo, Client(single_set.uri, database="scraped") as client:
        store = SyncStore(mongo, "scraped")
        store.run(setup.ensure())
        fill(store, wanted)
        pid = single_set.nodes[0].pid() or 0
        client.metrics()
        idle = idle_share(pid, scrapes * pause)
        examined, cpu = examined_documents(mongo), cpu_seconds(pid)
        own, began = time.process_time(), time.monotonic()
        counted = set()
        for number in range(scrapes):
            metrics = client.metrics()
            exposition.text_of(list(exposition.of_fleet(metrics)))
            counted.add(metrics.count_time)
            time.sleep(max(0.0, began + (number + 1) * pause - time.monotonic()))
        took = time.monotonic() - began
        share = (cpu_seconds(pid) - cpu) / took
        report("tasks", wanted)
        report("scrapes, counts of all tasks", (scrapes, len(counted)))
        report("CPU of mongod, % of one core", round(100 * share, 2))
        report("the same without scrapes", round(100 * idle, 2))
        report("CPU of the scraper, % of one core", round(100 * (time.process_time() - own) / took, 2))
        report("documents examined", examined_documents(mongo) - examined)
        assert len(counted) <= took / 2 + 2
        bound = len(counted) * 25_000 + scrapes * 100
        assert examined_documents(mongo) - examined < bound, "of tasks only those that are RUNNING or WAITING"


def idle_share(pid: int, seconds: float) -> float:
    """Return the share of a core that a mongod takes while nobody asks it anything, once it has written what it got."""
    shares = [1.0]
    while len(shares) < 10 and shares[-1] > 0.02:
        before = cpu_seconds(pid)
        time.sleep(seconds)
        shares.append((cpu_seconds(pid) - before) / seconds)
    return shares[-1]


def fill(store: SyncStore, wanted: int) -> None:
    tasks = list(tasks_of_all_kinds())
    made = 0
    while made < wanted:
        copies = [{**task, "_id": f"{task['_id']}-{made}", "key": f"{task['key']}-{made}"} for task in tasks]
        store.tasks.insert_many(copies[: wanted - made], ordered=False, bypass_document_validation=True)
        made += len(copies)


def examined_documents(mongo: Mongo) -> int:
    found: int = mongo.admin.command("serverStatus")["metrics"]["queryExecutor"]["scannedObjects"]
    return found


def test_a_worker_serves_its_own_metrics(stage: Stage) -> None:
    from urllib.request import urlopen

    worker = stage.launch("A", "--metrics-port", "0")
    stage.wait_running(worker)
    stage.client.publish("noop", key="k")
    stage.wait_status("noop:k", "SUCCESS")
    eventually(lambda: "metrics served" in worker.log, PATIENCE, "served")
    port = worker.log.partition("metrics served")[2].partition("port=")[2].split()[0]

    def counted() -> bool:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
        assert 'mtask_slots{state="free",worker="A"}' in text
        assert "mtask_tasks{" not in text
        return 'mtask_runs_total{name="noop",outcome="SUCCESS",queue="default"} 1.0' in text

    eventually(counted, PATIENCE, "counted, though nothing is stored yet")
    assert stage.mongo[stage.database]["metrics"].count_documents({"kind": "worker"}) <= 1
    refused = stage.launch("B", "--metrics-port", port)
    assert refused.wait() == 2
    assert "in use" in refused.log
    assert timedelta(0) <= stage.client.metrics().time - stage.server_now() + timedelta(minutes=1)
