"""Places: never more than the limit, whoever asks at once, and none kept for a run that there is not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from mtask.errors import DatabaseError
from mtask.model.controls import Limit
from mtask.model.documents import runs_in
from mtask.model.status import RunStatus
from mtask.store.driver.stores import SyncStore
from mtask.store.layout import setup
from mtask.store.queues import permits
from mtask.store.queues.permits import HeldPermit, PermitPool, PermitRequest
from mtask.store.statements.outcome import Outcome
from mtask.store.tasks import claims
from tests.integration.stores import publish

QUEUE, KEY = PermitPool("default"), PermitPool("default", "tenant")
Document = dict[str, Any]


@pytest.fixture(autouse=True)
def set_up(store: SyncStore) -> None:
    store.run(setup.ensure(setup.EVERY))


def stored(store: SyncStore, pool: PermitPool = QUEUE) -> Document:
    found = store.collections["places"].find_one({"_id": pool.id})
    assert found is not None
    return found


def take(
    store: SyncStore, limit: Limit, task_ids: Sequence[str], token: str, pool: PermitPool = QUEUE
) -> permits.PermitGrant:
    return store.run(permits.take([PermitRequest(pool, limit, task_ids)], token))[pool]


def claimed(store: SyncStore, key: str, token: str) -> Document:
    publish(store, key)
    (document,) = store.run(claims.claim([f"task:{key}"], "w", token))
    return document


def lapse(store: SyncStore, task_id: str) -> None:
    long_ago = {
        "$set": {"task_state.worker_states.$[].ping_expire_time": store.run(setup.check_server()) - timedelta(1)}
    }
    store.tasks.update_one({"_id": task_id}, long_ago)


@pytest.mark.parametrize("limit", [Limit(concurrency=3), Limit(starts=3, window_ms=60_000)])
def test_the_most_urgent_get_the_permits_there_are(store: SyncStore, limit: Limit) -> None:
    assert take(store, limit, ["a", "b"], "1").task_ids == {"a", "b"}
    second = take(store, limit, ["c", "d"], "2")
    assert second.task_ids == {"c"}
    assert second.is_crowded is (limit.concurrency is not None)
    third = take(store, limit, ["d"], "3")
    assert (third.task_ids, third.claim_by) == (frozenset(), None)
    if limit.starts:
        starts = [entry["time"] for entry in stored(store)["starts"]]
        assert third.next_time(max(starts)) == min(starts) + timedelta(milliseconds=60_100)
        assert third.next_time(max(starts) - timedelta(milliseconds=1)) is None  # a claim that may still be settled


def test_both_bounds_hold(store: SyncStore) -> None:
    limit = Limit(concurrency=5, starts=2, window_ms=60_000)
    assert take(store, limit, ["a", "b", "c"], "1").task_ids == {"a", "b"}
    store.run(permits.give_back([HeldPermit(QUEUE, "a", "1"), HeldPermit(QUEUE, "b", "1")]))
    assert take(store, limit, ["c"], "2").task_ids == frozenset()
    assert [len(stored(store)[name]) for name in ("running", "starts")] == [0, 2]


def test_several_permits_at_once(store: SyncStore) -> None:
    one = Limit(concurrency=1)
    requests = [PermitRequest(QUEUE, Limit(concurrency=2), ["a", "b"]), PermitRequest(KEY, one, ["b", "c"])]
    first = store.run(permits.take(requests, "1"))
    assert first[QUEUE].task_ids == {"a", "b"}
    assert first[KEY].task_ids == {"b"}
    second = store.run(permits.take(requests, "2"))
    assert not second[QUEUE].task_ids | second[KEY].task_ids


def test_of_any_number_that_ask_at_once_no_more_than_the_limit_get_one(store: SyncStore) -> None:
    limit = Limit(concurrency=7, starts=9, window_ms=60_000)

    def ask(number: int) -> int:
        if number % 2:
            return len(take(store, limit, [f"{number}-{n}" for n in range(3)], f"t{number}").task_ids)
        requests = [PermitRequest(QUEUE, limit, [f"{number}-a"]), PermitRequest(KEY, limit, [f"{number}-a"])]
        return len(store.run(permits.take(requests, f"t{number}"))[QUEUE].task_ids)

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(ask, range(32)))
    assert sum(got) == 7
    assert len(stored(store)["running"]) == 7
    assert len(stored(store, KEY)["running"]) <= 7


def test_what_was_not_claimed_is_given_back_and_a_start_counts_from_its_claim(store: SyncStore) -> None:
    limit = Limit(concurrency=3, starts=3, window_ms=60_000)
    taken = take(store, limit, ["task:a", "task:b"], "1")
    document = claimed(store, "a", "1")
    claim_time = runs_in(document)[0]["claim_time"]
    assert taken.claim_by is not None
    assert claim_time < taken.claim_by
    store.run(permits.settle([QUEUE], "1", {"task:a": claim_time}, ["task:b"]))
    assert [(e["task_id"], e["time"]) for e in stored(store)["starts"]] == [("task:a", claim_time)]
    assert [entry["task_id"] for entry in stored(store)["running"]] == ["task:a"]


def test_what_is_in_doubt_keeps_its_permit(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "1")
    store.run(permits.settle([QUEUE], "1", {}, []))
    assert len(stored(store)["running"]) == 1
    assert not store.run(permits.reclaim([QUEUE])).has_found  # its claim may come true yet


def test_a_permit_whose_run_is_closed_or_lapsed_is_given_back_by_whoever_looks(store: SyncStore) -> None:
    limit = Limit(concurrency=3)
    for key in "abc":
        take(store, limit, [f"task:{key}"], f"t{key}")
        claimed(store, key, f"t{key}")
    assert not store.run(permits.reclaim([QUEUE])).has_found
    store.run(claims.finish([Outcome("task:a", "ta-0", RunStatus.SUCCESS)]))
    lapse(store, "task:b")
    assert store.run(permits.reclaim([QUEUE])).has_found
    assert [entry["task_id"] for entry in stored(store)["running"]] == ["task:c"]
    # A ping that was under way when the lapse was seen cannot bring the run back: it is closed.
    assert runs_in(store.tasks.find_one({"_id": "task:b"}) or {})[0]["status"] == "TIMEOUT"


def test_a_permit_is_given_back_by_nobody_but_its_own_claim(store: SyncStore) -> None:
    """Several may claim one task at once, and it is claimed anew while its last run is still to be taken down."""
    limit = Limit(concurrency=3, starts=3, window_ms=60_000)
    for token in ("lost", "over", "live"):
        take(store, limit, ["task:a"], token)
    store.run(permits.settle([QUEUE], "lost", {}, ["task:a"]))
    for kind in ("running", "starts"):
        assert [entry["token"] for entry in stored(store)[kind]] == ["over", "live"]
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", "over")]))
    assert [entry["token"] for entry in stored(store)["running"]] == ["live"]


def test_a_permit_whose_claim_never_came_is_given_back_after_a_while(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "1")
    now = store.run(setup.check_server())
    for ago, is_over in ((10, False), (30, True)):  # a claim that was begun in time is written that much later at most
        was_until = {"$set": {"running.0.claim_by": now - timedelta(seconds=ago)}}
        store.collections["places"].update_one({}, was_until)
        assert store.run(permits.reclaim([QUEUE])).has_found is is_over
    assert stored(store)["running"] == []


def test_the_look_says_when_the_next_lease_lapses(store: SyncStore) -> None:
    take(store, Limit(concurrency=2), ["task:a", "task:b"], "1")
    publish(store, "a", worker_timeout_ms=60_000)
    publish(store, "b", worker_timeout_ms=90_000)
    assert store.run(permits.reclaim([QUEUE])).next_lapse is None
    store.run(claims.claim(["task:a", "task:b"], "w", "1"))
    lapse = store.run(permits.reclaim([QUEUE])).next_lapse
    assert lapse is not None
    assert timedelta(0) < lapse <= timedelta(seconds=60)


def test_a_run_without_a_lease_whose_task_has_ended_keeps_no_permit(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "ta")
    claimed(store, "a", "ta")
    no_lease = {"$unset": {"task_state.worker_states.0.ping_expire_time": ""}}
    store.tasks.update_one({}, no_lease, bypass_document_validation=True)
    assert not store.run(permits.reclaim([QUEUE])).has_found  # somebody will see to it first
    store.tasks.update_one({}, {"$set": {"task_state.status": "FAIL"}}, bypass_document_validation=True)
    assert store.run(permits.reclaim([QUEUE])).has_found
    assert stored(store)["running"] == []


def test_one_that_cannot_be_settled_keeps_no_other_from_it(store: SyncStore) -> None:
    for key in "ab":
        take(store, Limit(concurrency=2), [f"task:{key}"], f"t{key}")
        claimed(store, key, f"t{key}")
        lapse(store, f"task:{key}")
    spoiled = {"$set": {"task_option.specific_worker_ids": 3}}
    store.tasks.update_one({"_id": "task:a"}, spoiled, bypass_document_validation=True)
    with pytest.raises(DatabaseError):
        store.run(claims.settle(["task:a", "task:b"]))
    assert store.run(permits.reclaim([QUEUE])).has_found
    assert [entry["task_id"] for entry in stored(store)["running"]] == ["task:a"]


@pytest.mark.parametrize("limit", [Limit(concurrency=1), Limit(starts=1, window_ms=86_400_000)])
@pytest.mark.parametrize(
    "spoiled", [{}, {"task_id": "x"}, {"task_id": 1, "token": 2}, "text", {"task_id": "x", "token": "y"}]
)
def test_what_is_malformed_in_a_document_or_lies_in_an_absurd_future_takes_up_nothing(
    store: SyncStore, limit: Limit, spoiled: Any
) -> None:
    far = store.run(setup.check_server()) + timedelta(days=3)
    entry = {**spoiled, "time": far, "claim_by": far} if isinstance(spoiled, dict) and "token" in spoiled else spoiled
    store.collections["places"].database.command("collMod", "places", validator={})
    store.collections["places"].insert_one({"_id": QUEUE.id, "running": [entry], "starts": [entry]})
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", "1")]))
    store.run(permits.settle([QUEUE], "1", {}, ["task:a"]))
    assert not store.run(permits.reclaim([QUEUE])).has_found
    assert take(store, limit, ["a"], "1").task_ids == {"a"}
    assert [len(stored(store)[kind]) for kind in ("running", "starts")] in ([1, 0], [0, 1])


def test_a_document_in_use_does_not_expire(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "1")
    assert "expire_time" not in stored(store)
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", "1")]))
    assert stored(store)["expire_time"] > store.run(setup.check_server())
    take(store, Limit(starts=1, window_ms=60_000), ["task:b"], "2", KEY)
    assert stored(store, KEY)["expire_time"] > store.run(setup.check_server())


def test_queue_and_key_cannot_be_taken_for_another_pair() -> None:
    assert PermitPool('a", "b').id != PermitPool("a", "b").id
    assert PermitPool("a").id != PermitPool("a", "").id


def test_a_malformed_document_counts_as_empty(store: SyncStore) -> None:
    store.collections["places"].database.command("collMod", "places", validator={})
    store.collections["places"].insert_one({"_id": QUEUE.id, "running": "nonsense", "starts": 3})
    assert take(store, Limit(concurrency=1), ["a"], "1").task_ids == {"a"}
