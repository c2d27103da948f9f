"""`mtask show|list|stats|wait|cancel|retry|rerun|remove|update`."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import Any

import pytest

from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions
from mtask.kernel.statements.finish import Outcome
from tests.clients import claim, fail, succeed
from tests.integration.cli.commands import Commands, client_of
from tests.integration.stores import register

MALFORMED: dict[str, Any] = {
    "_id": "send:broken",
    "name": "send",
    "key": "broken",
    "queue": "default",
    "params": 1,
    "task_option": {},
    "task_state": {"status": "INIT"},
    "schema_version": 1,
}


def insert_malformed(store: SyncStore, **changes: Any) -> None:
    store.database.get_collection("tasks").insert_one({**MALFORMED, **changes}, bypass_document_validation=True)


@pytest.fixture
def failed_then_done(mtask: Commands, store: SyncStore) -> str:
    """Give a task that failed once and succeeded then."""
    options = ["-o", "retry_delay=0", "--priority", "5"]
    mtask.ok("publish", "send", '{"to": "a"}', "-k", "k1", "--queue", "mail", *options)
    fail(store, "send:k1", claim(store, "send:k1", "worker-a"), "ConnectionError: \x1b[31mgone")
    succeed(store, "send:k1", claim(store, "send:k1", "worker-b"), {"id": 7})
    return "send:k1"


def test_show_draws_each_run_as_a_line_in_time(mtask: Commands, failed_then_done: str) -> None:
    out = mtask.ok("show", failed_then_done).out
    assert out.startswith("send:k1  SUCCESS\n")
    assert re.search(r"^options +priority 5, retry_delay 0s$", out, re.MULTILINE)
    assert re.search(r'^params +{"to": "a"}$', out, re.MULTILINE)
    assert re.search(r"^#1  FAIL     worker-a  .*█", out, re.MULTILINE)
    assert re.search(r"^#2  SUCCESS  worker-b  .*█$", out, re.MULTILINE)
    assert r"ConnectionError: \x1b[31mgone" in out
    assert 'returns {"id": 7}' in out
    assert "\x1b" not in out


def test_show_in_json_is_the_document_and_what_it_waits_for(mtask: Commands, failed_then_done: str) -> None:
    shown = mtask.ok("show", "send", "k1", "--json").json
    assert shown["task"]["_id"] == failed_then_done
    assert [run["status"] for run in shown["task"]["task_state"]["worker_states"]] == ["FAIL", "SUCCESS"]
    assert shown["task"]["task_state"]["worker_states"][1]["returns"] == {"id": 7}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown["task"]["task_state"]["create_time"])
    assert (shown["waits_for"], shown["malformed"]) == ([], None)


def test_show_says_what_a_task_waits_for(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    assert "no worker is live" in mtask.ok("show", "send", "k1").out
    register(store, "w1", queues=["default"], names=["other"])
    assert "has a handler for 'send'" in mtask.ok("show", "send", "k1").out
    mtask.ok("publish", "send", "-k", "later", "--delay", "1h")
    out = mtask.ok("show", "send", "later").out
    assert re.search(r"not due until .* UTC \((in 59m|in 1h 00m)", out)


def test_show_keeps_to_the_newest_runs_unless_asked(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1", "-o", "retry_delay=0", "-o", "max_retries=9")
    for number in range(4):
        fail(store, "send:k1", claim(store, "send:k1"), f"reason {number}")
    out = mtask.ok("show", "send:k1", "--runs", "1").out
    assert "reason 3" in out
    assert "reason 0" not in out
    assert "3 earlier not shown" in out
    assert "reason 0" in mtask.ok("show", "send:k1", "--runs", "0").out


def test_show_gives_a_malformed_document_as_it_is(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    insert_malformed(store)
    ended = mtask.ok("show", "send:broken")
    assert "MALFORMED" in ended.out
    assert "task_state.create_time: Field required" in ended.out
    assert '"schema_version": 1' in ended.out
    shown = mtask.ok("show", "send", "broken", "--json").json
    assert shown["task"] == MALFORMED
    assert "create_time" in shown["malformed"]


def test_show_finds_a_foreign_document_by_its_object_id(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    document = {"any": 1}
    store.database.get_collection("tasks").insert_one(document, bypass_document_validation=True)
    shown = mtask.ok("show", str(document["_id"]), "--json").json
    assert shown["task"] == {"_id": {"$oid": str(document["_id"])}, "any": 1}


@pytest.mark.parametrize("command", ["show", "cancel", "retry", "rerun", "remove", "wait", "update"])
def test_a_missing_task_is_not_found(mtask: Commands, command: str) -> None:
    options = ["--priority", "1"] if command == "update" else []
    ended = mtask(command, "send", "none", *options, "--json")
    assert (ended.code, ended.out) == (4, "")
    assert (ended.error["error"], ended.error["task_id"]) == ("TaskNotFound", "send:none")


@pytest.mark.parametrize("command", ["show", "cancel", "retry", "rerun", "remove", "wait", "update"])
def test_a_name_without_key_is_wrong_usage(mtask: Commands, command: str) -> None:
    ended = mtask(command, "send")
    assert ended.code == 2
    assert "NAME:KEY" in ended.err


@pytest.mark.fresh_database
def test_reading_makes_no_collections(mtask: Commands, store: SyncStore) -> None:
    for command in (["list"], ["stats"], ["workers"], ["doctor"], ["show", "a", "b"], ["wait", "a", "b"]):
        mtask(*command)
    assert store.database.list_collection_names() == []


def test_list_filters_and_says_that_there_is_more(mtask: Commands, store: SyncStore, failed_then_done: str) -> None:
    for key in ("a", "b", "c"):
        mtask.ok("publish", "hash", "-k", key)
    claim(store, "hash:a", "worker-z")

    def ids(*filters: str) -> list[str]:
        return [task["_id"] for task in mtask.ok("list", "--json", *filters).json]

    assert ids() == ["hash:c", "hash:b", "hash:a", "send:k1"]
    assert ids("--status", "success") == ["send:k1"]
    assert ids("--status", "running,SUCCESS") == ["hash:a", "send:k1"]
    assert ids("--name", "hash", "--status", "INIT") == ["hash:b", "hash:c"]  # the one that is due first
    assert ids("--queue", "mail") == ["send:k1"]
    assert ids("--worker", "worker-z") == ["hash:a"]
    assert ids("--limit", "1") == ["hash:c"]
    assert len(ids("--limit", "0")) == 4
    ended = mtask.ok("list", "--limit", "2")
    assert ended.err.startswith("more: --cursor ")
    assert [line.split()[1] for line in ended.out.splitlines()] == ["TASK", "hash:c", "hash:b"]


def test_list_leaves_a_malformed_document_out_and_says_so(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    insert_malformed(store)
    ended = mtask.ok("list", "--json")
    assert [task["_id"] for task in ended.json] == ["send:k1"]
    assert "send:broken" in ended.err
    assert mtask.ok("list", "--quiet").err == ""


def test_nothing_found_names_the_database(mtask: Commands) -> None:
    for command in ("list", "stats"):
        ended = mtask.ok(command)
        assert ended.out == ""
        assert mtask.database in ended.err
        assert mtask.ok(command, "--json").json == []


def test_an_unknown_status_is_refused(mtask: Commands) -> None:
    ended = mtask("list", "--status", "DONE", "--json")
    assert (ended.code, ended.error["field"]) == (2, "status")


def test_a_key_cannot_break_the_listing(mtask: Commands) -> None:
    mtask.ok("publish", "send", "-k", "evil\x1b[2J[red]\n日本語")
    out = mtask.ok("list").out
    assert r"evil\x1b[2J[red]\n日本語" in out
    assert len(out.splitlines()) == 2


def test_stats_count_and_tell_the_oldest_waiting(mtask: Commands, store: SyncStore, failed_then_done: str) -> None:
    mtask.ok("publish", "hash", "-k", "a")
    mtask.ok("publish", "hash", "-k", "b", "--delay", "1h")
    rows = mtask.ok("stats", "--json").json
    assert [(row["queue"], row["name"], row["status"], row["count"]) for row in rows] == [
        ("default", "hash", "INIT", 2),
        ("mail", "send", "SUCCESS", 1),
    ]
    assert 0 <= rows[0]["oldest_waiting_ms"] < 60_000
    assert rows[1]["oldest_waiting_ms"] is None
    lines = mtask.ok("stats", "--name", "hash").out.splitlines()
    assert len(lines) == 2
    assert lines[1].split()[:3] == ["default", "hash", "2"]


def test_wait_ends_with_the_task_and_tells_how(mtask: Commands, store: SyncStore, failed_then_done: str) -> None:
    ended = mtask("wait", "send", "k1")
    assert (ended.code, ended.out) == (0, 'SUCCESS  send:k1  returns {"id": 7}\n')
    mtask.ok("publish", "send", "-k", "bad")
    fail(store, "send:bad", claim(store, "send:bad"), "ValueError: no", final=True)
    ended = mtask("wait", "send:bad", "--json")
    assert (ended.code, ended.json["task_state"]["status"]) == (8, "FAIL")
    mtask.ok("publish", "send", "-k", "off")
    mtask.ok("cancel", "send", "off")
    assert mtask("wait", "send", "off").code == 9


def test_wait_and_result_wait_for_the_value_and_tell_that_it_is_lost(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    run_id = claim(store, "send:k1")
    store.run(claims.finish_in_transaction(Outcome("send:k1", run_id, RunStatus.SUCCESS, returns_owed_by="w")))
    for command in ("wait", "result"):
        assert mtask(command, "send", "k1", "--timeout", "100ms").code == 6
    assert "still to come" in mtask.ok("show", "send", "k1").out
    store.run(transactions.lose_return("send:k1", run_id, "the worker died"))
    assert "lost: the worker died" in mtask.ok("show", "send", "k1").out
    ended = mtask("wait", "send", "k1")
    assert (ended.code, ended.out) == (0, "SUCCESS  send:k1  its result is lost: the worker died\n")
    lost = mtask("result", "send", "k1")
    assert lost.code == 1
    assert "its result is lost: the worker died" in lost.err


def test_wait_sees_the_end_when_it_comes(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    timer = threading.Timer(0.3, lambda: succeed(store, "send:k1", claim(store, "send:k1")))
    timer.start()
    try:
        assert mtask("wait", "send", "k1", "--timeout", "30s").code == 0
    finally:
        timer.join()


def test_wait_gives_up_after_its_timeout(mtask: Commands) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    ended = mtask("wait", "send", "k1", "--timeout", "200ms", "--json")
    assert (ended.code, ended.error["error"], ended.error["timeout"]) == (6, "WaitTimeout", 0.2)
    assert mtask("wait", "send", "k1", "--timeout", "soon").code == 2


def test_cancel_ends_a_waiting_task_and_asks_the_holder_of_a_running_one(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    assert mtask.ok("cancel", "send", "k1").out == "CANCELED  send:k1  canceled\n"
    mtask.ok("publish", "send", "-k", "k2")
    claim(store, "send:k2")
    mtask.ok("publish", "send", "-k", "k3")
    succeed(store, "send:k3", claim(store, "send:k3"))
    assert "had ended before" in mtask.ok("cancel", "send", "k3").out
    cancelled = mtask.ok("cancel", "send:k2", "--json").json
    assert cancelled["task_state"]["cancel_requested"] is True


def test_retry_and_rerun_open_a_finished_task(mtask: Commands, store: SyncStore, failed_then_done: str) -> None:
    assert mtask("retry", failed_then_done).code == 5
    assert mtask.ok("rerun", failed_then_done, "--json").json["task_state"]["status"] == "INIT"
    ended = mtask("rerun", failed_then_done, "--json")
    assert (ended.code, ended.error["error"], ended.error["status"]) == (5, "TaskNotFinished", "INIT")
    mtask.ok("publish", "send", "-k", "bad")
    fail(store, "send:bad", claim(store, "send:bad"), final=True)
    assert mtask.ok("retry", "send", "bad").out.startswith("INIT  send:bad")
    assert "FAIL (past)" in mtask.ok("show", "send", "bad").out


def test_update_changes_options(mtask: Commands) -> None:
    mtask.ok("publish", "send", "-k", "k1", "--priority", "2")
    updated = mtask.ok("update", "send", "k1", "-o", "retry_scope=worker", "--worker-timeout", "2m", "--json").json
    option = updated["task_option"]
    assert (option["priority"], option["retry_scope"], option["worker_timeout_ms"]) == (2, "worker", 120_000)
    said = "priority 2, worker_timeout 120s, retry_scope worker"
    assert said in mtask.ok("update", "send:k1", "--priority", "2").out


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ([], "InvalidInput"),
        (["-o", "prority=1"], "UnknownOption"),
        (["-o", "name=x"], "UnknownOption"),
        (["--retry-scope", "all"], "InvalidOption"),
        (["--concurrent-worker-cnt", "0"], "InvalidOption"),
    ],
)
def test_update_refuses_nonsense(mtask: Commands, flags: list[str], error: str) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    ended = mtask("update", "send", "k1", *flags, "--json")
    assert (ended.code, ended.error["error"]) == (2, error)


@pytest.mark.parametrize("command", [["cancel"], ["rerun"], ["update", "--priority", "1"], ["wait"]])
def test_a_malformed_task_is_told_as_such(mtask: Commands, store: SyncStore, command: list[str]) -> None:
    mtask.ok("init")
    insert_malformed(store, task_state={"status": "FAIL"})
    ended = mtask(command[0], "send", "broken", *command[1:], "--json")
    assert (ended.code, ended.error["error"]) == (5, "MalformedTask")


def test_remove_removes(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    assert mtask.ok("remove", "send", "k1", "--json").json == {"task_id": "send:k1", "removed": True}
    assert store.tasks.count_documents({}) == 0


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1)])
def test_remove_asks_on_a_terminal(
    mtask: Commands, store: SyncStore, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int
) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    asked: list[str] = []

    def confirm(text: str, **_: Any) -> bool:
        asked.append(text)
        return answer == "y\n"

    monkeypatch.setattr("mtask.cli.tasks.change.typer.confirm", confirm)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert mtask("remove", "send", "k1").code == code
    assert asked == ["Remove send:k1?"]
    assert store.tasks.count_documents({}) == left
    mtask.ok("publish", "send", "-k", "k2")
    mtask.ok("remove", "send", "k2", "--yes")
    assert len(asked) == 1


def test_what_a_client_publishes_the_command_line_reads(mtask: Commands) -> None:
    with client_of(mtask) as client:
        client.publish("send", {"n": 1}, key="k1", delay=timedelta(hours=1))
    assert mtask.ok("list", "--json").json[0]["params"] == {"n": 1}


def test_a_document_without_a_queue_is_malformed_and_in_no_queue(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    for status in ("RUNNING", "WAITING", "INIT", "SUCCESS"):
        bare = {**MALFORMED, "_id": f"send:{status}", "task_state": {"status": status}}
        del bare["queue"]
        store.database.get_collection("tasks").insert_one(bare, bypass_document_validation=True)
    assert [(row["queue"], row["name"], row["count"]) for row in mtask.ok("stats", "--json").json] == [
        ("default", "send", 1)
    ]
    assert [row["queue"] for row in mtask.ok("top", "--json").json["queues"]] == ["default"]
    assert "queue: Field required" in mtask.ok("show", "send:RUNNING").out
    assert "None" not in mtask.ok("stats").out + mtask.ok("top", "--once").out


def test_a_cancel_says_what_becomes_of_a_handler_in_a_thread(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("publish", "send", "-k", "k1")
    claim(store, "send:k1", "worker-a")
    for told in (mtask.ok("cancel", "send", "k1").out, " ".join(mtask.ok("show", "send", "k1").out.split())):
        assert "cancel requested: " in told
        assert "a handler in a thread goes on until it asks context.is_cancelled" in told
