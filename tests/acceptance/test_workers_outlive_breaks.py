"""The change stream breaks, the primary goes, the server restarts, replies are lost: workers go on by
themselves, and nothing is missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import pytest

import mtask
from mtask import TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.options import TaskOptions
from mtask.local import ReplicaSet
from tests.acceptance.conftest import Report
from tests.chaos.nemeses.network import ReplicaSetProxy
from tests.mongo import PATIENCE, Document, eventually, fail_command
from tests.security import is_secure
from tests.workers import Stage, WorkerProcess, end_of, open_stage, runs_of

#: A server that went takes seconds to be missed, and seconds to come back.
LONG = 60.0
APP_NAME = "mtask-worker:A"
BROKE = "change stream broke"


def assert_all_succeeded_once(stage: Stage, task_ids: list[str], timeout: float = LONG) -> None:
    """Each of these tasks comes to one SUCCESS: none lost, none done again after it."""
    tasks = stage.client.tasks

    def succeeded() -> bool:
        return tasks.count_documents({"_id": {"$in": task_ids}, "task_state.status": "SUCCESS"}) == len(task_ids)

    try:
        eventually(succeeded, timeout)
    except AssertionError:
        left = list(tasks.find({"_id": {"$in": task_ids}, "task_state.status": {"$ne": "SUCCESS"}}).limit(3))
        raise AssertionError(f"not SUCCESS within {timeout:g} s, among others: {left}") from None
    for document in tasks.find({"_id": {"$in": task_ids}}):
        statuses = [run["status"] for run in runs_of(document)]
        assert statuses.count("SUCCESS") == 1, document
        assert "RUNNING" not in statuses, document
    ended = [event.run_id for event in stage.events.all("end")]
    assert len(ended) == len(set(ended)), "no run ran twice"


def first_start_after(stage: Stage, moment: float) -> float:
    """Return how many seconds after this monotonic instant the next handler started."""

    def started() -> list[float]:
        return [event.monotonic - moment for event in stage.events.starts() if event.monotonic > moment]

    return min(eventually(started, LONG, "a handler that starts after the break"))


class SteadyPublisher:
    """Publishes one `noop` after the other in a thread, as a service would: what failed again, under its key."""

    def __init__(self, uri: str, database: str, interval: float = 0.02) -> None:
        self._client = mtask.Client(uri, database=database, server_timeout=timedelta(seconds=2))
        self._interval = interval
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        #: When the server had each task, on the monotonic clock.
        self.published: dict[str, float] = {}
        self.failures = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> dict[str, float]:
        """Publish the one under way to its end, and stop."""
        self._is_stopped.set()
        self._thread.join(60)
        self._client.close()
        assert not self._thread.is_alive()
        assert self.error is None, self.error
        return self.published

    def _run(self) -> None:
        number = 0
        try:
            while not self._is_stopped.is_set():
                number += 1
                task_id = self._publish(f"steady/{number}")
                self.published[task_id] = time.monotonic()
                time.sleep(self._interval)
        except BaseException as error:
            self.error = error

    def _publish(self, key: str) -> str:
        while True:
            try:
                return self._client.publish("noop", {"value": key}, key=key).task_id
            except DatabaseUnavailable:
                self.failures += 1
                time.sleep(0.05)


@contextmanager
def steady_work(stage: Stage) -> Iterator[tuple[SteadyPublisher, list[str]]]:
    """Have one task after the other published, and some run from before the block until after it."""
    long_lease: TaskOptions = {"ping_interval": 1, "worker_timeout": 120}
    held = stage.client.publish_many(
        [TaskSpec("hold", {"gate": stage.gate()}, key=f"held/{number}", **long_lease) for number in range(4)]
    )
    ids = [published.task_id for published in held if not isinstance(published, Exception)]
    for task_id in ids:
        stage.wait_run(task_id)
    with SteadyPublisher(stage.uri, stage.database) as publisher:
        stage.events.wait("end", 5)
        yield publisher, ids


def assert_went_on(stage: Stage, publisher: SteadyPublisher, held: list[str], workers: list[WorkerProcess]) -> None:
    """All that was published before, during and after the break is done, and what ran goes on to its end."""
    count = len(publisher.published)
    eventually(lambda: len(publisher.published) >= count + 20, LONG, "publishing goes on after the break")
    published = list(publisher.stop())
    stage.open_gate()
    assert_all_succeeded_once(stage, [*published, *held])
    for task_id in held:
        assert len(runs_of(stage.document(task_id))) == 1, "the lease outlasted the break"
        assert len(stage.events.starts(task_id)) == 1
    assert all(worker.is_alive for worker in workers)


# --- the change stream --------------------------------------------------------------------------------------------


def stream_cursors(stage: Stage, app_name: str) -> list[int]:
    """Return the change stream cursors of a worker, idle ones and those that a getMore waits on."""
    pipeline: list[Document] = [
        {"$currentOp": {"allUsers": True, "idleCursors": True}},
        {"$match": {"appName": app_name}},
    ]
    found = stage.mongo.admin.aggregate(pipeline)
    cursors = [op["cursor"] for op in found if "cursor" in op]
    return [
        int(cursor["cursorId"])
        for cursor in cursors
        if "$changeStream" in next(iter(cursor.get("originatingCommand", {}).get("pipeline", [{}])))
    ]


def kill_stream(stage: Stage, app_name: str) -> list[int]:
    """Kill the worker's change stream on the server; return the cursors killed."""

    def killed() -> list[int]:
        cursors = stream_cursors(stage, app_name)
        if not cursors:
            return []
        answer = stage.mongo[stage.database].command("killCursors", "$cmd.aggregate", cursors=cursors)
        return [int(cursor) for cursor in answer["cursorsKilled"]]

    return eventually(killed, PATIENCE, "the worker's cursor")


