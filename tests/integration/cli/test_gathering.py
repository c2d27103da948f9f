"""`mtask publish --debounce|--max-wait|--collect|--again|--window`, and what `show` and `doctor` tell of such tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtask.kernel.driver.stores import SyncStore
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
    publish(mtask, 0, "--collect", "--debounce", "1h")
    # Not by so many calls: each costs the server the whole list.
    calls = {"params.calls": list(range(990)), "gather.ids": [f"c{number}" for number in range(990)]}
    store.tasks.update_one({"_id": ID}, {"$set": calls})
    file.write_text("\n".join(json.dumps({"key": "k", "params": number}) for number in range(11)))
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
        (["--max-wait", "1s"], "--max-wait bounds a debounce: give --debounce, too"),
        (["--max-wait", "1s", "--debounce", "2s"], "--max-wait is shorter than --debounce"),
        (["--window", "1s", "--again"], "it does not go with --debounce, --collect or --again"),
        (["--again", "--if-exists", "update"], "drop --if-exists, --clean-failed, --clean-success and --not-update-r"),
        (["--if-exists", "reject", "--clean-failed"], "--if-exists reject leaves an existing task alone: drop --clean"),
        (["--collect", "--delay", "1s"], "drop --delay and --start-time"),
        (["--delay", "1s", "--start-time", "2030-01-01T00:00:00Z"], "give --start-time or --delay, not both"),
        (["--call-id", "c"], "--call-id is the id of a call that gathers: give --debounce, --collect or --again"),
        (["--again", "--call-id", "c" * 65], "--call-id is text of 1 to 64 characters"),
        (["--window", "1h", "--retain-success", "1s"], "--retain-success is shorter than --window"),
        (["--collect"], "--collect adds the params of each call to a list: give PARAMS, or null if a call has none"),
    ],
)
def test_flags_that_do_not_fit_are_usage_errors_that_name_the_flags(
    mtask: Commands, store: SyncStore, flags: list[str], message: str
) -> None:
    ended = mtask("publish", "send", "-k", "k", *flags)
    assert (ended.code, message in ended.err) == (2, True), ended.err
    for argument in ("max_wait", "call_id", "if_running", "if_exists", "clean_", "start_time", "retain_success"):
        assert argument not in ended.err
    assert store.tasks.count_documents({}) == 0


def test_a_call_that_gathers_needs_a_key(mtask: Commands, tmp_path: Path) -> None:
    ended = mtask("publish", "send", "1", "--collect")
    assert ended.code == 2
    assert "give --key, too: --debounce, --collect, --again and --window are about the calls of one key" in ended.err
    file = tmp_path / "calls"
    file.write_text('{"params": 1}')
    ended = mtask("publish", "send", "--many", str(file), "--collect")
    assert "give key, too: --debounce, --collect, --again and --window" in ended.err
    assert "drop --call-id" in mtask("publish", "send", "--many", str(file), "--collect", "--call-id", "c").err


@pytest.mark.parametrize("flag", ["--debounce", "--max-wait", "--window"])
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("-1", "'-1' is negative: write 90s, 5m, 1h30m, 250ms or a number of seconds"),
        ("-5m", "'-5m' is negative: write 90s"),
        ("", "'' is no duration: write 90s"),
        ("5 apples", "'5 apples' is no duration: write 90s"),
        ("nan", "'nan' is no duration: write 90s"),
        ("9" * 400, "... is too long: write 90s"),
        ("0", "cannot be 0 s: give 1 ms to 10 years"),
        ("5000d", "cannot be 4.32e+08 s: give 1 ms to 10 years"),
    ],
)
def test_a_duration_that_cannot_be_used_is_told_what_to_give(mtask: Commands, flag: str, text: str, fault: str) -> None:
    debounce = ["--debounce", "1s"] if flag == "--max-wait" else []
    ended = mtask("publish", "send", "1", "-k", "k", *debounce, flag, text)
    assert (ended.code, f"{flag} " in ended.err, fault in ended.err) == (2, True, True), ended.err


def test_a_collected_call_without_params_is_told_apart_from_null(
    mtask: Commands, store: SyncStore, tmp_path: Path
) -> None:
    file = tmp_path / "calls"
    file.write_text('{"key": "k"}')
    ended = mtask("publish", "send", "--many", str(file), "--collect")
    assert (ended.code, "give the line params, or null if a call has none" in ended.err) == (2, True)
    assert store.tasks.count_documents({}) == 0
    file.write_text('{"key": "k", "params": null}')
    mtask.ok("publish", "send", "--many", str(file), "--collect")
    mtask.ok("publish", "send", "null", "-k", "k", "--collect")
    assert mtask.ok("show", ID, "--json").json["task"]["params"] == {"calls": [None, None]}


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
