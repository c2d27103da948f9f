"""Workers and clients that have ended leave nothing behind, and a worker that goes on keeps nothing of what is done."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask import App, AsyncClient, Client, Context, Fail, Retry, TaskSpec
from mtask.kernel.operations import change_stream as wakeups
from mtask.kernel.operations.change_stream import Density
from tests.integration.kernel.worker.leaks import Before, connections, own_objects, sizes_of, uncollected_objects
from tests.integration.worker_harness import Bench, Working
from tests.mongo import PATIENCE, eventually, fail_command, until
from tests.mongo import Client as Mongo
from tests.workers import open_stage

#: Twice: more than the worker remembers of what it claimed lately.
_MANY = 3_000
#: Classes of which there are objects for each task, or each run.
_OF_TASKS = {"HeldRun", "StoredTask", "TaskState", "Run", "Outcome", "Ending", "Entry", "Event", "Context", "_WorkItem"}
_FINAL = ["SUCCESS", "FAIL", "CANCELED"]


class Play:
    """Handlers of all kinds, and the tasks that show each of them."""

    def __init__(self, effects: str) -> None:
        self.app = App()
        self.release = threading.Event()
        self.started: list[str] = []
        app = self.app

        @app.task
        async def work() -> int:
            return 1

        @app.task
        def plain() -> int:
            return 1

        @app.task
        async def commit(context: Context) -> str:
            async with context.transaction() as session:
                await session.client[effects]["effects"].insert_one({"of": context.task.id}, session=session)
            return "committed"

        @app.task
        def commit_plain(context: Context) -> str:
            with context.transaction() as session:
                session.client[effects]["effects"].insert_one({"of": context.task.id}, session=session)
            return "committed"

        @app.task
        async def abort(context: Context) -> None:
            async with context.transaction() as session:
                await session.client[effects]["effects"].insert_one({"of": context.task.id}, session=session)
                raise Fail("changed its mind")

        @app.task
        def abort_plain(context: Context) -> None:
            with context.transaction() as session:
                session.client[effects]["effects"].insert_one({"of": context.task.id}, session=session)
                raise Fail("changed its mind")

        @app.task
        async def fail() -> None:
            raise RuntimeError("no luck")

        @app.task
        async def later(context: Context) -> None:
            if context.attempt == 1:
                raise Retry(delay=timedelta(milliseconds=50))

        @app.task
        async def hold(context: Context) -> None:
            self.started.append(context.task.key)
            await asyncio.sleep(600)

        @app.task
        def hold_plain(context: Context) -> None:
            self.started.append(context.task.key)
            while not context.is_cancelled:
                time.sleep(0.01)

        @app.task
        def deaf(context: Context) -> None:
            self.started.append(context.task.key)
            self.release.wait()

    async def run(self, bench: Bench) -> None:
        """Run tasks of all kinds to their ends."""
        client, tasks = bench.client, bench.tasks
        once: Any = {"max_retries": 0}
        easy = ("work", "plain", "commit", "commit_plain", "abort", "abort_plain", "fail", "later")
        await client.publish_many([TaskSpec(name, {}, key=str(n), **once) for name in easy for n in range(5)])
        for name in ("hold", "hold_plain", "deaf"):
            await client.publish(name, {}, key=f"{name} out of time", run_timeout=0.2, **once)
        for name in ("hold", "hold_plain"):
            for end in ("canceled", "removed", "lost"):
                await client.publish(name, {}, key=f"{name} {end}", ping_interval=0.3, **once)
        await client.publish("unknown", {}, key="of nobody")
        await until(lambda: len(self.started) == 9, message="all that holds on has started")
        for name in ("hold", "hold_plain"):
            await client.cancel(name, f"{name} canceled")
            await client.remove(name, f"{name} removed")
            another = {"$set": {"task_state.worker_states.0.run_id": "another's"}}
            tasks.update_one({"_id": f"{name}:{name} lost"}, another)
        self.release.set()
        mine = {"name": {"$ne": "unknown"}, "key": {"$not": {"$regex": "lost"}}}
        waiting = {**mine, "task_state.status": {"$nin": _FINAL}}
        await until(lambda: not tasks.count_documents(waiting), message="all tasks are done")
        await until(
            lambda: not bench.worker.parts.scope.ledger.runs, message="the runs that lost their leases have ended"
        )

    async def break_stream(self, bench: Bench) -> None:
        """Break the change stream, and see that another works."""
        (dead,) = await until(lambda: stream_cursors(bench, is_waited_in=True), message="a stream that is waited in")
        with fail_command(bench.mongo, "getMore", times=1, error_code=286, app_name=bench.app_name):
            await bench.client.publish("work", {}, key="wakes the stream")
            await until(lambda: stream_cursors(bench) not in ([], [dead]), message="another stream")
        assert len(await until(lambda: stream_cursors(bench))) == 1, "the broken one is closed"


def stream_cursors(bench: Bench, *, is_waited_in: bool = False) -> list[int]:
    """Return the worker's open change streams on the server; or only what it waits in while little is written."""
    found = connections(bench.mongo, bench.app_name)
    if is_waited_in:
        found = [op for op in found if op.get("command", {}).get("maxTimeMS") == wakeups.MAX_AWAIT_MS[Density.STILL]]
    cursors = [op["cursor"] for op in found if "cursor" in op]
    return [
        cursor["cursorId"]
        for cursor in cursors
        if "$changeStream" in next(iter(cursor.get("originatingCommand", {}).get("pipeline", [{}])))
    ]


@pytest.fixture
def play(database_name: str) -> Iterator[Play]:
    made = Play(database_name)
    yield made
    made.release.set()