def test_killed_change_stream_cursor_is_replaced_and_nothing_is_missed(stage: Stage, report: Report) -> None:
    worker = stage.start("A")
    with steady_work(stage) as (publisher, held):
        for _ in range(3):
            killed = time.monotonic()
            dead = set(kill_stream(stage, APP_NAME))
            report("killed cursor: next claim after, ms", round(1000 * first_start_after(stage, killed), 1))
            # Killed under a getMore it is the worker that opens another; killed between two, the driver does.
            eventually(lambda dead=dead: set(stream_cursors(stage, APP_NAME)) - dead, PATIENCE, "a new cursor")  # type: ignore[misc]
        assert_went_on(stage, publisher, held, [worker])


def test_lost_history_opens_a_new_stream_and_what_came_meanwhile_is_found(stage: Stage, report: Report) -> None:
    worker = stage.start("A")
    before = [stage.client.publish("noop", key=f"before/{number}").task_id for number in range(20)]
    with fail_command(stage.mongo, "getMore", error_code=286, app_name=APP_NAME):
        wake = stage.client.publish("noop", key="wakes-the-stream").task_id
        eventually(lambda: worker.log.count(BROKE) >= 3, LONG, "the stream broken again and again")
        broken = time.monotonic()
        during = [stage.client.publish("noop", key=f"during/{number}").task_id for number in range(20)]
        report("lost history: claim while no stream stays open, ms", round(1000 * first_start_after(stage, broken), 1))
        assert_all_succeeded_once(stage, [*before, wake, *during])
    assert worker.log.count(BROKE) < 200, "no loop without a pause"

    eventually(lambda: stream_cursors(stage, APP_NAME), PATIENCE, "a stream that stays")
    healed = time.monotonic()
    after = [stage.client.publish("noop", key=f"after/{number}").task_id for number in range(20)]
    report("lost history: next claim after it healed, ms", round(1000 * first_start_after(stage, healed), 1))
    assert_all_succeeded_once(stage, after)
    assert worker.is_alive


def test_change_stream_that_cannot_be_opened_leaves_the_scans_and_nothing_is_missed(stage: Stage) -> None:
    worker = stage.start("A")
    with fail_command(stage.mongo, "aggregate", error_code=286, app_name=APP_NAME):
        kill_stream(stage, APP_NAME)
        wake = stage.client.publish("noop", key="wakes-the-stream").task_id
        eventually(lambda: worker.log.count(BROKE) >= 2, PATIENCE, "the stream fails to open")
        during = [wake] + [stage.client.publish("noop", key=f"during/{number}").task_id for number in range(20)]
        assert_all_succeeded_once(stage, during)
    eventually(lambda: stream_cursors(stage, APP_NAME), PATIENCE, "a new stream")


# --- the server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def three_nodes(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[Stage]:
    with open_stage(replica_set.uri, f"three_{tmp_path.name[-40:]}"[:60], tmp_path) as opened:
        yield opened


