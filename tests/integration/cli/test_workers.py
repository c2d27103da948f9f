"""`mtask workers|stop-worker|set-worker|init|schema`."""

from __future__ import annotations

import json
import re
import threading
from datetime import timedelta

import pytest

from mtask.kernel.document.options import OPTION_NAMES
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver.indexes import HEAD_INDEX
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import workers
from mtask.kernel.operations.workers import Heartbeat
from tests.integration.cli.commands import Commands
from tests.integration.stores import register, registration
from tests.mongo import eventually


def test_workers_lists_the_live_and_with_all_the_gone(mtask: Commands, store: SyncStore) -> None:
    register(store, "w1", queues=["a", "b"], names=["send"], concurrency=2, running_cnt=1, unserved_names=["odd"])
    register(store, "w2", queues=["a"], names=["send"], heartbeat_timeout=timedelta(milliseconds=1))
    eventually(lambda: len(mtask.ok("workers", "--json").json) == 1, 40, "w2 is gone")
    found = mtask.ok("workers", "--json").json[0]
    assert (found["_id"], found["is_live"], found["queues"], found["running_cnt"]) == ("w1", True, ["a", "b"], 1)
    assert 0 <= found["heartbeat_age_ms"] < 60_000
    out = mtask.ok("workers").out
    assert "w2" not in out
    assert re.search(r"NO HANDLER\n.* odd\n", out)
    assert "1/2" in out
    assert {worker["_id"]: worker["is_live"] for worker in mtask.ok("workers", "--all", "--json").json} == {
        "w1": True,
        "w2": False,
    }
    assert "gone" in mtask.ok("workers", "-a").out


def test_no_worker_is_said_and_is_an_empty_list(mtask: Commands) -> None:
    assert mtask.ok("workers", "--json").json == []
    assert "no worker is live" in mtask.ok("workers").err


def test_set_worker_pauses_and_resets(mtask: Commands, store: SyncStore) -> None:
    register(store, "w1", queues=["a"], names=["send"])
    assert mtask.ok("set-worker", "w1", "--concurrency", "0", "--json").json == {"worker_id": "w1", "concurrency": 0}
    assert "paused" in mtask.ok("workers").out
    assert "up to 7 runs" in mtask.ok("set-worker", "w1", "-c", "7").out
    assert mtask.ok("set-worker", "w1", "-c", "reset", "--json").json["concurrency"] is None


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "10001", ""])
def test_set_worker_refuses_nonsense(mtask: Commands, store: SyncStore, value: str) -> None:
    register(store, "w1", queues=["a"], names=["send"])
    ended = mtask("set-worker", "w1", f"--concurrency={value}", "--json")
    assert (ended.code, ended.error["field"]) == (2, "concurrency")


@pytest.mark.parametrize("command", [["stop-worker", "none"], ["set-worker", "none", "-c", "1"]])
def test_an_unknown_worker_is_not_found(mtask: Commands, command: list[str]) -> None:
    ended = mtask(*command, "--json")
    assert (ended.code, ended.error["error"], ended.error["worker_id"]) == (4, "WorkerNotFound", "none")


def test_stop_worker_asks_and_can_wait(mtask: Commands, store: SyncStore) -> None:
    register(store, "w1", queues=["a"], names=["send"])
    assert mtask.ok("stop-worker", "w1").out == "asked to stop  w1\n"
    assert "stopping" in mtask.ok("workers").out
    ended = mtask("stop-worker", "w1", "--wait", "--timeout", "300ms", "--json")
    assert (ended.code, ended.error["error"], ended.error["worker_id"]) == (6, "WorkerStillThere", "w1")
    me = registration("w1", ["a"], ["send"])
    beat = Heartbeat(WorkerStatus.STOPPED, 0, 2, [])
    timer = threading.Timer(0.3, lambda: store.run(workers.heartbeat(me, beat)))
    timer.start()
    try:
        assert mtask.ok("stop-worker", "w1", "--wait", "--json").json["stopped"] is True
    finally:
        timer.join()


@pytest.mark.fresh_database
def test_init_makes_everything_and_says_what(mtask: Commands, store: SyncStore) -> None:
    made = mtask.ok("init", "--json").json
    assert made["database"] == mtask.database
    assert [collection["name"] for collection in made["collections"]] == [
        "tasks",
        "workers",
        "schedules",
        "controls",
        "places",
        "actions",
        "bulks",
        "metrics",
        "logs",
        "handlers",
    ]
    present = store.tasks.index_information()
    assert set(made["collections"][0]["indexes"]) == set(present) - {"_id_"}
    assert HEAD_INDEX in mtask.ok("init").out
    assert "is ready" in mtask.ok("init").out


def test_schema_needs_no_database(mtask: Commands) -> None:
    flags = ["--uri", "mongodb://127.0.0.1:1/"]
    for collection in ("tasks", "workers"):
        mongo = mtask.ok("schema", collection, *flags).json
        assert mongo["$jsonSchema"]["title"].startswith(f"mtask {collection}")
        standard = mtask.ok("schema", collection, "--format", "json-schema", *flags).json
        assert standard["$schema"].startswith("https://json-schema.org/")
    assert set(mongo["$jsonSchema"]["properties"]) == set(standard["properties"])
    assert set(OPTION_NAMES) == set(mtask.ok("schema").json["$jsonSchema"]["properties"]["task_option"]["properties"])


@pytest.mark.parametrize("arguments", [["queues"], ["tasks", "--format", "xml"]])
def test_schema_refuses_what_it_does_not_know(mtask: Commands, arguments: list[str]) -> None:
    ended = mtask("schema", *arguments)
    assert ended.code == 2
    assert " or " in ended.err


@pytest.mark.fresh_database
def test_the_exported_rules_are_those_of_the_validator_in_the_database(mtask: Commands, store: SyncStore) -> None:
    mtask.ok("init")
    listed = next(iter(store.database.list_collections(filter={"name": "tasks"})))
    _cheap_case, rules = listed["options"]["validator"]["$or"]
    assert json.loads(json.dumps(rules)) == mtask.ok("schema").json
