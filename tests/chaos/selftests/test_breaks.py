"""The breaks of the database that other tests rely on: each does what it says, tells it, and is mended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError, WriteConcernError, WTimeoutError
from pymongo.write_concern import WriteConcern

from mtask import App, Context, TaskSpec
from mtask.local import ReplicaSet
from mtask.local.replica_set import ask, is_member_ready
from tests.chaos.nemeses import breaks
from tests.chaos.nemeses.breaks import Break
from tests.integration.worker_harness import Bench, working_on
from tests.mongo import Client, Document, eventually, until

#: Servers that start, and elections among them, take long on a machine that is busy.
#: The run under all faults in CI needs each of these to strike, and says so.
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
PATIENCE = 60.0
APP = "victim"


@pytest.fixture
def direct(replica_set: ReplicaSet) -> Iterator[Client]:
    client: Client = MongoClient(replica_set.uri, appname="direct", heartbeatFrequencyMS=500)
    with client:
        yield client


# --- servers ------------------------------------------------------------------------------------------------------


def assert_elected(broken: Break, client: Client) -> None:
    """Another primary than before was there, and there is one that writes."""
    assert broken.primary is not None
    assert broken.seconds > 0
    # Of its own: a majority takes as long as the other needs to see that it no longer follows a living one.
    written = client["t"].get_collection("elected", write_concern=WriteConcern(1))

    def is_written() -> bool:
        with suppress(PyMongoError), pymongo.timeout(5):
            return written.insert_one({}).acknowledged
        return False

    eventually(is_written, PATIENCE, "a write")


def test_killed_primary_is_followed_by_another_and_takes_part_again_at_the_end(
    replica_set: ReplicaSet, direct: Client
) -> None:
    former = replica_set.primary()
    with suppress(KeyError), breaks.killed_primary(replica_set) as broken:
        assert broken.nodes == [former]
        assert not former.is_running()
        assert_elected(broken, direct)
        assert broken.primary != former
        raise KeyError  # whatever becomes of the block
    eventually(lambda: is_member_ready(former), PATIENCE, "it takes part")


def test_stepped_down_primary_lives_on_and_another_has_its_role(replica_set: ReplicaSet, direct: Client) -> None:
    former = replica_set.primary()
    pid = former.pid()
    broken = breaks.step_down(replica_set, 3)
    assert_elected(broken, direct)
    assert broken.primary != former
    assert former.pid() == pid


def test_frozen_primary_keeps_its_port_and_says_nothing_while_another_is_elected(
    replica_set: ReplicaSet, direct: Client
) -> None:
    former = replica_set.primary()
    with breaks.frozen_primary(replica_set) as broken:
        pid = former.pid()
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        socket.create_connection(("127.0.0.1", former.port), timeout=10).close()
        assert ask(former, "hello") is None
        assert_elected(broken, direct)
        assert broken.primary != former
    told = eventually(lambda: ask(former, "hello"), PATIENCE, "it answers")
    assert told is not None
    assert told["setName"] == former.replica_set


def test_servers_that_are_all_killed_come_back_with_what_was_acknowledged(
    replica_set: ReplicaSet, direct: Client
) -> None:
    direct["t"]["kept"].insert_one({"_id": 1})
    pids = {node.pid() for node in replica_set.nodes}
    with breaks.killed_servers(replica_set) as broken:
        assert not [node for node in replica_set.nodes if node.is_running()]
        assert broken.elected is None
    assert_elected(broken, direct)
    assert all(node.is_running() for node in replica_set.nodes)
    assert not pids & {node.pid() for node in replica_set.nodes}
    eventually(lambda: is_kept(direct), PATIENCE, "what was acknowledged is there")


def is_kept(client: Client) -> bool:
    with suppress(PyMongoError):
        return client["t"]["kept"].find_one({"_id": 1}) is not None
    return False


# --- commands -----------------------------------------------------------------------------------------------------

#: What a client that repeats nothing gets, and whether the write was carried out all the same.
TOLD: dict[str, tuple[type[Exception], bool]] = {
    "shutting down": (AutoReconnect, False),
    "interrupted at shutdown": (AutoReconnect, False),
    "interrupted": (OperationFailure, False),
    "stepped down": (AutoReconnect, False),
    "write conflict": (OperationFailure, False),
    "connection closed": (AutoReconnect, False),
    "done, then shutting down": (WriteConcernError, True),
    "done, then stepped down": (WriteConcernError, True),
    "done, not replicated in time": (WTimeoutError, True),
}


def test_failure_strikes_as_often_as_asked_and_only_this_app_and_these_tasks(
    replica_set: ReplicaSet, direct: Client
) -> None:
    tasks = direct["struck"]["tasks"]
    client: Client = MongoClient(replica_set.uri, appname=APP, retryWrites=False, heartbeatFrequencyMS=500)
    with client:
        for number, (failure, (error, is_done)) in enumerate(TOLD.items()):
            write = partial(client["struck"]["tasks"].update_one, {"_id": number}, {"$set": {"x": 1}}, upsert=True)
            with breaks.failing(replica_set, "write", failure, app=APP, database="struck", times=1) as armed:
                client["struck"]["others"].update_one({"_id": number}, {"$set": {"x": 1}}, upsert=True)
                tasks.update_one({"_id": "direct"}, {"$set": {"x": 1}}, upsert=True)
                client["struck"]["tasks"].insert_one({})
                with pytest.raises(error):
                    write()
                armed.wait()
                assert tasks.count_documents({"_id": number}) == is_done, failure
                write()
            assert armed.count == 1, failure
            write()
    assert breaks.FAILURES.keys() == TOLD.keys() | {"late"}


def test_late_command_is_carried_out(replica_set: ReplicaSet, direct: Client) -> None:
    with breaks.failing(replica_set, "write", "late", app="direct", database="late") as armed:
        for _ in range(2):
            direct["late"]["tasks"].update_one({"_id": 1}, {"$inc": {"x": 1}}, upsert=True)
    assert armed.count == 2
    assert direct["late"]["tasks"].find_one({"_id": 1}) == {"_id": 1, "x": 2}


# --- a worker -----------------------------------------------------------------------------------------------------


def test_each_failure_strikes_the_operation_of_a_worker_that_it_is_named_after(
    replica_set: ReplicaSet, direct: Client
) -> None:
    app, database = App(), "operations"
    started: list[str] = []
    published: list[str] = []
    go_on = asyncio.Event()

    @app.task
    async def work(context: Context) -> None:
        started.append(context.task.id)

    @app.task
    async def hold(context: Context) -> None:
        started.append(context.task.id)
        await go_on.wait()

    async def publish(bench: Bench, name: str = "work", **options: Any) -> str:
        key = str(len(published))
        published.append((await bench.client.publish(name, key=key, **options)).task_id)
        return published[-1]

    async def struck(armed: breaks.Armed) -> None:
        await asyncio.to_thread(armed.wait)

    async def scenario() -> None:
        async with working_on(replica_set.uri, database, direct, app) as bench:
            failing = partial(breaks.failing, replica_set, database=database)
            with failing("claim", "connection closed", app=bench.app_name, times=1) as armed:
                await publish(bench)
                await struck(armed)
            with failing("write", "done, then shutting down", app=bench.app_name, times=1) as armed:
                await bench.status(await publish(bench), "SUCCESS")
                await struck(armed)
            # Alone it is neither claimed nor finished meanwhile: what strikes is a ping.
            held = await publish(bench, "hold", ping_interval=0.2, worker_timeout=120)
            await until(lambda: held in started, PATIENCE)
            with failing("ping", "interrupted", app=bench.app_name, times=1) as armed:
                await struck(armed)
            go_on.set()
            with failing("publish", "connection closed", app="mtask", times=1) as armed:
                await publish(bench)
                await struck(armed)
            with failing("publish", "connection closed", app="mtask", times=1) as armed:
                results = await bench.client.publish_many(
                    [TaskSpec("work", key="many/1"), TaskSpec("work", key="many/2")]
                )
                published.extend(result.task_id for result in results if not isinstance(result, Exception))
                await struck(armed)
            with failing("stream", {"errorCode": 286}, app=bench.app_name, times=1) as armed:
                await publish(bench)
                await publish(bench)
                await struck(armed)
            await streams(replica_set, database, bench)
            with failing("open stream", "interrupted", app=bench.app_name, times=1) as armed:
                breaks.kill_streams(replica_set, database, bench.app_name)
                await publish(bench)
                await struck(armed)
            for task_id in published:
                await bench.status(task_id, "SUCCESS", PATIENCE)
            assert sorted(started) == sorted(published), "each ran once"

    asyncio.run(scenario())


async def streams(replica_set: ReplicaSet, database: str, bench: Bench) -> set[int]:
    """Wait until the worker's change stream is open, and return its cursors."""

    def cursors() -> set[int]:
        found = breaks.stream_cursors(replica_set, database, bench.app_name)
        return {cursor for _, cursors in found for cursor in cursors}

    return await asyncio.to_thread(eventually, cursors, PATIENCE, "an open change stream")


