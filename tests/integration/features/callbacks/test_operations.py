"""Ends that are to be told: on each way to an end, across the death of a process at any point, with one id for each."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pymongo.errors import WriteError

from mtask import Client, Flow, RunStatus, TaskSpec
from mtask.errors import DatabaseUnavailable, InvalidInput, TaskRunning
from mtask.features.callbacks import operations as callbacks
from mtask.features.controls import client as purging
from mtask.features.flows import retention as flow_retention
from mtask.features.flows import settle as settling
from mtask.kernel.document.parts import MAX_OWED
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.parts import relays
from tests.clients import claim
from tests.explaining import examined_by

URL = "https://hooks.example.com/a"
TO = {"url": URL}
Document = dict[str, Any]


def end(store: SyncStore, task_id: str, status: Any = RunStatus.SUCCESS, **given: Any) -> None:
    """Claim the task and finish its run, as a worker does that takes it for simple."""
    run_id = claim(store, task_id)
    outcome = Outcome(task_id, run_id, status, **given)
    assert store.run(claims.finish([outcome], is_simple=True)) == {run_id}


def lapse(store: SyncStore, task_id: str) -> None:
    """Let the lease of the task's run lapse."""
    claim(store, task_id)
    past = {"$subtract": ["$$NOW", 60_000]}
    runs = {"$map": {"input": "$task_state.worker_states", "as": "run", "in": {"$mergeObjects": [
        "$$run", {"ping_expire_time": past}]}}}  # fmt: skip
    moved = {"$set": {"task_state.worker_states": runs, "task_state.next_preempt_time": past}}
    store.tasks.update_one({"_id": task_id}, [moved])


def owed(store: SyncStore, task_id: str) -> list[tuple[int, str]]:
    """Return the numbers and statuses of the ends that are still to be told."""
    document = store.tasks.find_one({"_id": task_id}) or {}
    return [(one["number"], one["status"]) for one in document.get("callback_owed", [])]


def told(store: SyncStore) -> list[tuple[str, str, int]]:
    """Return task, status and number of each published delivery, in order."""
    found = store.tasks.find({"name": "mtask/callback"})
    data = [document["params"]["event"]["data"] for document in found]
    return sorted((one["task_id"], one["status"], one["number"]) for one in data)


def settle_lapsed(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, max_retries=0)
    lapse(store, "task:k")
    store.run(claims.settle(["task:k"]))


def claim_lapsed(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, max_retries=0)
    lapse(store, "task:k")
    store.run(claims.claim(["task:k"], "another", "token"))


