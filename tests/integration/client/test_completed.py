"""Clients wait for several tasks with one stream of events, and for what a handler returned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtask import AsyncClient, Client, RunStatus, TaskCanceled, TaskFailed, TaskNotFound, TaskSpec, WaitTimeout
from mtask.errors import InvalidInput
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from tests.clients import AnyClient, claim, fail, meanwhile, succeed
from tests.mongo import Client as Mongo
from tests.mongo import eventually, streams


def done(store: SyncStore, key: str, returns: Any = None) -> None:
    succeed(store, f"a:{key}", claim(store, f"a:{key}"), returns)


def publish(client: AnyClient, *keys: str, **options: Any) -> list[Any]:
    published: list[Any] = client.publish_many([TaskSpec("a", key=key, **options) for key in keys])
    return published


# --- several tasks ------------------------------------------------------------------------------------------


def test_wait_all_returns_the_tasks_in_the_given_order(client: AnyClient, store: SyncStore) -> None:
    published = publish(client, "1", "2", "3", max_retries=0)
    done(store, "2", "two")
    fail(store, "a:3", claim(store, "a:3"))
    client.cancel("a", "1")
    found = client.wait_all([published[1], "a:1", ("a", "3"), published[1]])
    assert [(task.key, task.status) for task in found] == [
        ("2", "SUCCESS"), ("1", "CANCELED"), ("3", "FAIL"), ("2", "SUCCESS"),
    ]  # fmt: skip
    assert client.wait_all([]) == []


def test_wait_any_returns_the_task_that_ended_first(client: AnyClient, store: SyncStore) -> None:
    published = publish(client, "1", "2", "3")
    with meanwhile(lambda: done(store, "2", "two")):
        assert client.wait_any(published, timeout=60).returns == "two"
    done(store, "1")
    assert client.wait_any(published).key == "2", "it ended before the other"
    with pytest.raises(InvalidInput, match="give at least one task"):
        client.wait_any([])


def test_wait_follows_events_of_all_tasks_and_misses_none(
    client: AnyClient, store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    keys = [f"{n}" for n in range(12)]
    published = publish(client, *keys)

    def work() -> None:
        eventually(lambda: streams(mongo, database_name) > 0, 40)
        for key in reversed(keys):
            done(store, key, key)

    with meanwhile(work):
        found = client.wait_all(published, timeout=60)
    assert [task.returns for task in found] == keys


def test_one_stream_serves_all_tasks_and_is_closed_in_the_end(
    client: AnyClient, store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    published = publish(client, *(f"{n}" for n in range(30)))

    def work() -> None:
        eventually(lambda: streams(mongo, database_name) > 0, 40)
        assert streams(mongo, database_name) == 1
        for n in range(30):
            done(store, f"{n}")

    with meanwhile(work):
        client.wait_all(published, timeout=60)
    eventually(lambda: streams(mongo, database_name) == 0, 40)


def test_wait_for_several_times_out_and_names_one(client: AnyClient, store: SyncStore) -> None:
    published = publish(client, "1", "2", "3")
    done(store, "1")
    for ask, tasks in ((client.wait_all, published), (client.wait_any, published[1:])):
        with pytest.raises(
            WaitTimeout, match=r"task a:2 is still INIT after 0\.2 s, and 1 other task with it"
        ) as raised:
            ask(tasks, timeout=0.2)
        assert raised.value.others == ("a:3",)
        assert raised.value.task_id == "a:2"


def test_wait_for_a_missing_task_is_an_error(client: AnyClient) -> None:
    with pytest.raises(TaskNotFound, match="a:gone"):
        client.wait_all([*publish(client, "1", "2"), "a:gone"], timeout=60)


def test_wait_does_not_go_on_with_a_later_task_of_the_same_key(
    store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    with Client(mongo_uri, database=database_name) as client:
        published = client.publish_many([TaskSpec("a", key=key) for key in "12"])
        done(store, "1")
        with client.as_completed(published, timeout=60) as completed:
            assert next(completed).key == "1"  # the other one was read, too
            client.remove("a", "2")
            client.publish("a", key="2")
            with pytest.raises(TaskNotFound, match="a:2"):
                next(completed)


def test_removed_task_ends_the_wait_by_its_event(
    client: AnyClient, mongo: Mongo, mongo_uri: str, database_name: str
) -> None:
    published = publish(client, "1", "2")

    def remove() -> None:
        eventually(lambda: streams(mongo, database_name) > 0, 40)
        with Client(mongo_uri, database=database_name) as other:
            other.remove("a", "2")

    with meanwhile(remove), pytest.raises(TaskNotFound, match="a:2"):
        client.wait_any(published, timeout=60)


@pytest.mark.parametrize("given", ["a:1", [7], 7], ids=repr)
def test_wait_refuses_what_names_no_task(client: AnyClient, given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"give a list of tasks|names no task"):
        client.wait_all(given)


def test_as_completed_yields_tasks_as_they_end(store: SyncStore, mongo_uri: str, database_name: str) -> None:
    with Client(mongo_uri, database=database_name) as client:
        published = client.publish_many([TaskSpec("a", key=key) for key in "123"])
        order: list[str] = []
        done(store, "3")
        with client.as_completed(published, timeout=60) as completed:
            for task in completed:
                order.append(task.key)
                if len(order) < 3:
                    done(store, {1: "1", 2: "2"}[len(order)])
        assert order == ["3", "1", "2"]
        assert list(client.as_completed([])) == []


async def test_as_completed_is_awaited(store: SyncStore, mongo_uri: str, database_name: str) -> None:
    order: list[str] = []
    async with AsyncClient(mongo_uri, database=database_name) as client:
        published = await client.publish_many([TaskSpec("a", key=key) for key in "123"])
        done(store, "3")
        async for task in client.as_completed(published, timeout=60):
            order.append(task.key)
            if len(order) < 3:
                await asyncio.to_thread(done, store, {1: "1", 2: "2"}[len(order)])
    assert order == ["3", "1", "2"]


def test_closed_iterator_yields_nothing_more(store: SyncStore, mongo_uri: str, database_name: str) -> None:
    with Client(mongo_uri, database=database_name) as client:
        published = client.publish_many([TaskSpec("a", key=key) for key in "12"])
        done(store, "1")
        done(store, "2")
        with client.as_completed(published) as completed:
            assert next(completed).key == "1"
        assert list(completed) == []


def test_task_that_was_opened_again_has_not_ended(client: AnyClient, store: SyncStore) -> None:
    publish(client, "1", max_retries=0)
    fail(store, "a:1", claim(store, "a:1"))
    client.retry("a", "1")
    with pytest.raises(WaitTimeout):
        client.wait_all(["a:1"], timeout=0.1)


def test_thousand_tasks_are_awaited_together(
    client: AnyClient, store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    keys = [f"{n}" for n in range(1_000)]
    published = publish(client, *keys)

    def work() -> None:
        eventually(lambda: streams(mongo, database_name) > 0, 40)
        for start in range(0, 1_000, 200):
            task_ids = [f"a:{key}" for key in keys[start : start + 200]]
            token = f"t{start}"
            assert len(store.run(claims.claim(task_ids, "w", token))) == 200
            runs = claims.run_ids_of(task_ids, token)
            store.run(claims.finish([Outcome(task_id, runs[task_id], RunStatus.SUCCESS) for task_id in task_ids]))

    with meanwhile(work):
        found = client.wait_all(published, timeout=120)
    assert [task.key for task in found] == keys


# --- result -------------------------------------------------------------------------------------------------


def test_result_is_what_the_handler_returned(client: AnyClient, store: SyncStore) -> None:
    publish(client, "1", "2")
    done(store, "1", {"sum": 3})
    done(store, "2")
    assert client.result("a", "1") == {"sum": 3}
    assert client.result("a", "2", timeout=1) is None


def test_result_of_a_failed_task_is_an_error_with_the_reason(client: AnyClient, store: SyncStore) -> None:
    publish(client, "1", "2", "3", max_retries=0)
    fail(store, "a:1", claim(store, "a:1"), "no luck.")
    client.cancel("a", "2")
    with pytest.raises(TaskFailed, match=r"task a:1 ended as FAIL: no luck\. To run it again: retry\.") as raised:
        client.result("a", "1")
    assert (raised.value.reason, raised.value.status, raised.value.exit_code) == ("no luck.", "FAIL", 8)
    assert not isinstance(raised.value, TaskCanceled)
    with pytest.raises(TaskCanceled, match=r"task a:2 ended as CANCELED\. To run it again: retry\.") as canceled:
        client.result("a", "2")
    assert (canceled.value.reason, canceled.value.exit_code) == (None, 9)
    with pytest.raises(WaitTimeout):
        client.result("a", "3", timeout=0.1)
    with pytest.raises(TaskNotFound):
        client.result("a", "gone")
