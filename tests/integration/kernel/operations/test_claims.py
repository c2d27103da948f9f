"""Claim, ping and finish: one guarded update on the server decides each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from pymongo import MongoClient

from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import transactions
from mtask.kernel.operations.claim import claimed_task, facts_of
from mtask.kernel.statements.derive import LAPSED_REASON
from mtask.kernel.statements.finish import Outcome
from tests.clients import server_now
from tests.integration.stores import Document, claim, lapse, make_due, parsed, publish, stored
from tests.mongo import Client

SUCCESS, FAIL, CANCELED = RunStatus.SUCCESS, RunStatus.FAIL, RunStatus.CANCELED


def run_id_of(store: SyncStore, key: str, worker_id: str = "w") -> str:
    """Return the newest run of this worker."""
    return next(run.run_id for run in reversed(parsed(store, key).runs) if run.worker_id == worker_id)


def outcome(store: SyncStore, key: str, status: Any = SUCCESS, worker_id: str = "w", **given: Any) -> Outcome:
    return Outcome(f"task:{key}", run_id_of(store, key, worker_id), status, **given)


def finish(store: SyncStore, *outcomes: Outcome, is_simple: bool = False) -> set[str]:
    return store.run(claims.finish(outcomes, is_simple=is_simple))


def test_a_claim_returns_the_whole_task_with_the_run_in_it(store: SyncStore) -> None:
    publish(store, "k", {"a": 1}, worker_timeout=90)
    taken = store.run(claims.claim(["task:k"], "w", "token"))
    run = claims.run_of(taken[0], "token-0")
    assert run is not None
    assert taken[0]["params"] == {"a": 1}
    assert run["ping_expire_time"] == run["claim_time"] + timedelta(seconds=90)
    assert (run["worker_id"], run["attempt"], run["status"]) == ("w", 1, "RUNNING")
    state = taken[0]["task_state"]
    assert (state["status"], state["next_preempt_time"]) == ("RUNNING", run["ping_expire_time"])


def test_a_group_claims_what_is_there_and_due_and_tells_which(store: SyncStore) -> None:
    for key in ("a", "b", "c"):
        publish(store, key)
    publish(store, "later", start=timedelta(hours=1))
    claim(store, "other", "b")
    assert claim(store, "w", "a", "b", "c", "later", "gone") == ["a", "c"]
    assert len({run_id_of(store, key) for key in ("a", "c")}) == 2


@pytest.mark.parametrize("keys", [["k"], ["k", "also"]])
def test_a_task_that_is_held_is_not_claimed_again(store: SyncStore, keys: list[str]) -> None:
    for key in keys:
        publish(store, key)
    assert claim(store, "w", *keys) == sorted(keys)
    assert claim(store, "w", *keys, token="again") == []
    assert claim(store, "other", *keys) == []


@pytest.mark.parametrize("simple_cnt", [0, 25, 50])
def test_fifty_claims_at_once_give_a_task_to_one_worker(mongo_uri: str, store: SyncStore, simple_cnt: int) -> None:
    publish(store, "k")
    client: Client = MongoClient(mongo_uri, tz_aware=True)
    shared, barrier = SyncStore(client, store.database.name), Barrier(50)

    def strike(number: int) -> list[str]:
        barrier.wait(30)
        return claim(shared, f"w{number}", "k", are_simple=number < simple_cnt)

    with client, ThreadPoolExecutor(50) as pool:
        taken = [keys for keys in pool.map(strike, range(50)) if keys]
    assert taken == [["k"]]
    assert len(parsed(store, "k").runs) == 1


@pytest.mark.parametrize("are_simple", [False, True])
def test_groups_at_once_share_the_tasks_without_overlap(mongo_uri: str, store: SyncStore, are_simple: bool) -> None:
    keys = [f"k{number}" for number in range(100)]
    for key in keys:
        publish(store, key)
    client: Client = MongoClient(mongo_uri, tz_aware=True)
    shared, barrier = SyncStore(client, store.database.name), Barrier(8)

    def strike(number: int) -> list[str]:
        barrier.wait(30)
        return claim(shared, f"w{number}", *keys, are_simple=are_simple)

    with client, ThreadPoolExecutor(8) as pool:
        taken = [key for group in pool.map(strike, range(8)) for key in group]
    assert sorted(taken) == sorted(keys)


def test_group_taken_for_simple_is_claimed_and_finished_whole_whatever_is_in_it(store: SyncStore) -> None:
    publish(store, "simple")
    publish(store, "also simple")
    publish(store, "wants two", concurrent_worker_cnt=2)
    publish(store, "names one", specific_worker_ids=["w"])
    publish(store, "failed", retry_delay=0)
    publish(store, "of another", specific_worker_ids=["other"])
    publish(store, "later", start=timedelta(hours=1))
    claim(store, "w", "failed", token="first")
    finish(store, outcome(store, "failed", FAIL, reason="broken"))
    mine = ["also simple", "failed", "names one", "simple", "wants two"]

    assert claim(store, "w", *mine, "of another", "later", "gone", are_simple=True) == mine
    assert parsed(store, "failed").runs[-1].attempt == 2
    ends = [outcome(store, key, returns=key) for key in mine]
    assert finish(store, *ends, is_simple=True) == {end.run_id for end in ends}

    assert [parsed(store, key).status for key in mine] == ["SUCCESS"] * 4 + ["INIT"]
    assert [parsed(store, key).returns for key in mine] == mine
    assert [parsed(store, key).task_state.failed_cnt for key in mine] == [0, 1, 0, 0, 0]
    assert finish(store, *ends, is_simple=True) == {end.run_id for end in ends}, "after a lost reply it stands once"
    assert [len(parsed(store, key).runs) for key in mine] == [1, 2, 1, 1, 1]


def test_process_that_stands_still_between_the_two_statements_of_a_claim_preempts_nothing_of_its_own(
    store: SyncStore,
) -> None:
    publish(store, "simple")
    publish(store, "wants two", concurrent_worker_cnt=2)
    operation = claims.claim(["task:simple", "task:wants two"], "w", "token", are_simple=True)
    short = next(operation)
    long = operation.send(store._answer(short, None))
    lapse(store, "simple")
    before = stored(store, "simple")
    operation.send(store._answer(long, None))
    assert stored(store, "simple") == before
    assert [run.run_id for run in parsed(store, "wants two").runs] == ["token-1"]


def test_one_task_that_is_not_simple_is_left_by_the_short_claim(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2)
    before = stored(store, "k")
    assert claim(store, "w", "k", are_simple=True) == []
    assert stored(store, "k") == before
    assert claim(store, "w", "k") == ["k"]


def test_two_workers_at_once_where_two_must_succeed_and_no_third(store: SyncStore) -> None:
    publish(store, "k", concurrent_worker_cnt=2)
    assert claim(store, "w1", "k") == ["k"]
    assert claim(store, "w1", "k", token="again") == []
    assert claim(store, "w2", "k") == ["k"]
    assert claim(store, "w3", "k") == []
    finish(store, outcome(store, "k", worker_id="w1"))
    assert parsed(store, "k").status == "RUNNING"
    assert claim(store, "w1", "k", token="after") == []
    assert claim(store, "w3", "k") == []
    finish(store, outcome(store, "k", worker_id="w2"))
    assert parsed(store, "k").status == "SUCCESS"


def test_only_named_workers_get_a_task(store: SyncStore) -> None:
    publish(store, "k", specific_worker_ids=["w1", "w2"])
    assert claim(store, "w3", "k") == []
    assert claim(store, "w2", "k") == ["k"]


@pytest.mark.parametrize("worker_id", ["$w", "$$NOW", "{$literal: 1}", "w.1", "$task_option.priority"])
def test_a_worker_id_that_looks_like_an_expression_is_its_own_text(store: SyncStore, worker_id: str) -> None:
    publish(store, "$k", specific_worker_ids=[worker_id])
    publish(store, "$$ROOT")
    assert claim(store, worker_id, "$k", "$$ROOT") == ["$$ROOT", "$k"]
    assert {run.worker_id for run in parsed(store, "$k").runs} == {worker_id}
    ends = [outcome(store, key, worker_id=worker_id, returns=worker_id) for key in ("$k", "$$ROOT")]
    assert len(finish(store, *ends)) == 2
    assert parsed(store, "$k").returns == worker_id


def test_a_lapsed_run_is_marked_by_whoever_preempts_and_counts(store: SyncStore) -> None:
    publish(store, "k")
    claim(store, "w1", "k")
    lapse(store, "k")
    assert claim(store, "w2", "k") == ["k"]
    task = parsed(store, "k")
    assert [(run.worker_id, run.status, run.attempt) for run in task.runs] == [
        ("w1", "TIMEOUT", 1),
        ("w2", "RUNNING", 2),
    ]
    assert (task.runs[0].fail_reason, task.task_state.failed_cnt) == (LAPSED_REASON, 1)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_task_that_kills_every_worker_ends_as_fail_at_the_limit(store: SyncStore, limit: int) -> None:
    publish(store, "k", max_retries=limit)
    for number in range(limit + 1):
        assert claim(store, f"w{number}", "k") == ["k"]
        lapse(store, "k")
    assert claim(store, "last", "k") == []
    task = parsed(store, "k")
    assert (task.status, task.task_state.failed_cnt, len(task.runs)) == ("FAIL", limit + 1, limit + 1)
    assert task.task_state.finish_time is not None
    assert task.task_state.next_preempt_time is None


def test_a_lapsed_run_at_the_limit_is_settled_where_nobody_may_take_the_task(store: SyncStore) -> None:
    publish(store, "k", max_retries=0, specific_worker_ids=["gone"])
    publish(store, "live")
    claim(store, "gone", "k")
    claim(store, "w", "live")
    lapse(store, "k")
    assert store.run(claims.settle_lapsed(3_600_000, 100)) == 0
    assert store.run(claims.settle_lapsed(1_000, 100)) == 1
    assert parsed(store, "k").status == "FAIL"
    assert parsed(store, "live").status == "RUNNING"


def test_a_failure_waits_for_its_delay_and_then_is_tried_again(store: SyncStore) -> None:
    publish(store, "k", retry_delay=60)
    claim(store, "w", "k")
    finish(store, outcome(store, "k", FAIL, reason="broken"))
    task = parsed(store, "k")
    run = task.runs[0]
    assert (task.status, task.fail_reason, run.status) == ("INIT", "broken", "FAIL")
    assert run.fail_time is not None
    assert task.task_state.next_preempt_time == run.retry_time == run.fail_time + timedelta(minutes=1)
    assert claim(store, "w", "k", token="early") == []
    make_due(store, "k")
    assert claim(store, "w", "k", token="due") == ["k"]


def test_each_workers_own_failures_set_its_delay_where_the_limit_is_each_workers_own(store: SyncStore) -> None:
    publish(store, "k", retry_scope="worker", retry_backoff=2, retry_delay=1, max_retries=9)
    for number in range(3):
        claim(store, "w1", "k", token=f"first-{number}")
        finish(store, outcome(store, "k", FAIL, "w1"))
        make_due(store, "k")
    claim(store, "w2", "k")
    finish(store, outcome(store, "k", FAIL, "w2"))
    run = parsed(store, "k").runs[-1]
    assert run.fail_time is not None
    assert run.retry_time == run.fail_time + timedelta(seconds=1)


def test_a_worker_that_used_up_its_own_limit_is_not_shown_the_task_again(store: SyncStore) -> None:
    publish(store, "k", retry_scope="worker", max_retries=0, retry_delay=0)
    claim(store, "w1", "k")
    finish(store, outcome(store, "k", FAIL, "w1"))

    def shown_to(worker_id: str) -> list[str]:
        found = store.run(finding.scan(["default"], ["task"], worker_id, 10_000, 10))
        return [document["_id"] for document in found.documents]

    assert (shown_to("w1"), shown_to("w2")) == ([], ["task:k"])
    assert claim(store, "w1", "k", token="again") == []
    assert claim(store, "w2", "k") == ["k"]


def test_a_final_failure_ends_the_task_at_once(store: SyncStore) -> None:
    publish(store, "k", max_retries=-1)
    claim(store, "w", "k")
    finish(store, outcome(store, "k", FAIL, reason="no such user", final=True))
    task = parsed(store, "k")
    assert (task.status, task.fail_reason, task.task_state.failed_cnt) == ("FAIL", "no such user", 1)


def test_a_run_handed_back_is_not_counted_and_claimable_at_once(store: SyncStore) -> None:
    publish(store, "k", retry_delay=60, max_retries=0)
    claim(store, "w", "k")
    finish(store, outcome(store, "k", CANCELED, reason="the worker stops"))
    task = parsed(store, "k")
    assert (task.status, task.task_state.failed_cnt) == ("INIT", 0)
    assert task.task_state.next_preempt_time == task.task_state.create_time  # it keeps its place in the backlog
    assert claim(store, "w", "k", token="again") == ["k"]


RETURNS: list[Any] = [
    None,
    0,
    "$name",
    "$$NOW",
    {"$add": [1, 2]},
    {"$literal": {"$literal": 1}},
    [{"$concat": ["$name", "$key"]}, ["$_id"]],
    {"a": {"b": ["$params", {"$cond": [True, 1, 2]}]}},
    {},
    [],
]


@pytest.mark.parametrize("value", RETURNS)
def test_what_a_handler_returns_is_stored_as_it_is(store: SyncStore, value: Any) -> None:
    publish(store, "k", "the params")
    claim(store, "w", "k")
    finish(store, outcome(store, "k", returns=value))
    assert stored(store, "k")["task_state"]["worker_states"][0]["returns"] == value


def test_each_task_of_a_group_gets_its_own_return_value(store: SyncStore) -> None:
    keys = [f"k{number}" for number in range(len(RETURNS))]
    for key in keys:
        publish(store, key)
    claim(store, "w", *keys)
    ends = [outcome(store, key, returns=value) for key, value in zip(keys, RETURNS, strict=True)]
    assert finish(store, *reversed(ends)) == {end.run_id for end in ends}
    assert [parsed(store, key).returns for key in keys] == RETURNS
    assert {parsed(store, key).status for key in keys} == {"SUCCESS"}


def test_a_group_of_failures_and_runs_handed_back_gives_each_its_own_end(store: SyncStore) -> None:
    keys = ["failed", "final", "back", "later"]
    for key in keys:
        publish(store, key, retry_delay=60)
    claim(store, "w", *keys)
    ends = [
        outcome(store, "failed", FAIL, reason="$name"),
        outcome(store, "final", FAIL, reason="final", final=True),
        outcome(store, "back", CANCELED, reason="back"),
        outcome(store, "later", CANCELED, reason="later", delay_ms=5_000),
    ]
    assert finish(store, *ends) == {end.run_id for end in ends}
    made = {key: parsed(store, key) for key in keys}
    assert [made[key].status for key in keys] == ["INIT", "FAIL", "INIT", "INIT"]
    assert [made[key].task_state.failed_cnt for key in keys] == [1, 1, 0, 0]
    assert [made[key].fail_reason for key in keys] == ["$name", "final", "back", "later"]
    waits = {
        key: run.retry_time and run.fail_time and run.retry_time - run.fail_time
        for key, run in ((key, made[key].runs[0]) for key in keys)
    }
    minute = timedelta(minutes=1)
    assert waits == {"failed": minute, "final": minute, "back": None, "later": timedelta(seconds=5)}


def test_a_finish_repeated_after_a_lost_reply_stands_once_and_says_so(store: SyncStore) -> None:
    publish(store, "k", max_retries=5)
    claim(store, "w", "k")
    end = outcome(store, "k", FAIL, reason="broken")
    assert finish(store, end) == {end.run_id}
    before = stored(store, "k")
    assert finish(store, end) == {end.run_id}
    assert stored(store, "k") == before


def lapsed(store: SyncStore, key: str) -> None:
    lapse(store, key)


def preempted(store: SyncStore, key: str) -> None:
    lapse(store, key)
    assert claim(store, "other", key) == [key]


def retaken(store: SyncStore, key: str) -> None:
    """The same worker holds it again: its old run is still not this one."""
    lapse(store, key)
    assert claim(store, "w", key, token="retaken") == [key]


def removed(store: SyncStore, key: str) -> None:
    store.run(queries.remove(f"task:{key}"))


@pytest.mark.parametrize("lose", [lapsed, preempted, retaken, removed])
@pytest.mark.parametrize(("status", "is_simple"), [(SUCCESS, False), (SUCCESS, True), (FAIL, False), (CANCELED, False)])
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_lost_its_lease_finishes_nothing(
    store: SyncStore, lose: Any, status: Any, beside: bool, is_simple: bool
) -> None:
    publish(store, "k")
    publish(store, "beside")
    claim(store, "w", "k", "beside")
    end = outcome(store, "k", status, returns=1) if status is SUCCESS else outcome(store, "k", status, reason="late")
    ends = [end, *([outcome(store, "beside", status)] if beside else [])]
    lose(store, "k")
    before = store.tasks.find_one({"_id": "task:k"})
    assert finish(store, *ends, is_simple=is_simple) == {each.run_id for each in ends[1:]}
    assert store.tasks.find_one({"_id": "task:k"}) == before


@pytest.mark.parametrize("lose", [lapsed, preempted, retaken, removed])
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_that_lost_its_lease_pings_nothing(store: SyncStore, lose: Any, beside: bool) -> None:
    publish(store, "k")
    publish(store, "beside")
    claim(store, "w", "k", "beside")
    runs = {run_id_of(store, "k"): "task:k", **({run_id_of(store, "beside"): "task:beside"} if beside else {})}
    lose(store, "k")
    before = store.tasks.find_one({"_id": "task:k"})
    answer = store.run(claims.ping(runs, 600_000))
    assert store.tasks.find_one({"_id": "task:k"}) == before
    now = server_now(store)
    live = [
        run["run_id"]
        for document in answer
        for run in document["task_state"]["worker_states"]
        if run["run_id"] in runs and run["status"] == "RUNNING" and run["ping_expire_time"] > now
    ]
    assert live == list(runs)[1:]


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"]])
def test_a_ping_moves_the_lease_and_the_preemption_time_with_it(store: SyncStore, keys: list[str]) -> None:
    for key in keys:
        publish(store, key)
    claim(store, "w", *keys)
    answer = store.run(claims.ping({run_id_of(store, key): f"task:{key}" for key in keys}, 600_000))
    assert sorted(document["_id"] for document in answer) == [f"task:{key}" for key in keys]
    for key in keys:
        task = parsed(store, key)
        assert task.runs[0].ping_expire_time - task.runs[0].claim_time >= timedelta(minutes=10)
        assert task.task_state.next_preempt_time == task.runs[0].ping_expire_time


def test_a_ping_never_shortens_a_lease(store: SyncStore) -> None:
    publish(store, "k", worker_timeout=600)
    claim(store, "w", "k")
    before = parsed(store, "k").runs[0].ping_expire_time
    store.run(claims.ping({run_id_of(store, "k"): "task:k"}, 1000))
    assert parsed(store, "k").runs[0].ping_expire_time == before


def test_a_ping_tells_the_holder_that_it_is_to_stop(store: SyncStore) -> None:
    publish(store, "k")
    claim(store, "w", "k")
    store.run(queries.cancel("task:k"))
    answer: list[Document] = store.run(claims.ping({run_id_of(store, "k"): "task:k"}, 60_000))
    assert answer[0]["task_state"]["cancel_requested"] is True
    assert store.run(claims.held(["task:k"]))[0]["task_state"]["cancel_requested"] is True


def test_scan_for_due_tasks_alone_finds_no_others_and_asks_for_no_time(store: SyncStore) -> None:
    publish(store, "now")
    publish(store, "soon", start=timedelta(seconds=5))
    due = store.run(finding.scan(["default"], ["task"], "w", 0, 10))
    assert ([found["_id"] for found in due.documents], due.server_time, due.has_future) == (["task:now"], None, False)
    near = store.run(finding.scan(["default"], ["task"], "w", 10_000, 10))
    assert [found["_id"] for found in near.documents] == ["task:now", "task:soon"]
    assert near.server_time is not None
    assert near.has_future


def test_a_claim_whose_reply_was_lost_is_read_back_by_its_token(store: SyncStore) -> None:
    for key in ("a", "b", "c"):
        publish(store, key)
    claim(store, "other", "b")
    ids = ["task:a", "task:b", "task:c"]
    store.run(claims.claim(ids, "w", "lost"))
    again = store.run(claims.claimed(ids, "lost"))
    assert sorted(document["_id"] for document in again) == ["task:a", "task:c"]
    assert store.run(claims.claimed(ids, "never")) == []


def test_what_a_transaction_returned_is_added_to_its_success_alone(store: SyncStore) -> None:
    publish(store, "k")
    claim(store, "w", "k")
    end = outcome(store, "k")
    assert not store.run(transactions.store_return("task:k", end.run_id, "too early"))
    assert parsed(store, "k").returns is None
    with store.client.start_session() as session, session.start_transaction():
        assert store.run(claims.finish_in_transaction(end), session)
    assert store.run(transactions.store_return("task:k", end.run_id, {"$add": [1, 2]}))
    assert parsed(store, "k").returns == {"$add": [1, 2]}


def test_a_lapsed_run_finishes_nothing_in_a_transaction(store: SyncStore) -> None:
    publish(store, "k")
    claim(store, "w", "k")
    lapse(store, "k")
    with store.client.start_session() as session, session.start_transaction():
        assert not store.run(claims.finish_in_transaction(outcome(store, "k")), session)


def test_a_look_carries_the_servers_time_and_nothing_large(store: SyncStore) -> None:
    publish(store, "k", "x" * 1000)
    found = store.run(finding.look(["task:k"]))
    assert "params" not in found[0]
    assert found[0]["now"] >= parsed(store, "k").task_state.create_time


@pytest.mark.parametrize("history", [(), (CANCELED,), (FAIL,), (FAIL, CANCELED), (FAIL, "lapse"), ("lapse", "settle")])
def test_a_claimed_document_tells_the_order_that_its_task_had_before_the_claim(
    store: SyncStore, history: tuple[Any, ...]
) -> None:
    publish(store, "k", start=server_now(store) - timedelta(hours=1), worker_timeout=90, max_retries=9)
    for number, end in enumerate(history):
        if end == "settle":
            store.run(claims.settle(["task:k"]))
            continue
        claim(store, "w", "k", token=f"former{number}")
        if end == "lapse":
            lapse(store, "k")
        else:
            finish(store, outcome(store, "k", end, reason="r"))
        if end is FAIL:
            make_due(store, "k")
    before = stored(store, "k")["task_state"]["next_preempt_time"]
    (document,) = store.run(claims.claim(["task:k"], "w", "token"))
    task = claimed_task(document)
    facts = facts_of(task, task.runs[-1])
    assert (facts.due, facts.is_interrupted) == (before, history[-1:] not in ((), (FAIL,)))
