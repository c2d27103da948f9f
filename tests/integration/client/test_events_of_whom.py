"""Events tell what belongs to the task and the queue of the change, whatever its key and the task are by now."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mtask import Client, RunStatus
from mtask.client import requests
from mtask.database import setup
from mtask.errors import TaskNotFound
from mtask.features.events import readers
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.publish import Policy
from mtask.kernel.statements.finish import Outcome
from tests.clients import KINDS, AnyClient, Kind, claim, fail, open_client, succeed
from tests.faults.malformed import good
from tests.integration.client.event_readings import SOON, Reading
from tests.integration.stores import make_due, stored
from tests.integration.stores import publish as publish_task
from tests.mongo import Client as Mongo
from tests.mongo import eventually, fail_command

_REASON = "the password of A is 1234"


@pytest.fixture(autouse=True)
def set_up(store: SyncStore) -> None:
    store.run(setup.ensure())


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    with open_client("sync", mongo_uri, database_name, appname=database_name) as made:
        yield made


def beginning(client: AnyClient) -> str:
    """Return a token of now."""
    with Reading(client) as reading:
        assert reading.token is not None
        return reading.token


def read_now(client: AnyClient, store: SyncStore, after: str, **given: Any) -> list[TaskEvent]:
    """Return all that a reader is told until now."""
    queue = given.get("queue", "default")
    publish_task(store, "the last", queue=queue)
    found: list[TaskEvent] = []
    with Reading(client, after=after, **given) as reading:
        while not found or found[-1].key != "the last":
            found += reading.take(1)
    store.tasks.delete_one({"_id": "task:the last"})
    return found[:-1]


def kinds(found: list[TaskEvent]) -> list[str]:
    return [event.kind.value for event in found]


def a_failure_in(queue: str, store: SyncStore) -> str:
    publish_task(store, "k", queue=queue)
    run_id = claim(store, "task:k", "worker of A")
    progress = {"fraction": 0.5, "message": _REASON}
    store.run(claims.ping({run_id: "task:k"}, 60_000, {run_id: progress}))
    fail(store, "task:k", run_id, _REASON)
    return run_id


@pytest.mark.parametrize("kind", KINDS)
def test_reader_of_another_queue_is_not_told_of_the_task_that_had_the_key_before(
    mongo_uri: str, database_name: str, store: SyncStore, kind: Kind
) -> None:
    with open_client(kind, mongo_uri, database_name) as client:
        begin = beginning(client)
        run_id = a_failure_in("a", store)
        store.run(queries.remove("task:k"))
        publish_task(store, "k", queue="b")
        new_run = claim(store, "task:k", "worker of B")
        fail(store, "task:k", new_run, "of B")
        found = read_now(client, store, begin, queue="b")
        assert [(event.kind.value, event.worker_id, event.reason) for event in found] == [
            ("published", None, None),
            ("claimed", "worker of B", None),
            ("failed", "worker of B", "of B"),
        ]
        # Who reads all queues is told all, and of which task each was, as the server still knows it.
        found = read_now(client, store, begin)
        assert [(event.kind.value, event.queue, event.run_id) for event in found] == [
            ("published", "a", None),
            ("claimed", "a", run_id),
            ("progress", "a", run_id),
            ("failed", "a", run_id),
            ("removed", None, None),
            ("published", "b", None),
            ("claimed", "b", new_run),
            ("failed", "b", new_run),
        ]


@pytest.mark.parametrize("status", ["INIT", "CANCELED"])
def test_document_that_was_put_under_the_key_is_not_taken_for_the_former(
    client: AnyClient, store: SyncStore, mongo: Mongo, status: str
) -> None:
    """Another service may write any create_time; the server may not know any more what was there."""
    begin = beginning(client)
    a_failure_in("a", store)
    store.run(queries.remove("task:k"))
    document = good("k", name="task", queue="b")
    document["task_state"]["status"] = status
    store.tasks.insert_one(document)
    is_forgotten = fail_command(mongo, "find", error_code=239, app_name=client.source.options.pool_options.appname)
    with is_forgotten:
        assert kinds(read_now(client, store, begin, queue="b")) == ["published"]
        found = read_now(client, store, begin)
    assert kinds(found) == ["published", "claimed", "progress", "failed", "removed", "published"]
    assert [event.queue for event in found] == ["a", None, None, None, None, "b"]
    assert [event.worker_id for event in found[2:4]] == [None, None]


def test_task_that_moved_to_another_queue_is_told_of_in_each_as_it_was_there(
    client: AnyClient, store: SyncStore
) -> None:
    begin = beginning(client)
    update = Policy(if_exists="update")
    publish_task(store, "k", queue="a")
    run_id = claim(store, "task:k", "w1")
    publish_task(store, "k", queue="b", policy=update)
    fail(store, "task:k", run_id)
    publish_task(store, "k", queue="b", policy=update)  # it is there
    make_due(store, "k")
    run_id = claim(store, "task:k", "w1")
    publish_task(store, "k", queue="a", policy=update)
    publish_task(store, "k", queue="c", policy=update)
    succeed(store, "task:k", run_id)
    assert stored(store, "k")["task_state"]["former_queues"] == ["a", "b"]
    expected = {"a": ["published", "claimed"], "b": ["failed", "claimed"], "c": ["succeeded"], "d": []}
    for queue, told in expected.items():
        found = read_now(client, store, begin, queue=queue)
        assert kinds(found) == told, queue
        assert {event.queue for event in found} <= {queue}
    found = read_now(client, store, begin)
    assert [event.queue for event in found] == ["a", "a", "b", "b", "c"]


def test_what_was_opened_again_or_left_out_since_is_told_in_its_queue(client: AnyClient, store: SyncStore) -> None:
    begin = beginning(client)
    publish_task(store, "k", queue="a", max_retries=0)
    runs = []
    for _ in range(2):
        runs.append(claim(store, "task:k", "w1"))
        fail(store, "task:k", runs[-1], _REASON)
        publish_task(store, "k", policy=Policy(clean_failed=True))
    found = read_now(client, store, begin, queue="a")
    assert kinds(found) == ["published", *["claimed", "failed", "reopened"] * 2]
    told = [event.run_id for event in found if event.kind.value in ("claimed", "failed")]
    assert all(run in (None, right) for run, right in zip(told, [run for run in runs for _ in range(2)], strict=True))
    assert {event.queue for event in found} == {"a"}


def test_plain_tasks_are_told_without_a_look_however_late(
    client: AnyClient, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(change: Any) -> Any:
        looks.append(change["documentKey"]["_id"])
        return (yield from readers_look(change))

    readers_look = readers.with_document_then
    monkeypatch.setattr(readers, "with_document_then", look)
    begin = beginning(client)
    publish_task(store, "k", queue="a")
    run_id = claim(store, "task:k", "w1")
    for fraction in (0.25, 0.5):
        store.run(claims.ping({run_id: "task:k"}, 60_000, {run_id: {"fraction": fraction, "message": "going on"}}))
    for _ in range(3):
        store.run(claims.ping({run_id: "task:k"}, 60_000))
    outcome = Outcome("task:k", run_id, RunStatus.SUCCESS, progress={"fraction": 1.0, "message": "done"})
    assert store.run(claims.finish([outcome], is_simple=True)) == {run_id}
    publish_task(store, "canceled", queue="a")
    client.cancel("task", "canceled")
    found = read_now(client, store, begin, queue="a")
    assert kinds(found) == ["published", "claimed", *["progress"] * 3, "succeeded", "published", "canceled"]
    assert not looks
    # Nor where it is gone: there is nothing to tell of it but the change.
    store.tasks.delete_one({"_id": "task:k"})
    assert kinds(read_now(client, store, begin))[:3] == ["published", "claimed", "progress"]
    assert not looks


@pytest.mark.parametrize("kind", KINDS)
def test_wait_does_not_wait_for_another_task_under_the_same_key(
    mongo_uri: str, database_name: str, store: SyncStore, kind: Kind
) -> None:
    publish_task(store, "k")
    raised: list[BaseException] = []

    def wait() -> None:
        with open_client(kind, mongo_uri, database_name) as client:
            try:
                raised.append(client.wait("task", "k", timeout=SOON))
            except TaskNotFound as error:
                raised.append(error)

    with Client(mongo_uri, database=database_name) as watching:
        left = _streams(watching, database_name)  # an earlier test's, on a server that ends them later
        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: _streams(watching, database_name) - left, SOON, "the task is followed")
        store.run(queries.remove("task:k"))
        publish_task(store, "k")
        succeed(store, "task:k", claim(store, "task:k"))
        waiting.join(SOON)
    assert [type(found) for found in raised] == [TaskNotFound]


def _streams(client: Client, database_name: str) -> set[int]:
    """Return the ids of the cursors of change streams."""
    admin = client.tasks.database.client.admin
    going_on = admin.aggregate([{"$currentOp": {"idleCursors": True}}, {"$match": {"ns": {"$regex": database_name}}}])
    return {
        operation["cursor"]["cursorId"]
        for operation in going_on
        if "cursor" in operation and "$changeStream" in str(operation)
    }


def test_another_task_is_told_by_its_create_time_or_its_removal(store: SyncStore, client: AnyClient) -> None:
    publish_task(store, "k")
    waiting = requests.wait_policy("task:k", None)
    first = waiting.same(client.get("task", "k"))
    assert waiting.same(client.get("task", "k")).task_state == first.task_state
    store.run(queries.remove("task:k"))
    publish_task(store, "k")
    with pytest.raises(TaskNotFound):
        waiting.same(client.get("task", "k"))
