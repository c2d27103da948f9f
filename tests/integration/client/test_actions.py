"""The action log: what is written into it, by whom, and what it survives."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson.timestamp import Timestamp
from pymongo.errors import WriteError

from mtask import Action, AsyncClient, Client, TaskSpec
from mtask.database import setup
from mtask.errors import ControlUnconfirmed, InvalidInput, TaskNotFound
from mtask.features.audit_log.client import acting_as
from mtask.features.audit_log.rules import KEPT_FOR
from tests import build
from tests.clients import AnyClient, open_store
from tests.mongo import Client as Mongo

SECRET = "a-secret-in-params"


def described(actions: list[Action]) -> list[tuple[str, str, str | None]]:
    return [(action.intent, action.target, action.result) for action in actions]


def test_each_operating_call_is_written_down_with_its_result(client: AnyClient) -> None:
    client.publish("send", {"token": SECRET}, key="k/1")
    client.publish_many([])
    client.get("send", "k/1")
    client.update_option("send", "k/1", priority=5, limit_key="eu", run_timeout=1.5)
    client.cancel("send", "k/1")
    client.retry("send", "k/1")
    client.cancel("send", "k/1")
    client.rerun("send", "k/1")
    client.pause(queue="mail")
    client.resume(name="send")
    client.limit("mail", concurrency=3, rate=(5, timedelta(seconds=1)))
    client.keep("mail", success=10)
    client.add_schedule("nightly", "send", "30 2 * * *", {"token": SECRET})
    client.pause_schedule("nightly")
    client.resume_schedule("nightly")
    client.remove_schedule("nightly")
    with pytest.raises(TaskNotFound):
        client.cancel("send", "no such task")
    client.remove("send", "k/1")
    client.publish("send", {"token": SECRET}, key="k/2")
    client.cancel("send", "k/2")
    assert client.purge(status="CANCELED", queue="default", dry_run=True) == 1
    assert client.purge(status="CANCELED", queue="default") == 1
    found = client.actions()
    assert described(found)[::-1] == [
        ("update", "task:send:k/1", "done"),
        ("cancel", "task:send:k/1", "done"),
        ("retry", "task:send:k/1", "done"),
        ("cancel", "task:send:k/1", "done"),
        ("rerun", "task:send:k/1", "done"),
        ("pause", "queue:mail", "done"),
        ("resume", "name:send", "done"),
        ("limit", "queue:mail", "done"),
        ("keep", "queue:mail", "done"),
        ("add schedule", "schedule:nightly", "done"),
        ("pause schedule", "schedule:nightly", "done"),
        ("resume schedule", "schedule:nightly", "done"),
        ("remove schedule", "schedule:nightly", "done"),
        ("cancel", "task:send:no such task", "TaskNotFound"),
        ("remove", "task:send:k/1", "done"),
        ("cancel", "task:send:k/2", "done"),
        ("purge", "tasks", "done: 1 removed"),
    ]
    details = {action.intent: action.detail for action in found}
    assert details["update"] == "priority=5, limit_key='eu', run_timeout_ms=1500"
    assert details["limit"] == "concurrency=3, rate=[5, 0:00:01]"
    assert details["keep"] == "success=10"
    assert details["add schedule"] == "send in queue default"
    assert details["purge"] == "status='CANCELED', queue='default'"
    assert {(action.actor, action.via) for action in found} == {(pwd.getpwuid(os.geteuid()).pw_name, "python")}
    now = client.server_time()
    assert all(timedelta(0) <= now - action.time + timedelta(seconds=1) < timedelta(minutes=5) for action in found)
    assert all(action.end_time is not None and action.end_time >= action.time for action in found)
    assert SECRET not in repr(found)


def test_input_that_is_refused_before_anything_is_sent_is_not_written_down(client: AnyClient) -> None:
    client.init()
    refused: list[Callable[[], Any]] = [
        lambda: client.stop_worker("a,b"),
        lambda: client.set_worker("w", concurrency=-1),
        lambda: client.update_option("send", "k"),
        lambda: client.pause(queue="a,b"),
        lambda: client.cancel_flow(""),
        lambda: client.actions(intent="publish"),
        lambda: client.actions(actor=7),
        lambda: client.actions(after=7),
        lambda: client.actions(since=datetime.now()),  # noqa: DTZ005
        lambda: client.actions(limit=-1),
    ]
    for wrong in refused:
        with pytest.raises(InvalidInput):
            wrong()
    assert client.actions() == []


def test_the_log_is_searched_by_who_what_and_where_and_read_in_pages(
    client: AnyClient, mongo_uri: str, database_name: str
) -> None:
    for name in ("ann", "bob"):
        with Client(mongo_uri, database=database_name, actor=name) as acting:
            for queue in ("a", "b"):
                acting.pause(queue=queue)
                acting.resume(queue=queue)
    found = client.actions()
    assert len(found) == 8
    assert client.actions(actor="ann") == found[4:]
    assert client.actions(actor=["ann", "bob"]) == found
    assert described(client.actions(actor="bob", intent="pause")) == [
        ("pause", "queue:b", "done"),
        ("pause", "queue:a", "done"),
    ]
    assert [action.actor for action in client.actions(target="queue:a", intent="resume")] == ["bob", "ann"]
    assert client.actions(since=client.server_time() + timedelta(hours=1)) == []
    assert client.actions(since=client.server_time() - timedelta(hours=1)) == found
    assert client.actions(since=datetime(9999, 12, 31, tzinfo=UTC)) == [], "a BSON timestamp ends in 2106"
    assert client.actions(since=datetime(1, 1, 1, tzinfo=UTC)) == found
    pages: list[Action] = []
    while page := client.actions(limit=3, after=pages[-1] if pages else None):
        pages += page
    assert pages == found
    assert client.actions(limit=3, after=found[2].id) == found[3:6]
    assert client.actions(after="no such action") == []


async def test_callers_at_the_same_time_keep_their_names(mongo_uri: str, database_name: str) -> None:
    async with AsyncClient(mongo_uri, database=database_name, actor="the service") as client:

        async def act(number: int) -> None:
            with acting_as(f"user {number}", "web"):
                await client.pause(queue=f"q{number}")
                await client.resume(queue=f"q{number}")

        await client.pause(queue="first")
        await asyncio.gather(*(act(number) for number in range(20)))
        await client.resume(queue="first")
        found = await client.actions()
        assert len(found) == 42
        for action in found:
            number = action.target.removeprefix("queue:q")
            expected = ("the service", "python") if action.target == "queue:first" else (f"user {number}", "web")
            assert (action.actor, action.via) == expected


def test_a_pause_that_no_worker_confirms_is_written_down_as_stored(
    client: AnyClient, database_name: str, mongo: Mongo
) -> None:
    client.init()
    mongo[database_name]["workers"].insert_one(build.worker(now=client.server_time(), queues=["mail"]))
    with pytest.raises(ControlUnconfirmed):
        client.pause(queue="mail", timeout=0.05)
    assert described(client.actions()) == [("pause", "queue:mail", "done")]


def test_a_log_that_cannot_be_written_stops_no_action(
    mongo_uri: str, database_name: str, mongo: Mongo, caplog: pytest.LogCaptureFixture
) -> None:
    mongo[database_name].drop_collection("actions")
    mongo[database_name]["actions"].insert_one({"nobody": 1})  # a foreign document: the collection is not ours
    with Client(mongo_uri, database=database_name) as client, caplog.at_level(logging.INFO, "mtask.client"):
        assert client.pause(queue="mail").paused
        assert not client.resume(queue="mail").paused
        assert client.purge() == 0
    levels = [record.levelno for record in caplog.records if "action log" in record.getMessage()]
    assert levels == [logging.WARNING, logging.INFO, logging.INFO]
    assert mongo[database_name]["actions"].count_documents({}) == 1


def test_a_service_can_leave_its_actions_out(mongo_uri: str, database_name: str) -> None:
    with Client(mongo_uri, database=database_name, log_actions=False) as client:
        client.pause(queue="mail")
        assert client.purge() == 0
        assert client.actions() == []


def test_a_bulk_change_is_written_down_once_without_the_values_of_params(client: AnyClient) -> None:
    for key in "ab":
        client.publish("send", {"token": SECRET}, key=key, lookup={"user": SECRET})
    plan = client.plan_bulk("cancel", name="send", params={"token": SECRET}, lookup={"user": SECRET})
    assert client.run_bulk(plan.plan).done_cnt == 2
    client.run_bulk(plan.plan)
    (action,) = client.actions()
    assert (action.intent, action.target, action.result) == ("bulk cancel", "tasks", "done: 2 changed")
    assert "name='send'" in action.detail
    assert "token" in action.detail
    assert SECRET not in repr(action)


def test_an_action_whose_process_is_killed_is_in_the_log(mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    """A purge of many tasks dies in its pause between two batches. Its result is not known, but who began it is."""
    with Client(mongo_uri, database=database_name) as client:
        client.publish_many([TaskSpec("send", number, key=str(number)) for number in range(3)])
        code = (
            "import mtask, os, signal\n"
            "from mtask.features.controls.client import Purging\n"
            "def pause(self, took): os.kill(os.getpid(), signal.SIGKILL)\n"
            "Purging.pause = pause\n"
            f"mtask.Client({mongo_uri!r}, database={database_name!r}, actor='cleaner').purge(status='INIT')\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], timeout=100, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert client.count() == 0
        (action,) = client.actions()
        assert (action.actor, action.intent, action.result, action.end_time) == ("cleaner", "purge", None, None)


def test_the_log_keeps_90_days_and_its_searches_use_indexes(mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    with Client(mongo_uri, database=database_name) as client:
        for number in range(30):
            client.pause(queue=f"q{number % 3}", name=None)
        (newest,) = client.actions(limit=1)
    log = mongo[database_name]["actions"]
    stored = log.find_one({"_id": newest.id})
    assert stored is not None
    left = stored["expire_time"].replace(tzinfo=UTC) - datetime.now(UTC)
    assert KEPT_FOR - timedelta(minutes=5) < left <= KEPT_FOR
    assert log.index_information()["mtask_expiry"]["expireAfterSeconds"] == 0
    for criteria, most in (({}, 20), ({"target": "queue:q1"}, 10), ({"actor": newest.actor}, 10)):
        matched = {"actor": {"$exists": True}, **{field: {"$in": [value]} for field, value in criteria.items()}}
        command = {"find": "actions", "filter": matched, "sort": {"time": -1}, "limit": 10}
        stats = mongo[database_name].command("explain", command, verbosity="executionStats")["executionStats"]
        assert stats["totalDocsExamined"] <= most, (criteria, stats)
        assert "SORT" not in _stages(stats["executionStages"]), criteria


def _stages(stage: dict[str, Any]) -> set[str]:
    inner = [stage[name] for name in ("inputStage",) if name in stage] + stage.get("inputStages", [])
    return {str(stage["stage"])}.union(*(_stages(one) for one in inner))


@pytest.mark.parametrize(
    "wrong",
    [
        {"actor": None},
        {"via": "telephone"},
        {"intent": "publish"},
        {"time": datetime(2026, 1, 1, tzinfo=UTC)},
        {"target": "x" * 1001},
        {"actor": 7},
    ],
)
def test_the_server_refuses_documents_that_are_no_part_of_the_log(
    wrong: dict[str, Any], mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    with open_store(mongo_uri, database_name) as store:
        store.run(setup.make_sure(["actions"]))
    right = {
        "_id": "a",
        "time": Timestamp(0, 0),
        "actor": "ann",
        "via": "web",
        "intent": "pause",
        "target": "queue:mail",
        "expire_time": datetime(2026, 1, 1, tzinfo=UTC),
        "schema_version": 1,
    }
    mongo[database_name]["actions"].insert_one({**right, "_id": "b"})
    changed = {name: value for name, value in {**right, **wrong}.items() if value is not None}
    with pytest.raises(WriteError):
        mongo[database_name]["actions"].insert_one(changed)
