"""Many schedules, and long missed ones: none holds up another, nor the event loop; and a firing is published once."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import App, Client, Cron
from mtask.features.schedules import client as scheduling
from mtask.features.schedules import operations as schedules
from mtask.features.schedules import worker as scheduler_module
from mtask.features.schedules.operations import Firing
from mtask.features.schedules.rules import Pending, plan
from mtask.kernel.driver.stores import SyncStore
from mtask.logs import FIELDS
from tests.integration.features.schedules.schedulers import keys, scheduling_by, set_next
from tests.integration.worker_harness import between
from tests.mongo import until

Document = dict[str, Any]
EVERY_SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
LATER = datetime(2099, 1, 1, tzinfo=UTC)


def fill(client: Client, store: SyncStore, kind: str, count: int, **changes: Any) -> None:
    """Store so many schedules as nobody would by a client: overdue, but for the changes."""
    client.add_schedule("pattern", "report", HOUR)
    found = store.collections["schedules"].find_one_and_delete({"_id": "pattern"})
    assert found is not None
    overdue = {**found["schedule_state"], "next_fire_time": client.server_time() - HOUR}
    store.collections["schedules"].with_options(write_concern=store.database.client.write_concern).insert_many(
        [{**found, "schedule_state": overdue, **changes, "_id": f"{kind}-{number:05}"} for number in range(count)],
        bypass_document_validation=True,
    )


def fires(store: SyncStore, uri: str, database: str, *schedule_ids: str, app: App | None = None) -> None:
    """Wait until each of these schedules has published a task."""

    def have_fired() -> bool:
        return all(any(key.startswith(f"{name}/") for key in keys(store)) for name in schedule_ids)

    async def scenario() -> None:
        async with scheduling_by(uri, database, 1, app):
            await until(have_fired, message=f"{schedule_ids} fire")

    asyncio.run(scenario())


def declaring() -> App:
    app = App()

    @app.schedule(EVERY_SECOND)
    @app.task
    async def declared() -> None: ...

    return app


# --- others in masses -----------------------------------------------------------------------------------------


def test_overdue_schedules_that_nobody_declares_here_starve_no_others(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    fill(client, store, "a-undeclared", 1_200, source="app")
    client.add_schedule("good", "report", EVERY_SECOND)
    fires(store, mongo_uri, database_name, "good", "declared", app=declaring())
    assert not any(key.startswith("a-undeclared") for key in keys(store))


_UNKNOWN: Document = {"trigger": {"kind": "moon", "phase": "full"}}
_PENDING_AT = datetime(2026, 1, 1, tzinfo=UTC)
_BEGUN: Document = {
    "schedule_state": {
        "next_fire_time": None,
        "fired_cnt": 1,
        "skipped_cnt": 0,
        "pending": [{"fire_time": _PENDING_AT, "start_time": _PENDING_AT}],
    }
}


@pytest.mark.parametrize("changes", [_UNKNOWN, {**_UNKNOWN, **_BEGUN}], ids=["due", "begun"])
@pytest.mark.parametrize("are_left_out", [True, False], ids=["left out", "beyond what is left out"])
def test_malformed_schedules_starve_no_others(
    client: Client,
    store: SyncStore,
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    changes: Document,
    are_left_out: bool,
) -> None:
    count = 1_200
    if not are_left_out:
        monkeypatch.setattr(scheduler_module, "MAX_LEFT_OUT", 5)
        monkeypatch.setattr(scheduler_module, "PAGE", 20)
        count = 90
    fill(client, store, "a-malformed", count, **changes)
    client.add_schedule("good", "report", EVERY_SECOND)
    fill(client, store, "good-begun", 1, **_BEGUN)
    fires(store, mongo_uri, database_name, "good", "good-begun-00000")


def test_log_tells_of_many_schedules_that_cannot_be_fired_in_a_few_lines(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, store, "malformed", 450, **_UNKNOWN)
    client.add_schedule("good", "report", EVERY_SECOND)
    fires(store, mongo_uri, database_name, "good")
    told = [getattr(record, FIELDS) for record in caplog.records if "cannot be fired" in record.message]
    assert len([values for values in told if values.get("schedule_id", "").startswith("malformed-")]) == 100
    assert {"schedules": 350} in told


def branches(pipeline: list[Document]) -> Iterator[list[Document]]:
    """Yield the queries that one pipeline unites."""
    yield [stage for stage in pipeline if "$unionWith" not in stage and "$set" not in stage]
    for stage in pipeline:
        if "$unionWith" in stage:
            yield [inner for inner in stage["$unionWith"]["pipeline"] if "$set" not in inner]


def examined(store: SyncStore, stages: list[Document]) -> tuple[int, int, int]:
    """Return how many documents a query returns, and how many keys and documents it examines for that."""
    told = store.database.command(
        "explain", {"aggregate": "schedules", "pipeline": stages, "cursor": {}}, verbosity="executionStats"
    )
    found = told["stages"][0]["$cursor"] if "stages" in told else told
    statistics = found["executionStats"]
    assert statistics["executionSuccess"]
    return statistics["nReturned"], statistics["totalKeysExamined"], statistics["totalDocsExamined"]


def test_look_for_what_comes_examines_hardly_more_than_it_returns(client: Client, store: SyncStore) -> None:
    others, due = 2_000, 40
    over: Document = {"next_fire_time": None, "fired_cnt": 1, "skipped_cnt": 0, "pending": []}
    fill(client, store, "undeclared", others, source="app")
    fill(client, store, "paused", others, paused=True)
    fill(client, store, "over", others, schedule_state=over)
    fill(client, store, "later", others, schedule_state={**over, "next_fire_time": LATER})
    fill(client, store, "left-out", 500)
    fill(client, store, "due", due)
    fill(client, store, "begun", due, **_BEGUN)
    fill(client, store, "declared", 2, source="app")
    left_out = [f"left-out-{number:05}" for number in range(500)]
    arguments = (60_000, 200, ["declared-00000", "declared-00001"], left_out)
    [call] = [next(schedules.coming(*arguments))]
    returned = []
    for stages in branches(call.args[0]):
        count, keys_cnt, documents_cnt = examined(store, stages)
        returned.append(count)
        assert documents_cnt <= 2 * count + 5
        assert keys_cnt <= 2 * count + len(left_out) + 20
    assert returned == [due, due, 2]
    found = store.run(schedules.coming(*arguments))
    assert len(found.documents) == 2 * due + 2
    assert found.end is None


def test_pages_of_what_comes_bring_each_once(client: Client, store: SyncStore) -> None:
    fill(client, store, "due", 25)  # all at one instant
    fill(client, store, "begun", 15, **_BEGUN)
    brought, pages, after = [], 0, None
    while pages == 0 or after is not None:
        found = store.run(schedules.coming(60_000, 10, after=after))
        brought += [document["_id"] for document in found.documents]
        pages, after = pages + 1, found.end
    assert len(brought) == len(set(brought)) == 40
    assert pages == 3


# --- the event loop -------------------------------------------------------------------------------------------


@contextmanager
def worked(longest: list[float]) -> Iterator[asyncio.Task[None]]:
    """Take down the longest that this thread works without letting the event loop go on, in seconds of its CPU.

    The garbage collector rests meanwhile: after thousands of tests, a round of it takes as long as what is measured.
    """

    async def tick() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            longest.append(now - before)
            before = now

    ticking = asyncio.get_running_loop().create_task(tick())
    gc.disable()
    try:
        yield ticking
    finally:
        gc.enable()
        ticking.cancel()


async def test_catching_up_does_not_block_the_event_loop(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    count = 3
    begun = client.server_time() - timedelta(days=2)
    for number in range(count):
        client.add_schedule(f"s{number}", "report", Cron(second="*"), catch_up="all", catch_up_limit=400, jitter=HOUR)
        set_next(store, f"s{number}", begun)
    schedule = client.get_schedule("s0")
    before = time.thread_time()
    made = plan(schedule, client.server_time())
    takes = time.thread_time() - before
    assert made is not None
    assert len(made.firings) >= 400
    longest: list[float] = []
    async with scheduling_by(mongo_uri, database_name, 1):
        with worked(longest):
            await until(lambda: store.tasks.estimated_document_count() >= count * 400, message="caught up")
    # All three, and the jitter of each firing, take five times as long or more.
    assert max(longest) < 2 * takes


# --- published once -------------------------------------------------------------------------------------------


async def test_process_frozen_before_it_publishes_does_not_publish_what_was_done_and_removed_meanwhile(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    schedule = client.add_schedule("once", "report", due := client.server_time())
    key = schedule.key_of(due.replace(microsecond=due.microsecond // 1000 * 1000))
    removed, thawed = asyncio.Event(), asyncio.Event()
    async with scheduling_by(mongo_uri, database_name, 1) as ((_, its_store),):

        async def freeze() -> None:
            if store.collections["schedules"].find_one({"_id": "once", "schedule_state.pending.0": {"$exists": 1}}):
                await removed.wait()

        async def thaw() -> None:
            if removed.is_set():
                thawed.set()

        between(its_store, "publish", before=freeze, after=thaw)
        await until(lambda: client.get_schedule("once").schedule_state.pending, message="it is written down")
        async with scheduling_by(mongo_uri, database_name, 1):
            await until(lambda: keys(store) == [key], message="another publishes")
            await until(lambda: not client.get_schedule("once").schedule_state.pending, message="and crosses off")
        await asyncio.to_thread(client.remove, "report", key)
        removed.set()
        await thawed.wait()
        assert keys(store) == []


def test_firing_makes_the_same_document_as_a_publish(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    params = {"$literal": "$name", "nested": {"$ref": "a", "a.b": [None, 1.5, {"$set": {}}]}, "": b"x"}
    client.add_schedule("s", "report", client.server_time(), params, queue="reports", priority=3, limit_key="$k")
    client.publish("report", params, key="published", queue="reports", priority=3, limit_key="$k", delay=0)
    fires(store, mongo_uri, database_name, "s")
    [fired, published] = store.tasks.find({}, sort=[("key", -1)])
    assert list(fired) == list(published)
    assert list(fired["task_state"]) == list(published["task_state"])
    for name in ("name", "queue", "params", "task_option", "schema_version"):
        assert fired[name] == published[name]
    assert fired["task_state"]["next_preempt_time"] == fired["task_state"]["start_time"]


def test_firing_whose_task_is_there_leaves_it_as_it_is(client: Client, store: SyncStore) -> None:
    schedule = client.add_schedule("s", "report", HOUR)
    set_next(store, "s", due := client.server_time())
    client.publish("report", {"by": "hand"}, key=schedule.key_of(due))
    before = list(store.tasks.find())
    schedule = client.get_schedule("s")
    made = plan(schedule, client.server_time())
    assert made is not None
    firing = Firing(Pending(fire_time=due, start_time=due), scheduling.new_task(schedule, due, due))
    assert store.run(schedules.advance(schedule, made, [firing])) == [firing]
    store.run(schedules.publish("s", [firing]))
    assert list(store.tasks.find()) == before
    assert client.get_schedule("s").schedule_state.pending == []


# --- memory ---------------------------------------------------------------------------------------------------


async def test_scheduler_forgets_schedules_that_fire_no_more_and_all_but_the_newest(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_REMEMBERED", 3)
    for number in range(6):
        client.add_schedule(f"once-{number}", "report", client.server_time())
        client.add_schedule(f"hourly-{number}", "report", HOUR)
        set_next(store, f"hourly-{number}", client.server_time())
    async with scheduling_by(mongo_uri, database_name, 1) as ((scheduler, _),):
        await until(lambda: scheduler.fired_cnt == 12, message="all fire")
        assert len(scheduler._made) == 3
        assert all(name.startswith("hourly") for name in scheduler._made)
