"""`mtask doctor`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from bson import encode
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from pymongo import WriteConcern

from mtask import AsyncClient
from mtask.kernel.driver.stores import SyncStore
from tests.clients import claim, succeed
from tests.faults.malformed import good
from tests.integration.cli.commands import Commands, Ended
from tests.integration.cli.test_tasks import insert_malformed
from tests.integration.stores import register
from tests.mongo import eventually


def findings(ended: Ended, check: str) -> list[dict[str, Any]]:
    return [finding for finding in ended.json["findings"] if finding["check"] == check]


def levels(ended: Ended, check: str) -> list[str]:
    return [finding["level"] for finding in findings(ended, check)]


def healthy(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    register(store, "w1", queues=["default"], names=["send"])


def test_a_healthy_database_passes_every_check(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    ended = mtask("doctor", "--json")
    assert ended.code == 0
    assert ended.json["healthy"] is True
    assert {finding["level"] for finding in ended.json["findings"]} == {"OK"}, ended.out
    assert {
        "version",
        "replica set",
        "transactions",
        "clock",
        "rights",
        "storage engine",
        "oplog window",
        "validator of tasks",
        "indexes of tasks",
        "documents",
        "retention",
        "workers",
        "due tasks",
        "leases",
    } <= {finding["check"] for finding in ended.json["findings"]}
    assert "all is well" in mtask("doctor").out


def test_the_async_client_comes_to_the_same(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)

    async def diagnosed() -> list[str]:
        async with AsyncClient(mtask.uri, database=mtask.database, server_timeout=timedelta(seconds=5)) as client:
            return [finding.check for finding in await client.diagnose()]

    assert asyncio.run(diagnosed()) == [finding["check"] for finding in mtask("doctor", "--json").json["findings"]]


@pytest.mark.fresh_database
def test_an_empty_database_is_told_what_to_do(mtask: Commands) -> None:
    ended = mtask("doctor", "--json")
    assert ended.code == 0
    found = findings(ended, "collections")
    assert [finding["level"] for finding in found] == ["WARN"]
    assert "mtask init" in found[0]["remedy"]


def test_no_server_is_a_fail_in_bounded_time(mtask: Commands) -> None:
    began = time.monotonic()
    ended = mtask("doctor", "--uri", "mongodb://user:secret@127.0.0.1:1/", "--json")
    assert ended.code == 7
    assert levels(ended, "server") == ["FAIL"]
    assert "secret" not in ended.out + ended.err
    assert time.monotonic() - began < 20


def test_missing_and_differing_indexes_fail(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    for name in ("mtask_discovery", "mtask_expiry", "mtask_head"):
        store.tasks.drop_index(name)
    store.tasks.create_index("expire_time", name="mtask_expiry")
    ended = mtask("doctor", "--json")
    assert ended.code == 7
    found = findings(ended, "indexes of tasks")
    assert [finding["fields"] for finding in found] == [
        {"missing": ["mtask_discovery", "mtask_head"]},
        {"differing": ["mtask_expiry"]},
    ]
    out = mtask("doctor").out
    assert "FAIL  indexes of tasks" in out
    assert "-> Run `mtask init`." in out
    store.tasks.drop_index("mtask_expiry")
    assert mtask("init").code == 0
    assert levels(mtask("doctor", "--json"), "indexes of tasks") == ["OK"]


def test_a_missing_a_changed_and_a_foreign_validator_are_told_apart(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    store.database.command({"collMod": "tasks", "validationAction": "warn"})
    assert levels(mtask("doctor", "--json"), "validator of tasks") == ["WARN"]
    store.database.command({"collMod": "tasks", "validator": {"$jsonSchema": {"title": "theirs"}}})
    assert levels(mtask("doctor", "--json"), "validator of tasks") == ["FAIL"]
    store.database.command({"collMod": "tasks", "validator": {}})
    assert "malformed documents get in" in findings(mtask("doctor", "--json"), "validator of tasks")[0]["message"]
    mtask.ok("init")
    assert levels(mtask("doctor", "--json"), "validator of tasks") == ["OK"]


@pytest.mark.parametrize(
    ("title", "level"),
    [
        ("mtask tasks, schema_version 1, revision 0", "WARN"),
        ("mtask tasks, schema_version 1, revision 999", "OK"),
        ("mtask tasks, schema_version 2, revision 1", "FAIL"),
    ],
)
def test_older_and_newer_validators_are_told(mtask: Commands, store: SyncStore, title: str, level: str) -> None:
    healthy(mtask, store)
    store.database.command({"collMod": "tasks", "validator": {"$jsonSchema": {"title": title}}})
    assert levels(mtask("doctor", "--json"), "validator of tasks") == [level]


def test_malformed_newer_and_undiscoverable_documents_fail(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    insert_malformed(store)
    found = findings(mtask("doctor", "--json"), "documents")
    assert [finding["level"] for finding in found] == ["FAIL"]
    assert "mtask show send:broken" in found[0]["remedy"]
    store.tasks.delete_many({})
    mtask.ok("publish", "send", "-k", "k1", "--delay", "1h")
    lost = {"$unset": {"task_state.next_preempt_time": 1}}
    store.database.get_collection("tasks").update_one({}, lost, bypass_document_validation=True)
    assert findings(mtask("doctor", "--json"), "documents")[0]["fields"]["task_ids"] == ["send:k1"]
    insert_malformed(store, schema_version=2)
    assert "written by a newer mtask" in findings(mtask("doctor", "--json"), "documents")[0]["message"]


@pytest.mark.parametrize(
    ("collection", "change", "remedy"),
    [("schedules", {"$unset": {"revision": 1}}, "Mend it"), ("controls", {"$set": {"limit.starts": 5}}, "mtask pause")],
)
def test_malformed_schedules_and_controls_fail(
    mtask: Commands, store: SyncStore, collection: str, change: dict[str, Any], remedy: str
) -> None:
    healthy(mtask, store)
    mtask.ok("limit", "mail", "--concurrency", "1")
    mtask.ok("schedule", "add", "nightly", "send", "--cron", "0 3 * * *")
    assert levels(mtask("doctor", "--json"), collection) == ["OK"]
    found = store.database.get_collection(collection)
    found.update_one({}, change, bypass_document_validation=True)
    (finding,) = findings(mtask("doctor", "--json"), collection)
    assert (finding["level"], remedy in finding["remedy"]) == ("FAIL", True)
    assert "1 malformed" in finding["message"]
    assert str(found.distinct("_id")[0]) in finding["message"]


def test_a_document_that_workers_marked_is_only_worth_knowing(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    insert_malformed(store, task_state={"status": "FAIL"})
    assert levels(mtask("doctor", "--json"), "documents") == ["WARN"]


def test_each_malformed_document_is_named_marked_or_not_and_what_to_do(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    unchecked = store.tasks.with_options(write_concern=WriteConcern(w=1))
    bad: dict[str, dict[str, Any]] = {
        "name": {"name": "a\n"},
        "key": {"key": "é" * 300},
        "lease": {"task_option.worker_timeout_ms": 1},
        "workers": {"task_option.specific_worker_ids": ["a", "a"]},
        "worker": {"task_option.specific_worker_ids": ["a,b"]},
        "limit key": {"task_option.limit_key": "\x1b"},
        "year": {"task_state.create_time": DatetimeMS(2**60)},
        "run": {"task_state.worker_states": [{"claim_time": DatetimeMS(-(2**60))}]},
        "count": {"task_state.failed_cnt": 1e19},
        "id": {"_id": 5},
        "code": {"_id": Code("send:code")},
    }
    for kind, change in bad.items():
        document = good(kind, name="send")
        for path, value in change.items():
            *parents, last = path.split(".")
            (document[parents[0]] if parents else document)[last] = value
        unchecked.insert_one(document, bypass_document_validation=True)
    marked = good("marked", name="send")
    marked["task_state"] |= {"status": "FAIL", "failed_cnt": "x"}
    del marked["task_state"]["next_preempt_time"]
    unchecked.insert_one(marked, bypass_document_validation=True)
    unchecked.insert_one(good("sound", name="send"))
    (finding,) = findings(mtask("doctor", "--json"), "documents")
    assert finding["level"] == "FAIL"
    assert set(finding["fields"]["task_ids"]) == {f"send:{kind}" for kind in bad if kind != "id"} | {"5"}
    assert finding["fields"]["marked_ids"] == ["send:marked"]
    assert "by hand" in finding["remedy"]


def test_tasks_that_leave_no_room_for_what_workers_write_are_named(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    assert levels(mtask("doctor", "--json"), "document sizes") == ["OK"]
    large = good("large", name="send") | {"params": ""}
    large["params"] = "x" * (16 * 2**20 - 100 - len(encode(large)))
    store.tasks.insert_one(large)
    (finding,) = findings(mtask("doctor", "--json"), "document sizes")
    assert (finding["level"], finding["fields"]["task_ids"]) == ("FAIL", ["send:large"])
    assert "smaller params" in finding["remedy"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["other"], "no handler for it in w1"),
        (["send", "--queue", "mail"], "serves the queue"),
        (["send", "--specific-worker-ids", "w9"], "no such worker is live"),
        (["send"], "don't take it"),
    ],
)
def test_stuck_tasks_are_told_with_their_cause(
    mtask: Commands, store: SyncStore, flags: list[str], expected: str
) -> None:
    healthy(mtask, store)
    mtask.ok("publish", *flags, "--key", "k1")
    ended = when(mtask, lambda asked: asked.code == 7, "the task is stuck")
    found = findings(ended, "due tasks")
    assert [finding["level"] for finding in found] == ["FAIL"]
    assert expected in found[0]["message"]
    assert found[0]["fields"]["example"].endswith(":k1")


def when(mtask: Commands, condition: Callable[[Ended], object], message: str) -> Ended:
    """Ask the doctor until he says so."""
    asked: list[Ended] = []

    def is_so() -> bool:
        asked.append(mtask("doctor", "--patience", "1ms", "--json"))
        return bool(condition(asked[-1]))

    eventually(is_so, 40, message)
    return asked[-1]


def test_a_task_that_needs_another_worker_says_so(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    mtask.ok("publish", "send", "-k", "k1", "--concurrent-worker-cnt", "2", "--specific-worker-ids", "w1,w9")
    succeed(store, "send:k1", claim(store, "send:k1", "w1"))
    ended = when(mtask, lambda asked: asked.code == 7, "the task is stuck")
    assert "w9 is absent" in findings(ended, "due tasks")[0]["message"]


def test_due_tasks_with_a_worker_are_no_worry_at_first(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    mtask.ok("publish", "send", "-k", "k1")
    assert levels(mtask("doctor", "--json"), "due tasks") == ["OK"]


def test_paused_workers_and_unserved_names_are_worth_knowing(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    register(store, "w1", queues=["default"], names=["send"], unserved_names=["odd"])
    mtask.ok("set-worker", "w1", "-c", "0")
    ended = mtask("doctor", "--json")
    assert levels(ended, "workers") == ["WARN"]
    assert findings(ended, "unserved names")[0]["fields"]["names"] == ["odd"]


def test_a_silent_worker_with_tasks_in_hand_is_told(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    register(store, "w2", queues=["default"], names=["send"], heartbeat_timeout=timedelta(milliseconds=1))
    mtask.ok("publish", "send", "-k", "k1")
    claim(store, "send:k1", "w2")
    ended = when(mtask, lambda asked: findings(asked, "silent workers"), "w2 is silent")
    assert "holds 1 task" in findings(ended, "silent workers")[0]["message"]


def test_a_lease_that_lapsed_long_ago_fails(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    mtask.ok("publish", "send", "-k", "k1")
    claim(store, "send:k1", "w1")
    long_ago = {"$subtract": ["$$NOW", 600_000]}
    moved = {
        "task_state.next_preempt_time": long_ago,
        "task_state.worker_states": {
            "$map": {
                "input": "$task_state.worker_states",
                "as": "run",
                "in": {"$mergeObjects": ["$$run", {"ping_expire_time": long_ago}]},
            }
        },
    }
    store.tasks.update_one({}, [{"$set": moved}])
    ended = mtask("doctor", "--json")
    assert ended.code == 7
    assert findings(ended, "leases")[0]["fields"]["task_ids"] == ["send:k1"]


def test_doctor_changes_nothing(mtask: Commands, store: SyncStore) -> None:
    healthy(mtask, store)
    store.tasks.drop_index("mtask_discovery")
    mtask.ok("list")
    mtask("doctor")
    assert "mtask_discovery" not in store.tasks.index_information()


def test_a_patience_that_is_none_is_refused(mtask: Commands) -> None:
    assert mtask("doctor", "--patience", "soon").code == 2
