"""What readers are told of pools of permits, whatever is stored in them; and what the validator lets workers write."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask.database import setup
from mtask.features.controls.rules import Limit
from mtask.features.limits import operations as permits
from mtask.features.limits import usage as pools
from mtask.features.limits.operations import HeldPermit, PermitPool, PermitRequest, Wanted
from mtask.features.limits.usage import Held, PoolContent
from mtask.kernel.document.rules import Rank
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.claim import fresh_token
from mtask.kernel.statements.finish import Outcome
from tests.clients import server_now
from tests.integration.stores import publish

QUEUE, KEY, TENANT = PermitPool("default"), PermitPool("default", "k", "acme"), PermitPool("default", tenant="acme")
_LONG_AGO, _FAR = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)
Document = dict[str, Any]


@pytest.fixture(autouse=True)
def set_up(store: SyncStore) -> None:
    store.run(setup.ensure(setup.EVERY))


def ask(store: SyncStore, worker: str, wanted: Sequence[Wanted], pool: PermitPool = QUEUE, **given: Any) -> str:
    """Ask for permits, one of which is free at most; return the token of the request."""
    token = fresh_token()
    limit = given.pop("limit", Limit(concurrency=1))
    store.run(permits.take([PermitRequest(pool, limit, wanted, **given)], worker, token))
    return token


def rank(store: SyncStore, priority: int, begins: int = 1) -> Rank:
    return begins, -priority, server_now(store) - timedelta(seconds=10)


def content(store: SyncStore, pool: PermitPool = QUEUE) -> PoolContent:
    return store.run(pools.read([pool]))[pool]


def test_pool_tells_who_has_the_permits_and_who_waits_in_which_worker(store: SyncStore) -> None:
    token = ask(store, "w1", [Wanted("task:a", rank(store, 5)), Wanted("task:b", rank(store, 4))])
    ask(store, "w2", [Wanted("task:c", rank(store, 9, 0)), Wanted("task:b", rank(store, 4))])
    found = content(store)
    assert [(held.task_id, held.token) for held in found.running] == [("task:a", token)]
    listed = {w.worker_id: [(each.task_id, each.key[:2]) for each in w.tasks] for w in found.asking}
    assert listed == {"w1": [("task:b", (1, -4))], "w2": [("task:c", (0, -9)), ("task:b", (1, -4))]}
    assert [waiter.count for waiter in found.waiters] == [1, 2]
    assert found.turns is None
    assert found.update_time is not None
    assert found.now - found.update_time < timedelta(seconds=30)
    assert store.run(pools.read([KEY])) == {}


def test_key_of_a_fair_pool_goes_by_turns(store: SyncStore) -> None:
    for worker, tenant in (("w1", "a"), ("w2", "b")):
        given = [Wanted(f"task:{tenant}:{n}", rank(store, 1), tenant) for n in range(2)]
        ask(store, worker, given, is_fair=True)
    found = content(store)
    assert found.turns == {"a": 1}
    keys = {each.task_id: each.key[:3] for waiter in found.asking for each in waiter.tasks}
    assert keys == {"task:a:1": (1, 0, 1), "task:b:0": (1, 0, 0), "task:b:1": (1, 1, 0)}


def test_call_tells_that_the_pool_was_asked_lately(store: SyncStore) -> None:
    token = ask(store, "w1", [Wanted("task:a", rank(store, 5))])
    ask(store, "w2", [Wanted("task:c", rank(store, 9))])
    before = store.database["places"].find_one_and_update({}, {"$set": {"quiet_time": _LONG_AGO}})
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", token)], "w1"))
    assert before is not None
    found = content(store)
    assert found.update_time is not None
    assert found.update_time >= before["quiet_time"]


def test_pools_of_a_queue_are_told_where_most_wait_first(store: SyncStore) -> None:
    for n in range(4):
        ask(store, "w1", [Wanted(f"task:{n}", rank(store, 1))], PermitPool("default", f"k{n}"))
    ask(store, "w1", [Wanted(f"task:x{n}", rank(store, n)) for n in range(3)], KEY)
    ask(store, "w1", [Wanted(f"task:y{n}", rank(store, n)) for n in range(2)], TENANT)
    token = ask(store, "w1", [Wanted("task:z")], PermitPool("default", "unused"))
    store.run(permits.give_back([HeldPermit(PermitPool("default", "unused"), "task:z", token)], "w1"))
    others = (PermitPool("default2"), PermitPool("default2", "k"), PermitPool("defaul"), PermitPool(None, tenant="a"))
    for pool in others:
        ask(store, "w1", [Wanted("task:o")], pool)
    first = [KEY, TENANT, PermitPool("default", "k0")]
    assert [found.pool for found in store.run(pools.of_queue("default", 3))] == first
    ask(store, "w1", [Wanted("task:q")])
    found = store.run(pools.of_queue("default", 20))
    assert [each.pool for each in found] == [QUEUE, *first, *(PermitPool("default", f"k{n}") for n in (1, 2, 3))]
    (waiter,) = found[1].asking
    assert (waiter.count, len(waiter.tasks)) == (2, 1)


def test_runs_of_permits_are_read_from_their_tasks(store: SyncStore) -> None:
    for key, token in (("a", "ta"), ("b", "tb")):
        publish(store, key)
        store.run(claims.claim([f"task:{key}"], "w1", token))
    store.run(claims.finish([Outcome("task:b", "tb-0", RunStatus.SUCCESS)]))
    now = server_now(store)
    held = [Held(f"task:{key}", token, now) for key, token in (("a", "ta"), ("a", "other"), ("b", "tb"), ("c", "tc"))]
    found = store.run(pools.holders(held))
    assert found.keys() == {("task:a", "ta"), ("task:b", "tb")}
    assert (found["task:a", "ta"].worker_id, found["task:a", "ta"].is_over) == ("w1", False)
    assert found["task:b", "tb"].is_over
    assert found["task:b", "tb"].end_time is not None
    assert store.run(pools.holders([])) == {}


@pytest.mark.parametrize(
    "spoiled",
    [
        5,
        [5, None, "x", [1]],
        [{}, {"task_id": 5, "worker_id": 7, "tenant": 5}],
        [{"task_id": "a", "token": "t", "worker_id": "w", "tenant": "a", "until": "x", "claim_by": 3, "time": None}],
        [{"task_id": "a", "token": "t", "worker_id": "w", "until": _FAR, "claim_by": _FAR, "time": _FAR, "tasks": 5}],
    ],
)
@pytest.mark.parametrize("name", ["running", "starts", "start_times", "waiting", "turns", "call", "quiet_time"])
def test_what_is_malformed_is_told_to_nobody(store: SyncStore, name: str, spoiled: Any) -> None:
    ask(store, "w1", [Wanted("task:a", rank(store, 5), "a"), Wanted("task:b", rank(store, 4), "a")], is_fair=True)
    store.database["places"].update_one({}, {"$set": {name: spoiled}}, bypass_document_validation=True)
    found = content(store)
    sizes = {"running": len(found.running), "waiting": len(found.waiters), "starts": len(found.starts)}
    assert sizes == {"running": 1, "waiting": 1, "starts": 0} | ({name: 0} if name in sizes else {})
    assert [each.pool for each in store.run(pools.of_queue("default", 5))] == [QUEUE]


@pytest.mark.parametrize("listed", [5, [5], [{"task_id": "x", "rank": 5}], [{"task_id": "x", "rank": ["a", 1, 5]}]])
def test_malformed_tasks_of_a_worker_are_counted_and_not_compared(store: SyncStore, listed: Any) -> None:
    ask(store, "w1", [Wanted("task:a", rank(store, 5)), Wanted("task:b", rank(store, 4))])
    store.database["places"].update_one({}, {"$set": {"waiting.0.tasks": listed}})
    (waiter,) = content(store).waiters
    assert list(waiter.tasks) == []


def test_document_that_is_no_pool_is_left_out(store: SyncStore) -> None:
    for pool_id in ("x", "[]", "[1]", '{"a": 1}', '["a", "b", "c", "d"]', '["default", 5]'):
        store.database["places"].insert_one({"_id": pool_id, "running": [], "schema_version": 1})
        assert pools.pool_of(pool_id) is None
    assert store.run(pools.of_queue("default", 5)) == []
    for pool in (QUEUE, KEY, TENANT, PermitPool(None, tenant="a"), PermitPool('a", "b')):
        assert pools.pool_of(pool.id) == pool


@pytest.mark.parametrize(
    "own", [{"until": "x", "tasks": 5}, {"tasks": [{"task_id": 5}]}, {"until": None, "tasks": ["x"], "other": 1}]
)
def test_validator_refuses_no_update_of_a_worker_whose_entry_is_malformed(store: SyncStore, own: Document) -> None:
    token = ask(store, "w1", [Wanted("task:a", rank(store, 5)), Wanted("task:b", rank(store, 4))])
    spoiled = {"waiting": [{"worker_id": "w1", **own}], "concurrency": "x", "call": 5, "quiet_time": 5}
    store.database["places"].update_one({}, {"$set": spoiled}, bypass_document_validation=True)
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", token)], "w1"))
    ask(store, "w1", [Wanted("task:b", rank(store, 4))])
    assert [held.task_id for held in content(store).running] == ["task:b"]
