"""Rounds, bounds and ends: cancel, retry and rerun, options, the bounded array, retention, counts."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Task
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.publish import Policy
from mtask.kernel.statements.finish import Outcome
from tests.integration.stores import claim, lapse, make_due, parsed, publish, stored

SUCCESS, FAIL, CANCELED = RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED


def finish(store: SyncStore, key: str, status: Any = SUCCESS, worker_id: str = "w", **given: Any) -> None:
    """End this worker's newest run."""
    run_id = next(run.run_id for run in reversed(parsed(store, key).runs) if run.worker_id == worker_id)
    assert store.run(claims.finish([Outcome(f"task:{key}", run_id, status, **given)])) == {run_id}


def try_once(store: SyncStore, key: str, status: Any, number: int, worker_id: str = "w", **given: Any) -> None:
    assert claim(store, worker_id, key, token=f"{worker_id}-{number}") == [key]
    finish(store, key, status, worker_id, **given)
    make_due(store, key)


def again(store: SyncStore, key: str, *, everything: bool) -> Task:
    return Task.model_validate(store.run(queries.run_again(f"task:{key}", everything=everything)))


# --- the bounded array --------------------------------------------------------------------------------------


def test_without_a_retry_limit_the_newest_twenty_closed_runs_stay_and_the_count_goes_on(store: SyncStore) -> None:
    publish(store, "k", max_retries=-1, retry_delay=0)
    for number in range(45):
        try_once(store, "k", FAIL, number, reason=f"reason {number}")
    assert claim(store, "w", "k", token="last") == ["k"]
    task = parsed(store, "k")
    closed, running = task.runs[:-1], task.runs[-1]
    assert [run.fail_reason for run in closed] == [f"reason {number}" for number in range(25, 45)]
    assert (task.task_state.failed_cnt, running.attempt, running.status) == (45, 46, "RUNNING")


def test_runs_handed_back_again_and_again_do_not_fill_the_document(store: SyncStore) -> None:
    publish(store, "k", max_retries=0)
    for number in range(45):
        try_once(store, "k", CANCELED, number, reason="stopping")
    task = parsed(store, "k")
    assert (task.status, task.task_state.failed_cnt) == ("INIT", 0)
    assert len(task.runs) == 21  # trimmed at each claim, then one more
    assert task.runs[-1].attempt == 45


def test_with_a_limit_beyond_twenty_every_counted_run_stays(store: SyncStore) -> None:
    publish(store, "k", max_retries=29, retry_delay=0)
    for number in range(30):
        try_once(store, "k", FAIL, number)
    task = parsed(store, "k")
    assert (task.status, task.task_state.failed_cnt, len(task.runs)) == ("FAIL", 30, 30)


def test_each_workers_own_limit_holds_however_many_runs_there_are(store: SyncStore) -> None:
    workers = [f"w{number}" for number in range(6)]
    publish(
        store,
        "k",
        retry_scope="worker",
        max_retries=5,
        retry_delay=0,
        specific_worker_ids=workers,
    )
    for number in range(6):
        for worker in workers:
            assert parsed(store, "k").status == "INIT"
            try_once(store, "k", FAIL, number, worker)
    task = parsed(store, "k")
    assert task.status == "FAIL"
    assert Counter(run.worker_id for run in task.runs) == dict.fromkeys(workers, 6)


def test_successes_of_a_round_stay_whatever_else_goes(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2, max_retries=-1, retry_delay=0)
    try_once(store, "k", SUCCESS, 0, "first")
    for number in range(30):
        try_once(store, "k", FAIL, number)
    assert claim(store, "first", "k", token="again") == []
    try_once(store, "k", SUCCESS, 99)
    assert parsed(store, "k").status == "SUCCESS"


def test_reruns_keep_the_newest_twenty_runs_of_earlier_rounds(store: SyncStore) -> None:
    publish(store, "k")
    for number in range(30):
        try_once(store, "k", SUCCESS, number, returns=number)
        again(store, "k", everything=True)
    task = parsed(store, "k")
    assert [run.returns for run in task.runs] == list(range(10, 30))
    assert all(run.past for run in task.runs)
    assert (task.status, task.returns) == ("INIT", None)


# --- rounds -------------------------------------------------------------------------------------------------


def test_a_retry_is_due_at_once_whatever_the_delay_of_the_round_before(store: SyncStore) -> None:
    publish(store, "k", max_retries=0, retry_delay=3600)
    assert claim(store, "w", "k") == ["k"]
    finish(store, "k", FAIL)
    again(store, "k", everything=False)
    assert claim(store, "w", "k", token="again") == ["k"]


def test_a_retry_keeps_the_successes_that_there_are(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2, max_retries=0)
    try_once(store, "k", SUCCESS, 0, "w1")
    try_once(store, "k", FAIL, 0, "w2")
    assert parsed(store, "k").status == "FAIL"
    again(store, "k", everything=False)
    assert claim(store, "w1", "k", token="w1-again") == []
    try_once(store, "k", SUCCESS, 1, "w2")
    assert parsed(store, "k").status == "SUCCESS"


