"""`mtask purge` and `mtask tail`."""

from __future__ import annotations

import io
import json
import math
from datetime import timedelta

import pytest

from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from tests.clients import claim, fail, succeed
from tests.integration.cli.commands import Commands, client_of


class Terminal(io.StringIO):
    """What somebody types who was asked."""

    def isatty(self) -> bool:
        return True


def test_purge_counts_asks_and_removes(mtask: Commands, store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(mtask, store)
    counted = mtask.ok("purge", "--dry-run", "--json").json
    assert counted == {"removed": 0, "found": 5}
    ended = mtask("purge", "--json")
    assert (ended.code, ended.error["field"]) == (2, "yes")  # nobody can be asked
    assert "5 tasks would be removed" in mtask.ok("purge", "--dry-run").out
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert mtask("purge").code == 1
    assert len(left(store)) == 8
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert mtask.ok("purge", "--limit", "1").out.strip() == "1 tasks removed"
    assert mtask.ok("purge", "-y", "--json").json == {"removed": 4, "found": 4}
    assert left(store) == {"late:1", "run:1", "wait:1"}
    assert "nothing matches" in mtask.ok("purge", "-y").out


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--status", "success"], {"good:1", "good:2"}),
        (["--status", "SUCCESS,FAIL", "--queue", "mail"], {"bad:1"}),
        (["--name", "good", "--name", "off"], {"good:1", "good:2", "off:1", "off:2"}),
        (["--status", "INIT"], {"late:1", "wait:1"}),
        (["--older-than", "1h"], {"good:2"}),
        (["--older-than", "1h", "--status", "INIT"], set()),
        (["--name", "none"], set()),
    ],
)
def test_purge_removes_what_it_names_and_nothing_else(
    mtask: Commands, store: SyncStore, flags: list[str], gone: set[str]
) -> None:
    finished(mtask, store)
    before = left(store)
    mtask.ok("purge", "--yes", *flags)
    assert before - left(store) == gone


@pytest.mark.parametrize(
    "flags", [["--status", "RUNNING"], ["--status", "DONE"], ["--older-than", "old"], ["--older-than=-1h"]]
)
def test_a_purge_of_what_cannot_be_purged_is_refused(mtask: Commands, store: SyncStore, flags: list[str]) -> None:
    finished(mtask, store)
    assert mtask("purge", "--yes", *flags).code == 2
    assert len(left(store)) == 8


def finished(mtask: Commands, store: SyncStore) -> None:
    """Leave tasks in every state: two SUCCESS, one of them old, a FAIL, two CANCELED, one runs, two wait."""
    mtask.ok("init")
    for name, key in (("good", "1"), ("good", "2"), ("run", "1"), ("wait", "1"), ("off", "1"), ("off", "2")):
        mtask.ok("publish", name, "--key", key)
    mtask.ok("publish", "late", "--key", "1", "--delay", "2h")
    mtask.ok("publish", "bad", "--key", "1", "--queue", "mail")
    for task_id in ("good:1", "good:2"):
        succeed(store, task_id, claim(store, task_id))
    fail(store, "bad:1", claim(store, "bad:1"), final=True)
    claim(store, "run:1")
    for key in "12":
        mtask.ok("cancel", "off", key)
    ended = store.tasks.find_one({"_id": "good:2"})
    assert ended is not None
    earlier = {"$set": {"task_state.finish_time": ended["task_state"]["finish_time"] - timedelta(hours=2)}}
    store.tasks.update_one({"_id": "good:2"}, earlier)


def left(store: SyncStore) -> set[str]:
    return {document["_id"] for document in store.tasks.find({}, {"_id": 1})}


# --- tail -------------------------------------------------------------------------------------------------------


def begun(commands: Commands) -> str:
    """Return a token from which on all will be told."""
    with client_of(commands) as client, client.events() as happening:
        token = happening.open().token
    assert token is not None
    return token


def test_tail_prints_what_happens_and_ends_after_so_many(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    token = begun(mtask)
    mtask.ok("publish", "send", "--key", "1", "--queue", "mail")
    fail(store, "send:1", claim(store, "send:1", "w7"), "no luck", final=True)
    ended = mtask.ok("tail", "--after", token, "--count", "3", "--json")
    published, claimed, failed = [json.loads(line) for line in ended.out.splitlines()]
    assert [event["kind"] for event in (published, claimed, failed)] == ["published", "claimed", "failed"]
    assert {event["task_id"] for event in (published, claimed, failed)} == {"send:1"}
    assert (published["queue"], published["task_status"]) == ("mail", "INIT")
    assert (claimed["worker_id"], claimed["attempt"]) == ("w7", 1)
    assert (failed["reason"], failed["task_status"]) == ("no luck", "FAIL")
    assert "Ctrl-C" in ended.err
    (line,) = mtask.ok("tail", "--after", claimed["token"], "--count", "1").out.splitlines()
    for said in ("failed", "send:1", "w7", "no luck", "task FAIL"):
        assert said in line


def test_tail_prints_progress(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    mtask.ok("publish", "send", "--key", "1")
    token = begun(mtask)
    run_id = claim(store, "send:1")
    store.run(claims.ping({run_id: "send:1"}, 60_000, {run_id: {"fraction": 0.25, "message": "begun"}}))
    last = mtask.ok("tail", "--after", token, "--count", "2").out.splitlines()[-1]
    for said in ("progress", "25%", "begun"):
        assert said in last
    event = json.loads(mtask.ok("tail", "--after", token, "--count", "2", "--json").out.splitlines()[-1])
    assert (event["progress"], event["message"]) == (0.25, "begun")


@pytest.mark.parametrize(
    ("flags", "task_ids"),
    [
        (["--name", "send"], ["send:1", "send:2"]),
        (["--queue", "mail"], ["send:2", "other:1"]),
        (["--key", "1"], ["send:1", "other:1"]),
        (["--name", "send", "--key", "2"], ["send:2"]),
    ],
)
def test_tail_shows_what_was_asked_for(mtask: Commands, flags: list[str], task_ids: list[str]) -> None:
    mtask.ok("init")
    token = begun(mtask)
    mtask.ok("publish", "send", "--key", "1")
    mtask.ok("publish", "send", "--key", "2", "--queue", "mail")
    mtask.ok("publish", "other", "--key", "1", "--queue", "mail")
    out = mtask.ok("tail", "--after", token, *flags, "--count", str(len(task_ids)), "--json").out
    assert [json.loads(line)["task_id"] for line in out.splitlines()] == task_ids


def test_tail_begins_as_long_ago_as_asked(mtask: Commands) -> None:
    mtask.ok("publish", "send", "--key", "1")
    with client_of(mtask) as client:
        age = client.server_time() - client.get("send", "1").task_state.create_time
    since = f"{math.ceil(age.total_seconds()) + 60}s"
    assert "published" in mtask.ok("tail", "--since", since, "--name", "send", "--count", "1").out


@pytest.mark.parametrize("flags", [["--after", "nonsense"], ["--since", "then"], ["--count=-1"]])
def test_nonsense_is_refused(mtask: Commands, flags: list[str]) -> None:
    mtask.ok("init")
    assert mtask("tail", *flags).code == 2
