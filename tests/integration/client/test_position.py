"""A client tells the position of a task in its queue, and when the task will probably start."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mtask import TaskNotFound, TaskSpec, TaskStatus
from mtask.database import setup
from mtask.errors import InvalidKey, MalformedTask
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from tests.clients import AnyClient, claim, fail, server_now, succeed
from tests.integration.stores import register


@pytest.fixture
def serving(client: AnyClient, store: SyncStore) -> None:
    """Put a worker on record that runs the names "a" and "b"."""
    client.init(repair=False)
    register(store, "w1", ["a", "b"])


def reasons(found: Any) -> list[str]:
    return [reason.code for reason in found.reasons]


@pytest.mark.usefixtures("serving")
def test_position_counts_the_due_tasks_that_go_first(client: AnyClient) -> None:
    client.publish_many([TaskSpec("a", key=f"{n}") for n in range(5)])  # due at one instant: ordered by `_id`
    client.publish("b", key="urgent", priority=5)
    client.publish("a", key="urgent-later", priority=5, delay=3600)
    client.publish("c", key="not-ours", priority=5)
    client.publish("a", key="elsewhere", queue="mail", priority=5)
    client.publish("a", key="for-another", priority=5, specific_worker_ids=["w2"])
    assert [client.position("a", f"{n}").ahead for n in range(5)] == [1, 2, 3, 4, 5]
    found = client.position("b", "urgent")
    assert (found.ahead, found.is_more, found.is_due, found.status) == (0, False, True, TaskStatus.INIT)
    assert found.start_estimate == found.now
    assert found.due_time == client.get("b", "urgent").task_state.next_preempt_time
    assert reasons(found) == ["due"]


@pytest.mark.usefixtures("serving")
def test_delayed_task_tells_when_it_is_due(client: AnyClient) -> None:
    client.publish("a", key="now")
    client.publish("a", key="later", delay=3600)
    found = client.position("a", "later")
    assert (found.ahead, found.is_due, found.rate) == (1, False, None)
    assert timedelta(minutes=59) < found.due_time - found.now <= timedelta(hours=1)
    assert found.start_estimate is None, "the queue has finished nothing yet"
    assert reasons(found) == ["not_due"]
    client.remove("a", "now")
    found = client.position("a", "later")
    assert found.start_estimate == found.due_time


@pytest.mark.usefixtures("serving")
def test_start_is_estimated_by_what_the_queue_finished_lately(client: AnyClient, store: SyncStore) -> None:
    client.publish_many([TaskSpec("a", key=f"done/{n}") for n in range(10)])
    for n in range(10):
        succeed(store, f"a:done/{n}", claim(store, f"a:done/{n}", f"by-{n}"))
    client.publish_many([TaskSpec("a", key=f"{n:02}") for n in range(20)])
    began = server_now(store) - timedelta(seconds=20)
    for n in range(10):  # one each 2 s
        ended = began + timedelta(seconds=2 * n)
        store.tasks.update_one({"_id": f"a:done/{n}"}, {"$set": {"task_state.finish_time": ended}})
    found = client.position("a", "19")
    assert found.ahead == 19
    assert found.rate == pytest.approx(10 / (found.now - began).total_seconds())
    assert found.start_estimate - found.now == pytest.approx(
        timedelta(seconds=19 / found.rate), abs=timedelta(milliseconds=2)
    )
    long_ago = server_now(store) - timedelta(hours=1)
    store.tasks.update_many({"task_state.status": "SUCCESS"}, {"$set": {"task_state.finish_time": long_ago}})
    found = client.position("a", "19")
    assert (found.rate, found.start_estimate) == (None, None)


@pytest.mark.usefixtures("serving")
def test_running_and_finished_tasks_have_no_place(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k", max_retries=0)
    run_id = claim(store, "a:k")
    found = client.position("a", "k")
    assert (found.status, found.ahead, found.is_due, found.start_estimate) == (TaskStatus.RUNNING, None, False, None)
    assert found.due_time == client.get("a", "k").runs[0].ping_expire_time
    fail(store, "a:k", run_id)
    found = client.position("a", "k")
    assert (found.status, found.ahead, found.due_time, found.reasons) == (TaskStatus.FAIL, None, None, ())


def test_start_is_not_estimated_while_nobody_would_take_the_task(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    found = client.position("a", "k")
    assert (found.ahead, found.start_estimate, reasons(found)) == (0, None, ["no_worker"])
    register(store, "w1", ["a"])
    assert client.position("a", "k").start_estimate is not None
    store.database["controls"].insert_one(
        {
            "_id": "queue:default", "kind": "queue", "target": "default", "paused": True, "revision": 1,
            "update_time": server_now(store), "schema_version": 1,
        }
    )  # fmt: skip
    found = client.position("a", "k")
    assert (found.start_estimate, reasons(found)) == (None, ["paused"])


@pytest.mark.usefixtures("serving")
def test_interrupted_tasks_go_before_any_priority(client: AnyClient, store: SyncStore) -> None:
    for key, priority in (("low", -5), ("lower", -9), ("high", 5), ("higher", 9)):
        client.publish("a", key=key, priority=priority)
    claim(store, "a:low", "w1")
    lapse(store, "a:low")
    run_id = claim(store, "a:lower", "w1")
    assert store.run(claims.finish([Outcome("a:lower", run_id, RunStatus.CANCELED)])) == {run_id}
    assert {key: client.position("a", key).ahead for key in ("low", "lower", "higher", "high")} == {
        "low": 0,
        "lower": 1,
        "higher": 2,
        "high": 3,
    }


def lapse(store: SyncStore, task_id: str) -> None:
    past = server_now(store) - timedelta(minutes=1)
    changes = {"task_state.worker_states.0.ping_expire_time": past, "task_state.next_preempt_time": past}
    store.tasks.update_one({"_id": task_id}, {"$set": changes})


@pytest.mark.usefixtures("serving")
def test_where_tenants_take_turns_the_turn_is_told(client: AnyClient, store: SyncStore) -> None:
    for tenant, count in (("acme", 3), ("beta", 5), ("gone", 1), ("paused", 2)):
        client.for_tenant(tenant).publish_many([TaskSpec("a", key=f"{n}") for n in range(count)])
    client.cancel("a", "gone:0")
    store.run(setup.ensure(setup.EVERY))
    controls: list[tuple[str, str, dict[str, Any]]] = [
        ("queue", "default", {"fair": True, "limit": {"concurrency": 1}}),
        ("tenant", "paused", {"paused": True}),
    ]
    for kind, target, fields in controls:
        common = {"kind": kind, "target": target, "revision": 1, "update_time": server_now(store), "schema_version": 1}
        store.database["controls"].insert_one({"_id": f"{kind}:{target}", "paused": False, **common, **fields})
    found = client.position("a", "acme:2")
    assert (found.ahead, found.is_more, found.tenants_ahead) == (2, False, None), "no pool tells the turns yet"
    pool = {"_id": '["default"]', "running": [], "starts": [], "schema_version": 1, "turn": 9}
    turns = [{"tenant": "acme", "turn": 7}, {"tenant": "beta", "turn": 6}, {"tenant": "gone", "turn": 1}]
    store.database["places"].insert_one({**pool, "turns": turns})
    assert client.position("a", "acme:0").tenants_ahead == 1
    assert client.position("a", "beta:4").tenants_ahead == 0
    found = client.position("a", "acme:2")
    assert (found.ahead, found.tenants_ahead, found.start_estimate) == (2, 1, None)
    client.publish("a", key="of-nobody")
    assert client.position("a", "of-nobody").tenants_ahead == 0, "it never had a turn"


def test_position_names_what_is_wrong(client: AnyClient, store: SyncStore) -> None:
    with pytest.raises(TaskNotFound, match="a:gone"):
        client.position("a", "gone")
    with pytest.raises(InvalidKey):
        client.position("a", "")
    store.database.get_collection("tasks").insert_one(
        {"_id": "a:bad", "name": "a", "key": "bad", "schema_version": 1}, bypass_document_validation=True
    )
    with pytest.raises(MalformedTask, match="a:bad"):
        client.position("a", "bad")