KILLS: dict[str, Callable[[ReplicaSet, str], Any]] = {
    "streams": lambda replica_set, database: breaks.kill_streams(replica_set, database, "mtask-worker:*"),
    "sessions": lambda replica_set, _: breaks.kill_sessions(replica_set, "mtask-worker:w1"),
}


def test_killed_streams_and_sessions_are_replaced_and_nothing_is_missed(
    replica_set: ReplicaSet, direct: Client
) -> None:
    app, database = App(), "kills"
    started: list[str] = []

    @app.task
    async def work(context: Context) -> None:
        started.append(context.task.id)

    async def scenario() -> None:
        async with working_on(replica_set.uri, database, direct, app) as bench:
            other: Document = {"$match": {"operationType": "insert"}}
            with direct["elsewhere"].watch([other]) as bystander:
                for kill, strike in KILLS.items():
                    before = await streams(replica_set, database, bench)
                    # It may be opened anew, at another pace, just then.
                    await asyncio.to_thread(eventually, partial(strike, replica_set, database), PATIENCE, kill)
                    task_ids = [(await bench.client.publish("work", key=f"{kill}/{n}")).task_id for n in range(3)]
                    for task_id in task_ids:
                        await bench.status(task_id, "SUCCESS", PATIENCE)
                    await until(lambda: started[-3:] and len(started) % 3 == 0, PATIENCE)
                    after = await streams(replica_set, database, bench)
                    assert not before & after, kill
                direct["elsewhere"]["t"].insert_one({})
                assert bystander.next()["operationType"] == "insert", "other streams are spared"
        assert len(started) == len(set(started)) == 3 * len(KILLS)

    asyncio.run(scenario())
