"""What each kind of client asks of tasks and workers: read, search, wait, cancel, run again, change, remove."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from mtask import AsyncClient, Client, RunStatus, TaskNotFound, TaskStatus, WaitTimeout
from mtask.errors import (
    InvalidInput,
    InvalidKey,
    InvalidName,
    InvalidOption,
    MalformedTask,
    TaskNotFinished,
    UnknownOption,
    WorkerNotFound,
)
from mtask.kernel.driver.stores import SyncStore
from tests import build
from tests.clients import AnyClient, claim, fail, is_claimable, server_now, succeed
from tests.mongo import Client as Mongo
from tests.mongo import eventually

# --- read and search --------------------------------------------------------------------------------------


def test_missing_task_is_told_by_its_id(client: AnyClient) -> None:
    for ask in (client.get, client.cancel, client.retry, client.rerun, client.wait):
        with pytest.raises(TaskNotFound, match=r"there is no task a:nowhere\. Check name and key") as raised:
            ask("a", "nowhere")
        assert raised.value.task_id == "a:nowhere"
    with pytest.raises(TaskNotFound):
        client.update_option("a", "nowhere", priority=1)
    assert client.remove("a", "nowhere") is False


def test_bad_name_or_key_is_refused_by_each_request(client: AnyClient) -> None:
    for ask in (client.get, client.cancel, client.retry, client.rerun, client.wait, client.remove):
        with pytest.raises(InvalidName):
            ask("a:b", "k")
        with pytest.raises(InvalidKey):
            ask("a", "")


def test_find_selects_by_each_criterion_and_by_all_of_them(client: AnyClient, store: SyncStore) -> None:
    for name, key, queue in (("a", "1", "mail"), ("a", "2", "default"), ("b", "1", "mail"), ("b", "3", "default")):
        client.publish(name, key=key, queue=queue)
    succeed(store, "a:2", claim(store, "a:2", "worker-7"))
    claim(store, "b:3", "worker-8")

    def found(**criteria: Any) -> set[str]:
        return {task.id for task in client.find(**criteria)}

    assert found() == {"a:1", "a:2", "b:1", "b:3"}
    assert found(status="SUCCESS") == found(status=TaskStatus.SUCCESS) == found(worker_id="worker-7") == {"a:2"}
    assert found(status=["SUCCESS", "RUNNING"]) == found(worker_id=["worker-7", "worker-8"]) == {"a:2", "b:3"}
    assert found(name="a") == {"a:1", "a:2"}
    assert found(queue="mail") == {"a:1", "b:1"}
    assert found(key="1") == {"a:1", "b:1"}
    assert found(key=["1", "3"], name="b", queue="default", status="RUNNING", worker_id="worker-8") == {"b:3"}
    assert found(name="a", status="FAIL") == set()
    assert found(name=[]) == set()
    assert (client.count(), client.count(status="INIT"), client.count(name="a", queue="mail")) == (4, 2, 1)


def test_find_gives_the_newest_first_and_at_most_the_limit(client: AnyClient, mongo: Mongo) -> None:
    for key in ("first", "second", "third"):
        before = server_now(mongo)
        eventually(lambda before=before: server_now(mongo) > before)  # type: ignore[misc]
        client.publish("a", key=key)
    assert [task.key for task in client.find()] == ["third", "second", "first"]
    assert [task.key for task in client.find(limit=2)] == ["third", "second"]
    assert len(client.find(limit=0)) == 3


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ({"status": "DONE"}, "'DONE' is no status: use WAITING, INIT, RUNNING, SUCCESS, FAIL, CANCELED"),
        ({"status": 3}, "status is text or a list of texts, not int"),
        ({"name": [3]}, "name is text, not int"),
        ({"limit": -1}, "limit -1: use a whole number"),
        ({"limit": "5"}, "limit '5': use a whole number"),
    ],
    ids=str,
)
def test_find_refuses_bad_criteria(client: AnyClient, criteria: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        client.find(**criteria)


def test_malformed_task_is_told_by_get_and_left_out_by_find(
    client: AnyClient, mongo: Mongo, caplog: pytest.LogCaptureFixture
) -> None:
    client.publish("a", key="good")
    mongo[client.client.database_name].get_collection("tasks").insert_one(
        {"_id": "a:bad", "name": "a", "key": "bad", "schema_version": 1}, bypass_document_validation=True
    )
    with pytest.raises(MalformedTask, match=r"a:bad is malformed: queue: Field required.*Mend it by hand"):
        client.get("a", "bad")
    assert [task.id for task in client.find()] == ["a:good"]
    assert "malformed task left out" in caplog.text


def test_stats_count_by_queue_name_and_status(client: AnyClient, store: SyncStore) -> None:
    for key in "123":
        client.publish("a", key=key, queue="mail")
    client.publish("b", key="1")
    succeed(store, "a:1", claim(store, "a:1"))
    rows = {(row.queue, row.name, row.status): row for row in client.stats()}
    assert {what: row.count for what, row in rows.items()} == {
        ("default", "b", "INIT"): 1,
        ("mail", "a", "INIT"): 2,
        ("mail", "a", "SUCCESS"): 1,
    }
    assert rows["mail", "a", "SUCCESS"].oldest_preempt_time is None
    assert rows["mail", "a", "INIT"].oldest_preempt_time == client.get("a", "2").task_state.create_time


# --- wait -------------------------------------------------------------------------------------------------


def test_wait_returns_a_finished_task_at_once(client: AnyClient, store: SyncStore) -> None:
    for key in ("good", "bad", "off"):
        client.publish("a", key=key, max_retries=0)
    succeed(store, "a:good", claim(store, "a:good"), {"n": 1})
    fail(store, "a:bad", claim(store, "a:bad"), "no luck")
    client.cancel("a", "off")
    assert client.wait("a", "good", timeout=0).returns == {"n": 1}
    assert client.wait("a", "bad", timeout=timedelta(0)).fail_reason == "no luck"
    assert client.wait("a", "off").status is TaskStatus.CANCELED


def test_wait_times_out_and_says_what_the_task_is(client: AnyClient) -> None:
    client.publish("a", key="k")
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"task a:k is still INIT after 0\.2 s") as raised:
        client.wait("a", "k", timeout=0.2)
    assert time.monotonic() - began >= 0.2
    assert isinstance(raised.value, TimeoutError)
    assert (raised.value.status, raised.value.timeout) == ("INIT", timedelta(milliseconds=200))


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, timedelta(-1), "5", True], ids=repr)
def test_wait_refuses_a_timeout_that_is_no_length_of_time(client: AnyClient, timeout: Any) -> None:
    client.publish("a", key="k")
    with pytest.raises(InvalidInput, match="is no length of time"):
        client.wait("a", "k", timeout=timeout)


def test_wait_sees_a_task_finish(mongo_uri: str, database_name: str, store: SyncStore) -> None:
    with Client(mongo_uri, database=database_name) as client:
        client.publish("a", key="k")
        run_id = claim(store, "a:k")
        finisher = threading.Timer(0.1, succeed, (store, "a:k", run_id, "done"))
        finisher.start()
        assert client.wait("a", "k", timeout=30).returns == "done"
        finisher.join()


async def test_wait_in_asyncio_leaves_the_loop_free(mongo_uri: str, database_name: str, store: SyncStore) -> None:
    async with AsyncClient(mongo_uri, database=database_name) as client:
        await client.publish("a", key="k")
        run_id = claim(store, "a:k")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.wait("a", "k", timeout=30))
            await client.get("a", "k")
            assert not waiting.done()
            await asyncio.to_thread(succeed, store, "a:k", run_id, "done")
        assert waiting.result().returns == "done"


def test_wait_for_a_task_that_is_removed_meanwhile_raises_task_not_found(mongo_uri: str, database_name: str) -> None:
    with Client(mongo_uri, database=database_name) as client:
        client.publish("a", key="k")
        remover = threading.Timer(0.1, client.remove, ("a", "k"))
        remover.start()
        with pytest.raises(TaskNotFound):
            client.wait("a", "k", timeout=30)
        remover.join()


# --- cancel, run again, change, remove --------------------------------------------------------------------


def test_cancel_ends_a_task_that_nobody_holds(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    task = client.cancel("a", "k")
    assert (task.status, task.task_state.cancel_requested) == (TaskStatus.CANCELED, False)
    assert task.task_state.finish_time is not None
    assert task.task_state.next_preempt_time is None
    assert not is_claimable(store, "a:k")
    assert client.cancel("a", "k") == task


def test_cancel_asks_the_worker_that_holds_the_task(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    claim(store, "a:k")
    task = client.cancel("a", "k")
    assert (task.status, task.task_state.cancel_requested) == (TaskStatus.RUNNING, True)


def test_cancel_leaves_a_finished_task_as_it_is(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    succeed(store, "a:k", claim(store, "a:k"))
    before = client.get("a", "k")
    assert client.cancel("a", "k") == before


@pytest.mark.parametrize("final", [False, True])
def test_retry_lets_a_failed_task_run_again(client: AnyClient, store: SyncStore, final: bool) -> None:
    client.publish("a", key="k", max_retries=0)
    fail(store, "a:k", claim(store, "a:k"), final=final)
    task = client.retry("a", "k")
    assert (task.status, task.task_state.failed_cnt, task.task_state.finish_time) == (TaskStatus.INIT, 0, None)
    assert [(run.status, run.past) for run in task.runs] == [(RunStatus.FAIL, True)]
    succeed(store, "a:k", claim(store, "a:k"))
    assert client.get("a", "k").status is TaskStatus.SUCCESS


def test_retry_lets_a_canceled_task_run_again_and_keeps_successes(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k", concurrent_worker_cnt=2)
    succeed(store, "a:k", claim(store, "a:k", "worker-1"))
    client.cancel("a", "k")
    assert client.retry("a", "k").status is TaskStatus.INIT
    assert not is_claimable(store, "a:k", "worker-1")
    succeed(store, "a:k", claim(store, "a:k", "worker-2"))
    assert client.get("a", "k").status is TaskStatus.SUCCESS


def test_rerun_lets_a_successful_task_run_from_the_start(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    succeed(store, "a:k", claim(store, "a:k"), "first")
    with pytest.raises(TaskNotFinished, match=r"a:k is SUCCESS, so there is nothing to run again\..*rerun"):
        client.retry("a", "k")
    task = client.rerun("a", "k")
    assert (task.status, task.returns, [run.past for run in task.runs]) == (TaskStatus.INIT, None, [True])
    succeed(store, "a:k", claim(store, "a:k"), "second")
    assert client.get("a", "k").returns == "second"


def test_retry_and_rerun_refuse_a_task_that_is_not_finished(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    for status in ("INIT", "RUNNING"):
        for again in (client.retry, client.rerun):
            with pytest.raises(TaskNotFinished, match=f"a:k is {status}") as raised:
                again("a", "k")
            assert raised.value.status == status
        if status == "INIT":
            claim(store, "a:k")


def test_update_option_changes_what_it_names_and_nothing_else(client: AnyClient) -> None:
    client.publish("a", {"n": 1}, key="k", priority=3, retry_backoff=2.0)
    task = client.update_option("a", "k", priority=8, worker_timeout=timedelta(minutes=3))
    option = task.task_option
    assert (option.priority, option.worker_timeout_ms, option.retry_backoff) == (8, 180_000, 2.0)
    assert task.params == {"n": 1}
    assert client.get("a", "k") == task


def test_update_option_settles_what_follows_from_it(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k", concurrent_worker_cnt=2)
    succeed(store, "a:k", claim(store, "a:k"))
    assert client.update_option("a", "k", concurrent_worker_cnt=1).status is TaskStatus.SUCCESS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, InvalidInput, "name at least one option"),
        ({"prio": 1}, UnknownOption, "did you mean 'priority'"),
        ({"priority": "high"}, InvalidOption, "option priority"),
        ({"ping_interval": 60}, InvalidOption, r"must exceed ping_interval \(60 s\)"),
        ({"specific_worker_ids": ["only"]}, InvalidOption, "allows only 1"),
    ],
    ids=str,
)
def test_update_option_refuses_what_publish_refuses(
    client: AnyClient, options: dict[str, Any], error: type[InvalidInput], message: str
) -> None:
    client.publish("a", key="k", concurrent_worker_cnt=2)
    before = client.get("a", "k")
    with pytest.raises(error, match=message):
        client.update_option("a", "k", **options)
    assert client.get("a", "k") == before


def test_option_changes_made_at_once_all_take_effect(mongo_uri: str, database_name: str) -> None:
    changes: list[dict[str, Any]] = [
        {"priority": 7},
        {"retry_backoff": 2.0},
        {"run_timeout": 0.005},
        {"max_retries": 9},
    ]
    with Client(mongo_uri, database=database_name) as client:
        client.publish("a", key="k")
        threads = [
            threading.Thread(target=lambda change=change: client.update_option("a", "k", **change))
            for change in changes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        option = client.get("a", "k").task_option.model_dump()
    changed = {"priority": 7, "retry_backoff": 2.0, "run_timeout_ms": 5, "max_unexpected_retries": 9}
    assert {name: option[name] for name in changed} == changed


def test_removed_task_is_gone_and_its_key_is_free_again(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", {"n": 1}, key="k")
    claim(store, "a:k")
    assert client.remove("a", "k") is True
    assert client.remove("a", "k") is False
    assert client.publish("a", {"n": 2}, key="k").created


# --- workers ----------------------------------------------------------------------------------------------


def test_workers_are_listed_stopped_and_resized(client: AnyClient, mongo: Mongo) -> None:
    client.init()
    workers = mongo[client.client.database_name]["workers"]
    now = client.server_time()
    workers.insert_many([build.worker("w1", now), build.worker("w2", now), build.worker("dead")])

    assert {worker.worker_id for worker in client.workers()} == {"w1", "w2"}
    assert {worker.worker_id for worker in client.workers(live_only=False)} == {"w1", "w2", "dead"}
    assert client.stop_worker("w1").control.stop
    assert client.set_worker("w2", concurrency=0).control.concurrency == 0
    assert client.set_worker("w2", concurrency=None).control.concurrency is None
    controls = {worker.worker_id: worker.control for worker in client.workers()}
    assert (controls["w1"].stop, controls["w2"].stop) == (True, False)


def test_worker_that_is_not_there_is_told_by_its_id(client: AnyClient) -> None:
    with pytest.raises(WorkerNotFound, match="there is no live worker 'nobody'"):
        client.stop_worker("nobody")
    with pytest.raises(WorkerNotFound, match="there is no live worker 'nobody'"):
        client.set_worker("nobody", concurrency=1)


@pytest.mark.parametrize("concurrency", [-1, 10_001, True, 1.5, "3"], ids=repr)
def test_concurrency_that_is_no_number_of_runs_is_refused(client: AnyClient, concurrency: Any) -> None:
    with pytest.raises(InvalidInput, match="concurrency"):
        client.set_worker("w", concurrency=concurrency)