def fail_finally(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    end(store, "task:k", RunStatus.FAIL, reason="no", final=True)


def fail_by_limit(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, max_retries=1, retry_delay=0)
    end(store, "task:k", RunStatus.FAIL, reason="no")
    assert owed(store, "task:k") == []
    end(store, "task:k", RunStatus.FAIL, reason="no")


def succeed(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    end(store, "task:k")


def succeed_as_step(store: SyncStore, client: Client) -> None:
    flow = Flow("f")
    flow.add("k", "task", callback=TO)
    client.publish_flow(flow)
    end(store, "task:f/k")


def quarantine(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    store.tasks.update_one(
        {"_id": "task:k"}, {"$set": {"task_option.priority": "high"}}, bypass_document_validation=True
    )
    assert store.run(claims.quarantine("task:k", "w", "malformed"))


def canceled_by_flow(store: SyncStore, client: Client) -> None:
    flow = Flow("f")
    first = flow.add("a", "task")
    flow.add("k", "task", after=[first], callback=TO)
    client.publish_flow(flow)
    end(store, "task:f/a", RunStatus.FAIL, reason="no", final=True)
    store.run(settling.settle_all(["task:f/a"]))


def failed_by_flow(store: SyncStore, client: Client) -> None:
    flow = Flow("f")
    first = flow.add("a", "task")
    flow.add("k", "task", after=[first], on_failed="fail", callback=TO)
    client.publish_flow(flow)
    end(store, "task:f/a", RunStatus.FAIL, reason="no", final=True)
    store.run(settling.settle_all(["task:f/a"]))


def failed_fast(store: SyncStore, client: Client) -> None:
    flow = Flow("f", fail_fast=True)
    flow.add("a", "task")
    flow.add("k", "task", callback=TO)
    client.publish_flow(flow)
    end(store, "task:f/a", RunStatus.FAIL, reason="no", final=True)
    store.run(settling.settle_all(["task:f/a"]))


def lower_the_wanted_successes(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, concurrent_worker_cnt=2)
    end(store, "task:k")
    store.run(queries.update_option("task:k", {"concurrent_worker_cnt": 1}))


def stop_a_running_task(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    run_id = claim(store, "task:k")
    client.cancel("task", "k")
    assert owed(store, "task:k") == []
    store.run(claims.finish([Outcome("task:k", run_id, RunStatus.CANCELED, reason="asked to")]))


def succeed_in_a_transaction(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    run_id = claim(store, "task:k")
    with store.client.start_session() as session, session.start_transaction():
        assert store.run(claims.finish_in_transaction(Outcome("task:k", run_id, RunStatus.SUCCESS)), session)


WAYS: dict[Callable[[SyncStore, Client], None], str] = {
    succeed: "SUCCESS",
    succeed_as_step: "SUCCESS",
    succeed_in_a_transaction: "SUCCESS",
    lower_the_wanted_successes: "SUCCESS",
    fail_finally: "FAIL",
    fail_by_limit: "FAIL",
    settle_lapsed: "FAIL",
    claim_lapsed: "FAIL",
    quarantine: "FAIL",
    failed_by_flow: "FAIL",
    canceled_by_flow: "CANCELED",
    failed_fast: "CANCELED",
    stop_a_running_task: "CANCELED",
}


@pytest.mark.parametrize("way", list(WAYS), ids=lambda way: way.__name__)
def test_each_way_to_an_end_owes_one_callback_and_the_next_process_publishes_it(
    way: Callable[[SyncStore, Client], None], store: SyncStore, client: Client
) -> None:
    way(store, client)
    (task_id,) = [document["_id"] for document in store.tasks.find({"callback": {"$exists": True}})]
    assert owed(store, task_id) == [(1, WAYS[way])]
    assert told(store) == []
    store.run(callbacks.settle(store.run(callbacks.find())))
    assert (owed(store, task_id), told(store)) == ([], [(task_id, WAYS[way], 1)])
    store.run(callbacks.settle_all([task_id]))
    assert len(told(store)) == 1
    (delivery,) = client.find(lookup={"callback_of": task_id})
    assert (delivery.queue, delivery.status, delivery.params["url"]) == ("mtask/callbacks", "INIT", URL)
    assert delivery.key == delivery.params["webhook_id"]


class Died(Exception):
    """The process ends here."""


def until_call(operation: Operation[Any], count: int) -> Generator[Call, Any, Any]:
    """Run an operation, and let the process die before the call of this number, counted from 1."""
    number = 0
    call = next(operation)
    try:
        while True:
            number += 1
            if number == count:
                raise Died
            call = operation.send((yield call))
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("dies_at", [1, 2, 3])
def test_a_death_at_any_point_leaves_the_mark_or_has_done_all(dies_at: int, store: SyncStore, client: Client) -> None:
    """The calls are: find, publish, cross off. After each, another process settles the same end."""
    succeed(store, client)
    with pytest.raises(Died):
        store.run(until_call(callbacks.settle_all(["task:k"]), dies_at))
    assert owed(store, "task:k") == [(1, "SUCCESS")]
    before = [document["_id"] for document in store.tasks.find({"name": "mtask/callback"})]
    assert len(before) == (dies_at == 3)
    store.run(callbacks.settle(store.run(callbacks.find())))
    after = [document["_id"] for document in store.tasks.find({"name": "mtask/callback"})]
    assert len(after) == 1
    assert set(before) <= set(after)
    assert owed(store, "task:k") == []


def test_two_processes_at_once_publish_one_delivery(store: SyncStore, client: Client) -> None:
    succeed(store, client)
    rows = store.run(callbacks.find())
    store.run(callbacks.settle(rows))
    store.run(callbacks.settle(rows))
    assert told(store) == [("task:k", "SUCCESS", 1)]
    assert owed(store, "task:k") == []


def test_each_end_has_a_number_of_its_own_also_between_two_looks(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback={"url": URL, "on": ["SUCCESS", "FAIL"]})
    end(store, "task:k", RunStatus.FAIL, reason="no", final=True)
    rows = store.run(callbacks.find())
    store.run(queries.run_again("task:k", everything=True))
    end(store, "task:k")
    assert owed(store, "task:k") == [(1, "FAIL"), (2, "SUCCESS")]
    store.run(callbacks.settle(rows))  # a process that read before the retry
    assert owed(store, "task:k") == [(2, "SUCCESS")]
    store.run(callbacks.settle(store.run(callbacks.find())))
    assert told(store) == [("task:k", "FAIL", 1), ("task:k", "SUCCESS", 2)]
    ids = store.tasks.distinct("params.webhook_id")
    assert len(ids) == 2


def test_a_client_tells_at_once_what_it_has_ended(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    client.cancel("task", "k")
    assert (owed(store, "task:k"), told(store)) == ([], [("task:k", "CANCELED", 1)])
    client.cancel("task", "k")
    assert len(told(store)) == 1


@pytest.mark.parametrize(
    "cancel",
    [
        lambda client: client.cancel("first", "f/a"),
        lambda client: client.cancel_flow("f"),
        lambda client: client.run_bulk(client.plan_bulk("cancel", name="first").plan),
    ],
    ids=["a step", "a flow", "a bulk change"],
)
def test_a_client_tells_at_once_what_ends_because_of_its_cancel(
    cancel: Callable[[Client], Any], store: SyncStore, client: Client
) -> None:
    flow = Flow("f")
    flow.add("b", "second", after=[flow.add("a", "first", callback=TO)], callback=TO)
    client.publish_flow(flow)
    cancel(client)
    assert told(store) == [("first:f/a", "CANCELED", 1), ("second:f/b", "CANCELED", 1)]


def test_ends_that_nobody_asked_for_are_not_told(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback={"url": URL, "on": ["FAIL"]})
    end(store, "task:k")
    document = store.tasks.find_one({"_id": "task:k"}) or {}
    assert "callback_owed" not in document
    assert "callback_cnt" not in document


def test_a_task_that_is_published_again_after_its_removal_has_other_ids(store: SyncStore, client: Client) -> None:
    for _ in range(2):
        client.publish("task", key="k", callback=TO)
        client.cancel("task", "k")
        assert client.remove("task", "k")
    assert told(store) == [("task:k", "CANCELED", 1)] * 2
    assert len(store.tasks.distinct("_id", {"name": "mtask/callback"})) == 2


def test_a_mark_of_the_task_that_was_there_before_is_not_crossed_off_the_next_one(
    store: SyncStore, client: Client
) -> None:
    succeed(store, client)
    rows = store.run(callbacks.find())
    store.tasks.delete_one({"_id": "task:k"})
    succeed(store, client)
    store.run(callbacks.settle(rows))
    assert owed(store, "task:k") == [(1, "SUCCESS")]
    store.run(callbacks.settle(store.run(callbacks.find())))
    assert told(store) == [("task:k", "SUCCESS", 1)] * 2


def test_an_end_keeps_the_address_that_the_task_had_then(store: SyncStore, client: Client) -> None:
    succeed(store, client)
    client.publish("task", key="k", callback={"url": "https://other.example"}, if_exists="update", clean_success=True)
    client.cancel("task", "k")
    found = store.tasks.find({"name": "mtask/callback"})
    assert {d["params"]["event"]["data"]["number"]: d["params"]["url"] for d in found} == {
        1: URL,
        2: "https://other.example",
    }
    client.publish("task", key="k", if_exists="update")
    assert "callback" not in (store.tasks.find_one({"_id": "task:k"}) or {})


def test_only_the_newest_ends_are_kept_while_nobody_tells_them(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    mark = {"number": 1, "status": "FAIL", "time": client.server_time(), "url": URL}
    marks = [{**mark, "number": number} for number in range(1, MAX_OWED + 1)]
    store.tasks.update_one({"_id": "task:k"}, {"$set": {"callback_owed": marks, "callback_cnt": MAX_OWED}})
    end(store, "task:k")
    numbers = [number for number, _ in owed(store, "task:k")]
    assert numbers == list(range(2, MAX_OWED + 2))


# --- retention and removal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [RunStatus.SUCCESS, RunStatus.FAIL])
def test_retention_begins_when_the_end_is_told(status: Any, store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, retain_success=1, retain_fail=1)
    end(store, "task:k", status, final=status == RunStatus.FAIL)
    assert "expire_time" not in (store.tasks.find_one({"_id": "task:k"}) or {})
    store.run(callbacks.settle_all(["task:k"]))
    document = store.tasks.find_one({"_id": "task:k"}) or {"task_state": {}}
    assert document["expire_time"] == document["task_state"]["finish_time"] + timedelta(seconds=1)


def test_a_task_that_was_opened_again_before_its_end_was_told_does_not_expire(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, retain_success=1)
    end(store, "task:k")
    store.run(queries.run_again("task:k", everything=True))
    store.run(callbacks.settle_all(["task:k"]))
    assert "expire_time" not in (store.tasks.find_one({"_id": "task:k"}) or {})


def test_neither_a_purge_nor_the_keep_of_a_queue_removes_a_task_whose_end_is_to_be_told(
    store: SyncStore, client: Client
) -> None:
    succeed(store, client)
    assert client.purge(status="SUCCESS") == 0
    assert store.run(queries.remove_older("default", [TaskStatus.SUCCESS], 0)) == 0
    assert store.run(purging.prepare({"status": "SUCCESS"}, None, 0).count()) == 0
    store.run(callbacks.settle_all(["task:k"]))
    assert client.purge(name="task") == 1


def test_the_retention_of_a_flow_waits_for_its_callbacks(store: SyncStore, client: Client) -> None:
    flow = Flow("f", retain_success=1)
    flow.add("k", "task", callback=TO)
    client.publish_flow(flow)
    end(store, "task:f/k")
    store.run(settling.settle_all(["task:f/k"]))
    assert store.run(flow_retention.end_flows()) == 0
    store.run(callbacks.settle_all(["task:f/k"]))
    assert "expire_time" not in (store.tasks.find_one({"_id": "task:f/k"}) or {})
    assert store.run(flow_retention.end_flows()) == 1
    assert "expire_time" in (store.tasks.find_one({"_id": "task:f/k"}) or {})


def test_a_removal_tells_the_end_first(store: SyncStore, client: Client) -> None:
    succeed(store, client)
    assert client.remove("task", "k")
    assert told(store) == [("task:k", "SUCCESS", 1)]
    assert client.count(name="task") == 0


def test_a_bulk_removal_tells_the_ends_first(store: SyncStore, client: Client) -> None:
    succeed(store, client)
    assert client.run_bulk(client.plan_bulk("remove", name="task").plan).done_cnt == 1
    assert told(store) == [("task:k", "SUCCESS", 1)]


def test_a_bulk_cancel_tells_the_ends(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    assert client.run_bulk(client.plan_bulk("cancel", name="task").plan).done_cnt == 1
    assert told(store) == [("task:k", "CANCELED", 1)]


def test_a_removal_on_a_condition_tells_the_end_first(store: SyncStore, client: Client) -> None:
    succeed(store, client)
    assert client.remove("task", "k", if_match=client.etag(client.get("task", "k")))
    assert told(store) == [("task:k", "SUCCESS", 1)]


def test_a_delivery_is_tried_again_only_with_its_own_params(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO)
    client.cancel("task", "k")
    (delivery,) = client.find(name="mtask/callback")
    client.cancel("mtask/callback", delivery.key)
    with pytest.raises(InvalidInput, match="mtask's own"):
        client.retry("mtask/callback", delivery.key, params={"url": "https://elsewhere.example"})
    assert client.retry("mtask/callback", delivery.key).params == delivery.params


def test_a_task_with_a_next_one_expires_only_when_both_are_published(store: SyncStore, client: Client) -> None:
    client.publish("task", key="k", callback=TO, retain_success=1)
    end(store, "task:k")
    store.tasks.update_one({"_id": "task:k"}, [{"$set": {"owed_since": "$$NOW"}}])
    store.run(callbacks.settle_all(["task:k"]))
    assert "expire_time" not in (store.tasks.find_one({"_id": "task:k"}) or {})
    store.run(settling.settle_all(["task:k"]))
    assert "expire_time" in (store.tasks.find_one({"_id": "task:k"}) or {})


# --- malformed documents, and what the queries cost --------------------------------------------------------------


def test_a_mark_that_cannot_be_read_is_dropped_and_the_readable_ones_are_told(store: SyncStore, client: Client) -> None:
    succeed(store, client)
    for broken in ({"number": "one"}, 7, {"number": 9, "status": "RUNNING"}):
        store.tasks.update_one({"_id": "task:k"}, {"$push": {"callback_owed": broken}}, bypass_document_validation=True)
    store.run(callbacks.settle(store.run(callbacks.find())))
    assert told(store) == [("task:k", "SUCCESS", 1)]
    assert "callback_owed" not in (store.tasks.find_one({"_id": "task:k"}) or {})
    store.tasks.update_one({"_id": "task:k"}, {"$set": {"callback_owed": "x"}}, bypass_document_validation=True)
    store.run(callbacks.settle(store.run(callbacks.find())))
    assert not store.run(callbacks.is_any())


@pytest.mark.parametrize("callback", ["x", 7, {}, {"url": 7, "on": ["FAIL"]}, {"url": URL, "on": "FAIL"}, [TO]])
def test_a_malformed_callback_ends_as_fail_and_disturbs_nothing(
    callback: Any, store: SyncStore, client: Client
) -> None:
    client.publish("task", key="k")
    store.tasks.update_one({"_id": "task:k"}, {"$set": {"callback": callback}}, bypass_document_validation=True)
    assert store.run(claims.quarantine("task:k", "w", "malformed"))
    store.run(callbacks.settle(store.run(callbacks.find())))
    assert told(store) == []
    assert (store.tasks.find_one({"_id": "task:k"}) or {})["task_state"]["status"] == "FAIL"
    with pytest.raises(WriteError):
        store.tasks.insert_one({**(store.tasks.find_one({"_id": "task:k"}) or {}), "_id": "task:l", "key": "l"})


def test_the_search_for_marks_examines_only_marked_tasks(store: SyncStore, client: Client) -> None:
    tasks = [TaskSpec("task", key=f"open/{number}", callback=TO if number % 2 else None) for number in range(200)]
    client.publish_many(tasks)
    succeed(store, client)
    rows, calls = examined_by(store, callbacks.find())
    assert len(rows) == 1
    assert [(call.keys, call.documents) for call in calls] == [(1, 1)]
    assert "SORT" not in calls[0].stages


def test_a_removal_that_cannot_tell_the_end_keeps_the_task(
    store: SyncStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed(store, client)

    def unavailable(task_ids: Any) -> Operation[list[str]]:
        if task_ids:
            raise DatabaseUnavailable("away")
        yield from ()
        return []

    monkeypatch.setattr(relays, "RELAYS", [replace(callbacks.RELAY, settle=unavailable)])
    with pytest.raises((DatabaseUnavailable, TaskRunning)):
        client.remove("task", "k")
    assert owed(store, "task:k") == [(1, "SUCCESS")]