def test_primary_steps_down_and_workers_go_on_with_the_next(
    three_nodes: Stage, replica_set: ReplicaSet, report: Report
) -> None:
    workers = three_nodes.start_all(["A", "B"])
    with steady_work(three_nodes) as (publisher, held):
        former = replica_set.step_down(timedelta(seconds=LONG))
        down = time.monotonic()
        replica_set.wait_primary(other_than=former)
        up = time.monotonic()
        report("step-down: until the new primary, ms", round(1000 * (up - down), 1))
        report("step-down: next claim after the new primary, ms", round(1000 * first_start_after(three_nodes, up), 1))
        assert_went_on(three_nodes, publisher, held, workers)


def test_primary_is_killed_and_workers_go_on_with_the_next(
    three_nodes: Stage, replica_set: ReplicaSet, report: Report
) -> None:
    workers = three_nodes.start_all(["A", "B"])
    with steady_work(three_nodes) as (publisher, held):
        former = replica_set.primary()
        replica_set.kill(former)
        down = time.monotonic()
        try:
            replica_set.wait_primary(other_than=former)
            up = time.monotonic()
            report("killed primary: until the new primary, ms", round(1000 * (up - down), 1))
            report(
                "killed primary: next claim after the new one, ms", round(1000 * first_start_after(three_nodes, up), 1)
            )
            assert_went_on(three_nodes, publisher, held, workers)
        finally:
            replica_set.restart(former)


def test_mongod_restarts_and_workers_go_on(single_set: ReplicaSet, tmp_path: Path, report: Report) -> None:
    with open_stage(single_set.uri, "restarted", tmp_path) as stage:
        workers = stage.start_all(["A", "B"])
        with steady_work(stage) as (publisher, held):
            (node,) = single_set.nodes
            for how in ("stopped", "killed"):
                if how == "killed":
                    single_set.kill(node)
                single_set.restart(node)
                single_set.wait_primary()
                up = time.monotonic()
                next_ms = round(1000 * first_start_after(stage, up), 1)
                report(f"mongod {how} and restarted: next claim after, ms", next_ms)
            assert_went_on(stage, publisher, held, workers)


# --- replies ------------------------------------------------------------------------------------------------------


@contextmanager
def behind_proxy(server: ReplicaSet, database: str, folder: Path) -> Iterator[tuple[Stage, ReplicaSetProxy]]:
    """Set a stage whose workers reach the server through a proxy, and the test by itself."""
    if is_secure():
        pytest.skip("the proxy reads what passes through it, and TLS hides that")
    with ReplicaSetProxy(server) as proxy, open_stage(server.uri, database, folder) as stage:
        stage.uri = stage.worker_uri = proxy.uri
        yield stage, proxy


#: Far longer than the test waits: what is only settled by a lapse does not pass.
LEASE: TaskOptions = {"ping_interval": 60, "worker_timeout": 300}


def publish_group(stage: Stage, count: int, name: str = "noop", params: Any = None) -> list[str]:
    """Publish that many tasks, due all at once."""
    specs = [TaskSpec(name, params, key=f"{number}", delay=0.5, **LEASE) for number in range(count)]
    results = stage.client.publish_many(specs)
    return [published.task_id for published in results if not isinstance(published, Exception)]


@pytest.mark.parametrize(("count", "command"), [(1, "findAndModify"), (20, "update")])
def test_claim_whose_reply_is_lost_is_run_and_counted_once(
    mongo_server: ReplicaSet, database_name: str, tmp_path: Path, report: Report, count: int, command: str
) -> None:
    with behind_proxy(mongo_server, database_name, tmp_path) as (stage, proxy):
        stage.start("A")
        loss = proxy.drop_replies(1, commands=[command], text=b"claim_time")
        task_ids = publish_group(stage, count)
        assert loss.is_done.wait(PATIENCE)
        lost = time.monotonic()

        assert_all_succeeded_once(stage, task_ids)

        (dropped,) = loss.dropped
        assert dropped.reply["ok"] == 1.0, "the server had carried it out"
        assert dropped.reply.get("n", 1) == dropped.reply.get("nModified", 1)
        report(
            f"lost reply of a claim of {count}: next start after, ms", round(1000 * first_start_after(stage, lost), 1)
        )
        for task_id in task_ids:
            document = stage.document(task_id)
            (run,) = runs_of(document)
            assert (run["attempt"], document["task_state"]["failed_cnt"]) == (1, 0)
            assert len(stage.events.starts(task_id)) == 1


