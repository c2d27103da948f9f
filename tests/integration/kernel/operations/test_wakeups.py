"""What change streams tell a worker: what is news to it, whoever wrote it, and not what workers do all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.write_concern import WriteConcern

from mtask.kernel.document.identity import BUCKET_CNT, bucket_of
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.document.status import RunStatus, WorkerStatus
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import change_stream as wakeups
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import stream_filter as concerns
from mtask.kernel.operations import workers
from mtask.kernel.operations.change_stream import Density, Stream
from mtask.kernel.operations.workers import Heartbeat
from mtask.kernel.statements.filters import Shares
from mtask.kernel.statements.finish import Outcome
from tests.clients import server_now
from tests.integration.stores import claim, parsed, publish, register, registration, stored
from tests.mongo import PATIENCE, Client, until

_HORIZON_MS = int(HORIZON / timedelta(milliseconds=1))
_SHORT: dict[str, Any] = {"worker_timeout": 2, "ping_interval": 0.2}
_LONG: dict[str, Any] = {"worker_timeout": 60}
_ID = {"_id": "task:k"}


def heard(store: SyncStore, change: Callable[[], object]) -> list[dict[str, Any]]:
    """Return what the stream tells of the task k, from before the change until after it."""
    with store.database.watch(concerns.pipeline("other", ["default"], _HORIZON_MS), max_await_time_ms=200) as stream:
        change()
        publish(store, "last")
        told: list[dict[str, Any]] = []
        for event in stream:
            if event["documentKey"]["_id"] == "task:last":
                return told
            told.append(event)
    raise AssertionError("the stream ended")


def finish(store: SyncStore, status: Any, **given: Any) -> None:
    run = parsed(store, "k").runs[-1]
    assert store.run(claims.finish([Outcome("task:k", run.run_id, status, **given)])) == {run.run_id}


def ping(store: SyncStore, lease_ms: int) -> None:
    run = parsed(store, "k").runs[-1]
    assert store.run(claims.ping({run.run_id: "task:k"}, lease_ms))


def by_hand(store: SyncStore, **fields: Any) -> None:
    changed = store.tasks.update_one(_ID, {"$set": {name.replace("__", "."): value for name, value in fields.items()}})
    assert changed.modified_count == 1


@pytest.mark.parametrize(("options", "is_heard"), [(_LONG, False), (_SHORT, True)], ids=["long-lease", "short-lease"])
def test_claims(store: SyncStore, options: dict[str, Any], is_heard: bool) -> None:
    publish(store, "k", **options)
    assert bool(heard(store, lambda: claim(store, "w", "k"))) is is_heard
    assert ("quiet_time" in stored(store, "k")) is not is_heard


@pytest.mark.parametrize(
    ("change", "is_heard"),
    [
        pytest.param(lambda s: finish(s, RunStatus.SUCCESS), False, id="success"),
        pytest.param(lambda s: ping(s, 90_000), False, id="ping"),
        pytest.param(lambda s: finish(s, RunStatus.FAIL, reason="no", delay_ms=60_000), False, id="fail-long-delay"),
        pytest.param(lambda s: finish(s, RunStatus.FAIL, reason="no", delay_ms=100), True, id="fail"),
        pytest.param(lambda s: finish(s, RunStatus.CANCELED, reason="handed back"), True, id="hand-back"),
        pytest.param(lambda s: s.run(queries.cancel("task:k")), True, id="cancel"),
        pytest.param(lambda s: by_hand(s, task_state__cancel_requested=True), True, id="cancel-by-hand"),
        pytest.param(lambda s: by_hand(s, task_option__specific_worker_ids=["a"]), True, id="option-by-hand"),
        pytest.param(lambda s: by_hand(s, queue="elsewhere"), True, id="queue-by-hand"),
        pytest.param(lambda s: by_hand(s, task_state__next_preempt_time=server_now(s)), True, id="time-by-hand"),
        pytest.param(lambda s: by_hand(s, params={"a": 1}), False, id="params-by-hand"),
        pytest.param(lambda s: s.tasks.delete_one(_ID), False, id="delete"),
    ],
)
def test_changes_of_a_held_task(store: SyncStore, change: Callable[[SyncStore], object], is_heard: bool) -> None:
    publish(store, "k", **_LONG)
    claim(store, "w", "k")
    before = stored(store, "k")
    assert bool(heard(store, lambda: change(store))) is is_heard
    assert store.tasks.find_one(_ID) != before


def test_changes_by_hand_are_heard_though_the_document_says_that_it_was_quiet_before(store: SyncStore) -> None:
    publish(store, "k", **_LONG)
    claim(store, "w", "k")
    quiet_time = stored(store, "k")["quiet_time"]
    (event,) = heard(store, lambda: by_hand(store, task_state__cancel_requested=True))
    assert event["concerns_holder"]
    assert stored(store, "k")["quiet_time"] == quiet_time


def test_quiet_changes_are_left_out_on_the_oplog(store: SyncStore) -> None:
    """Where the server could not rewrite the condition, each event would be made first: twice the cost."""
    stages = [{"$changeStream": {}}, *concerns.pipeline("w", ["default"], _HORIZON_MS)]
    plan = store.database.command("explain", {"aggregate": 1, "pipeline": stages, "cursor": {}})
    assert "o.diff.u.quiet_time" in str(plan["stages"][0])


# --- shares -----------------------------------------------------------------------------------------------


def told_of(store: SyncStore, shares: Shares, *documents: dict[str, Any]) -> set[Any]:
    """Return the ids of those of these new tasks of which a stream with these shares tells. The first one is told."""
    stages = concerns.pipeline("me", ["default"], _HORIZON_MS, shares)
    with store.database.watch(stages, max_await_time_ms=200) as stream:
        first, *others = documents
        store.database.command(
            "insert", "tasks", documents=others, bypassDocumentValidation=True, writeConcern={"w": "majority"}
        )
        store.tasks.insert_one(first)
        told: set[Any] = set()
        for event in stream:
            told.add(event["documentKey"]["_id"])
            if event["documentKey"]["_id"] == first["_id"]:
                return told
    raise AssertionError("the stream ended")


def test_stream_with_shares_tells_of_their_simple_tasks_and_of_all_that_are_not_simple(store: SyncStore) -> None:
    publish(store, "k")
    model = stored(store, "k")

    def made(key: str, **fields: Any) -> dict[str, Any]:
        document = {**model, "_id": f"task:{key}", "key": key}
        for path, value in fields.items():
            *parents, last = path.split("__")
            inner = document
            for parent in parents:
                inner[parent] = inner = {**inner[parent]}
            inner[last] = value
        return document

    simple = sorted((made(f"{number}") for number in range(200)), key=lambda task: bucket_of(task["_id"]) % 3)
    ours = {task["_id"] for task in simple if bucket_of(task["_id"]) % 3 == 0}
    others = [task["key"] for task in simple if task["_id"] not in ours]
    told_anyway = [
        made("several" + others[0], task_option__concurrent_worker_cnt=2),
        made("named" + others[1], task_option__specific_worker_ids=["me"]),
        made("sealed" + others[2], sealed="one-key"),
        made("malformed" + others[3], task_state__status=7),
        {**made("unknown"), "_id": "other:unknown", "name": "other"},
    ]
    odd = {**made("number"), "_id": 17}  # it has a bucket, too
    digits = "".join("1" if bucket % 3 == 0 else "0" for bucket in range(BUCKET_CNT))
    found = told_of(store, [(["task", "mail"], digits)], *simple, *told_anyway, odd) - {17}
    always = {task["_id"] for task in told_anyway}
    assert found - always == ours
    assert always <= found
    assert 40 < len(ours) < 100


async def test_stream_turns_to_shares_without_its_last_event(mongo_uri: str, store: SyncStore) -> None:
    """The server cannot go on behind an event that the new filter leaves out. Nothing is missed nevertheless."""
    keys = {bucket_of(f"task:{number}") % 3 == 0: f"{number}" for number in range(50)}
    digits = "".join("1" if bucket % 3 == 0 else "0" for bucket in range(BUCKET_CNT))
    async with asyncio.timeout(PATIENCE):
        reader = AsyncStore(AsyncMongoClient(mongo_uri, tz_aware=True), store.database.name)
        stream = await Stream.open(reader, "w", ["default"], _HORIZON_MS)
        told: list[str] = []

        async def read_until(task_id: str) -> None:
            while task_id not in told:
                told.extend(event.task_id for event in [await stream.next()] if event is not None)

        await asyncio.to_thread(publish, store, keys[False])
        await read_until(f"task:{keys[False]}")
        assert not await stream.hear([(["task"], digits)])
        await asyncio.to_thread(publish, store, keys[True])
        await read_until(f"task:{keys[True]}")
        assert await stream.hear(None)
        await asyncio.to_thread(publish, store, "last")
        await read_until("task:last")
        await stream.close()
        await reader.close()
    assert [task_id for task_id in told if task_id != f"task:{keys[False]}"] == [f"task:{keys[True]}", "task:last"]


def test_appeals_and_ends_of_other_workers_are_told(store: SyncStore) -> None:
    def beat(worker_id: str, status: WorkerStatus = WorkerStatus.RUNNING, appeal_cnt: int = 0) -> None:
        me = registration(worker_id, ["default"], ["task"])
        assert store.run(workers.heartbeat(me, Heartbeat(status, 0, 10, [], appeal_cnt=appeal_cnt)))

    for worker_id in ("me", "other", "third"):
        register(store, worker_id, ["task"])
    with store.database.watch(concerns.pipeline("me", ["default"], _HORIZON_MS), max_await_time_ms=200) as stream:
        beat("other")
        beat("other", appeal_cnt=1)
        beat("other", appeal_cnt=1)
        beat("other", WorkerStatus.STOPPING, appeal_cnt=2)  # the end is more: the workers rank anew
        beat("third", WorkerStatus.STOPPING)
        beat("me", appeal_cnt=1)  # a worker hears its own appeals, too
        beat("other", WorkerStatus.STOPPED, appeal_cnt=2)
        register(store, "last", ["task"])
        events = []
        for change in stream:
            event = wakeups._event(change)
            if event.kind is wakeups.EventKind.PEERS_CHANGED:
                break
            events.append(event)
    end = wakeups.EventKind.WORKER_ORDER
    assert [(event.kind, event.task_id) for event in events] == [
        (wakeups.EventKind.APPEAL, "other"),
        (end, "other"),
        (end, "third"),
        (wakeups.EventKind.APPEAL, "me"),
        (end, "other"),
    ]


def test_calls_are_told_to_those_that_are_called_though_the_server_writes_a_replacement(store: SyncStore) -> None:
    places, now = store.database["places"], server_now(store)
    first, second = ((now + timedelta(seconds=n)).isoformat(timespec="milliseconds")[:23] + "Z" for n in range(2))

    def document(time: str, worker_id: str, **fields: Any) -> dict[str, Any]:
        return {"call": f"{time}\n{worker_id}\n", "schema_version": 1, **fields}

    def write(number: int, time: str, worker_id: str, **fields: Any) -> None:
        places.replace_one({"_id": f'["{number}"]'}, document(time, worker_id, **fields))

    def call() -> None:
        places.update_one({"_id": '["0"]'}, {"$set": document(first, "other")})
        places.update_one({"_id": '["1"]'}, {"$set": document(first, "another")})
        write(2, second, "other", quiet_time=now)
        write(3, first, "other", quiet_time=now + timedelta(seconds=1))  # quiet: the call came before
        write(4, second, "another", quiet_time=now)
        write(5, first, "other")
        publish(store, "last")

    places.insert_many([{"_id": f'["{n}"]', "starts": [], "running": [], "schema_version": 1} for n in range(6)])
    assert [event["documentKey"]["_id"] for event in heard(store, call)] == ['["0"]', '["2"]', '["5"]']


# --- how it is read ---------------------------------------------------------------------------------------


def is_waited_in(mongo: Client, app_name: str) -> bool:
    """Whether a client's stream waits on the server for what comes."""
    waits = {
        "appName": app_name,
        "command.getMore": {"$gt": 0},
        "command.maxTimeMS": wakeups.MAX_AWAIT_MS[Density.STILL],
    }
    return bool(list(mongo.admin.aggregate([{"$currentOp": {}}, {"$match": waits}])))


