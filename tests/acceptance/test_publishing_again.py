"""What becomes of a task that is published again. No worker: runs are made by the engine's claim."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import Client, Published, RunStatus, Task, TaskExists, TaskRunning, TaskSpec, TaskStatus
from mtask.kernel.driver.stores import SyncStore
from tests.clients import KINDS, AnyClient, claim, fail, is_claimable, open_client, server_now, succeed
from tests.mongo import Client as Mongo
from tests.mongo import eventually

ID = "send_email:welcome/42"
OLD = {"subject": "old"}
NEW = {"subject": "new"}


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    with open_client(request.param, mongo_uri, database_name) as opened:
        yield opened


@pytest.fixture
def sync_client(mongo_uri: str, database_name: str) -> Iterator[Client]:
    with Client(mongo_uri, database=database_name) as opened:
        yield opened


def publish(client: AnyClient | Client, params: Any = None, **policy: Any) -> Published:
    published: Published = client.publish("send_email", OLD if params is None else params, key="welcome/42", **policy)
    return published


def read(client: AnyClient | Client) -> Task:
    task: Task = client.get("send_email", "welcome/42")
    return task


def test_task_resent_with_new_params_stays_unchanged(client: AnyClient, store: SyncStore, mongo: Mongo) -> None:
    assert publish(client) == Published(ID, created=True, updated=False)
    claim(store, ID)
    before = mongo[client.client.database_name]["tasks"].find_one()

    again = publish(client, NEW, queue="other", priority=9, delay=60)

    assert again == Published(ID, created=False, updated=False)
    assert mongo[client.client.database_name]["tasks"].find_one() == before


def test_task_resent_with_update_gets_the_new_params_options_and_queue(client: AnyClient) -> None:
    publish(client, priority=1)

    assert publish(client, NEW, if_exists="update", queue="other") == Published(ID, created=False, updated=True)

    task = read(client)
    assert (task.params, task.queue, task.task_option.priority) == (NEW, "other", 0)


def test_update_with_nothing_new_changes_nothing_and_says_so(client: AnyClient) -> None:
    publish(client)
    assert publish(client, if_exists="update") == Published(ID, created=False, updated=False)


def test_update_moves_the_start_time_later_and_earlier_and_away(client: AnyClient, mongo: Mongo) -> None:
    later = server_now(mongo) + timedelta(hours=2)
    sooner = later - timedelta(hours=1)
    publish(client, start_time=later)
    for start_time in (sooner, later, sooner):
        publish(client, start_time=start_time, if_exists="update")
        state = read(client).task_state
        assert state.start_time == state.next_preempt_time == start_time

    publish(client, if_exists="update")

    state = read(client).task_state
    assert state.start_time is None
    assert state.next_preempt_time is not None
    assert state.next_preempt_time <= server_now(mongo)


def test_task_moved_to_later_cannot_be_claimed_before(sync_client: Client, store: SyncStore) -> None:
    publish(sync_client)
    publish(sync_client, if_exists="update", delay=3600)
    assert not is_claimable(store, ID)
    publish(sync_client, if_exists="update", start_time=datetime(2001, 1, 1, tzinfo=UTC))
    assert is_claimable(store, ID)


def test_update_leaves_a_live_run_alone(sync_client: Client, store: SyncStore) -> None:
    publish(sync_client)
    run_id = claim(store, ID)
    (before,) = read(sync_client).runs

    assert publish(sync_client, NEW, if_exists="update", priority=3).updated

    task = read(sync_client)
    assert task.status is TaskStatus.RUNNING
    assert task.runs == [before]
    assert task.params == NEW
    succeed(store, ID, run_id)
    assert read(sync_client).status is TaskStatus.SUCCESS


def test_reject_raises_and_leaves_the_task_alone(client: AnyClient) -> None:
    publish(client, if_exists="reject")
    with pytest.raises(TaskExists, match="send_email:welcome/42 exists already") as raised:
        publish(client, NEW, if_exists="reject")
    assert raised.value.task_id == ID
    assert read(client).params == OLD


@pytest.mark.parametrize("policy", [{"if_exists": "update"}, {"clean_failed": True}, {"clean_success": True}], ids=str)
def test_not_update_running_refuses_while_a_live_run_holds_the_task(
    sync_client: Client, store: SyncStore, policy: dict[str, Any]
) -> None:
    publish(sync_client)
    run_id = claim(store, ID)
    before = read(sync_client)

    with pytest.raises(TaskRunning, match="held by a live run") as raised:
        publish(sync_client, NEW, not_update_running=True, **policy)

    assert raised.value.task_id == ID
    assert read(sync_client) == before
    succeed(store, ID, run_id)
    assert not publish(sync_client, NEW, not_update_running=True, **policy).created


def test_not_update_running_refuses_through_every_client(client: AnyClient, store: SyncStore) -> None:
    publish(client)
    claim(store, ID)
    with pytest.raises(TaskRunning):
        publish(client, NEW, if_exists="update", not_update_running=True)
    told = client.publish_many(
        [TaskSpec("send_email", NEW, key="welcome/42"), TaskSpec("send_email", NEW, key="welcome/43")],
        if_exists="update",
        not_update_running=True,
    )
    assert isinstance(told[0], TaskRunning)
    assert told[1] == Published("send_email:welcome/43", created=True, updated=False)
    assert read(client).params == OLD


def test_not_update_running_lets_a_task_through_that_nobody_holds(client: AnyClient) -> None:
    publish(client)
    assert publish(client, NEW, if_exists="update", not_update_running=True).updated


def test_not_update_running_refuses_until_the_lease_has_lapsed_and_no_longer(
    sync_client: Client, store: SyncStore, mongo: Mongo
) -> None:
    publish(sync_client, ping_interval=0.5, worker_timeout=2.5)
    claim(store, ID)
    lease = read(sync_client).runs[0].ping_expire_time
    refusals = 0

    def is_let_through() -> bool:
        nonlocal refusals
        try:
            return publish(sync_client, NEW, if_exists="update", not_update_running=True).updated
        except TaskRunning:
            refusals += 1
            return False

    eventually(is_let_through, 10, "an update after the lease has lapsed")

    assert refusals > 0
    assert server_now(mongo) >= lease
    task = read(sync_client)
    assert task.params == NEW
    assert (task.runs[0].status, task.task_state.failed_cnt) == (RunStatus.TIMEOUT, 1)
    assert is_claimable(store, ID, "worker-2")


def test_clean_failed_makes_a_failed_task_claimable_again(client: AnyClient, store: SyncStore) -> None:
    publish(client, max_retries=0)
    fail(store, ID, claim(store, ID))
    assert read(client).status is TaskStatus.FAIL
    assert not is_claimable(store, ID)

    assert publish(client, NEW, clean_failed=True, max_retries=0).updated

    task = read(client)
    assert (task.status, task.runs, task.task_state.failed_cnt) == (TaskStatus.INIT, [], 0)
    assert task.task_state.finish_time is None
    assert task.params == OLD  # if_exists is "keep": cleaned, not replaced
    assert is_claimable(store, ID)


def test_clean_failed_forgets_a_final_failure_and_the_retry_delay(sync_client: Client, store: SyncStore) -> None:
    publish(sync_client, retry_delay=3600)
    fail(store, ID, claim(store, ID))
    assert not is_claimable(store, ID)
    publish(sync_client, clean_failed=True)
    fail(store, ID, claim(store, ID), final=True)
    assert read(sync_client).status is TaskStatus.FAIL
    publish(sync_client, clean_failed=True)
    assert is_claimable(store, ID)


def test_clean_success_makes_a_successful_task_claimable_again(client: AnyClient, store: SyncStore) -> None:
    publish(client)
    succeed(store, ID, claim(store, ID), "sent")
    assert not is_claimable(store, ID)

    assert publish(client, NEW, clean_success=True, if_exists="update").updated

    task = read(client)
    assert (task.status, task.runs, task.params, task.task_state.finish_time) == (TaskStatus.INIT, [], NEW, None)
    succeed(store, ID, claim(store, ID), "sent again")
    assert read(client).returns == "sent again"


def test_clean_failed_leaves_successes_and_clean_success_leaves_failures(sync_client: Client, store: SyncStore) -> None:
    publish(sync_client, concurrent_worker_cnt=2, retry_delay=0)
    fail(store, ID, claim(store, ID, "unlucky"))
    succeed(store, ID, claim(store, ID, "lucky"))

    publish(sync_client, clean_failed=True)
    task = read(sync_client)
    assert [(run.worker_id, run.status) for run in task.runs] == [("lucky", RunStatus.SUCCESS)]
    assert task.task_state.failed_cnt == 0
    assert not is_claimable(store, ID, "lucky")

    fail(store, ID, claim(store, ID, "unlucky"))
    publish(sync_client, clean_success=True)
    task = read(sync_client)
    assert [(run.worker_id, run.status) for run in task.runs] == [("unlucky", RunStatus.FAIL)]
    assert task.task_state.failed_cnt == 1
    assert is_claimable(store, ID, "lucky")


def test_cleaning_leaves_a_live_run_alone(sync_client: Client, store: SyncStore) -> None:
    publish(sync_client, concurrent_worker_cnt=3, retry_delay=0)
    fail(store, ID, claim(store, ID, "worker-1"))
    succeed(store, ID, claim(store, ID, "worker-2"))
    live = claim(store, ID, "worker-3")

    publish(sync_client, clean_failed=True, clean_success=True)

    task = read(sync_client)
    assert [(run.run_id, run.status) for run in task.runs] == [(live, RunStatus.RUNNING)]
    assert task.status is TaskStatus.RUNNING
    succeed(store, ID, live)


def test_final_statuses_stay_under_update(sync_client: Client, store: SyncStore) -> None:
    def finish_as(status: TaskStatus) -> None:
        publish(sync_client, max_retries=0)
        if status is TaskStatus.SUCCESS:
            succeed(store, ID, claim(store, ID))
        elif status is TaskStatus.FAIL:
            fail(store, ID, claim(store, ID))
        else:
            sync_client.cancel("send_email", "welcome/42")

    for status in (TaskStatus.SUCCESS, TaskStatus.FAIL, TaskStatus.CANCELED):
        finish_as(status)
        before = read(sync_client)
        assert before.status is status

        publish(sync_client, NEW, if_exists="update", delay=5, concurrent_worker_cnt=4, max_retries=9)

        after = read(sync_client)
        assert (after.status, after.runs, after.params) == (status, before.runs, NEW)
        assert after.task_state.finish_time == before.task_state.finish_time
        assert after.task_state.next_preempt_time is None
        assert not is_claimable(store, ID, "worker-2")
        sync_client.remove("send_email", "welcome/42")
