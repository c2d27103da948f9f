"""Publishing that gathers, with each kind of client: debounce, collect, again and window. Runs are the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Client, RunStatus, TaskSpec
from mtask.errors import (
    GatherConflict,
    GatherFull,
    InvalidInput,
    InvalidParams,
    TaskExists,
    WorkersTooOld,
)
from mtask.features.gathering import statements as gathering
from mtask.features.gathering.statements import SentCall
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.operations import workers
from mtask.kernel.statements.finish import Outcome
from tests.clients import AnyClient, claim, fail, is_claimable, open_store, server_now, succeed

LONG = timedelta(hours=1)
ID = "work:k"


@pytest.fixture
def store(client: AnyClient, mongo_uri: str, database_name: str) -> Iterator[SyncStore]:
    client.init()
    with open_store(mongo_uri, database_name) as opened:
        yield opened


def document(store: SyncStore, task_id: str = ID) -> dict[str, Any]:
    found = store.tasks.find_one({"_id": task_id})
    assert found is not None
    return found


def state(store: SyncStore) -> dict[str, Any]:
    found: dict[str, Any] = document(store)["task_state"]
    return found


def again(client: AnyClient, params: Any = None, **more: Any) -> Any:
    return client.publish("work", params, key="k", if_running="again", **more)


def collect(client: AnyClient, params: Any, **more: Any) -> Any:
    return client.publish("work", params, key="k", collect=True, **more)


def lapse(store: SyncStore) -> None:
    """Let the lease of the last run lapse, as if its worker had died."""
    past = server_now(store) - timedelta(seconds=1)
    path = "task_state.worker_states.$[run].ping_expire_time"
    running = [{"run.status": "RUNNING"}]
    change = {"$set": {path: past, "task_state.next_preempt_time": past}}
    assert store.tasks.update_one({"_id": ID}, change, array_filters=running).modified_count == 1


# --- debounce ---------------------------------------------------------------------------------------------


def test_calls_move_the_start_and_the_newest_params_win(client: AnyClient, store: SyncStore) -> None:
    before = server_now(store)
    first = client.publish("work", 1, key="k", debounce=60, max_wait=100)
    second = client.publish("work", 2, key="k", debounce=60, max_wait=100)
    assert (first.created, first.updated) == (True, False)
    assert (second.created, second.updated) == (False, True)
    found = document(store)
    gather, start = found["gather"], found["task_state"]["start_time"]
    assert found["params"] == 2
    assert start == gather["newest"]["asked_time"] + timedelta(seconds=60) == found["task_state"]["next_preempt_time"]
    assert before <= gather["first_time"] < gather["newest"]["asked_time"]


def test_max_wait_bounds_the_wait(client: AnyClient, store: SyncStore) -> None:
    client.publish("work", 1, key="k", debounce=60, max_wait=100)
    first = server_now(store) - timedelta(seconds=90)
    store.tasks.update_one({"_id": ID}, {"$set": {"gather.first_time": first}})
    client.publish("work", 2, key="k", debounce=60, max_wait=100)
    assert state(store)["start_time"] == first + timedelta(seconds=100)


def test_a_call_that_arrives_late_changes_nothing_that_is_newer(client: AnyClient, store: SyncStore) -> None:
    client.publish("work", "new", key="k", debounce=60)
    before = document(store)
    asked = before["gather"]["first_time"] - timedelta(seconds=10)
    late = SentCall(asked, "late", "latest", {"params": "late", "queue": "x", "task_option": {}}, None, 60_000)
    store.tasks.update_one({"_id": ID}, gathering.add(late))
    found = document(store)
    assert found["gather"].pop("first_time") == asked
    del before["gather"]["first_time"]
    assert found == before


def test_a_call_is_newer_than_those_before_it_though_the_servers_clock_was_set_back(
    client: AnyClient, store: SyncStore
) -> None:
    client.publish("work", "before", key="k", debounce=60)
    later = server_now(store) + LONG
    store.tasks.update_one({"_id": ID}, {"$set": {"gather.newest.asked_time": later}})
    assert client.publish("work", "after", key="k", debounce=60).updated
    assert document(store)["params"] == "after"
    assert state(store)["start_time"] <= server_now(store) + timedelta(seconds=60), "and the start is not delayed"


def test_a_call_reopens_a_task_that_has_ended(client: AnyClient, store: SyncStore) -> None:
    client.publish("work", 1, key="k", debounce=0.001)
    succeed(store, ID, claim(store, ID))
    assert client.publish("work", 2, key="k", debounce=60).updated
    found = document(store)
    assert (found["task_state"]["status"], found["params"]) == ("INIT", 2)
    assert [run["past"] for run in found["task_state"]["worker_states"]] == [True]
    assert not {"finish_time"} & found["task_state"].keys()
    assert not is_claimable(store, ID)


def test_a_call_during_a_run_starts_the_next_round_after_its_quiet_time(client: AnyClient, store: SyncStore) -> None:
    client.publish("work", 1, key="k", debounce=0.001)
    run_id = claim(store, ID)
    client.publish("work", 2, key="k", debounce=60)
    assert document(store)["params"] == 1
    assert document(store)["again"]["params"] == 2
    succeed(store, ID, run_id)
    found = document(store)
    assert (found["task_state"]["status"], found["params"]) == ("INIT", 2)
    assert found["task_state"]["next_preempt_time"] == found["gather"]["newest"]["asked_time"] + timedelta(seconds=60)
    assert "again" not in found


# --- again ------------------------------------------------------------------------------------------------


def test_a_live_run_goes_on_and_the_task_runs_once_more(client: AnyClient, store: SyncStore) -> None:
    assert again(client, 1).created
    run_id = claim(store, ID)
    for number in (2, 3, 4):
        assert again(client, number).updated
    assert (document(store)["params"], document(store)["again"]["params"]) == (1, 4)
    succeed(store, ID, run_id)
    second = claim(store, ID)
    assert document(store)["params"] == 4
    succeed(store, ID, second)
    assert state(store)["status"] == "SUCCESS"
    assert not is_claimable(store, ID)


@pytest.mark.parametrize("end", ["fail", "final", "hand back", "lapse", "lapse and claim", "many failures"])
def test_whatever_leaves_no_live_run_begins_the_next_round(client: AnyClient, store: SyncStore, end: str) -> None:
    again(client, 1, max_retries=0 if end == "many failures" else 3)
    run_id = claim(store, ID)
    again(client, 2, priority=7)
    if end in ("fail", "many failures", "final"):
        fail(store, ID, run_id, final=end == "final")
    elif end == "hand back":
        given_back = Outcome(ID, run_id, RunStatus.CANCELED, reason="stopping")
        store.run(claims.finish([given_back]))
    else:
        lapse(store)
        if end == "lapse":
            store.run(claims.settle([ID]))
        else:
            assert not is_claimable(store, ID), "the claim begins the next round and takes nothing of the last one"
    found = document(store)
    assert (found["task_state"]["status"], found["params"], found["task_option"]["priority"]) == ("INIT", 2, 7)
    assert found["task_state"]["failed_cnt"] == 0
    assert "again" not in found
    succeed(store, ID, claim(store, ID))
    assert state(store)["status"] == "SUCCESS"


def test_a_cancel_drops_what_was_published_meanwhile(client: AnyClient, store: SyncStore) -> None:
    again(client, 1)
    run_id = claim(store, ID)
    again(client, 2)
    client.cancel("work", "k")
    assert "again" not in document(store)
    store.run(claims.finish([Outcome(ID, run_id, RunStatus.CANCELED)]))
    assert state(store)["status"] == "CANCELED"


def test_a_call_after_the_cancel_runs(client: AnyClient, store: SyncStore) -> None:
    again(client, 1)
    run_id = claim(store, ID)
    client.cancel("work", "k")
    again(client, 2)
    store.run(claims.finish([Outcome(ID, run_id, RunStatus.CANCELED)]))
    found = document(store)
    assert (found["task_state"]["status"], found["params"]) == ("INIT", 2)
    assert found["task_state"]["cancel_requested"] is False


def test_a_call_that_is_sent_twice_counts_once(client: AnyClient, store: SyncStore) -> None:
    again(client, 1, call_id="first")
    run_id = claim(store, ID)
    sent = document(store)["gather"]["newest"]["asked_time"]
    repeated = SentCall(sent, "first", "latest", {"params": 1, "queue": "default", "task_option": {}})
    before = document(store)
    store.tasks.update_one({"_id": ID}, gathering.add(repeated))
    assert document(store) == before, "the run that holds the task has consumed the call"
    succeed(store, ID, run_id)
    store.tasks.update_one({"_id": ID}, gathering.add(repeated))
    assert state(store)["status"] == "SUCCESS"


def test_a_caller_repeats_a_call_under_its_own_id(client: AnyClient, store: SyncStore) -> None:
    def call(params: Any, call_id: str) -> Any:
        return again(client, params, call_id=call_id)

    assert call(1, "a").created
    call(2, "b")
    before = document(store)
    assert call(1, "a").updated, "the call is known, as if its first reply had arrived"
    assert document(store) == before, "the open round has the call"
    run_id = claim(store, ID)
    call(2, "b")
    assert "again" not in document(store), "the run that holds the task has consumed the call"
    call(3, "c")
    call(4, "d")
    call(3, "c")
    assert document(store)["again"]["params"] == 4
    succeed(store, ID, run_id)
    assert (state(store)["status"], document(store)["params"]) == ("INIT", 4)
    call(3, "c")
    assert document(store)["params"] == 4
    succeed(store, ID, claim(store, ID))
    for number, call_id in enumerate("abcd"):
        call(number, call_id)
    assert state(store)["status"] == "SUCCESS", "each call has had its run"
    call(5, "e")
    assert (state(store)["status"], document(store)["params"]) == ("INIT", 5)


def test_a_call_waits_for_a_live_run_of_a_task_that_has_ended(client: AnyClient, store: SyncStore) -> None:
    again(client, 1, concurrent_worker_cnt=2)
    first = claim(store, ID, "w1")
    second = claim(store, ID, "w2")
    succeed(store, ID, first)
    client.update_option("work", "k", concurrent_worker_cnt=1)
    assert state(store)["status"] == "SUCCESS", "one success suffices now"
    again(client, 2, call_id="x")
    assert (state(store)["status"], document(store)["params"]) == ("RUNNING", 1)
    lapse(store)
    assert store.run(finding.lapsed(0, 10)) == [ID], "the next round is not lost if that run's worker dies"
    assert store.run(claims.claim([ID], "w3", "token")) == []
    assert (state(store)["status"], document(store)["params"]) == ("INIT", 2)
    assert second in {run["run_id"] for run in state(store)["worker_states"] if run["past"]}


def test_a_repeat_opens_no_task_that_has_ended(client: AnyClient, store: SyncStore) -> None:
    again(client, 1, concurrent_worker_cnt=2, call_id="x")
    first = claim(store, ID, "w1")
    claim(store, ID, "w2")
    succeed(store, ID, first)
    client.update_option("work", "k", concurrent_worker_cnt=1)
    before = document(store)
    again(client, 1, concurrent_worker_cnt=2, call_id="x")
    assert document(store) == before


def test_a_worker_that_took_the_task_for_simple_begins_the_next_round(client: AnyClient, store: SyncStore) -> None:
    again(client, 1)
    (found,) = store.run(claims.claim([ID], "w", "token", are_simple=True))
    assert len(found["task_state"]["worker_states"]) == 1
    again(client, 2)
    ended = Outcome(ID, "token-0", RunStatus.SUCCESS)
    assert store.run(claims.finish([ended], is_simple=True)) == {"token-0"}
    assert (state(store)["status"], document(store)["params"]) == ("INIT", 2)
    assert store.run(claims.claim([ID], "w", "other", are_simple=True)) == [], "it is simple no longer"
    assert is_claimable(store, ID)


def test_a_task_that_was_published_plainly_runs_again(client: AnyClient, store: SyncStore) -> None:
    client.publish("work", 1, key="k")
    run_id = claim(store, ID)
    again(client, 2, queue="other")
    succeed(store, ID, run_id)
    found = document(store)
    assert (found["params"], found["queue"]) == (2, "other")
    assert found["task_state"]["former_queues"] == ["default"]


# --- collect ----------------------------------------------------------------------------------------------


def test_calls_are_collected_and_those_during_a_run_are_the_next_list(client: AnyClient, store: SyncStore) -> None:
    for number in range(3):
        collect(client, number, debounce=0.001)
    run_id = claim(store, ID)
    assert document(store)["params"] == {"calls": [0, 1, 2]}
    for number in range(3, 5):
        collect(client, number)
    succeed(store, ID, run_id)
    succeed(store, ID, claim(store, ID))
    assert document(store)["params"] == {"calls": [3, 4]}
    assert state(store)["status"] == "SUCCESS"
    collect(client, 5)
    assert document(store)["params"] == {"calls": [5]}


def test_a_list_that_failed_is_tried_again_as_it_is(client: AnyClient, store: SyncStore) -> None:
    collect(client, 0, retry_delay=0)
    run_id = claim(store, ID)
    collect(client, 1)
    fail(store, ID, run_id)
    collect(client, 2)
    assert document(store)["params"] == {"calls": [0]}
    second = claim(store, ID)
    lapse(store)
    third = claim(store, ID, "worker-2")
    assert len({run_id, second, third}) == 3
    assert document(store)["params"] == {"calls": [0]}
    succeed(store, ID, third)
    assert document(store)["params"] == {"calls": [1, 2]}


def test_a_repeated_call_is_not_collected_twice(client: AnyClient, store: SyncStore) -> None:
    assert collect(client, 0, call_id="c0").created
    assert collect(client, 0, call_id="c0").updated
    assert document(store)["params"] == {"calls": [0]}
    run_id = claim(store, ID)
    for _ in range(2):
        collect(client, 1, call_id="c1")
        collect(client, 0, call_id="c0")
    assert document(store)["again"]["params"] == {"calls": [1]}
    succeed(store, ID, run_id)
    collect(client, 0, call_id="c0")
    collect(client, 1, call_id="c1")
    assert document(store)["params"] == {"calls": [1]}


def test_a_full_list_starts_now_and_takes_no_more(client: AnyClient, store: SyncStore) -> None:
    big = "x" * (3 * 2**20)
    collect(client, big, debounce=LONG)
    assert not is_claimable(store, ID)
    with pytest.raises(GatherFull, match="4 MB"):
        collect(client, big, debounce=LONG)
    with pytest.raises(GatherFull):
        collect(client, "small", debounce=LONG)
    run_id = claim(store, ID)
    collect(client, "small", debounce=LONG)
    succeed(store, ID, run_id)
    assert document(store)["params"] == {"calls": ["small"]}


# A call of a list costs the server the whole list. The clients' other tests show that each kind collects as the others.
@pytest.mark.parametrize("client", ["sync"], indirect=True)
def test_a_thousand_calls_fill_a_list(client: AnyClient, store: SyncStore) -> None:
    results = client.publish_many([TaskSpec("work", n, key="k") for n in range(1002)], collect=True, debounce=LONG)
    assert [type(result).__name__ for result in results[998:]] == ["Published"] * 2 + ["GatherFull"] * 2
    found = document(store)
    assert found["params"]["calls"] == list(range(1000))
    assert found["gather"]["full"] is True
    assert is_claimable(store, ID)


def test_one_key_gathers_in_one_way(client: AnyClient, store: SyncStore) -> None:
    collect(client, 0)
    with pytest.raises(GatherConflict, match="does not collect"):
        again(client, 1)
    claim(store, ID)
    assert document(store)["params"] == {"calls": [0]}
    client.publish("work", 1, key="other", debounce=60)
    with pytest.raises(GatherConflict, match="this call collects"):
        client.publish("work", 2, key="other", collect=True)


# --- window -----------------------------------------------------------------------------------------------


def test_a_success_is_kept_for_the_window(client: AnyClient, store: SyncStore) -> None:
    def publish(number: int) -> tuple[bool, bool]:
        published = client.publish("work", number, key="k", window=60, retain_success=60)
        return published.created, published.updated

    assert publish(1) == (True, False)
    assert publish(2) == (False, False)
    run_id = claim(store, ID)
    assert publish(3) == (False, False)
    succeed(store, ID, run_id)
    assert publish(4) == (False, False)
    assert document(store)["params"] == 1
    ended = server_now(store) - timedelta(seconds=60)
    store.tasks.update_one({"_id": ID}, {"$set": {"task_state.finish_time": ended}})
    assert publish(5) == (False, True)
    found = document(store)
    assert (found["params"], found["task_state"]["status"]) == (5, "INIT")
    assert not {"expire_time", "gather"} & found.keys()
    assert publish(6) == (False, False)


@pytest.mark.parametrize("end", ["FAIL", "CANCELED"])
def test_what_did_not_succeed_is_published_anew_at_once(client: AnyClient, store: SyncStore, end: str) -> None:
    client.publish("work", 1, key="k", window=LONG)
    if end == "FAIL":
        fail(store, ID, claim(store, ID), final=True)
    else:
        client.cancel("work", "k")
    assert state(store)["status"] == end
    assert client.publish("work", 2, key="k", window=LONG).updated
    succeed(store, ID, claim(store, ID))
    assert document(store)["params"] == 2


# --- in a transaction, in bulk, and what is refused --------------------------------------------------------


def test_calls_gather_inside_the_callers_transaction(client: AnyClient, store: SyncStore) -> None:
    created, updated = client.in_transaction(
        lambda session: client.client.publish("work", 1, key="k", debounce=60, session=session),
        lambda session: client.client.publish("work", 2, key="k", debounce=60, session=session),
    )
    assert (created.created, updated.updated) == (True, True)
    found = document(store)
    assert (found["params"], found["task_state"]["status"]) == (2, "INIT")
    assert found["task_state"]["start_time"] >= found["task_state"]["create_time"] + timedelta(seconds=60)

    def abandoned(session: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        client.in_transaction(
            lambda session: client.client.publish("work", 3, key="k", debounce=60, session=session), abandoned
        )
    assert document(store) == found


def test_many_calls_gather_in_their_order(client: AnyClient, store: SyncStore) -> None:
    specs = [TaskSpec("work", number, key=key) for number in range(3) for key in ("k", "l")]
    results = client.publish_many(specs, debounce=60)
    assert [(r.created, r.updated) for r in results] == [(True, False)] * 2 + [(False, True)] * 4
    assert [document(store, f"work:{key}")["params"] for key in ("k", "l")] == [2, 2]
    results = client.publish_many(specs, window=60)
    assert [(r.created, r.updated) for r in results] == [(False, False)] * 6


def test_a_step_of_a_flow_gathers_nothing(client: AnyClient, store: SyncStore) -> None:
    flow = {"key": "f", "step": "k", "after": [], "on_failed": "cancel", "release_time": server_now(store)}
    client.publish("work", 1, key="k")
    store.tasks.update_one({"_id": ID}, {"$set": {"flow": flow}})
    before = document(store)
    with pytest.raises(TaskExists):
        again(client, 2)
    assert not client.publish("work", 2, key="k", window=1).updated
    assert document(store) == before


def test_workers_that_do_not_know_it_are_named(client: AnyClient, store: SyncStore) -> None:
    expiry = server_now(store) + LONG
    old = {"_id": "old", "incarnation": "i", "host": "h", "pid": 1, "status": "running", "queues": [], "names": []}
    store.collections["workers"].insert_one({**old, "heartbeat_expire_time": expiry})
    assert store.run(workers.without_flows(5)) == ["old"]
    with pytest.raises(WorkersTooOld, match="gathers"):
        again(client, 1)
    with pytest.raises(WorkersTooOld):
        client.in_transaction(lambda session: client.client.publish("work", 1, key="k", collect=True, session=session))
    assert store.tasks.find_one() is None
    assert client.publish("work", 1, key="k", window=1).created, "an older worker ends such a task rightly"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"debounce": 0}, "1 ms to 10 years"),
    ({"debounce": "x"}, "give 1 ms to 10 years, as a timedelta or in seconds"),
    ({"debounce": float("nan")}, "no length of time"),
    ({"max_wait": 5}, "give debounce"),
    ({"debounce": 5, "max_wait": 4}, "at least debounce"),
    ({"if_running": "stop"}, '"keep" or "again"'),
    ({"collect": 1}, "True or False"),
    ({"window": 5, "collect": True}, "does not go with"),
    ({"call_id": "x"}, "is the id of a call that gathers"),
    ({"call_id": "x" * 65, "collect": True}, "1 to 64 characters"),
    ({"debounce": 5, "key": None}, "give key, too"),
    ({"window": 5, "key": None}, "give key, too"),
    ({"debounce": 5, "delay": 1}, "drop delay"),
    ({"collect": True, "delay": 1}, "drop delay"),
    ({"window": 5, "if_exists": "update"}, "drop if_exists"),
    ({"if_running": "again", "clean_failed": True}, "clean_failed"),
    ({"window": 5, "retain_success": 4.999}, "retain_success is shorter than window"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_does_not_fit_is_an_error_before_anything_is_sent(arguments: dict[str, Any], message: str) -> None:
    client = Client("mongodb://localhost:1", database="none", server_timeout=timedelta(milliseconds=1))
    with client, pytest.raises(InvalidInput, match=message):
        client.publish("work", 1, **{"key": "k", **arguments})


def test_each_call_is_checked_against_the_handler(client: AnyClient, store: SyncStore) -> None:
    app = App()

    @app.task
    def digest(calls: list[dict[str, int]]) -> None: ...

    client.publish(digest, {"a": 1}, key="k", collect=True)
    with pytest.raises(InvalidParams, match="calls"):
        client.publish(digest, {"a": "x"}, key="k", collect=True)
    with pytest.raises(InvalidParams, match="4 MB"):
        client.publish("work", "x" * 2**22, key="k", collect=True)
    assert document(store, "digest:k")["params"] == {"calls": [{"a": 1}]}


def test_a_publish_without_it_ends_the_gathering(client: AnyClient, store: SyncStore) -> None:
    collect(client, 1, debounce=60)
    client.publish("work", 2, key="k", if_exists="update")
    found = document(store)
    assert found["params"] == 2
    assert found["gather"].keys() == {"newest"}
    again(client, 3)
    assert document(store)["params"] == 3