@pytest.mark.parametrize("count", [1, 20])
def test_finish_whose_reply_is_lost_stands_and_is_not_repeated(
    mongo_server: ReplicaSet, database_name: str, tmp_path: Path, count: int
) -> None:
    with behind_proxy(mongo_server, database_name, tmp_path) as (stage, proxy):
        worker = stage.start("A")
        loss = proxy.drop_replies(1, commands=["update"], text=b"success_time")
        task_ids = publish_group(stage, count)
        assert loss.is_done.wait(PATIENCE)
        ends = {task_id: end_of(runs_of(stage.document(task_id))[0]) for task_id in finished(stage, task_ids)}
        assert ends, "the server had carried it out"

        assert_all_succeeded_once(stage, task_ids)

        after = stage.client.publish("noop", key="after")
        stage.wait_status(after.task_id, "SUCCESS")
        for task_id in task_ids:
            (run,) = runs_of(stage.document(task_id))
            assert run["attempt"] == 1
            assert len(stage.events.starts(task_id)) == 1
            if task_id in ends:
                assert end_of(run) == ends[task_id], "what stood was not written again"
        assert "result refused" not in worker.log


def finished(stage: Stage, task_ids: list[str]) -> list[str]:
    done = stage.client.tasks.find({"_id": {"$in": task_ids}, "task_state.status": "SUCCESS"}, {"_id": 1})
    return [document["_id"] for document in done]


@pytest.mark.parametrize("count", [1, 5])
def test_ping_whose_reply_is_lost_costs_no_lease(
    mongo_server: ReplicaSet, database_name: str, tmp_path: Path, count: int
) -> None:
    with behind_proxy(mongo_server, database_name, tmp_path) as (stage, proxy):
        stage.start("A")
        lease: TaskOptions = {"ping_interval": 0.5, "worker_timeout": 15}
        task_ids = [
            stage.client.publish("hold", {"gate": stage.gate()}, key=f"{number}", **lease).task_id
            for number in range(count)
        ]
        for task_id in task_ids:
            stage.wait_run(task_id, "A")
        command = "findAndModify" if count == 1 else "update"
        for _ in range(3):
            loss = proxy.drop_replies(1, commands=[command], text=b"ping_expire_time")
            assert loss.is_done.wait(PATIENCE)
        begin = {task_id: runs_of(stage.document(task_id))[0]["ping_expire_time"] for task_id in task_ids}
        for task_id, lease_end in begin.items():
            stage.wait_document(
                task_id,
                lambda found, was=lease_end: runs_of(found)[0]["ping_expire_time"] > was,  # type: ignore[misc]
                "a later lease",
            )
        stage.open_gate()
        assert_all_succeeded_once(stage, task_ids)
        for task_id in task_ids:
            assert len(runs_of(stage.document(task_id))) == 1


def test_commit_whose_reply_is_lost_is_sent_again_and_its_effect_is_there_once(
    mongo_server: ReplicaSet, database_name: str, tmp_path: Path
) -> None:
    with behind_proxy(mongo_server, database_name, tmp_path) as (stage, proxy):
        stage.mongo[stage.database].create_collection("effects")
        stage.start("A")
        loss = proxy.drop_replies(1, commands=["commitTransaction"])
        task = stage.client.publish("deposit", {"database": stage.database}, key="t", **LEASE)

        assert_all_succeeded_once(stage, [task.task_id])

        assert loss.is_done.is_set()
        assert len(list(stage.mongo[stage.database]["effects"].find())) == 1
        assert len(runs_of(stage.document(task.task_id))) == 1


# --- commands that fail -------------------------------------------------------------------------------------------

FAILURES: dict[str, dict[str, Any]] = {
    "the connection is cut": {"close_connection": True},
    "the primary steps down": {"error_code": 189, "error_labels": ["RetryableWriteError"]},
    "it takes too long": {"error_code": 50},
}


#: The others repeat it with other pairs.
_IN_SHORT = {
    ("update", "the connection is cut"),
    ("findAndModify", "the primary steps down"),
    ("find", "it takes too long"),
}


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        pytest.param(command, failure, marks=() if (command, failure) in _IN_SHORT else pytest.mark.long)
        for command in ("update", "findAndModify", "find")
        for failure in FAILURES
    ],
)
def test_command_that_fails_before_it_is_carried_out_is_sent_again(stage: Stage, command: str, failure: str) -> None:
    worker = stage.start("A")
    with fail_command(stage.mongo, command, times=5, app_name=APP_NAME, **FAILURES[failure]):
        # Alone they are claimed one at a time, together in groups.
        task_ids = [stage.client.publish("noop", key="alone", **LEASE).task_id, *publish_group(stage, 20)]
        assert_all_succeeded_once(stage, task_ids)
    assert all(len(runs_of(stage.document(task_id))) == 1 for task_id in task_ids)
    assert worker.is_alive