async def test_what_changes_while_it_turns_to_dense_writes_is_told(mongo_uri: str, store: SyncStore) -> None:
    """The stream is reopened where it was last read, not at the present."""
    async with asyncio.timeout(PATIENCE):
        reader = AsyncStore(AsyncMongoClient(mongo_uri, tz_aware=True), store.database.name)
        stream = await Stream.open(reader, "w", ["default"], _HORIZON_MS)
        assert await stream.next() is None
        told: list[str] = []
        for density, key in ((Density.DENSE, "first"), (Density.STILL, "second")):
            await asyncio.to_thread(publish, store, key)
            stream._traffic.density = density
            told.extend(event.task_id for event in [await stream.next()] if event is not None)
            assert stream.density is density
        await asyncio.to_thread(publish, store, "last")
        while "task:last" not in told:
            told.extend(event.task_id for event in [await stream.next()] if event is not None)
        await stream.close()
        await reader.close()
    assert told == ["task:first", "task:second", "task:last"]


async def test_where_writes_are_dense_it_is_not_waited_in_and_every_change_is_told_once(
    mongo_uri: str, mongo: Client, store: SyncStore
) -> None:
    """Others write all the while, first much, then nothing, then much; what concerns this stream comes in between."""
    name, app_name = store.database.name, f"stream-{store.database.name}"
    unhurried = mongo[name].get_collection("others", write_concern=WriteConcern(w=1, j=False))
    told: list[str] = []
    reader = AsyncStore(AsyncMongoClient(mongo_uri, appname=app_name, tz_aware=True), name)
    stream = await Stream.open(reader, "w", ["default"], _HORIZON_MS)

    async def read() -> None:
        while stream.is_open:
            event = await stream.next()
            if event is not None:
                told.append(event.task_id)

    async def waits() -> bool:
        return await asyncio.to_thread(is_waited_in, mongo, app_name)

    async def publish_and_hear(key: str) -> None:
        await asyncio.to_thread(publish, store, key)
        await until(lambda: f"task:{key}" in told, message=f"{key} is told")

    reading = asyncio.create_task(read())
    published = 0
    for _ in range(2):
        await until(waits, message="it waits for what comes")
        await publish_and_hear(f"calm-{published}")
        end = monotonic() + 20
        while stream.density is not Density.DENSE:
            assert monotonic() < end, "it is waited in, though writes are dense"
            await asyncio.to_thread(unhurried.insert_many, [{} for _ in range(1_000)])
            published += 1
            await asyncio.to_thread(publish, store, f"dense-{published}")
        await publish_and_hear(f"last-{published}")
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    await stream.close()
    await reader.close()
    assert sorted(told) == sorted(document["_id"] for document in store.tasks.find({}, {"_id": 1}))