def test_a_rerun_leaves_a_live_run_in_the_new_round(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2, max_retries=0)
    for worker in ("w1", "w2"):
        assert claim(store, worker, "k") == ["k"]
    finish(store, "k", SUCCESS, "w1")
    store.run(queries.update_option("task:k", {"concurrent_worker_cnt": 1}))
    assert parsed(store, "k").status == "SUCCESS"
    task = again(store, "k", everything=True)
    assert (task.status, [run.past for run in task.runs]) == ("RUNNING", [True, False])
    assert claim(store, "w1", "k", token="too many") == []
    finish(store, "k", FAIL, "w2")
    assert parsed(store, "k").status == "FAIL"


# --- cancel -------------------------------------------------------------------------------------------------


def test_a_running_task_is_canceled_when_its_holder_lets_go(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2)
    claim(store, "w", "k")
    store.run(queries.cancel("task:k"))
    task = parsed(store, "k")
    assert (task.status, task.task_state.cancel_requested) == ("RUNNING", True)
    assert claim(store, "other", "k") == []
    finish(store, "k", CANCELED, reason="canceled")
    task = parsed(store, "k")
    assert (task.status, task.task_state.cancel_requested, task.task_state.failed_cnt) == ("CANCELED", False, 0)


def test_a_task_being_canceled_whose_worker_died_is_canceled_by_the_next_who_looks(store: SyncStore) -> None:
    publish(store, "k")
    claim(store, "w", "k")
    store.run(queries.cancel("task:k"))
    lapse(store, "k")
    assert claim(store, "other", "k") == []
    assert parsed(store, "k").status == "CANCELED"


def test_a_success_in_time_wins_over_a_cancel(store: SyncStore) -> None:
    publish(store, "k")
    claim(store, "w", "k")
    store.run(queries.cancel("task:k"))
    finish(store, "k", SUCCESS)
    assert parsed(store, "k").status == "SUCCESS"


@pytest.mark.parametrize("status", [SUCCESS, FAIL])
def test_a_finished_task_stays_as_it_is_when_canceled(store: SyncStore, status: Any) -> None:
    publish(store, "k", max_retries=0)
    try_once(store, "k", status, 0)
    before = stored(store, "k")
    assert store.run(queries.cancel("task:k")) == before
    assert stored(store, "k") == before


# --- options, retention, removal ----------------------------------------------------------------------------


def test_a_changed_limit_decides_at_once(store: SyncStore) -> None:
    publish(store, "k", max_retries=3)
    try_once(store, "k", FAIL, 0)
    store.run(queries.update_option("task:k", {"max_retries": 0}))
    assert parsed(store, "k").status == "FAIL"
    store.run(queries.update_option("task:k", {"max_retries": 3}))
    assert parsed(store, "k").status == "FAIL", "a final status stays"


@pytest.mark.parametrize(("status", "option"), [(SUCCESS, "retain_fail"), (FAIL, "retain_success")])
def test_the_retention_of_the_other_kind_does_not_bind(store: SyncStore, status: Any, option: str) -> None:
    kept: Any = {option: 0}
    publish(store, "k", max_retries=0, **kept)
    try_once(store, "k", status, 0)
    assert "expire_time" not in stored(store, "k")


def test_retention_follows_a_change_of_options_and_ends_with_a_new_round(store: SyncStore) -> None:
    publish(store, "k", retain_success=3600)
    try_once(store, "k", SUCCESS, 0)
    ended = parsed(store, "k").task_state.finish_time
    assert ended is not None
    store.run(queries.update_option("task:k", {"retain_success": 7200}))
    assert parsed(store, "k").expire_time == ended + timedelta(hours=2)
    store.run(queries.update_option("task:k", {"retain_success": None}))
    assert "expire_time" not in stored(store, "k")
    store.run(queries.update_option("task:k", {"retain_success": 0}))
    assert parsed(store, "k").expire_time == ended
    again(store, "k", everything=True)
    assert "expire_time" not in stored(store, "k")


def test_publishing_again_with_clean_success_ends_retention_with_the_success(store: SyncStore) -> None:
    publish(store, "k", retain_success=3600)
    try_once(store, "k", SUCCESS, 0)
    assert publish(store, "k", policy=Policy(clean_success=True)).updated
    assert "expire_time" not in stored(store, "k")
    assert claim(store, "w", "k", token="again") == ["k"]


def test_counts_and_searches_agree_with_what_happened(store: SyncStore) -> None:
    for key in ("a", "b", "c", "$d"):
        publish(store, key, max_retries=0)
    try_once(store, "a", SUCCESS, 0)
    try_once(store, "b", FAIL, 0)
    claim(store, "$w", "$d")

    def keys(**criteria: Any) -> list[str]:
        return sorted(found["key"] for found in store.run(queries.find(criteria, 0)))

    assert keys(status="SUCCESS") == ["a"]
    assert keys(status=["SUCCESS", "FAIL"]) == ["a", "b"]
    assert keys(worker_id="w") == ["a", "b"]
    assert keys(worker_id="$w") == keys(key="$d") == ["$d"]
    assert keys(name="task", queue=["default", "other"]) == ["$d", "a", "b", "c"]
    assert store.run(queries.count({})) == 4
    assert store.run(queries.count({"status": "INIT"})) == 1
    rows = {row["_id"]["status"]: row["count"] for row in store.run(queries.statistics())}
    assert rows == {"SUCCESS": 1, "FAIL": 1, "INIT": 1, "RUNNING": 1}
