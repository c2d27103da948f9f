"""`mtask publish --debounce|--max-wait|--collect|--again|--window`, and what `show` and `doctor` tell of such tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtask.store.driver.stores import SyncStore
from tests.clients import claim, succeed
from tests.integration.cli.commands import Commands

ID = "send:k"


def publish(mtask: Commands, params: object, *flags: str) -> str:
    result: str = mtask.ok("publish", "send", json.dumps(params), "-k", "k", *flags, "--json").json["result"]
    return result


def test_a_debounced_task_tells_that_it_gathers(mtask: Commands, store: SyncStore) -> None:
    assert publish(mtask, 1, "--debounce", "1h", "--max-wait", "2h") == "created"
    assert publish(mtask, 2, "--debounce", "1h", "--max-wait", "2h") == "updated"
    shown = mtask.ok("show", ID)
    assert "gathers" in shown.out
    assert "the newest call " in shown.out
    assert "gathers calls until" in shown.out
    assert mtask.ok("show", ID, "--json").json["task"]["gather"]["kind"] == "latest"


def test_a_running_task_tells_that_it_runs_again(mtask: Commands, store: SyncStore) -> None:
    publish(mtask, 1, "--again")
    run_id = claim(store, ID)
    assert publish(mtask, {"$oid": "0123456789abcdef01234567"}, "--again", "--call-id", "c") == "updated"
    shown = mtask.ok("show", ID)
    assert "runs once more afterwards" in shown.out
    assert "0123456789abcdef01234567" in shown.out
    told = mtask.ok("show", ID, "--json").json
    assert told["task"]["again"]["params"] == {"$oid": "0123456789abcdef01234567"}
    assert "again" in [reason["reason"] for reason in told["waits_for"]]
    succeed(store, ID, run_id)
    assert "again" not in mtask.ok("show", ID, "--json").json["task"]


def test_collected_calls_are_counted(mtask: Commands, store: SyncStore, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    file.write_text("\n".join(json.dumps({"key": "k", "params": number}) for number in range(1001)))
    ended = mtask("publish", "send", "--many", str(file), "--collect", "--debounce", "1h")
    assert ended.code == 5
    assert "1 full" in ended.out
    assert "1000 calls, full" in mtask.ok("show", ID).out
    refused = mtask("publish", "send", "1", "-k", "k", "--collect")
    assert (refused.code, "1000 calls or 4 MB" in refused.err) == (5, True)
    file.write_text('{"key": "k"}')
    ended = mtask("publish", "send", "--many", str(file), "--again", "--json")
    assert ended.json["summary"]["conflict"] == 1


def test_a_window_keeps_a_success(mtask: Commands, store: SyncStore) -> None:
    assert publish(mtask, 1, "--window", "1h") == "created"
    succeed(store, ID, claim(store, ID))
    assert publish(mtask, 2, "--window", "1h") == "unchanged"
    assert publish(mtask, 2, "--window", "1ms") == "updated"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--debounce", "soon"], "debounce 'soon'"),
        (["--max-wait", "1s"], "give debounce"),
        (["--window", "1s", "--again"], "does not go with"),
        (["--again", "--if-exists", "update"], "drop if_exists"),
        (["--collect", "--delay", "1s"], "drop delay"),
    ],
)
def test_flags_that_do_not_fit_are_usage_errors(mtask: Commands, flags: list[str], message: str) -> None:
    ended = mtask("publish", "send", "-k", "k", *flags)
    assert (ended.code, message in ended.err) == (2, True), ended.err


def test_the_doctor_finds_a_round_that_an_older_worker_has_left(mtask: Commands, store: SyncStore) -> None:
    publish(mtask, 1, "--again")
    run_id = claim(store, ID)
    publish(mtask, 2, "--again")
    again = store.tasks.find_one({"_id": ID}, {"again": 1})
    assert again is not None
    succeed(store, ID, run_id)
    # An older worker's finish knows nothing of the next round.
    left = {"task_state.status": "SUCCESS", "again": again["again"]}
    store.tasks.update_one({"_id": ID}, {"$set": left, "$unset": {"task_state.next_preempt_time": ""}})
    told = mtask("doctor")
    assert "1 tasks have ended although calls wait for them, such as send:k" in " ".join(told.out.split())
    mtask.ok("rerun", ID)
    assert "again" not in mtask.ok("show", ID, "--json").json["task"]
    assert "calls wait" not in mtask("doctor").out


def test_a_schedule_takes_no_such_flag(mtask: Commands) -> None:
    ended = mtask("schedule", "add", "s", "send", "--every", "1m", "--debounce", "1s")
    assert (ended.code, "--debounce" in ended.err) == (2, True)
