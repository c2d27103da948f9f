"""An idle worker issues less than one command a second, and takes under 1 % of one core."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

import mtask
from mtask.local import ReplicaSet
from tests.acceptance.conftest import Report
from tests.mongo import Client, eventually
from tests.workers import Stage, open_stage

pytestmark = pytest.mark.usefixtures("nothing_is_dropped")

#: A multiple of every period of the worker, so that where it begins makes no difference.
WINDOW = 20.0
#: What a new worker does once: first scans, connections, its peers.
SETTLING = 6.0
APP = "tests.acceptance.app:app"
#: What a loop of a million empty turns takes of a usual machine's CPU, in seconds.
_USUAL = 0.025


def commands(mongo: Client) -> Counter[str]:
    """Return how many commands of each kind the server has ever taken, from anyone, hellos included."""
    counted = mongo.admin.command("serverStatus")["metrics"]["commands"]
    return Counter({name: entry["total"] for name, entry in counted.items() if isinstance(entry, dict)})


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slowness() -> float:
    """Return how many times slower than a usual one this machine is now, 1 at least: seconds of CPU are no measure."""
    began = time.process_time()
    for _ in range(1_000_000):
        pass
    return max(1.0, (time.process_time() - began) / _USUAL)


def watched(mongo: Client, seconds: float) -> tuple[Counter[str], float]:
    """Return what the server took in a window without a call from this test but the two that count, and its length."""
    begin, before = time.monotonic(), commands(mongo)
    time.sleep(seconds)
    after = commands(mongo)
    took = time.monotonic() - begin
    difference = after - before
    difference["serverStatus"] -= 1  # the first count saw itself under way, the second saw the first done
    return +difference, took


def test_idle_worker_issues_less_than_one_command_a_second_and_takes_under_a_hundredth_of_a_core(
    single_set: ReplicaSet, tmp_path: Path, report: Report
) -> None:
    counting_client = Client(
        f"mongodb://{single_set.nodes[0].address}",
        directConnection=True,
        # It asks for nothing by itself.
        serverMonitoringMode="poll",
        heartbeatFrequencyMS=3_600_000,
    )
    with open_stage(single_set.uri, "idle", tmp_path) as stage, counting_client as counting:
        stage.client.close()
        stage.mongo.close()
        worker = stage.launch("idle", app=APP)
        workers = counting["idle"]["workers"]
        eventually(lambda: workers.find_one({"_id": "idle", "status": "running"}), 40, "the worker running")
        time.sleep(SETTLING)
        cpu_before = cpu_seconds(worker.pid)
        seen, took = watched(counting, WINDOW)
        cpu = cpu_seconds(worker.pid) - cpu_before

        assert worker.is_alive
        rate = sum(seen.values()) / took
        report("commands a second, all that the server took", round(rate, 3))
        report("of these the hellos of the driver's monitors", round(seen["hello"] / took, 3))
        report("commands in the window", dict(sorted(seen.items())))
        report("CPU, % of one core", round(100 * cpu / took, 2))
        assert rate < 1.0, seen
        assert cpu / took < 0.01 * slowness()
        assert_still_there(stage, single_set)


def assert_still_there(stage: Stage, server: ReplicaSet) -> None:
    """The idle worker is at once there for a task."""
    with mtask.Client(server.uri, database=stage.database) as client:
        client.publish("noop", key="wakes")
        assert client.wait("noop", "wakes", timeout=30).status == "SUCCESS"
