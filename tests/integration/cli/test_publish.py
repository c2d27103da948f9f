"""`mtask publish`."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mtask.kernel.driver.stores import SyncStore
from tests.clients import claim, fail
from tests.integration.cli.commands import Commands
from tests.integration.stores import register


def test_a_task_is_published_once_per_key(mtask: Commands, store: SyncStore) -> None:
    assert mtask.ok("publish", "send", '{"to": "a"}', "--key", "k1").out == "created  send:k1\n"
    assert mtask.ok("publish", "send", '{"to": "b"}', "--key", "k1").out == "unchanged  send:k1\n"
    assert mtask.ok("publish", "send", '{"to": "b"}', "--key", "k1", "--if-exists", "update").out.startswith("updated")
    document = store.tasks.find_one({"_id": "send:k1"})
    assert document is not None
    assert document["params"] == {"to": "b"}


def test_json_tells_what_happened(mtask: Commands) -> None:
    first = mtask.ok("publish", "send", "--key", "k1", "--json").json
    assert first == {"task_id": "send:k1", "created": True, "updated": False, "result": "created"}
    fresh = mtask.ok("--json", "publish", "send").json
    assert fresh["created"]
    assert fresh["task_id"].startswith("send:")


def test_an_existing_task_may_be_rejected(mtask: Commands) -> None:
    mtask.ok("publish", "send", "--key", "k1")
    ended = mtask("publish", "send", "--key", "k1", "--if-exists", "reject", "--json")
    assert (ended.code, ended.out) == (5, "")
    assert ended.error["error"] == "TaskExists"
    assert ended.error["task_id"] == "send:k1"


def test_a_running_task_may_be_guarded(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "--key", "k1")
    claim(store, "send:k1")
    ended = mtask("publish", "send", "{}", "-k", "k1", "--if-exists", "update", "--not-update-running", "--json")
    assert (ended.code, ended.error["error"]) == (5, "TaskRunning")


def test_a_failed_task_runs_again_when_cleaned(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "--key", "k1")
    fail(store, "send:k1", claim(store, "send:k1"), final=True)
    assert mtask.ok("publish", "send", "--key", "k1", "--clean-failed").out.startswith("updated")
    assert mtask.ok("show", "send", "k1", "--json").json["task"]["task_state"]["status"] == "INIT"


def test_every_way_to_give_an_option_arrives(mtask: Commands, store: SyncStore) -> None:
    flags = ["-o", "priority=3", "--option", "run_timeout=90s", "--retain-success", "1h", "--retry-backoff", "2"]
    mtask.ok("publish", "send", "-k", "k1", "--queue", "mail", "--specific-worker-ids", "w1,w2", *flags)
    document = store.tasks.find_one({"_id": "send:k1"})
    assert document is not None
    option = document["task_option"]
    assert (option["priority"], option["run_timeout_ms"], option["retain_success_ms"]) == (3, 90_000, 3_600_000)
    assert (option["retry_backoff"], option["specific_worker_ids"], document["queue"]) == (2.0, ["w1", "w2"], "mail")


def test_a_flag_wins_over_the_general_option(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1", "--priority", "7", "-o", "priority=3")
    document = store.tasks.find_one({"_id": "send:k1"})
    assert document is not None
    assert document["task_option"]["priority"] == 7


def test_later_is_given_as_delay_or_instant(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "delay", "--delay", "1h30m")
    mtask.ok("publish", "send", "-k", "start", "--start-time", "2040-01-01T00:00:00Z")
    delayed = store.tasks.find_one({"_id": "send:delay"})
    started = store.tasks.find_one({"_id": "send:start"})
    assert delayed is not None
    assert started is not None
    state = delayed["task_state"]
    assert (state["start_time"] - state["create_time"]).total_seconds() == pytest.approx(5400, abs=1)
    assert started["task_state"]["start_time"] == datetime(2040, 1, 1, tzinfo=UTC)


def test_params_keep_their_bson_types(mtask: Commands, store: SyncStore, tmp_path: Path) -> None:
    file = tmp_path / "params.json"
    file.write_text('{"at": {"$date": "2020-01-01T00:00:00Z"}, "id": {"$oid": "0123456789abcdef01234567"}}')
    mtask.ok("publish", "send", "-k", "k1", "--params-file", str(file))
    document = store.tasks.find_one({"_id": "send:k1"})
    assert document is not None
    assert document["params"]["at"] == datetime(2020, 1, 1, tzinfo=UTC)
    shown = mtask.ok("show", "send:k1", "--json").json["task"]["params"]
    assert shown == json.loads(file.read_text())


@pytest.mark.fresh_database
@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        (["se:nd"], "InvalidName", "not a task name"),
        (["send", "--key", ""], "InvalidKey", "empty"),
        (["send", "--key", "x" * 513], "InvalidKey", "513 bytes"),
        (["send", "{"], "InvalidInput", "no JSON"),
        (["send", '{"n": 99999999999999999999}'], "InvalidParams", "cannot be stored"),
        (["send", "--delay", "soon"], "InvalidInput", "no duration"),
        (["send", "--delay", "99999w"], "InvalidInput", "10 years"),
        (["send", "--delay", "1s", "--start-time", "2030-01-01T00:00:00Z"], "InvalidInput", "not both"),
        (["send", "--start-time", "2030-01-01"], "InvalidInput", "no time zone"),
        (["send", "-o", "priorty=3"], "UnknownOption", "'priority'"),
        (["send", "-o", "key=3"], "UnknownOption", "no such option"),
        (["send", "-o", "priority=high"], "InvalidOption", "whole number"),
        (["send", "--worker-timeout", "1s"], "InvalidOption", "must exceed"),
        (["send", "--if-exists", "perhaps"], "InvalidInput", "keep"),
        (["send", "--if-exists", "reject", "--clean-failed"], "InvalidInput", "leaves an existing task alone"),
        (["send", "--queue", "a,b"], "InvalidInput", "comma"),
        ([], "InvalidInput", "NAME"),
        (["send", "--many", "x.jsonl", "--key", "k"], "InvalidInput", "in the file"),
        (["send", "--many", "missing.jsonl"], "InvalidInput", "cannot be read"),
    ],
)
def test_nonsense_is_refused_before_anything_is_written(
    mtask: Commands, store: SyncStore, arguments: list[str], error: str, expected: str
) -> None:
    ended = mtask("publish", *arguments, "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["error"] == error
    assert expected in ended.error["message"]
    assert store.database.list_collection_names() == []


def lines(*objects: Any) -> str:
    return "\n".join(json.dumps(item) for item in objects) + "\n"


def test_thousands_are_published_from_a_file_and_told_per_task(mtask: Commands, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text(lines(*({"key": f"k{i}", "params": {"i": i}} for i in range(2500))))
    first = mtask.ok("publish", "hash", "--many", str(file), "--json").json
    assert first["summary"] == {
        "total": 2500,
        "created": 2500,
        "updated": 0,
        "unchanged": 0,
        "exists": 0,
        "running": 0,
    }
    assert first["tasks"][2499] == {"line": 2500, "task_id": "hash:k2499", "result": "created"}
    assert mtask.ok("publish", "hash", "--many", str(file), "--quiet").out == "2500 tasks: 2500 unchanged\n"


def test_a_line_wins_over_the_flags(mtask: Commands, store: SyncStore, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    own = {"name": "own", "key": "k", "queue": "q", "delay": "1h", "task_option": {"priority": 9}}
    file.write_text(lines(own, {"key": "k"}) + "\n")
    flags = ["--queue", "all", "--priority", "1", "--start-time", "2040-01-01T00:00:00Z"]
    assert "created    own:k\n" in mtask.ok("publish", "hash", "--many", str(file), *flags).out
    documents = {document["_id"]: document for document in store.tasks.find()}
    assert (documents["own:k"]["queue"], documents["own:k"]["task_option"]["priority"]) == ("q", 9)
    assert (documents["hash:k"]["queue"], documents["hash:k"]["task_option"]["priority"]) == ("all", 1)
    assert documents["hash:k"]["task_state"]["start_time"] == datetime(2040, 1, 1, tzinfo=UTC)
    assert documents["own:k"]["task_state"]["start_time"] != datetime(2040, 1, 1, tzinfo=UTC)


def test_rejected_ones_among_many_are_told_and_the_rest_is_published(mtask: Commands, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text(lines({"key": "old"}, {"key": "new"}))
    mtask.ok("publish", "hash", "--key", "old")
    ended = mtask("publish", "hash", "--many", str(file), "--if-exists", "reject")
    assert ended.code == 5
    assert ended.out.splitlines() == ["exists     hash:old", "created    hash:new", "2 tasks: 1 created, 1 exists"]


@pytest.mark.fresh_database
@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("{", "no JSON"),
        ('"text"', "a JSON object"),
        ('{"kye": "x"}', "no field 'kye'"),
        ('{"key": 5}', "not a key"),
        ('{"task_option": {"priorty": 1}}', "'priority'"),
        ('{"task_option": 5}', "object of options"),
        ('{"delay": "soon"}', "no duration"),
        ('{"delay": -1}', "10 years"),
        ('{"delay": [1]}', "delay is"),
        ('{"start_time": "2030-01-01"}', "no time zone"),
        ('{"queue": 5}', "queue 5"),
        ('{"name": 5}', "5 is no task"),
        ('{"name": "a:b"}', "not a task name"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_published(
    mtask: Commands, store: SyncStore, tmp_path: Path, bad: str, expected: str
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text(lines({"key": "good"}) + "\n" + bad + "\n")
    ended = mtask("publish", "hash", "--many", str(file))
    assert (ended.code, ended.out) == (2, "")
    assert expected in ended.err
    assert "That is line 3; nothing was published." in ended.err
    assert store.database.list_collection_names() == []


def test_a_file_without_names_needs_one_for_all(mtask: Commands, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text(lines({"key": "a"}))
    assert "no name" in mtask("publish", "--many", str(file)).err


def test_params_and_lines_come_from_standard_input(mtask: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}')))
    assert mtask("publish", "hash", "-k", "a", "--params-file", "-").out == "created  hash:a\n"
    many = mtask.entry("publish", "hash", "--many", "-", stdin='{"key": "a"}\n{"key": "b"}\n')
    assert many.out.splitlines()[-1] == "2 tasks: 1 created, 1 unchanged"


def test_a_name_that_no_live_worker_serves_is_published_with_a_warning(
    mtask: Commands, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mtask.ok("publish", "send_invoce").err == "", "before the first worker starts, there is nothing to say"
    register(store, "w1", names=["send_invoice", "send_reminder"])
    warned = mtask.ok("publish", "send_invoce", "--key", "k1")
    assert warned.out == "created  send_invoce:k1\n"
    assert warned.err == "no live worker serves 'send_invoce'; did you mean 'send_invoice'?\n"
    assert mtask.ok("publish", "other").err == "no live worker serves 'other'; it waits for a worker that does\n"
    for quiet in (["publish", "send_invoce", "--json"], ["publish", "send_invoce", "-q"], ["publish", "send_invoice"]):
        assert mtask.ok(*quiet).err == ""
    lines = '{"name": "send_invoce"}\n{"name": "send_invoce"}\n{"name": "send_reminder"}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert mtask.ok("publish", "--many", "-").err == warned.err
