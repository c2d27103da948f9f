"""Limits by real worker processes: never exceeded, nearly reached, and no place lost with a worker that is killed."""

from __future__ import annotations

import time
from bisect import bisect_left
from datetime import datetime, timedelta
from typing import Any

import pytest

from mtask import TaskSpec
from mtask.kernel.document.options import TaskOptions
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, Document, eventually
from tests.workers import Stage, runs_of

_KEYS, _STARTS, _WINDOW = 10, 3, timedelta(seconds=3)
_EACH = 15
_AT_ONCE = 5
_DONE = {"task_state.status": "SUCCESS"}
_LEASE_MS = 3000
_LEASE: TaskOptions = {"ping_interval": 1, "worker_timeout": _LEASE_MS / 1000, "retry_delay": 0}


def tasks_of(stage: Stage) -> Any:
    return stage.mongo[stage.database]["tasks"]


def starts_of(stage: Stage, limit_key: str) -> list[datetime]:
    found = tasks_of(stage).find({"task_option.limit_key": limit_key})
    return sorted(run["claim_time"] for document in found for run in runs_of(document))


def lateness_of(document: Document) -> float:
    """Return how long after its start_time a task was claimed, in seconds."""
    late: timedelta = runs_of(document)[0]["claim_time"] - document["task_state"]["start_time"]
    return late.total_seconds()


def most_in_a_window(starts: list[datetime], window: timedelta) -> int:
    return max(bisect_left(starts, start + window) - place for place, start in enumerate(starts))


@pytest.mark.long
def test_ten_groups_at_three_starts_in_three_seconds_with_four_workers(stage: Stage, report: Report) -> None:
    stage.start_all([f"w{n}" for n in range(4)])
    stage.client.limit("default", key_rate=(_STARTS, _WINDOW))
    begun = time.monotonic()
    stage.client.publish_many(
        TaskSpec("noop", key=f"{key}-{n}", limit_key=f"group {key}") for n in range(_EACH) for key in range(_KEYS)
    )
    # The first three of each at once, then three in each window.
    windows = _EACH / _STARTS - 1
    shortest = windows * _WINDOW.total_seconds()
    probes = 0

    def is_done() -> bool:
        nonlocal probes
        stage.client.publish("noop", key=f"probe-{probes}", delay=0.2)
        probes += 1
        of_keys = {"task_option.limit_key": {"$ne": None}, **_DONE}
        return bool(tasks_of(stage).count_documents(of_keys) == _EACH * _KEYS)

    eventually(is_done, 2 * shortest + PATIENCE, "all done", interval=0.2)
    eventually(lambda: stage.client.count(status="SUCCESS") == _EACH * _KEYS + probes, PATIENCE, "the probes, too")
    all_starts = [starts_of(stage, f"group {key}") for key in range(_KEYS)]
    assert [most_in_a_window(starts, _WINDOW) for starts in all_starts] == [_STARTS] * _KEYS
    spans = [(starts[-1] - starts[0]).total_seconds() for starts in all_starts]
    report("the last start of a group after its first, s; shortest possible 12", round(max(spans), 2))
    report("all done after, s", round(time.monotonic() - begun, 2))
    # How late this machine is with what nothing limits: each window may begin so much later.
    usual = max(lateness_of(probe) for probe in tasks_of(stage).find({"task_option.limit_key": None}))
    report("an unlimited task is late by, s at most", round(usual, 3))
    assert max(spans) <= shortest / 0.9 + windows * usual


def test_five_at_once_with_four_workers_of_which_one_is_killed(stage: Stage, report: Report) -> None:
    started = stage.start_all([f"w{n}" for n in range(4)])
    stage.client.limit("default", concurrency=_AT_ONCE)
    stage.client.publish_many(TaskSpec("sleep", {"seconds": 0.4}, key=str(n), **_LEASE) for n in range(60))

    def running() -> dict[str, int]:
        held: dict[str, int] = {}
        for document in tasks_of(stage).find({"task_state.status": "RUNNING"}):
            for run in runs_of(document):
                if run["status"] == "RUNNING":
                    held[run["worker_id"]] = held.get(run["worker_id"], 0) + 1
        return held

    eventually(lambda: sum(running().values()) == _AT_ONCE, PATIENCE, "five run")
    busiest = max(held := running(), key=lambda worker_id: held[worker_id])
    next(worker for worker in started if worker.worker_id == busiest).kill()
    eventually(lambda: stage.client.count(status="SUCCESS") == 60, PATIENCE, "all done")
    # From the documents, by the server's clock: at each claim, how many leases held.
    runs = [run for document in tasks_of(stage).find() for run in runs_of(document)]
    for run in runs:
        ended = run.get("success_time") or run.get("fail_time")
        run["end"] = ended if run["status"] != "TIMEOUT" else run["ping_expire_time"]
    claims = sorted(run["claim_time"] for run in runs)
    most = max(sum(run["claim_time"] <= at < run["end"] for run in runs) for at in claims)
    report("most at once", most)
    assert most == _AT_ONCE
    lapses = [run["ping_expire_time"] for run in runs if run["status"] == "TIMEOUT"]
    assert lapses, "it was killed in between"
    full_again = min(
        at for at in claims if at >= max(lapses) and sum(r["claim_time"] <= at < r["end"] for r in runs) == _AT_ONCE
    )
    report("five again after the last lapse, ms", round((full_again - max(lapses)).total_seconds() * 1000))
    assert full_again - max(lapses) <= timedelta(milliseconds=_LEASE_MS)
    unused = {"_id": '["default"]', "running": []}
    eventually(lambda: stage.mongo[stage.database]["places"].find_one(unused), PATIENCE, "no place is kept")
