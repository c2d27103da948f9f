"""No document whatever ends or hangs a reader of events: what is malformed is told as far as it is understood."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import Binary, Code, DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import UpdateOne, WriteConcern
from pymongo.errors import BulkWriteError

from mtask import Client, RunStatus, TaskStatus
from mtask.cli.output import write_json
from mtask.database import setup
from mtask.features.events import cli as tail
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from tests.clients import claim, fail
from tests.faults.malformed import BEFORE_CHRIST, BEYOND
from tests.integration.client.event_readings import SOON
from tests.integration.stores import publish as publish_task
from tests.mongo import Document

_numbers = itertools.count()
_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_RUN: Document = {"run_id": "r", "worker_id": "w", "attempt": 1, "status": "RUNNING", "claim_time": _NOW}

#: One of each BSON type, and what is read wrongly most easily.
VALUES: list[Any] = [
    None, True, 0, -1, Int64(2**62), 1.5, 1e308, float("nan"), Decimal128("NaN"), "", "text", "SUCCESS", "x" * 3_000,
    [], [[]], ["SUCCESS"], [None, 5, {"status": []}], {}, {"status": {"a": 1}}, {"0": _RUN}, _RUN, [_RUN], [_RUN, _RUN],
    b"bytes", Binary(b"b", 5), ObjectId("5f5e0c5e5f5e0c5e5f5e0c5e"), _NOW, BEYOND, BEFORE_CHRIST, Regex("^a"),
    Code("c"), Code("c", {"a": 1}), Timestamp(1, 1), MinKey(), MaxKey(), DBRef("c", 1),
]  # fmt: skip
_STATE = "task_state"
_RUNS = f"{_STATE}.worker_states"
_RUN_FIELDS = (
    *("run_id", "worker_id", "attempt", "status", "claim_time", "ping_expire_time", "success_time", "fail_time"),
    *("fail_reason", "returns", "progress", "progress.time", "progress.fraction", "progress.message", "past", "new"),
)
PATHS = [
    *("name", "key", "queue", "params", "task_option", "schema_version", "quiet_time", "expire_time", "new"),
    *(_STATE, _RUNS),
    *(f"{_STATE}.{field}" for field in ("status", "create_time", "finish_time", "next_preempt_time", "failed_cnt")),
    *(f"{_STATE}.{field}" for field in ("cancel_requested", "clean_cnt", "queue_time", "former_queues", "new")),
    *(f"{_RUNS}.{place}" for place in (0, 1, 25)),
    *(f"{_RUNS}.{place}.{field}" for place in (0, 1) for field in _RUN_FIELDS),
]


@pytest.fixture(autouse=True)
def set_up(store: SyncStore) -> None:
    store.run(setup.ensure())


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Iterator[Client]:
    with Client(mongo_uri, database=database_name) as made:
        yield made


def put(store: SyncStore, *updates: Document) -> None:
    """Update a task past the validator, each update apart; what the server cannot do is left undone."""
    unjournaled = store.tasks.with_options(write_concern=WriteConcern(1, j=False))
    requests = [UpdateOne({"_id": "task:k"}, update) for update in updates]
    with suppress(BulkWriteError):
        unjournaled.bulk_write(requests, ordered=False, bypass_document_validation=True)


def read_all(client: Client, store: SyncStore, after: str, **given: Any) -> list[TaskEvent]:
    """Return all that has happened to the task until now: what a command would print of it can be printed."""
    key = f"last {next(_numbers)}"
    publish_task(store, key)
    found: list[TaskEvent] = []
    with client.events(after=after, **given) as happening:
        while (event := happening.poll(SOON)) is None or event.key != key:
            assert event is not None, found
            assert_printable(event)
            found.append(event)
    store.tasks.delete_one({"_id": f"task:{key}"})
    return [event for event in found if event.key == "k"]


def assert_printable(event: TaskEvent) -> None:
    tail._line(event)
    write_json(tail._document(event), indent=None)
    told = {field.name: getattr(event, field.name) for field in fields(event)}
    texts = ("task_id", "queue", "run_id", "worker_id", "reason", "message", "token")
    assert all(told[name] is None or isinstance(told[name], str) for name in texts), told
    assert isinstance(event.time, datetime)
    assert event.task_status is None or isinstance(event.task_status, TaskStatus)


def a_task(store: SyncStore, runs: int) -> None:
    """Let there be a task with so many runs, the last of which goes on."""
    store.tasks.delete_one({"_id": "task:k"})
    publish_task(store, "k", max_retries=-1, retry_delay=0)
    for _ in range(runs - 1):
        fail(store, "task:k", claim(store, "task:k"))
    claim(store, "task:k")


@pytest.mark.parametrize("paths", [PATHS[start::4] for start in range(4)], ids=str)
def test_no_value_of_a_field_ends_a_reader(client: Client, store: SyncStore, paths: list[str]) -> None:
    with client.events() as happening:
        begin = happening.token
    assert begin is not None
    for runs, values in ((2, VALUES), (22, VALUES[::4])):
        a_task(store, runs)
        for path in paths:
            changes = ({"$set": {path: value}} for value in values)
            put(store, *(update for change in changes for update in (change, {"$unset": {path: 1}})))
        put(store, {"$unset": {_STATE: 1}}, {"$set": {f"{_STATE}.status": "SUCCESS"}})
    found = read_all(client, store, begin)
    assert [event.kind.value for event in found if event.is_end and event.task_status == "SUCCESS"][-1:] == [
        "succeeded"
    ]
    read_all(client, store, begin, queue=["default", "text"])


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_change_of_several_fields_ends_a_reader(client: Client, store: SyncStore, data: st.DataObject) -> None:
    with client.events() as happening:
        begin = happening.token
    assert begin is not None
    a_task(store, data.draw(st.sampled_from([1, 2])))
    for _ in range(12):
        paths = data.draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4, unique=True))
        changed = {path: data.draw(st.sampled_from(VALUES)) for path in paths}
        put(store, {data.draw(st.sampled_from(["$set", "$set", "$set", "$push", "$unset"])): changed})
    # And as whole documents, too.
    document = store.tasks.find_one({"_id": "task:k"}) or {}
    store.tasks.delete_one({"_id": "task:k"})
    store.tasks.insert_one(document, bypass_document_validation=True)
    store.tasks.replace_one({"_id": "task:k"}, document | {"new": 1}, bypass_document_validation=True)
    assert [event.kind.value for event in read_all(client, store, begin)][-3:] == ["removed", "published", "published"]
    read_all(client, store, begin, queue="default")


@pytest.mark.parametrize("_id", [None, 5, 1.5, "no colon", {}, {"a": [1]}, b"b", BEYOND, Code("task:k"), MinKey()])
def test_documents_that_are_no_tasks_are_left_out(client: Client, store: SyncStore, _id: Any) -> None:
    with client.events() as happening:
        begin = happening.token
        assert begin is not None
        store.tasks.insert_one({"_id": _id}, bypass_document_validation=True)
        store.tasks.update_one({"_id": _id}, {"$set": {_STATE: 5}}, bypass_document_validation=True)
        store.tasks.delete_one({"_id": _id})
        assert read_all(client, store, begin) == []


def test_malformed_task_that_was_quarantined_is_told_as_failed(client: Client, store: SyncStore) -> None:
    with client.events() as happening:
        begin = happening.token
    assert begin is not None
    publish_task(store, "k")
    put(store, {"$set": {_STATE: "no document"}})
    assert store.run(claims.quarantine("task:k", "w1", "it is malformed"))
    assert [event.kind.value for event in read_all(client, store, begin)] == ["published", "failed"]


def test_change_that_is_too_large_for_a_stream_ends_no_reader(client: Client, store: SyncStore) -> None:
    """The change has the reason, and so has the document: together they are too large."""
    size = 9_000_000
    with client.events() as happening:
        begin = happening.token
    assert begin is not None
    publish_task(store, "k")
    run_id = claim(store, "task:k")
    outcome = Outcome("task:k", run_id, RunStatus.FAIL, reason="x" * size, final=True)
    assert store.run(claims.finish([outcome])) == {run_id}
    found = read_all(client, store, begin, queue="default")
    assert [event.kind.value for event in found] == ["published", "claimed", "failed"]
    assert found[-1].reason == "x" * size
    assert found[-1].run_id == run_id
