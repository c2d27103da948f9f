"""Schedules on a real database: stored once, changed and paused, and fired once by however many schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from pymongo.errors import WriteError

from mtask import App, Client, Cron
from mtask.errors import HandlerError, InvalidInput, ScheduleExists, ScheduleNotFound, SchemaMismatch
from mtask.features.schedules import client as scheduling
from mtask.features.schedules import operations as schedules
from mtask.features.schedules.operations import Firing
from mtask.features.schedules.rules import GRACE, Pending, Schedule, plan
from mtask.features.schedules.triggers import Once
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.logs import FIELDS
from tests.integration.features.schedules.schedulers import keys, scheduling_by, set_next
from tests.integration.worker_harness import Working
from tests.mongo import until

EVERY_SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
LATER = datetime(2099, 1, 1, tzinfo=UTC)
BEFORE_1970 = datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)


def now_of(client: Client) -> datetime:
    return client.server_time()


def resumed_by_an_update(client: Client, schedule_id: str, when: datetime) -> Schedule:
    return client.add_schedule(schedule_id, "report", when, paused=False)


def resumed(client: Client, schedule_id: str, _: datetime) -> Schedule:
    return client.resume_schedule(schedule_id)


# --- stored, changed, paused ----------------------------------------------------------------------------------


def test_added_once_and_changed_without_losing_its_place(client: Client, store: SyncStore) -> None:
    first = client.add_schedule(
        "nightly", "report", "0 3 * * *", {"kind": "sales"}, timezone="Europe/Berlin", priority=3
    )
    assert (first.name, first.params, first.task_option.priority) == ("report", {"kind": "sales"}, 3)
    assert first.schedule_state.next_fire_time == first.next_firing(first.create_time)
    assert (
        client.add_schedule("nightly", "report", "0 3 * * *", {"kind": "sales"}, timezone="Europe/Berlin", priority=3)
        == first
    )
    overdue = first.create_time - HOUR
    set_next(store, "nightly", overdue)
    changed = client.add_schedule("nightly", "report", "0 3 * * *", {"kind": "costs"}, timezone="Europe/Berlin")
    assert (changed.params, changed.task_option.priority) == ({"kind": "costs"}, 0)
    assert (changed.create_time, changed.schedule_state.next_fire_time) == (first.create_time, overdue)
    moved = client.add_schedule("nightly", "report", "0 4 * * *", {"kind": "costs"}, timezone="Europe/Berlin")
    assert moved.schedule_state.next_fire_time == moved.next_firing(moved.update_time)
    assert [schedule.id for schedule in client.schedules()] == ["nightly"]


@pytest.mark.parametrize("resume", [resumed, resumed_by_an_update])
def test_resume_does_not_make_up_for_the_only_firing(
    client: Client, resume: Callable[[Client, str, datetime], Schedule]
) -> None:
    past = now_of(client) - HOUR
    past = past.replace(microsecond=past.microsecond // 1000 * 1000)
    for schedule_id, when, following in (("past", past, None), ("later", LATER, LATER)):
        client.add_schedule(schedule_id, "report", when, paused=True)
        assert resume(client, schedule_id, when).schedule_state.next_fire_time == following
    unpaused = client.add_schedule("at once", "report", past)
    assert unpaused.schedule_state.next_fire_time == past


def test_end_that_is_past_is_refused_unless_it_is_stored_or_declared(client: Client, store: SyncStore) -> None:
    past = now_of(client) - HOUR
    with pytest.raises(InvalidInput, match=r"end_time .* is past"):
        client.add_schedule("s", "report", HOUR, end_time=past)
    client.add_schedule("s", "report", HOUR)
    with pytest.raises(InvalidInput, match=r"end_time .* is past"):
        client.add_schedule("s", "report", HOUR, end_time=past)
    assert client.get_schedule("s").end_time is None
    store.database.schedules.update_one({"_id": "s"}, {"$set": {"end_time": past}})
    assert client.add_schedule("s", "report", HOUR, "changed", end_time=past).params == "changed"

    app = App()
    app.schedule(HOUR, id="declared", end_time=past)(app.task(name="report")(lambda: None))
    declared = store.run(scheduling.put(app.schedules[0], "update", "app"))
    assert declared.schedule_state.next_fire_time is None


def test_what_becomes_of_one_that_exists(client: Client) -> None:
    client.add_schedule("s", "report", HOUR, 1)
    assert client.add_schedule("s", "report", HOUR, 2, if_exists="keep").params == 1
    with pytest.raises(ScheduleExists):
        client.add_schedule("s", "report", HOUR, 2, if_exists="reject")
    assert client.add_schedule("s", "report", HOUR, 2).params == 2


def test_paused_resumed_removed(client: Client, store: SyncStore) -> None:
    client.add_schedule("s", "report", HOUR)
    set_next(store, "s", now_of(client) - 5 * HOUR)
    assert client.pause_schedule("s").paused
    assert client.next_firings("s") == []
    resumed = client.resume_schedule("s")
    assert not resumed.paused
    assert resumed.schedule_state.next_fire_time is not None
    assert resumed.schedule_state.next_fire_time > now_of(client)  # what would have fired meanwhile is not made up for
    found = client.next_firings("s", 3)
    assert [b - a for a, b in pairwise(found)] == [HOUR, HOUR]
    assert client.remove_schedule("s")
    assert not client.remove_schedule("s")
    for ask in (client.get_schedule, client.pause_schedule, client.resume_schedule, client.next_firings):
        with pytest.raises(ScheduleNotFound):
            ask("s")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"when": "* * *"}, "3 fields"),
        ({"when": "0 0 30 2 *"}, "never fire"),
        ({"when": 5}, "use a crontab"),
        ({"when": timedelta(milliseconds=5)}, "use 1 s to"),
        ({"when": datetime(2030, 1, 1)}, "aware datetime"),  # noqa: DTZ001
        ({"when": HOUR, "timezone": "UTC"}, "timezone belongs to a crontab"),
        ({"when": "* * * * *", "timezone": "Mars/Olympus"}, "no time zone"),
        ({"when": HOUR, "jitter": -1}, "jitter"),
        ({"when": HOUR, "jitter": "soon"}, "jitter"),
        ({"when": LATER, "jitter": 5}, "again and again"),
        ({"when": HOUR, "catch_up": "some"}, "catch_up"),
        ({"when": HOUR, "catch_up_limit": 0}, "catch_up_limit"),
        ({"when": HOUR, "overlap": "maybe"}, "overlap"),
        ({"when": HOUR, "start_time": LATER, "end_time": LATER - HOUR}, "after end_time"),
        ({"when": BEFORE_1970}, "when 1969-12-31 23:59:59.* lies before 1970"),
        ({"when": Once(time=BEFORE_1970)}, "when 1969-12-31 23:59:59.* lies before 1970"),
        ({"when": HOUR, "start_time": BEFORE_1970}, "start_time 1969-12-31 23:59:59.* lies before 1970"),
        ({"when": HOUR, "end_time": BEFORE_1970}, "end_time 1969-12-31 23:59:59.* lies before 1970"),
        ({"when": "0 3 * * *", "timezone": "localtime"}, "'localtime' differs from machine to machine"),
        ({"when": Cron(hour="3", timezone="localtime")}, "'localtime' differs from machine to machine"),
        ({"when": HOUR, "start_time": "tomorrow"}, "aware datetime"),
        ({"when": HOUR, "prioritty": 3}, "did you mean 'priority'"),
        ({"when": HOUR, "params": {"x": object()}}, "cannot be stored"),
        ({"when": HOUR, "schedule_id": ""}, "schedule id"),
        ({"when": HOUR, "schedule_id": "x" * 201}, "200 bytes"),
        ({"when": HOUR, "task": "no name"}, "not a task name"),
        ({"when": HOUR, "if_exists": "perhaps"}, "if_exists"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_at_once(client: Client, given: dict[str, Any], told: str) -> None:
    arguments = {"schedule_id": "s", "task": "report", **given}
    with pytest.raises(InvalidInput, match=told):
        client.add_schedule(**arguments)
    assert client.schedules() == []


@pytest.mark.parametrize(
    "change", [{"$set": {"trigger": {"kind": "cron", "minute": "x"}}}, {"$unset": {"revision": 1}}]
)
async def test_malformed_document_is_told_of_and_disturbs_no_other(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str, change: dict[str, Any]
) -> None:
    client.add_schedule("good", "report", EVERY_SECOND)
    client.add_schedule("bad", "report", EVERY_SECOND)
    store.database.command("collMod", "schedules", validator={})
    store.collections["schedules"].update_one({"_id": "bad"}, change)
    assert [schedule.id for schedule in client.schedules()] == ["good"]
    with pytest.raises(SchemaMismatch, match="bad"):
        client.get_schedule("bad")
    async with scheduling_by(mongo_uri, database_name, 1):
        await until(lambda: len(keys(store)) >= 2, message="two firings")
    assert all(key.startswith("good/") for key in keys(store))


def test_validator_wants_a_revision(client: Client, store: SyncStore) -> None:
    client.add_schedule("s", "report", EVERY_SECOND)
    with pytest.raises(WriteError, match="failed validation"):
        store.collections["schedules"].update_one({"_id": "s"}, {"$unset": {"revision": 1}})


class Refused:
    """Has a store move one schedule on never, and counts how often that is tried."""

    def __init__(self, store: AsyncStore, schedule_id: str) -> None:
        self._run = store.run
        vars(store)["run"] = self.run
        self._schedule_id = schedule_id
        self.tried_cnt = 0

    async def run(self, operation: Any) -> Any:
        if operation.__name__ == "advance" and operation.gi_frame.f_locals["schedule"].id == self._schedule_id:
            self.tried_cnt += 1
            operation.close()
            return None
        return await self._run(operation)


async def test_schedule_that_cannot_be_moved_on_is_left_alone_for_a_while(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.add_schedule("good", "report", EVERY_SECOND)
    client.add_schedule("stuck", "report", EVERY_SECOND)
    async with scheduling_by(mongo_uri, database_name, 1) as ((_, its_store),):
        refused = Refused(its_store, "stuck")
        await until(lambda: refused.tried_cnt, message="it is due")
        before = len(keys(store))
        await until(lambda: len(keys(store)) >= before + 2, message="the other fires")
        assert refused.tried_cnt == 2
    told = [getattr(record, FIELDS) for record in caplog.records if "schedule cannot be fired" in record.message]
    assert "stuck" in [values["schedule_id"] for values in told]
    assert all(key.startswith("good/") for key in keys(store))


# --- fired ----------------------------------------------------------------------------------------------------


async def test_firings_have_the_lookups_of_their_schedule(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    app = App()

    @app.schedule(EVERY_SECOND, id="declared", params={"user_id": 8}, lookup={"tags": ["a", "b"]})
    @app.task(lookup=["user_id"])
    def report(user_id: int) -> None: ...

    client.add_schedule("stored", "report", EVERY_SECOND, lookup={"user_id": 7})
    client.add_schedule("plain", "report", EVERY_SECOND)
    async with scheduling_by(mongo_uri, database_name, 1, app):
        await until(lambda: len({key.split("/")[0] for key in keys(store)}) == 3, message="one firing of each")
    expected = {"declared": {"user_id": [8], "tags": ["a", "b"]}, "stored": {"user_id": [7]}, "plain": {}}
    for task in client.find():
        assert task.lookups == expected[task.key.split("/")[0]]
    plain = {"key": {"$regex": "^plain/"}, "lookup": {"$exists": True}}
    assert store.tasks.count_documents(plain) == 0


async def test_each_firing_exists_once_however_many_schedulers_run(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    added = client.add_schedule("s", "report", EVERY_SECOND, catch_up="all")
    async with scheduling_by(mongo_uri, database_name, 5) as schedulers:
        await until(lambda: len(keys(store)) >= 6, message="six firings")
        for scheduler, _ in schedulers:
            scheduler.stop()
    found = client.get_schedule("s").schedule_state
    published = list(store.tasks.find({}, sort=[("task_state.start_time", 1)]))
    starts = [document["task_state"]["start_time"] for document in published]
    assert starts == [added.anchor + (place + 1) * EVERY_SECOND for place in range(len(starts))]
    assert [document["key"] for document in published] == [added.key_of(start) for start in starts]
    assert (found.fired_cnt, found.last_fire_time) == (len(starts), starts[-1])
    assert found.last_task_id == published[-1]["_id"]


def _has_fired(schedule: Schedule) -> bool:
    return schedule.schedule_state.fired_cnt == 1 and not schedule.schedule_state.pending


@pytest.mark.parametrize("is_begun", [False, True], ids=["made", "completed for a dead process"])
async def test_firing_under_a_key_that_somebody_has_published_is_told(
    client: Client,
    store: SyncStore,
    mongo_uri: str,
    database_name: str,
    caplog: pytest.LogCaptureFixture,
    is_begun: bool,
) -> None:
    due = now_of(client) + timedelta(seconds=0.5)
    for schedule_id in ("taken", "free"):
        schedule = client.add_schedule(schedule_id, "report", HOUR)
        set_next(store, schedule_id, due)
    by_hand = client.publish("report", {"by": "hand"}, key=(key := client.get_schedule("taken").key_of(due)))
    await until(lambda: now_of(client) >= due, message="the firing is due")
    if is_begun:
        for schedule_id in ("taken", "free"):
            schedule = client.get_schedule(schedule_id)
            firing = Firing(Pending(fire_time=due, start_time=due), scheduling.new_task(schedule, due, due))
            assert (made := plan(schedule, now_of(client))) is not None
            assert store.run(schedules.advance(schedule, made, [firing])) == [firing]
    async with scheduling_by(mongo_uri, database_name, 1):
        await until(lambda: len(keys(store)) == 2, message="the other schedule fires")
        await until(lambda: all(map(_has_fired, client.schedules())), message="both firings are made")
        await until(lambda: "its key was taken" in caplog.text, message="it is told")
    told = [getattr(record, FIELDS) for record in caplog.records if "its key was taken" in record.message]
    assert told == [{"schedule_id": "taken", "key": key, "task": by_hand.task_id}]
    assert client.get("report", key).params == {"by": "hand"}


async def test_firings_that_several_processes_complete_are_not_told_to_be_taken(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.add_schedule("s", "report", HOUR)
    set_next(store, "s", due := now_of(client))
    schedule = client.get_schedule("s")
    firing = Firing(Pending(fire_time=due, start_time=due), scheduling.new_task(schedule, due, due))
    read_at = now_of(client)
    assert (made := plan(schedule, read_at)) is not None
    assert store.run(schedules.advance(schedule, made, [firing])) == [firing]
    assert store.run(schedules.publish("s", [firing])) == []  # another process has completed it meanwhile
    assert store.run(schedules.publish("s", [firing], read_at)) == []
    async with scheduling_by(mongo_uri, database_name, 2):
        await until(lambda: client.get_schedule("s").schedule_state.pending == [])
    assert not [record for record in caplog.records if "its key was taken" in record.message]


def test_a_change_beside_a_firing_does_not_take_it_back(client: Client, store: SyncStore) -> None:
    client.add_schedule("s", "report", HOUR)
    set_next(store, "s", due := now_of(client))
    schedule = client.get_schedule("s")
    task = scheduling.new_task(schedule, due, due)
    tried: list[datetime] = []

    def changed(now: datetime, former: dict[str, Any]) -> dict[str, Any]:
        if not tried:  # after it was read: another process makes the firing
            made = plan(schedule, now_of(client))
            assert made is not None
            firing = Firing(Pending(fire_time=due, start_time=due), task)
            assert store.run(schedules.advance(schedule, made, [firing])) == [firing]
        tried.append(now)
        return {**former, "params": 2}

    store.run(schedules.change("s", changed))
    after = client.get_schedule("s")
    assert (len(tried), after.params, after.schedule_state.fired_cnt) == (2, 2, 1)
    assert [pending.fire_time for pending in after.schedule_state.pending] == [due]


@pytest.mark.parametrize(("catch_up", "count"), [("none", 0), ("last", 1), ("all", 6)])
async def test_down_for_an_hour(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str, catch_up: Any, count: int
) -> None:
    ten_minutes = timedelta(minutes=10)
    client.add_schedule("s", "report", ten_minutes, catch_up=catch_up)
    begun = now_of(client) - HOUR - GRACE - timedelta(seconds=30)
    store.collections["schedules"].update_one({"_id": "s"}, {"$set": {"create_time": begun - ten_minutes}})
    set_next(store, "s", begun)
    async with scheduling_by(mongo_uri, database_name, 2):
        await until(lambda: client.get_schedule("s").schedule_state.next_fire_time == begun + 7 * ten_minutes)
    due = [begun + place * ten_minutes for place in range(7)]
    schedule = client.get_schedule("s")
    expected = {"none": [], "last": due[-1:], "all": due}[catch_up]
    assert keys(store) == [schedule.key_of(at) for at in expected]
    assert len(expected) == (7 if count == 6 else count)


async def test_overlap_skip_waits_for_the_last_task(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    client.add_schedule("s", "report", EVERY_SECOND, overlap="skip")
    async with scheduling_by(mongo_uri, database_name, 2):
        await until(lambda: client.get_schedule("s").schedule_state.skipped_cnt >= 2, message="two left out")
        assert len(keys(store)) == 1
        await asyncio.to_thread(client.cancel, "report", keys(store)[0])
        await until(lambda: len(keys(store)) == 2, message="the next")


async def test_new_changed_and_resumed_schedules_are_heard_of_at_once(working: Working, client: Client) -> None:
    app = App()

    @app.task
    async def report() -> None:
        return None

    async with working(app) as bench:
        await until(lambda: bench.worker.parts.scans.is_ready.is_set(), message="ready")
        soon = client.server_time() + timedelta(seconds=0.3)
        await asyncio.to_thread(client.add_schedule, "once", "report", soon)
        await until(lambda: bench.count("SUCCESS") == 1, 5.0, "fired long before the next look")
        assert client.get_schedule("once").schedule_state.next_fire_time is None
        await asyncio.to_thread(client.add_schedule, "every", report, EVERY_SECOND, paused=True)
        await asyncio.to_thread(client.resume_schedule, "every")
        await until(lambda: bench.count("SUCCESS") == 3, 6.0, "fired")


async def test_jitter_delays_the_task_and_not_its_key(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    client.add_schedule("s", "report", EVERY_SECOND, jitter=HOUR)
    async with scheduling_by(mongo_uri, database_name, 1):
        await until(lambda: len(keys(store)) >= 3, message="three firings")
    schedule = client.get_schedule("s")
    fired = [schedule.anchor + place * EVERY_SECOND for place in range(1, len(keys(store)) + 1)]
    assert keys(store) == [schedule.key_of(at) for at in fired]
    delays = [
        document["task_state"]["start_time"] - at
        for document, at in zip(store.tasks.find({}, sort=[("key", 1)]), fired, strict=True)
    ]
    assert all(timedelta(0) <= delay <= HOUR for delay in delays)
    assert len(set(delays)) == len(delays)


class Dying:
    """Has a store hang, and with it whose it is, when a firing is written down, before its task is published."""

    def __init__(self, store: AsyncStore, dead: list[Dying]) -> None:
        self._run = store.run
        vars(store)["run"] = self.run
        self._dead = dead

    async def run(self, operation: Any) -> Any:
        result = await self._run(operation)
        if operation.__name__ == "advance" and result and not self._dead:
            self._dead.append(self)
        if self in self._dead:
            await asyncio.Event().wait()
        return result


async def test_schedulers_go_on_where_one_dies_in_mid_firing(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    schedule = client.add_schedule("s", "report", EVERY_SECOND, catch_up="all")

    async def die_of_it() -> None:
        dead: list[Dying] = []
        async with scheduling_by(mongo_uri, database_name, 2) as schedulers:
            for _, its_store in schedulers:  # whichever fires first dies of it
                Dying(its_store, dead)
            await until(lambda: dead, message="one dies")
            before = len(keys(store))
            await until(lambda: len(keys(store)) >= before + 3, message="the other fires")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await die_of_it()
    made = keys(store)
    assert made == [schedule.key_of(schedule.anchor + place * EVERY_SECOND) for place in range(1, len(made) + 1)]


# --- declared -------------------------------------------------------------------------------------------------


async def test_declared_beside_the_handler(working: Working, client: Client) -> None:
    app = App()

    @app.schedule(EVERY_SECOND, params={"kind": "sales"}, overlap="skip", priority=4)
    @app.task(queue="reports")
    async def report(kind: str) -> str:
        return kind

    @app.task(name="mails/digest")
    @app.schedule(Cron(hour="3", timezone="Europe/Berlin"), id="digest")
    @app.schedule("0 12 * * 1", id="weekly")
    def digest() -> None: ...

    async with working(app, queues=["reports"]) as bench:
        await until(lambda: bench.count("SUCCESS") >= 2, message="two firings done")
        document = bench.tasks.find_one({"task_state.status": "SUCCESS"})
        assert document is not None
        assert (document["queue"], document["params"]) == ("reports", {"kind": "sales"})
        assert document["task_option"]["priority"] == 4
    found = {schedule.id: schedule for schedule in client.schedules()}
    assert {name: schedule.name for name, schedule in found.items()} == {
        "report": "report",
        "digest": "mails/digest",
        "weekly": "mails/digest",
    }
    assert {schedule.source for schedule in found.values()} == {"app"}


async def test_what_an_app_declares_no_more_is_fired_by_nobody_who_runs_it(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    declared = App()

    @declared.schedule(EVERY_SECOND)
    @declared.task
    async def report() -> None: ...

    client.add_schedule("other", "report", EVERY_SECOND)
    async with scheduling_by(mongo_uri, database_name, 1, declared):
        await until(lambda: any(key.startswith("report/") for key in keys(store)), message="it fires")
    fired = client.get_schedule("report").schedule_state.fired_cnt
    async with scheduling_by(mongo_uri, database_name, 1, App()):
        before = len(keys(store))
        await until(lambda: len(keys(store)) >= before + 2, message="the other fires")
    assert client.get_schedule("report").schedule_state.fired_cnt == fired


async def test_paused_declared_schedule_stays_paused_when_its_app_starts_again(
    client: Client, store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    app = App()

    @app.schedule(HOUR)
    @app.task
    async def report() -> None: ...

    store.run(scheduling.put(app.schedules[0], "update", "app"))
    client.pause_schedule("report")
    client.add_schedule("other", "report", EVERY_SECOND)
    async with scheduling_by(mongo_uri, database_name, 1, app):
        await until(lambda: len(keys(store)) >= 1, message="the other fires")
    assert client.get_schedule("report").paused


def test_wrong_declarations_are_told_before_anything_runs() -> None:
    app = App()

    @app.schedule(HOUR)
    def plain() -> None: ...

    with pytest.raises(HandlerError, match="add @app\\.task"):
        _ = app.schedules
    twice = App()

    @twice.schedule(HOUR)
    @twice.schedule("* * * * *")
    @twice.task
    def work() -> None: ...

    with pytest.raises(HandlerError, match="give one another with id"):
        _ = twice.schedules
    wrong = App()

    @wrong.schedule(HOUR, params={"unknown": 1})
    @wrong.task
    def needs(known: int) -> None: ...

    with pytest.raises(InvalidInput, match="known"):
        _ = wrong.schedules
    with pytest.raises(InvalidInput, match="4 fields"):
        wrong.schedule("* * * *")
