"""`mtask schedule add|list|show|next|pause|resume|remove`."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from mtask import Client
from mtask.kernel.driver.stores import SyncStore
from tests.integration.cli.commands import Commands

NIGHTLY = ("add", "nightly", "report", '{"kind": "sales"}', "--cron", "30 2 * * 1", "--timezone", "Europe/Berlin")


def test_a_schedule_lives_and_ends(mtask: Commands, client: Client) -> None:
    added = mtask.ok("schedule", *NIGHTLY, "--priority", "4", "--json").json
    assert (added["_id"], added["name"], added["params"]) == ("nightly", "report", {"kind": "sales"})
    assert added["trigger"]["day_of_week"] == "mon"
    assert added["task_option"]["priority"] == 4
    again = mtask("schedule", *NIGHTLY, "--json")
    assert (again.code, again.error["error"]) == (5, "ScheduleExists")
    assert mtask.ok("schedule", *NIGHTLY, "--if-exists", "update", "--json").json["task_option"]["priority"] == 0
    (listed,) = mtask.ok("schedule", "list", "--json").json
    assert listed["_id"] == "nightly"
    out = mtask.ok("schedule", "list").out
    assert "nightly" in out
    assert "report" in out
    firings = [
        datetime.fromisoformat(text) for text in mtask.ok("schedule", "next", "nightly", "-n", "3", "--json").json
    ]
    assert firings == client.next_firings("nightly", 3)
    assert all(timedelta(days=6) < b - a < timedelta(days=8) for a, b in pairwise(firings))
    assert "02:30:00 Europe/Berlin" in mtask.ok("schedule", "next", "nightly").out
    assert "paused" in mtask.ok("schedule", "pause", "nightly").out
    assert "paused" in mtask.ok("schedule", "list").out
    assert "is paused" in mtask.ok("schedule", "next", "nightly").err
    shown = mtask.ok("schedule", "show", "nightly").out
    assert "paused    yes" in shown
    assert "Europe/Berlin" in shown
    assert "next " in mtask.ok("schedule", "resume", "nightly").out
    assert mtask.ok("schedule", "remove", "nightly", "--json").json == {"schedule_id": "nightly", "removed": True}
    gone = mtask("schedule", "remove", "nightly", "--json")
    assert (gone.code, gone.error["error"]) == (4, "ScheduleNotFound")
    assert "has no schedules" in mtask.ok("schedule", "list").err


def test_the_last_task_is_told_to_be_somebody_elses(mtask: Commands, client: Client, store: SyncStore) -> None:
    for schedule_id in ("taken", "free"):
        client.add_schedule(schedule_id, "report", timedelta(hours=1))
        client.publish("report", key=schedule_id)
        fired = client.server_time() + timedelta(hours=1 if schedule_id == "taken" else -1)
        last = {"last_fire_time": fired, "last_task_id": f"report:{schedule_id}"}
        stored = {f"schedule_state.{name}": value for name, value in last.items()}
        store.collections["schedules"].update_one({"_id": schedule_id}, {"$set": stored})
    assert "report:taken, published before the firing" in mtask.ok("schedule", "show", "taken").out
    assert "published before" not in mtask.ok("schedule", "show", "free").out
    client.remove("report", "taken")
    assert "report:taken\n" in mtask.ok("schedule", "show", "taken").out


def test_every_and_at(mtask: Commands) -> None:
    every = mtask.ok("schedule", "add", "e", "report", "--every", "1h30m", "--jitter", "10s", "--json").json
    assert (every["trigger"]["interval_ms"], every["jitter_ms"]) == (5_400_000, 10_000)
    once = mtask.ok("schedule", "add", "o", "report", "--at", "2099-01-31T08:00:00Z", "--paused", "--json").json
    assert (once["trigger"]["kind"], once["paused"]) == ("once", True)
    assert "once at" in mtask.ok("schedule", "list").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["add", "s", "report"], "--cron, --every and --at"),
        (["add", "s", "report", "--every", "5m", "--cron", "* * * * *"], "--cron, --every and --at"),
        (["add", "s", "report", "--every", "soon"], "no duration"),
        (["add", "s", "report", "--cron", "* * *"], "3 fields"),
        (["add", "s", "report", "--cron", "* * * * *", "--timezone", "Mars"], "no time zone"),
        (["add", "s", "report", "--at", "2099-01-31"], "time zone"),
        (["add", "s", "report", "--every", "5m", "--catch-up", "some"], "catch_up"),
        (["add", "s", "report", "--every", "5m", "--overlap", "some"], "overlap"),
        (["add", "s", "no name", "--every", "5m"], "not a task name"),
        (["add", "s", "report", "{", "--every", "5m"], "JSON"),
        (["next", "s", "--count", "0"], "count"),
    ],
)
def test_nonsense_is_refused_in_one_line(mtask: Commands, arguments: list[str], told: str) -> None:
    ended = mtask("schedule", *arguments)
    assert ended.code == 2
    assert told in ended.err
    assert "Traceback" not in ended.err
