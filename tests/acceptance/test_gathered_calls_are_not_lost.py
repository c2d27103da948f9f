"""Calls under one key gather: few runs, the last params, no payload lost, though clocks are wrong and workers die."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from mtask.kernel.document.options import TaskOptions
from tests import faketime
from tests.acceptance.conftest import Report
from tests.mongo import eventually
from tests.workers import ROOT, Stage, WorkerProcess

APP = "tests.acceptance.gathering_app:app"
#: A short lease may lapse several times on a slow machine. A list that has used up its tries would be given up.
LEASE: TaskOptions = {
    "ping_interval": 0.3, "worker_timeout": 1, "retry_delay": 0, "max_retries": -1,
}  # fmt: skip
QUIET, MOST, LASTS = 0.3, 1.0, 2.0

#: Publishes every n-th number at its time, and prints when each call began and ended, by the clock that is never wrong.
PUBLISHER = """
import json, select, sys, time
from mtask import Client

uri, database, begin, first, step, count, lasts = sys.argv[1:]
begin, first, step, count, lasts = float(begin), int(first), int(step), int(count), float(lasts)
with Client(uri, database=database) as client:
    client.server_time()
    made = []
    for number in range(first, count, step):
        select.select([], [], [], max(0, begin + number * lasts / count - time.monotonic()))
        called = time.monotonic()
        client.publish("index", {"number": number}, key="k", debounce=QUIET, max_wait=MOST)
        made.append((number, called, time.monotonic()))