@pytest.mark.parametrize("way", ["gracefully", "at once"])
def test_worker_that_ran_tasks_of_all_kinds_leaves_nothing_when_it_stops(
    working: Working, database_name: str, mongo: Mongo, play: Play, way: str
) -> None:
    mongo[database_name].create_collection("effects")
    before = Before.note(mongo)
    names: list[str] = []

    async def scenario() -> None:
        async with working(play.app, concurrency=50, shutdown_timeout=timedelta(seconds=600)) as bench:
            names.append(bench.app_name)
            await play.run(bench)
            await play.break_stream(bench)
            await until(lambda: not any(sizes_of(bench.worker).values()), message=f"at rest: {sizes_of(bench.worker)}")
            if way == "at once":
                await bench.client.publish("hold", {}, key="at the end")
                await bench.client.publish("hold_plain", {}, key="at the end")
                await until(lambda: play.started.count("at the end") == 2)
                bench.worker.stop()
            bench.worker.stop()
            await asyncio.wait((bench.life,), timeout=PATIENCE)
            assert bench.life.done()
            assert not any(sizes_of(bench.worker).values()), sizes_of(bench.worker)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, message=f"left: {asyncio.all_tasks()}")

    asyncio.run(scenario())

    before.check_nothing_left(names[0])
    assert mongo[database_name]["tasks"].count_documents({"task_state.status": "RUNNING", "key": "at the end"}) == 0
    assert {found["of"].partition(":")[0] for found in mongo[database_name]["effects"].find()} == {
        "commit",
        "commit_plain",
    }


def test_clients_that_are_closed_leave_nothing(mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    before = Before.note(mongo)

    with Client(mongo_uri, database=database_name) as client:
        client.publish("a", key="1")
        client.publish_many([TaskSpec("a", {}, key=str(number)) for number in range(10)])
        with pytest.raises(TimeoutError):
            client.wait("a", "1", timeout=0.2)
        assert len(client.find(name="a")) == 10
        assert connections(mongo, "mtask")

    async def scenario() -> None:
        async with AsyncClient(mongo_uri, database=database_name) as client:
            await client.publish("b", key="1")
            with pytest.raises(TimeoutError):
                await client.wait("b", "1", timeout=0.2)
            assert len(await client.find(name="b")) == 1
            assert connections(mongo, "mtask")
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, message=f"left: {asyncio.all_tasks()}")

    asyncio.run(scenario())
    before.check_nothing_left("mtask")


def test_worker_process_that_was_asked_to_stop_leaves_no_connection_and_no_process(
    mongo_uri: str, database_name: str, mongo: Mongo, tmp_path: Path
) -> None:
    with open_stage(mongo_uri, database_name, tmp_path) as stage:
        worker = stage.start("A", "--shutdown-timeout", "0.2")
        done = [stage.client.publish("noop", key=str(number)).task_id for number in range(5)]
        for task_id in done:
            stage.wait_status(task_id, "SUCCESS")
        held = stage.client.publish("hold", {"gate": stage.gate()}, key="held").task_id
        stage.wait_run(held, "A")
        assert connections(mongo, "mtask-worker:A")
        assert worker.pids()
        worker.terminate()
        assert worker.wait() == 0
        assert worker.pids() == []
        eventually(lambda: not connections(mongo, "mtask-worker:A"), PATIENCE, "its connections end")
        assert stage.document(held)["task_state"]["status"] == "INIT"


def test_worker_keeps_nothing_of_the_tasks_that_it_has_done(working: Working, play: Play) -> None:
    before = own_objects()  # what other tests have left in this process

    async def scenario() -> None:
        async with working(play.app, concurrency=200) as bench:
            counts = []
            for half in range(2):
                specs = [TaskSpec("work", {}, key=f"{half}/{number}") for number in range(_MANY)]
                await bench.client.publish_many(specs)
                del specs
                await until(lambda done=_MANY * (half + 1): bench.worker.parts.finisher.finished_cnt == done)  # type: ignore[misc]
                await until(lambda: not any(sizes_of(bench.worker).values()), message=f"{sizes_of(bench.worker)}")
                counts.append(own_objects())
            first, second = counts
            for name, count in second.items():
                if name.rpartition(".")[2] in _OF_TASKS:
                    assert count <= before[name] + 5, second - before
            assert sum(second.values()) <= sum(first.values()) + 20, second - first
            assert len(bench.worker.parts.scope.ledger._claimed) <= 2 * _MANY

    asyncio.run(scenario())


def test_what_is_done_is_freed_without_a_look_for_cycles(
    working: Working, database_name: str, mongo: Mongo, play: Play
) -> None:
    easy = ("work", "plain", "commit", "commit_plain", "later", "abort", "abort_plain")
    before = own_objects()  # what other tests have left in this process

    async def scenario() -> None:
        async with working(play.app, concurrency=50) as bench:
            own_objects()
            gc.disable()
            once: Any = {"max_retries": 0}
            specs = [TaskSpec(name, {}, key=str(number), **once) for name in easy for number in range(40)]
            await bench.client.publish_many(specs)
            del specs
            waiting = {"task_state.status": {"$nin": _FINAL}}
            await until(lambda: not bench.tasks.count_documents(waiting), message="all tasks are done")
            await until(lambda: not any(sizes_of(bench.worker).values()), message=f"{sizes_of(bench.worker)}")
            for name, count in uncollected_objects().items():
                if name.rpartition(".")[2] in _OF_TASKS:
                    left = count - before[name]
                    assert left <= 5, f"{left} {name}: what is done waits until Python looks for cycles"

    try:
        mongo[database_name].create_collection("effects")
        asyncio.run(scenario())
    finally:
        gc.enable()
