"""`mtask find|position|result`, and --lookup of `mtask publish` and `mtask schedule add`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mtask.kernel.driver.stores import SyncStore
from tests.clients import claim, fail, succeed
from tests.integration.cli.commands import Commands, client_of
from tests.integration.stores import register


def published(mtask: Commands, key: str, *flags: str) -> None:
    mtask.ok("publish", "send", '{"to": "a"}', "-k", key, *flags)


# --- publish ------------------------------------------------------------------------------------------------


def test_publish_reads_lookups_as_json_or_text(mtask: Commands) -> None:
    lookups = ["user_id=7", "name=Ada", "is_new=true", 'tags=["x", "y"]', "tags=z", 'text="7"', "empty="]
    oid = {"$oid": "0123456789abcdef01234567"}
    published(mtask, "k", *(f"--lookup={text}" for text in lookups), f"--lookup=of={json.dumps(oid)}")
    with client_of(mtask) as client:
        found = client.get("send", "k").lookups
    assert str(found.pop("of")[0]) == oid["$oid"]
    assert found == {
        "user_id": [7], "name": ["Ada"], "is_new": [True], "tags": ["x", "y", "z"], "text": ["7"], "empty": [""],
    }  # fmt: skip
    assert '"tags": ["x", "y", "z"]' in mtask.ok("show", "send", "k").out


def test_publish_many_takes_lookups_from_lines_and_flags(mtask: Commands, tmp_path: Path) -> None:
    lines = [{"key": "1", "lookup": {"user_id": 8}}, {"key": "2"}]
    file = tmp_path / "tasks"
    file.write_text("\n".join(map(json.dumps, lines)))
    mtask.ok("publish", "send", "--many", str(file), "--lookup", "user_id=7")
    assert [row["_id"] for row in mtask.ok("find", "--lookup", "user_id=8", "--json").json] == ["send:1"]
    assert [row["_id"] for row in mtask.ok("find", "--lookup", "user_id=7", "--json").json] == ["send:2"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("user_id", "--lookup 'user_id': write NAME=VALUE, such as user_id=7"),
        ("=7", "write NAME=VALUE"),
        ("user id=7", "'user id' is no name"),
        ('user_id={"deep": 1}', "'user_id' is dict"),
        ("user_id=null", "has no value"),
    ],
)
def test_bad_lookup_is_a_usage_error(mtask: Commands, flag: str, message: str) -> None:
    for command in (["publish", "send", "-k", "k"], ["find"], ["list"]):
        ended = mtask(*command, "--lookup", flag)
        assert ended.code == 2
        assert message in ended.err


def test_schedule_add_takes_lookups(mtask: Commands) -> None:
    added = mtask.ok("schedule", "add", "digest", "report", "--every", "1h", "--lookup", "user_id=7", "--json").json
    assert added["lookup"] == [{"k": "user_id", "v": 7}]
    assert mtask.ok("schedule", "add", "plain", "report", "--every", "1h", "--json").json["lookup"] is None


# --- find ---------------------------------------------------------------------------------------------------


def test_find_and_list_are_one_command(mtask: Commands) -> None:
    for key, user in (("1", 7), ("2", 8), ("3", 7)):
        published(mtask, key, "--lookup", f"user_id={user}")
    for command in ("find", "list"):
        found = mtask.ok(command, "--lookup", "user_id=7", "--json").json
        assert sorted(row["_id"] for row in found) == ["send:1", "send:3"]
        assert found[0]["lookup"] == [{"k": "user_id", "v": 7}]
        out = mtask.ok(command, "--lookup", "user_id=7", "--lookup", "user_id=8", "--status", "init").out
        assert [f"send:{key}" in out for key in "123"] == [True] * 3
    assert "no task in database" in mtask.ok("find", "--lookup", "user_id=9").err


def test_find_prints_the_fields_that_were_asked_for(mtask: Commands, store: SyncStore) -> None:
    published(mtask, "k")
    succeed(store, "send:k", claim(store, "send:k"), {"id": 7})
    fields = "status,returns.id,params.to,params.none"
    assert mtask.ok("find", "--fields", fields, "--json").json == [
        {"_id": "send:k", "status": "SUCCESS", "returns.id": 7, "params.to": "a", "params.none": None}
    ]
    heading, line = mtask.ok("find", "--fields", fields).out.splitlines()
    assert heading.split() == ["TASK", "STATUS", "RETURNS.ID", "PARAMS.TO", "PARAMS.NONE"]
    assert line.split() == ["send:k", "SUCCESS", "7", "a", "null"]
    ended = mtask("find", "--fields", "retuns")
    assert (ended.code, "did you mean 'returns' or" in ended.err) == (2, True)


def test_find_continues_after_a_task(mtask: Commands) -> None:
    for key in "12345":
        published(mtask, key)
    whole = [row["_id"] for row in mtask.ok("find", "--json").json]
    first = mtask.ok("find", "--limit", "2")
    match = re.search(r"^more: --cursor (\S+)$", first.err)
    assert match is not None
    assert [task["_id"] for task in mtask.ok("find", "--cursor", match[1], "--json").json] == whole[2:]
    rest = mtask.ok("find", "--after", whole[1], "--json").json
    assert [row["_id"] for row in rest] == whole[2:]
    assert mtask("find", "--after", "send:gone").code == 4


# --- result -------------------------------------------------------------------------------------------------


def test_result_prints_what_the_handler_returned(mtask: Commands, store: SyncStore) -> None:
    published(mtask, "k")
    succeed(store, "send:k", claim(store, "send:k"), {"id": 7})
    assert mtask.ok("result", "send", "k").out == '{"id": 7}\n'
    assert mtask.ok("result", "send:k", "--json").json == {"task_id": "send:k", "returns": {"id": 7}}


def test_result_of_a_task_without_one_ends_with_the_codes_of_wait(mtask: Commands, store: SyncStore) -> None:
    for key in ("bad", "off", "open"):
        published(mtask, key, "--max-retries", "0")
    fail(store, "send:bad", claim(store, "send:bad"), "no luck")
    mtask.ok("cancel", "send", "off")
    ended = mtask("result", "send", "bad")
    assert (ended.code, "ended as FAIL: no luck" in ended.err) == (8, True)
    ended = mtask("result", "send", "bad", "--json")
    assert ended.error["error"] == "TaskFailed"
    assert (ended.error["reason"], ended.error["status"], ended.error["exit_code"]) == ("no luck", "FAIL", 8)
    assert mtask("result", "send", "off").code == 9
    assert mtask("result", "send", "open", "--timeout", "0").code == 6
    assert mtask("result", "send", "gone").code == 4


# --- position -----------------------------------------------------------------------------------------------


def test_position_is_told_in_words_and_as_json(mtask: Commands, store: SyncStore) -> None:
    for key in "123":
        published(mtask, key)
    published(mtask, "later", "--delay", "1h")
    out = mtask.ok("position", "send", "3").out
    assert out.startswith("send:3  INIT\n2 due tasks before it; due for ")
    assert "no worker is live" in out
    register(store, "w1", ["send"])
    assert "no due task before it" in mtask.ok("position", "send", "1").out
    assert "starts probably now" in mtask.ok("position", "send", "1").out
    assert "3 due tasks before it; due in " in mtask.ok("position", "send:later").out
    told = mtask.ok("position", "send", "2", "--json").json
    assert (told["task_id"], told["status"], told["ahead"], told["is_more"], told["is_due"]) == (
        "send:2", "INIT", 1, False, True,
    )  # fmt: skip
    assert {"due_time", "start_estimate", "rate", "now"} <= told.keys()
    assert told["reasons"][0]["reason"] == "due"


def test_position_of_a_task_without_a_place_tells_why_it_has_none(mtask: Commands, store: SyncStore) -> None:
    published(mtask, "k", "--max-retries", "0")
    run_id = claim(store, "send:k")
    out = mtask.ok("position", "send", "k").out
    assert out.startswith("send:k  RUNNING\na worker runs it: it has no place in its queue; its lease ends in ")
    succeed(store, "send:k", run_id)
    assert mtask.ok("position", "send", "k").out == (
        "send:k  SUCCESS\nhas ended: it has no place in its queue; `mtask result` prints what it returned\n"
    )
    mtask.ok("rerun", "send", "k")
    fail(store, "send:k", claim(store, "send:k"), "no luck")
    why = "has ended: it has no place in its queue; `mtask show` tells why, `mtask retry` runs it again\n"
    assert mtask.ok("position", "send", "k").out == f"send:k  FAIL\n{why}"
    mtask.ok("retry", "send", "k")
    mtask.ok("cancel", "send", "k")
    assert mtask.ok("position", "send", "k").out == f"send:k  CANCELED\n{why}"
    assert mtask.ok("position", "send", "k", "--json").json["ahead"] is None
    assert mtask("position", "send", "gone").code == 4
