"""`mtask migrate agenda`: real jobs of Agenda 5 and 6 are moved once, also if it is called twice, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo.collection import Collection

from mtask import App, Client
from mtask.contrib.agenda.jobs import Jobs
from mtask.contrib.agenda.migration import Migration
from mtask.contrib.agenda.rules import BEFORE, DISABLED, FAILED, FINISHED, LOCKED, MOVED, REVIVED, SKIPS, UNPLANNED
from mtask.features.schedules.triggers import Cron, Every
from mtask.kernel.driver.stores import SyncStore
from tests.integration.cli.commands import Commands
from tests.integration.contrib.agenda.jobs import Document, job, written_by
from tests.integration.features.registry.apps import registered
from tests.mongo import Client as Mongo

HOUR = timedelta(hours=1)


def migrated(mtask: Commands, agenda: Collection[Document], *flags: str) -> Any:
    return mtask.ok("migrate", "agenda", "--from", agenda.full_name, *flags, "--json").json


def reasons(answer: Any) -> dict[str, dict[str, int]]:
    """Return how many jobs stay, by name and reason."""
    found: dict[str, dict[str, int]] = {}
    for row in answer["left"]:
        found.setdefault(row["name"], {})[row["reason"]] = row["count"]
    return found


def key_of(found: Document) -> str:
    return f"agenda/{found['_id']}"


@pytest.mark.parametrize("version", [5, 6])
def test_jobs_of_agenda_are_moved_once(
    mtask: Commands, client: Client, agenda: Collection[Document], version: int
) -> None:
    agenda.insert_many(written_by(version, client.server_time()))
    before = list(agenda.find())
    flags = ("--name", "send email=send_email", "--timezone", "Europe/Berlin")
    would = migrated(mtask, agenda, *flags, "--dry-run")
    assert list(agenda.find()) == before
    assert [*client.find(), *client.schedules()] == []

    answer = migrated(mtask, agenda, *flags)
    assert {**would, "dry_run": False} == answer
    moved = {row["name"]: (row["task"], row["tasks"], row["schedules"]) for row in answer["moved"]}
    repeating = ("tick", "words", "ms", "cron5", "cron6", "daily", "ending")
    assert moved == {
        "send email": ("send_email", 4, 0),
        "tidy/up": ("tidy/up", 1, 0),
        **{name: (name, 0, 1) for name in repeating},
    }
    left = reasons(answer)
    assert "Use two schedules" in next(iter(left.pop("either")))
    assert left == {
        "send email": {FINISHED: 1, DISABLED: 1},
        "broken": {FAILED: 1},
        "slow": {LOCKED: 1},
        "sleepy": {SKIPS: 1},
        "odd": {UNPLANNED: 1},
    }
    tasks = {task.key: task for task in client.find(limit=0)}
    schedules = {one.id: one for one in client.schedules()}
    for former in before:
        now, key = agenda.find_one({"_id": former["_id"]}), key_of(former)
        assert now is not None
        if MOVED not in now:
            assert (now, key in tasks, key in schedules) == (former, False, False)
            continue
        assert {**former, "disabled": True, MOVED: now[MOVED]} == now
        expected = (former["data"], former["priority"], former["nextRunAt"])
        if former["name"] in repeating:
            one = schedules[key]
            assert (one.params, one.task_option.priority, one.start_time, one.overlap) == (*expected, "skip")
        else:
            task = tasks[key]
            assert (task.params, task.task_option.priority, task.task_state.start_time) == expected
    triggers = {one.name: one.trigger for one in schedules.values()}
    assert [triggers[name] for name in ("tick", "words", "ms", "ending")] == [
        Every(interval_ms=seconds * 1000) for seconds in (180, 5400, 90, 2 * 86_400)
    ]
    assert triggers["cron5"] == Cron.parse("*/5 * * * *", "Europe/Berlin")
    assert triggers["daily"] == Cron(hour="15", minute="40", timezone="Europe/Berlin")
    assert str(triggers["cron6"]).endswith("minute=*/5 second=30 Europe/Berlin")
    for one in schedules.values():
        former = next(each for each in before if key_of(each) == one.id)
        # Agenda begins a repeatAt at once: that run is no firing of the schedule.
        assert (one.schedule_state.next_fire_time == former["nextRunAt"]) is (one.name != "daily")
        assert (one.id in tasks) is (one.name == "daily")
        assert (one.end_time is None) is (one.name != "ending")

    again = migrated(mtask, agenda, *flags)
    assert again["moved"] == []
    assert reasons(again)["send email"] == {BEFORE: 4, FINISHED: 1, DISABLED: 1}
    assert {task.key: task for task in client.find(limit=0)} == tasks
    assert {one.id: one for one in client.schedules()} == schedules


def test_job_that_every_enabled_again_is_disabled_again_and_not_moved_twice(
    mtask: Commands, client: Client, agenda: Collection[Document]
) -> None:
    agenda.insert_one(job(1, name="tick", repeatInterval="1 hour", nextRunAt=client.server_time() + HOUR))
    migrated(mtask, agenda)
    # What `every` of Agenda 6 writes, when a service starts that still calls it.
    agenda.update_one({}, {"$set": {"disabled": None, "nextRunAt": client.server_time()}})
    assert reasons(migrated(mtask, agenda, "--dry-run")) == {"tick": {REVIVED: 1}}
    assert agenda.count_documents({"disabled": True}) == 0
    assert reasons(migrated(mtask, agenda)) == {"tick": {REVIVED: 1}}
    assert agenda.count_documents({"disabled": True}) == 1
    assert (len(client.schedules()), client.find()) == (1, [])


def test_overdue_run_of_a_repeating_job_is_a_task_that_is_due(
    mtask: Commands, client: Client, agenda: Collection[Document]
) -> None:
    now = client.server_time()
    since = now - timedelta(minutes=30)
    agenda.insert_one(job(1, name="hourly", repeatInterval="1 hour", nextRunAt=since))
    agenda.insert_one(job(2, name="nightly", repeatInterval="0 2 1 1 *", nextRunAt=since))
    agenda.insert_one(job(3, name="over", repeatInterval="1 hour", nextRunAt=since, endDate=since + timedelta(1 / 48)))
    agenda.insert_one(job(4, name="plain", nextRunAt=since))
    shown = mtask.ok("migrate", "agenda", "--from", agenda.full_name)
    assert "1 schedule in UTC, as the jobs name no time zone" in shown.err
    assert f"3 jobs of {agenda.full_name} moved to database {mtask.database}; 1 stay" in shown.out
    assert "end_time" in shown.out
    assert "would never fire" in shown.out
    assert sorted(task.name for task in client.find()) == ["hourly", "nightly", "plain"]
    assert {task.task_state.start_time for task in client.find()} == {
        since.replace(microsecond=since.microsecond // 1000 * 1000)
    }
    first = {one.name: one.schedule_state.next_fire_time for one in client.schedules()}
    assert first.keys() == {"hourly", "nightly"}
    assert first["hourly"] is not None
    assert now < first["hourly"] < now + HOUR


def test_params_that_the_handler_does_not_take_stay_where_they_are(
    mtask: Commands, client: Client, store: SyncStore, agenda: Collection[Document]
) -> None:
    app = App()

    @app.task(queue="mail", max_retries=7)
    def send(to: str) -> None: ...

    registered(store, app)
    agenda.insert_many([job(1, data={"to": "a"}), job(2, data={"address": "a"}), job(3, name="sent", data=None)])
    for flags in (["--dry-run"], []):
        shown = mtask.ok("migrate", "agenda", "--from", agenda.full_name, *flags)
        assert "to: Field required" in shown.out
        assert "address: Extra inputs" in shown.out
    assert "did you mean 'send'?" in shown.err
    moved = client.get("send", key_of(job(1)))
    assert (moved.queue, moved.task_option.max_unexpected_retries) == ("mail", 7)
    assert [each["_id"] for each in agenda.find({"disabled": True})] == [job(1)["_id"], job(3)["_id"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "agendaJobs"], "give the database and the collection"),
        (["--from", "{place}x"], "no such collection; database .* has: agendaJobs"),
        (["--from", "{place}", "--name", "send"], "give JOB=TASK"),
        (["--from", "{place}", "--name", "sent=a"], "is named 'sent'; there are: 'send'"),
        (["--from", "{place}", "--name", "send=a b"], "a b"),
        (["--from", "{place}", "--name", "send=a", "--name", "send=b"], "two names: a, b"),
        (["--from", "{place}", "--timezone", "Berlin"], "'Berlin' is no time zone"),
    ],
)
def test_wrong_call_says_what_is_right_and_moves_nothing(
    mtask: Commands, client: Client, agenda: Collection[Document], flags: list[str], message: str
) -> None:
    agenda.insert_one(job(1))
    ended = mtask("migrate", "agenda", *(flag.format(place=agenda.full_name) for flag in flags))
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(ended.err)
    assert (client.find(), agenda.count_documents({"disabled": True})) == ([], 0)


class _Racing(Jobs):
    """Agenda locks the job, between the read of a transaction and its write."""

    def __init__(self, client: Client, agenda: Collection[Document]) -> None:
        super().__init__(client, agenda.full_name)
        self.agenda = agenda
        self.times = 0

    def disable(self, job_id: Any, moved_to: str | None = None, session: Any = None) -> None:
        self.times += 1
        self.agenda.update_one({"_id": job_id}, {"$set": {"lockedAt": datetime.now(UTC)}})
        super().disable(job_id, moved_to, session)


def test_job_that_agenda_takes_meanwhile_is_left_to_it(client: Client, agenda: Collection[Document]) -> None:
    agenda.insert_one(job(1, repeatInterval="1 hour"))
    jobs = _Racing(client, agenda)
    result = Migration(client, jobs, {}, "UTC").run()
    assert (jobs.times, result.moved, [*result.left]) == (1, {}, [("send", LOCKED)])
    assert [*client.find(), *client.schedules()] == []
    assert agenda.count_documents({"disabled": True}) == 0


def end_abandoned(mongo: Mongo) -> None:
    """End the transaction of the killed process: by itself, the server does so after a minute."""
    held = {"active": True, "appName": "mtask", "command.autocommit": False}
    found = mongo.admin.aggregate([{"$currentOp": {"allUsers": True}}, {"$match": held}])
    sessions = [each["lsid"]["id"] for each in found]
    assert sessions
    mongo.admin.command("killSessions", [{"id": session} for session in sessions])


@pytest.mark.parametrize("amid", ["update", "commitTransaction"])
def test_killed_migration_loses_nothing_and_the_next_one_doubles_nothing(
    mtask: Commands,
    client: Client,
    mongo: Mongo,
    agenda: Collection[Document],
    amid: str,
) -> None:
    count, done = 12, 5
    repeats = {"repeatInterval": "1 hour", "nextRunAt": client.server_time() + HOUR}
    agenda.insert_many([job(number, **(repeats if number % 3 == 0 else {})) for number in range(count)])
    held: Document = {"failCommands": [amid], "blockConnection": True, "blockTimeMS": 60_000, "appName": "mtask"}
    if amid == "update":
        held["namespace"] = agenda.full_name  # the task is published, and the job not disabled yet
    set_to = mongo.admin.command("configureFailPoint", "failCommand", mode={"skip": done}, data=held)
    command = [sys.executable, "-m", "mtask.cli.main", "migrate", "agenda", "--from", agenda.full_name]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            entered = {"timesEntered": set_to["count"] + 1, "maxTimeMS": 60_000}
            mongo.admin.command("waitForFailPoint", "failCommand", **entered)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            end_abandoned(mongo)
            mongo.admin.command("configureFailPoint", "failCommand", mode="off")

    def keys_and_moved() -> tuple[set[str], set[str]]:
        """Return what was published and what was disabled, at one instant."""
        own = mongo[mtask.database]
        with mongo.start_session(snapshot=True) as session:
            published = {task["key"] for task in own["tasks"].find(session=session)}
            published |= {one["_id"] for one in own["schedules"].find(session=session)}
            return published, {key_of(each) for each in agenda.find({"disabled": True}, session=session)}

    published, moved = keys_and_moved()
    assert published == moved
    assert done <= len(moved) < count
    again = migrated(mtask, agenda)
    assert [(row["tasks"], row["schedules"]) for row in again["moved"]] != []
    published, moved = keys_and_moved()
    assert published == moved == {key_of(job(number)) for number in range(count)}
    assert len(client.schedules()) == count // 3
    assert client.count() == count - count // 3
    assert sum(row["tasks"] + row["schedules"] for row in again["moved"]) + reasons(again)["send"][BEFORE] == count
