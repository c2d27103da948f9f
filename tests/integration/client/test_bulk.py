"""Bulk changes: counted and planned first, carried out in batches under a lease, and gone on with if a process dies."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from mtask import Client, Count, Flow, TaskSpec
from mtask.errors import BulkNotFound, InvalidInput
from mtask.features.bulk import client as requests
from mtask.features.bulk import operations as bulk
from mtask.features.bulk.rules import SECRET_ID
from mtask.features.flows import settle as settling
from mtask.kernel.driver.stores import SyncStore
from mtask.parts.relays import RELAYS
from tests.clients import AnyClient, claim, fail

COUNT = 25


def fill(client: Any, store: SyncStore, *, prefix: str = "", count: int = COUNT) -> None:
    """Publish tasks and let each fail."""
    keys = [f"{prefix}{n:02}" for n in range(count)]
    client.publish_many([TaskSpec("a", {"n": n}, key=key, max_retries=0) for n, key in enumerate(keys)])
    for key in keys:
        fail(store, f"a:{key}", claim(store, f"a:{key}"), "no luck")


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 10)
    monkeypatch.setattr(requests, "LOOK_AGAIN", 0.05)


def test_a_plan_counts_and_changes_nothing_and_a_run_retries_each_task_once(
    client: AnyClient, store: SyncStore
) -> None:
    fill(client, store)
    client.publish("a", key="open")
    plan = client.plan_bulk("retry", status="FAIL", name="a")
    assert (plan.action, plan.count) == ("retry", Count(COUNT))
    assert client.count(status="FAIL") == COUNT
    # What fails after the plan was made is not retried.
    client.publish("a", key="later", max_retries=0)
    fail(store, "a:later", claim(store, "a:later"), "no luck")
    done = client.run_bulk(plan.plan)
    assert (done.done_cnt, done.left_cnt, done.is_over) == (COUNT, 0, True)
    assert client.count(status="INIT") == COUNT + 1
    assert client.get("a", "later").status == "FAIL"
    fail(store, "a:00", claim(store, "a:00"), "again")
    assert client.run_bulk(plan.plan) == done, "a plan is carried out once"
    assert client.get("a", "00").status == "FAIL"
    assert client.bulk(done.bulk_id) == done
    assert [one.bulk_id for one in client.bulks()] == [done.bulk_id]


def test_what_fails_again_meanwhile_is_not_retried_for_ever(
    client: AnyClient, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client.kind != "sync":
        pytest.skip("the operation is the same for each kind")
    fill(client, store)
    change = bulk.change_batch

    def failing_at_once(action: Any, still: Any) -> Any:
        changed = yield from change(action, still)
        for row in store.tasks.find({"task_state.status": "INIT"}):
            fail(store, row["_id"], claim(store, row["_id"]), "at once")
        return changed

    monkeypatch.setattr(bulk, "change_batch", failing_at_once)
    done = client.run_bulk(client.plan_bulk("retry", name="a").plan)
    assert done.done_cnt == COUNT
    assert client.count(status="FAIL") == COUNT


def test_cancel_and_remove(client: AnyClient, store: SyncStore) -> None:
    client.publish_many([TaskSpec("a", key=f"{n:02}", queue=f"q{n % 2}") for n in range(COUNT)])
    claim(store, "a:01")
    done = client.run_bulk(client.plan_bulk("cancel", queue="q1").plan)
    assert done.done_cnt == 12
    assert client.count(status="CANCELED") == 11
    assert client.get("a", "01").task_state.cancel_requested
    flow = Flow("f")
    flow.add("one", "a")
    client.publish_flow(flow)
    removed = client.run_bulk(client.plan_bulk("remove", status="CANCELED", params=None, name="a").plan)
    assert (removed.done_cnt, removed.left_cnt) == (11, 0)
    rest = client.run_bulk(client.plan_bulk("remove", name="a").plan)
    assert (rest.done_cnt, rest.left_cnt) == (14, 1), "the step of a flow stays"
    assert [task.id for task in client.find()] == ["a:f/one"]


def test_a_bulk_cancel_tells_the_other_steps_of_a_flow(client: AnyClient) -> None:
    flow = Flow("f")
    flow.add("two", "b", after=[flow.add("one", "a")])
    client.publish_flow(flow)
    assert client.run_bulk(client.plan_bulk("cancel", name="a").plan).done_cnt == 1
    assert client.get("b", "f/two").status == "CANCELED"


def test_a_bulk_cancel_of_a_large_flow_is_the_users_in_each_batch(client: AnyClient, store: SyncStore) -> None:
    """The flow has more steps than a batch: none of them ends by another one, and no clean-up runs."""
    flow = Flow("f")
    root = flow.add("root", "a")
    for number in range(COUNT):
        flow.add(f"clean-{number:02}", "clean", after=[root], on_failed="run")
        flow.add(f"work-{number:02}", "a", after=[root])
    client.publish_flow(flow)
    client.publish_many([TaskSpec("a", key=f"alone-{number}") for number in range(5)])
    done = client.run_bulk(client.plan_bulk("cancel", status=["INIT", "WAITING"]).plan)
    assert (done.done_cnt, done.left_cnt) == (2 * COUNT + 6, 0)
    assert client.count(status="CANCELED") == client.count() == done.done_cnt
    assert client.retry("a", "f/root").status == "INIT"
    store.run(settling.settle_all(["a:f/root"]))
    assert client.count(status="CANCELED") == done.done_cnt - 1, "the user canceled the others, too"


def test_a_bulk_cancel_of_some_steps_leaves_the_others_to_the_flow(client: AnyClient, store: SyncStore) -> None:
    flow = Flow("f")
    root = flow.add("root", "a")
    flow.add("clean", "clean", after=[root], on_failed="run")
    flow.add("work", "b", after=[root])
    client.publish_flow(flow)
    run_id = claim(store, "a:f/root")
    done = client.run_bulk(client.plan_bulk("cancel", name="a").plan)
    assert (done.done_cnt, done.left_cnt) == (1, 0)
    again = client.run_bulk(client.plan_bulk("cancel", name="a").plan)
    assert (again.done_cnt, again.left_cnt) == (0, 0), "it is asked to stop already"
    fail(store, "a:f/root", run_id, "canceled")
    store.run(settling.settle_all(["a:f/root"]))
    assert [client.get(*one).status for one in (("clean", "f/clean"), ("b", "f/work"))] == ["INIT", "CANCELED"]


def test_another_process_goes_on_where_the_first_one_died(client: AnyClient, store: SyncStore) -> None:
    fill(client, store)
    begun = client.begin_bulk(client.plan_bulk("retry", status="FAIL").plan)
    first = store.run(bulk.step(begun.bulk_id, "dies", RELAYS))
    assert (first.is_ours, first.document["done_cnt"]) == (True, 10)
    second = store.run(bulk.step(begun.bulk_id, "waits", RELAYS))
    assert (second.is_ours, second.document["done_cnt"]) == (False, 10), "the lease of the first one still holds"
    assert client.count(status="INIT") == 10
    store.database["bulks"].update_one({"_id": begun.bulk_id}, {"$set": {"lease_expire_time": begun.begin_time}})
    done = client.carry_bulk(begun.bulk_id)
    assert (done.done_cnt, done.is_over) == (COUNT, True)
    # The first process comes back: it has lost its lease, and changes nothing more.
    assert not store.run(bulk.step(begun.bulk_id, "dies", RELAYS)).is_ours


def test_a_batch_whose_end_was_not_written_is_done_again_without_harm(
    client: AnyClient, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client.kind != "sync":
        pytest.skip("the operation is the same for each kind")
    fill(client, store)
    begun = client.begin_bulk(client.plan_bulk("retry", status="FAIL").plan)
    change = bulk.change_batch

    def dying(action: Any, still: Any) -> Any:
        yield from change(action, still)
        raise KeyboardInterrupt

    monkeypatch.setattr(bulk, "change_batch", dying)
    with pytest.raises(KeyboardInterrupt):
        store.run(bulk.step(begun.bulk_id, "dies", RELAYS))
    monkeypatch.setattr(bulk, "change_batch", change)
    for row in store.tasks.find({"task_state.status": "INIT"}):
        fail(store, row["_id"], claim(store, row["_id"]), "again")
    store.database["bulks"].update_one({"_id": begun.bulk_id}, {"$set": {"lease_expire_time": begun.begin_time}})
    done = client.carry_bulk(begun.bulk_id)
    assert client.count(status="FAIL") == 10, "what failed again stays as it is"
    assert done.done_cnt == COUNT - 10


def test_two_processes_at_once_change_each_task_once(mongo_uri: str, database_name: str, store: SyncStore) -> None:
    with Client(mongo_uri, database=database_name) as client:
        fill(client, store)
        begun = client.begin_bulk(client.plan_bulk("remove", status="FAIL").plan)
        ended: list[Any] = []
        threads = [threading.Thread(target=lambda: ended.append(client.carry_bulk(begun.bulk_id))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [one.done_cnt for one in ended] == [COUNT] * 4
        assert client.count() == 0


def test_a_restricted_plan_stays_within_its_keys(client: AnyClient, store: SyncStore) -> None:
    for prefix in ("acme:", "umbra:"):
        fill(client, store, prefix=prefix, count=3)
    plan = client.plan_bulk("retry", status="FAIL", within="acme:")
    assert plan.count == Count(3)
    for other in (None, "umbra:", "acme"):
        with pytest.raises(InvalidInput):
            client.run_bulk(plan.plan, within=other)
    assert client.run_bulk(plan.plan, within="acme:").done_cnt == 3
    assert {task.key.split(":")[0] for task in client.find(status="FAIL")} == {"umbra"}
    with pytest.raises(InvalidInput):
        client.plan_bulk("retry", within="acme:"), "a tenant's prefix is no filter"
    assert client.bulks(within="umbra:") == []
    assert len(client.bulks(within="acme:")) == 1


@pytest.mark.parametrize(
    ("action", "criteria"),
    [
        ("retry", {}),
        ("remove", {"name": None, "status": []}),
        ("drop", {"name": "a"}),
        (None, {"name": "a"}),
        ("retry", {"status": "SUCCESS"}),
        ("retry", {"status": ["FAIL", "INIT"]}),
        ("cancel", {"status": "FAIL"}),
        ("remove", {"status": "LOST"}),
        ("retry", {"key": ""}),
        ("retry", {"key": ["a", ""]}),
        ("remove", {"name": "a", "key": ["k" * 513]}),
        ("remove", {"name": "a", "key_prefix": ""}),
        ("cancel", {"key_prefix": "é" * 257}),
    ],
)
def test_what_is_no_bulk_change_is_refused(action: Any, criteria: dict[str, Any]) -> None:
    with Client("mongodb://127.0.0.1:1", timeout=timedelta(seconds=1)) as client, pytest.raises(InvalidInput):
        client.plan_bulk(action, **criteria)


def test_forged_and_old_plans_are_refused(client: AnyClient, store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = client.plan_bulk("remove", name="a").plan
    body, _, signature = plan.partition(".")
    for forged in ("", ".", body, f"{body}.", f"{body}x.{signature}", f"{body}.{signature[:-1]}", "é.ü", "\ud800.a", 7):
        with pytest.raises(InvalidInput):
            client.run_bulk(forged)
    with pytest.raises(InvalidInput):
        client.begin_bulk(plan, action="retry")
    for missing in ("x", SECRET_ID):
        with pytest.raises(BulkNotFound):
            client.carry_bulk(missing)
        with pytest.raises(BulkNotFound):
            client.bulk(missing)
    monkeypatch.setattr(requests, "PLAN_LASTS", timedelta(seconds=-1))
    with pytest.raises(InvalidInput, match="older than ten minutes"):
        client.run_bulk(client.plan_bulk("remove", name="a").plan)
    assert store.database["bulks"].count_documents({}) == 1, "only the secret"
    assert client.bulks() == []