print(json.dumps({"clock": time.time(), "calls": made}))
""".replace("QUIET", str(QUIET)).replace("MOST", str(MOST))


def start(stage: Stage, worker_id: str) -> WorkerProcess:
    worker = stage.launch(worker_id, app=APP)
    stage.wait_running(worker)
    return worker


def tasks_of(stage: Stage) -> Any:
    return stage.mongo[stage.database]["tasks"]


def noted(stage: Stage, event: str) -> list[dict[str, Any]]:
    """Return what handlers noted, in the order of time."""
    entries = (json.loads(line) for line in stage.events.path.read_text().splitlines())
    return sorted((entry for entry in entries if entry["event"] == event), key=lambda entry: entry["monotonic"])


def at_rest(stage: Stage, task_id: str) -> dict[str, Any]:
    """Wait until the task has ended, and return its document."""

    is_final = {"task_state.status": {"$in": ["SUCCESS", "FAIL"]}}
    ended: Any = eventually(lambda: tasks_of(stage).find_one({"_id": task_id, **is_final}), 60, f"{task_id} at rest")
    assert "again" not in ended
    return dict(ended)


def test_hundreds_of_calls_in_two_seconds_are_few_runs_and_the_last_params_win(stage: Stage, report: Report) -> None:
    start(stage, "A")
    count, offsets = 300, (timedelta(minutes=-10), timedelta(0), timedelta(minutes=10), timedelta(hours=-3))
    begin = time.monotonic() + 4

    def publish(place: int) -> Any:
        numbers = [str(each) for each in (begin, place, len(offsets), count, LASTS)]
        arguments = [sys.executable, "-c", PUBLISHER, stage.uri, stage.database, *numbers]
        return json.loads(faketime.run(arguments, offsets[place], cwd=ROOT))

    with ThreadPoolExecutor(len(offsets)) as pool:
        printed = list(pool.map(publish, range(len(offsets))))
    for told, offset in zip(printed, offsets, strict=True):
        assert abs(told["clock"] - time.time() - offset.total_seconds()) < 60, "its clock is wrong as intended"
    calls = {number: (called, returned) for told in printed for number, called, returned in told["calls"]}
    assert len(calls) == count

    document = at_rest(stage, "index:k")
    runs = noted(stage, "end")
    took = max(returned for _, returned in calls.values()) - min(called for called, _ in calls.values())
    report(f"runs for {count} calls", len(runs))
    report("the calls took, s", round(took, 1))
    # A round takes QUIET at least, and MOST from its first call at most. The rest is a worker's time to start it.
    assert 2 <= len(runs) <= took / QUIET + 1
    last = runs[-1]["number"]
    assert document["params"] == {"number": last}
    # The params are those of a call that no other call came after.
    assert all(called < calls[last][1] for called, _ in calls.values())
    # Each call was followed by a run with its own params, or with those of a call that was not before it.
    for called, _ in calls.values():
        assert any(run["monotonic"] >= called and calls[run["number"]][1] >= called for run in runs)
    waited = [min(run["monotonic"] for run in noted(stage, "start") if run["monotonic"] > called) - returned
              for called, returned in calls.values()]  # fmt: skip
    report("longest wait of a call, s", round(max(waited), 2))
    assert max(waited) < MOST + 3


def called(publish: Callable[[int], Any], numbers: range, threads: int) -> dict[int, tuple[float, float]]:
    """Let threads publish these numbers; return when each call began and ended."""
    times: dict[int, tuple[float, float]] = {}
    left, lock = iter(numbers), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            begun = time.monotonic()
            publish(number)
            times[number] = (begun, time.monotonic())

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run) for _ in range(threads)]:
            future.result()
    return times


def test_no_payload_is_lost_though_a_worker_is_killed(stage: Stage, report: Report) -> None:
    killed = start(stage, "A")
    start(stage, "B")

    def publish(number: int) -> None:
        stage.client.publish("digest", {"number": number}, key="k", collect=True, **LEASE)
        if number % 50 == 25:  # in the middle of a run of this worker, if it has one
            holder = tasks_of(stage).find_one({"task_state.worker_states": {"$elemMatch": {
                "worker_id": "A", "status": "RUNNING"}}})  # fmt: skip
            if holder is not None and killed.is_alive:
                killed.kill()

    with stage.client.events(name="digest") as events:
        calls = called(publish, range(200), 20)
        document = at_rest(stage, "digest:k")
        while killed.is_alive:
            stage.client.publish("digest", {"number": 1000}, key="k", collect=True, **LEASE)
            run = next(
                (run for run in noted(stage, "start") if run["worker_id"] == "A" and 1000 in run["numbers"]), None
            )
            if run is not None:
                killed.kill()
            document = at_rest(stage, "digest:k")
        assert document["task_state"]["status"] == "SUCCESS"
        # Only the database knows which runs count. A worker may die, or lose its lease on a slow machine, when the
        # handler has ended and the result is not stored. Then the list is tried again.
        last = document["task_state"]["worker_states"][-1]["run_id"]
        succeeded: set[str | None] = set()
        while last not in succeeded:
            event = next(events)
            succeeded |= {event.run_id} if event.kind == "succeeded" else set()
    done = Counter(number for run in noted(stage, "end") if run["run_id"] in succeeded for number in run["numbers"])
    done.pop(1000, None)
    assert done == Counter(calls.keys()), "each payload was in one run that succeeded"
    report("runs for 200 collected calls", len(noted(stage, "end")))


@pytest.mark.parametrize("threads", [1, 8])
def test_every_publish_is_followed_by_a_run_and_none_by_two(stage: Stage, report: Report, threads: int) -> None:
    start(stage, "A")
    start(stage, "B")

    def publish(number: int) -> None:
        stage.client.publish("index", {"number": number}, key="k", if_running="again")

    calls = called(publish, range(150), threads)
    at_rest(stage, "index:k")
    starts, ends = noted(stage, "start"), noted(stage, "end")
    assert len(starts) == len(ends) <= len(calls)
    for begun, _ in calls.values():
        assert any(run["monotonic"] >= begun and calls[run["number"]][1] >= begun for run in starts)
    for earlier, later in zip(ends, starts[1:], strict=False):
        assert earlier["monotonic"] <= later["monotonic"], "never two at once"
    assert len({run["number"] for run in starts}) == len(starts), "no call has two runs"
    report(f"runs for 150 calls of {threads} threads during runs", len(starts))


def test_a_window_lets_one_report_through(stage: Stage) -> None:
    start(stage, "A")

    def publish(number: int) -> bool:
        published = stage.client.publish("index", {"number": number}, key="k", window=2)
        return published.created or published.updated

    begun, taken = time.monotonic(), 0
    while time.monotonic() < begun + 5:
        taken += publish(taken)
        time.sleep(0.02)
    at_rest(stage, "index:k")
    assert len(noted(stage, "end")) == taken
    assert 2 <= taken <= 3
