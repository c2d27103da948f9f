"""What a task costs: round trips and documents examined. They are the same on a slow machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pymongo import MongoClient

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Counters
from mtask.local import ReplicaSet
from tests.acceptance.conftest import Report
from tests.mongo import Client, Document, eventually
from tests.workers import Stage, open_stage

pytestmark = pytest.mark.usefixtures("nothing_is_dropped")

APP = "benchmarks.measuring.app:app"
TASKS = 6_000
SINGLES = 60
#: A group of 250 is claimed, read back and finished: 0.012. The rest is for scans, and for groups that are less than
#: full; heartbeats, hellos and the test's own looks are counted apart, by the second.
MAX_ROUND_TRIPS = 0.03
MAX_ROUND_TRIPS_A_SECOND = 40.0
#: Found by a scan, claimed, read back, finished: 4. The rest is for what a refill finds twice, and for the entries of
#: the oplog that the worker's stream reads before it rests: with a stream until the end there would be 2 more. The
#: scans that come every few seconds, whatever there is to find, are counted apart.
MAX_EXAMINED = 5.5
MAX_EXAMINED_A_SECOND = 800.0
#: Four workers: the first look of each, 2,000, then each task by its claim and by a scan of one worker alone; and the
#: last looks, in which each sees what the others have left. Were each to read all that waits, it would be 6 and more.
WORKERS = 4
SHARED = 12_000
MAX_RETURNED = 5.0
#: Each of them looks at all that is due every 2 s, at most.
MAX_RETURNED_A_SECOND = WORKERS * 1_000.0
#: Claimed, and finished.
MAX_WRITES_OF_A_SINGLE = 2.2
#: To the server: the short statements, and not the 28,000 of those that know every rule.
MAX_BYTES_OF_A_SINGLE = 12_000
MAX_BYTES_A_SECOND = 20_000.0
_LOOK = 0.25


@contextmanager
def _stage(server: ReplicaSet, folder: Path) -> Iterator[Stage]:
    with open_stage(server.uri, "costs", folder) as stage:
        stage.set_up()
        yield stage


def _counted(mongo: Client) -> Counters:
    return Counters.of(mongo.admin.command("serverStatus"))


def _writes(mongo: Client) -> int:
    """Return how many commands that change documents the server has taken."""
    commands: Document = mongo.admin.command("serverStatus")["metrics"]["commands"]
    return sum(commands[name]["total"] for name in ("update", "findAndModify"))


def _returned(mongo: Client) -> int:
    """Return how many documents the server has sent."""
    returned: int = mongo.admin.command("serverStatus")["metrics"]["document"]["returned"]
    return returned


@dataclass(frozen=True)
class Drained:
    """What a drained backlog has cost."""

    used: Counters
    examined: float  #: documents, with those of the oplog
    took: float  #: seconds
    #: Whether the server answered so late that the worker sent a statement again. Such statements cost more.
    was_slow: bool


def _drain(server: ReplicaSet, folder: Path, around: int) -> Drained:
    folder.mkdir()
    with _stage(server, folder) as stage:
        now = datetime.now(UTC)
        tasks = stage.mongo["costs"]["tasks"]
        raw.insert(tasks, (raw.finished_document("noop", f"done/{n}", now) for n in range(around)))
        far = timedelta(days=1)
        raw.insert(tasks, (raw.document("noop", f"far/{n}", now, delay=far) for n in range(around // 5)))
        raw.insert(tasks, (raw.document("noop", f"due/{n}", now) for n in range(TASKS)))
        # Started only now: what its change stream reads of the oplog counts as examined, too.
        worker = stage.launch("w1", "--concurrency", "0", app=APP)
        stage.wait_running(worker)
        before, since = _counted(stage.mongo), time.monotonic()
        stage.client.set_worker("w1", concurrency=100)
        soon = {"$lt": now + timedelta(hours=1)}
        open_ = {"task_state.status": {"$in": ["INIT", "RUNNING"]}, "task_state.next_preempt_time": soon}
        eventually(lambda: tasks.find_one(open_, {"_id": 1}, hint="mtask_status") is None, 120, "done", interval=_LOOK)
        used, took = _counted(stage.mongo) - before, time.monotonic() - since
        assert tasks.count_documents({"_id": {"$regex": "^noop:due/"}, "task_state.status": "SUCCESS"}) == TASKS
        return Drained(used, used.docs_examined, took, was_slow="cannot be reached" in worker.log)


@pytest.mark.parametrize(
    "around",
    [pytest.param(0, id="alone", marks=pytest.mark.long), pytest.param(12_000, id="among-finished-and-delayed")],
)
def test_backlog_costs_so_many_round_trips_and_examined_documents_a_task(
    single_set: ReplicaSet, tmp_path: Path, report: Report, around: int
) -> None:
    for attempt in range(3):
        drained = _drain(single_set, tmp_path / str(attempt), around)
        if not drained.was_slow:
            break
        with MongoClient[Document](single_set.uri) as mongo:
            mongo.drop_database("costs")
    used, took = drained.used, drained.took
    report(f"round trips a task, {around:,} around", round(used.requests / TASKS, 4))
    report(f"documents examined a task, {around:,} around", round(drained.examined / TASKS, 2))
    assert used.requests - took * MAX_ROUND_TRIPS_A_SECOND < MAX_ROUND_TRIPS * TASKS
    assert drained.examined - took * MAX_EXAMINED_A_SECOND < MAX_EXAMINED * TASKS


@pytest.mark.long
def test_workers_that_share_a_backlog_do_not_each_read_all_of_it(
    single_set: ReplicaSet, tmp_path: Path, report: Report
) -> None:
    with _stage(single_set, tmp_path) as stage:
        now = datetime.now(UTC)
        tasks = stage.mongo["costs"]["tasks"]
        raw.insert(tasks, (raw.document("noop", f"due/{n}", now) for n in range(SHARED)))
        workers = [stage.launch(f"w{n}", "--concurrency", "0", app=APP) for n in range(WORKERS)]
        for worker in workers:
            stage.wait_running(worker)
        before, since = _returned(stage.mongo), time.monotonic()
        stage.mongo["costs"]["workers"].update_many({}, {"$set": {"control.concurrency": 100}})
        open_ = {"task_state.status": {"$in": ["INIT", "RUNNING"]}}
        eventually(lambda: tasks.find_one(open_, {"_id": 1}, hint="mtask_status") is None, 120, "done", interval=_LOOK)
        returned, took = _returned(stage.mongo) - before, time.monotonic() - since
        by = tasks.aggregate([{"$group": {"_id": "$task_state.worker_states.worker_id", "tasks": {"$sum": 1}}}])
        done = {row["_id"][0]: row["tasks"] for row in by if len(row["_id"]) == 1}

    report("documents returned a task, four workers", round(returned / SHARED, 2))
    report("tasks by worker", sorted(done.values()))
    assert sum(done.values()) == SHARED
    assert len(done) == WORKERS
    assert returned - took * MAX_RETURNED_A_SECOND < MAX_RETURNED * SHARED


def test_single_task_is_claimed_by_one_write_and_finished_by_another(
    single_set: ReplicaSet, tmp_path: Path, report: Report
) -> None:
    with _stage(single_set, tmp_path) as stage:
        stage.wait_running(stage.launch("w1", app=APP))
        tasks = stage.mongo["costs"]["tasks"]
        stage.client.publish("noop", key="first")
        stage.client.wait("noop", "first", timeout=40)
        before, since, counted = _writes(stage.mongo), time.monotonic(), _counted(stage.mongo)
        for number in range(SINGLES):
            tasks.insert_one(raw.document("noop", f"{number}", datetime.now(UTC)))
            stage.client.wait("noop", f"{number}", timeout=40)
        took = time.monotonic() - since
        writes = _writes(stage.mongo) - before
        used = _counted(stage.mongo) - counted

    report("bytes for a single task, its insert and the looks at it included", int(used.bytes_in / SINGLES))
    report("writes of the worker for a single task", round(writes / SINGLES, 3))
    assert writes - took < MAX_WRITES_OF_A_SINGLE * SINGLES  # a heartbeat now and then
    assert used.bytes_in - took * MAX_BYTES_A_SECOND < MAX_BYTES_OF_A_SINGLE * SINGLES
