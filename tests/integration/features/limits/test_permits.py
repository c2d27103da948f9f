"""Places: never more than the limit, whoever asks at once, and none kept for a run that there is not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask.database import setup
from mtask.errors import DatabaseError
from mtask.features.controls.rules import Limit
from mtask.features.limits import operations as permits
from mtask.features.limits.operations import HeldPermit, PermitPool, PermitRequest, Wanted
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations.claim import fresh_token
from mtask.kernel.statements.finish import Outcome
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
    store: SyncStore,
    limit: Limit,
    task_ids: Sequence[str],
    token: str,
    pool: PermitPool = QUEUE,
    *,
    is_single: bool = True,
) -> permits.PermitGrant:
    request = PermitRequest(pool, limit, [Wanted(task_id, is_single=is_single) for task_id in task_ids])
    return store.run(permits.take([request], "w", token))[pool]


def claimed(store: SyncStore, key: str, token: str) -> Document:
    publish(store, key)
    (document,) = store.run(claims.claim([f"task:{key}"], "w", token))
    return document


def lapse(store: SyncStore, task_id: str, ago: timedelta = timedelta(1)) -> None:
    expire_time = store.run(setup.check_server()) - ago
    lapsed = {"$set": {"task_state.worker_states.$[].ping_expire_time": expire_time}}
    store.tasks.update_one({"_id": task_id}, lapsed)


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
        assert third.next_time(max(starts)) == min(starts) + timedelta(milliseconds=60_000)
        assert third.next_time(min(starts) - timedelta(milliseconds=1)) is None  # a start whose time is not known yet


def test_both_bounds_hold(store: SyncStore) -> None:
    limit = Limit(concurrency=5, starts=2, window_ms=60_000)
    assert take(store, limit, ["a", "b", "c"], "1").task_ids == {"a", "b"}
    store.run(permits.give_back([HeldPermit(QUEUE, "a", "1"), HeldPermit(QUEUE, "b", "1")], "w"))
    assert take(store, limit, ["c"], "2").task_ids == frozenset()
    assert [len(stored(store)[name]) for name in ("running", "starts")] == [0, 2]


def test_several_permits_at_once(store: SyncStore) -> None:
    one = Limit(concurrency=1)
    requests = [
        PermitRequest(QUEUE, Limit(concurrency=2), [Wanted(t) for t in ["a", "b"]]),
        PermitRequest(KEY, one, [Wanted(t) for t in ["b", "c"]]),
    ]
    first = store.run(permits.take(requests, "w", "1"))
    assert first[QUEUE].task_ids == {"a", "b"}
    assert first[KEY].task_ids == {"b"}
    second = store.run(permits.take(requests, "w", "2"))
    assert not second[QUEUE].task_ids | second[KEY].task_ids


def test_of_any_number_that_ask_at_once_no_more_than_the_limit_get_one(store: SyncStore) -> None:
    limit = Limit(concurrency=7, starts=9, window_ms=60_000)

    def ask(number: int) -> int:
        if number % 2:
            return len(take(store, limit, [f"{number}-{n}" for n in range(3)], f"t{number}").task_ids)
        requests = [
            PermitRequest(QUEUE, limit, [Wanted(t) for t in [f"{number}-a"]]),
            PermitRequest(KEY, limit, [Wanted(t) for t in [f"{number}-a"]]),
        ]
        return len(store.run(permits.take(requests, "w", f"t{number}"))[QUEUE].task_ids)

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(ask, range(32)))
    assert sum(got) == 7
    assert len(stored(store)["running"]) == 7
    assert len(stored(store, KEY)["running"]) <= 7


def test_what_was_not_claimed_is_given_back_and_a_start_counts_from_its_time(store: SyncStore) -> None:
    limit = Limit(concurrency=3, starts=3, window_ms=60_000)
    taken = take(store, limit, ["task:a", "task:b"], "1")
    document = claimed(store, "a", "1")
    claim_time = runs_in(document)[0]["claim_time"]
    assert taken.claim_by is not None
    assert claim_time < taken.claim_by
    store.run(permits.settle([QUEUE], "w", {("task:a", "1"): claim_time}, [("task:b", "1")]))
    assert (stored(store)["starts"], stored(store)["start_times"]) == ([], [claim_time])
    assert [entry["task_id"] for entry in stored(store)["running"]] == ["task:a"]


def test_what_is_in_doubt_keeps_its_permit(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "1")
    store.run(permits.settle([QUEUE], "w", {}))
    assert len(stored(store)["running"]) == 1
    assert not store.run(permits.reclaim([QUEUE], "w")).has_found  # its claim may come true yet


def test_a_permit_whose_run_is_closed_or_lapsed_is_given_back_by_whoever_looks(store: SyncStore) -> None:
    limit = Limit(concurrency=3)
    for key in "abc":
        take(store, limit, [f"task:{key}"], f"t{key}")
        claimed(store, key, f"t{key}")
    assert not store.run(permits.reclaim([QUEUE], "w")).has_found
    store.run(claims.finish([Outcome("task:a", "ta-0", RunStatus.SUCCESS)]))
    lapse(store, "task:b")
    assert store.run(permits.reclaim([QUEUE], "w")).has_found
    assert [entry["task_id"] for entry in stored(store)["running"]] == ["task:c"]
    # A ping that was under way when the lapse was seen cannot bring the run back: it is closed.
    assert runs_in(store.tasks.find_one({"_id": "task:b"}) or {})[0]["status"] == "TIMEOUT"


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_permit_of_a_lapsed_run_is_left_to_its_own_task_for_a_while(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    """Whoever rescues the task closes the run before it asks. Given back between, the permit would go to others."""
    assert ask(store, "w1", wanted("t1")).task_ids == {"t1"}
    token = stored(store)["running"][0]["token"]
    publish(store, "a")
    store.collections["places"].update_one({}, {"$set": {"running.0.task_id": "task:a"}})
    store.run(claims.claim(["task:a"], "w1", token))
    lapse(store, "task:a", permits.RESCUE / 2)
    if is_closed:
        store.run(claims.settle(["task:a"]))
    monkeypatch.setattr(permits, "RESCUE", timedelta(hours=1))
    assert not ask(store, "w2", wanted("t9")).task_ids
    found = store.run(permits.reclaim([QUEUE], "w2"))
    assert not found.has_found
    assert found.next_lapse is not None
    assert called(store) == []  # t9 waits for it, too
    monkeypatch.setattr(permits, "RESCUE", timedelta(0))
    assert store.run(permits.reclaim([QUEUE], "w3")).has_found  # nobody has rescued it
    assert called(store) == ["w2"]


def test_a_permit_is_given_back_by_nobody_but_its_own_claim(store: SyncStore) -> None:
    """Several may claim one task at once, and it is claimed anew while its last run is still to be taken down."""
    limit = Limit(concurrency=3, starts=3, window_ms=60_000)
    for token in ("lost", "over", "live"):
        take(store, limit, ["task:a"], token, is_single=False)
    store.run(permits.settle([QUEUE], "w", {}, [("task:a", "lost")]))
    for kind in ("running", "starts"):
        assert [entry["token"] for entry in stored(store)[kind]] == ["over", "live"]
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", "over")], "w"))
    assert [entry["token"] for entry in stored(store)["running"]] == ["live"]


def test_a_permit_whose_claim_never_came_is_given_back_after_a_while(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "1")
    now = store.run(setup.check_server())
    for ago, is_over in ((5, False), (7, True)):  # a claim that was begun in time is written that much later at most
        was_until = {"$set": {"running.0.claim_by": now - timedelta(seconds=ago)}}
        store.collections["places"].update_one({}, was_until)
        assert store.run(permits.reclaim([QUEUE], "w")).has_found is is_over
    assert stored(store)["running"] == []


def test_the_look_says_when_the_next_lease_lapses(store: SyncStore) -> None:
    take(store, Limit(concurrency=2), ["task:a", "task:b"], "1")
    publish(store, "a", worker_timeout=60)
    publish(store, "b", worker_timeout=90)
    assert store.run(permits.reclaim([QUEUE], "w")).next_lapse is None
    store.run(claims.claim(["task:a", "task:b"], "w", "1"))
    lapse = store.run(permits.reclaim([QUEUE], "w")).next_lapse
    assert lapse is not None
    assert timedelta(0) < lapse <= timedelta(seconds=60) + permits.RESCUE


def test_a_run_without_a_lease_whose_task_has_ended_keeps_no_permit(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "ta")
    claimed(store, "a", "ta")
    no_lease = {"$unset": {"task_state.worker_states.0.ping_expire_time": ""}}
    store.tasks.update_one({}, no_lease, bypass_document_validation=True)
    assert not store.run(permits.reclaim([QUEUE], "w")).has_found  # somebody will see to it first
    store.tasks.update_one({}, {"$set": {"task_state.status": "FAIL"}}, bypass_document_validation=True)
    assert store.run(permits.reclaim([QUEUE], "w")).has_found
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
    assert store.run(permits.reclaim([QUEUE], "w")).has_found
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
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", "1")], "w"))
    store.run(permits.settle([QUEUE], "w", {}, [("task:a", "1")]))
    assert not store.run(permits.reclaim([QUEUE], "w")).has_found
    assert take(store, limit, ["a"], "1").task_ids == {"a"}
    assert [len(stored(store)[kind]) for kind in ("running", "starts")] in ([1, 0], [0, 1])


def test_a_document_in_use_does_not_expire(store: SyncStore) -> None:
    take(store, Limit(concurrency=1), ["task:a"], "1")
    assert "expire_time" not in stored(store)
    store.run(permits.give_back([HeldPermit(QUEUE, "task:a", "1")], "w"))
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


# --- the order of those that wait ---------------------------------------------------------------------------

_TIME = datetime(2026, 1, 1, tzinfo=UTC)


def wanted(*task_ids: str, begins: int = 1, tenant: str = "") -> list[Wanted]:
    """Return tasks whose priority is the number behind their letter."""
    return [Wanted(task_id, (begins, -int(task_id[1:]), _TIME), tenant) for task_id in task_ids]


def ask(store: SyncStore, worker: str, tasks: Sequence[Wanted], *, limit: int = 1, **given: Any) -> permits.PermitGrant:
    request = PermitRequest(QUEUE, Limit(concurrency=limit), tasks, **given)
    return store.run(permits.take([request], worker, f"{worker}{fresh_token()}"))[QUEUE]


def called(store: SyncStore) -> list[str]:
    return str(stored(store).get("call", "")).split("\n")[1:-1]


def running(store: SyncStore) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = stored(store)["running"]
    return entries


def give_back_all(store: SyncStore, worker: str) -> None:
    held = [HeldPermit(QUEUE, entry["task_id"], entry["token"]) for entry in running(store)]
    store.run(permits.give_back(held, worker))


def test_who_returns_a_permit_takes_it_again_only_if_no_better_task_waits_elsewhere(store: SyncStore) -> None:
    assert ask(store, "a", wanted("t5", "t4")).task_ids == {"t5"}
    assert not ask(store, "b", wanted("u9", "u1")).task_ids
    assert called(store) == []
    give_back_all(store, "a")
    assert called(store) == ["b"]
    refused = ask(store, "a", wanted("t4"))
    assert (refused.task_ids, refused.has_rivals, refused.is_crowded) == (frozenset(), True, False)
    assert ask(store, "b", wanted("u9", "u1")).task_ids == {"u9"}
    give_back_all(store, "b")
    assert called(store) == ["a"]  # its t4 goes before u1
    assert ask(store, "a", wanted("t4")).task_ids == {"t4"}


def test_a_permit_goes_to_the_worker_that_asks_if_the_others_wait_for_worse_or_the_same_tasks(store: SyncStore) -> None:
    ask(store, "a", wanted("t5", "t4"))
    assert ask(store, "b", wanted("t4", "t2")).is_listed
    give_back_all(store, "a")
    assert called(store) == ["b"]
    assert ask(store, "a", wanted("t4", "t3")).task_ids == {"t4"}
    waiting = [[task["task_id"] for task in of["tasks"]] for of in stored(store)["waiting"]]
    assert waiting == [["t2"], ["t3"]]


def test_for_the_tasks_that_a_worker_asks_for_itself_no_other_one_is_called(store: SyncStore) -> None:
    ask(store, "a", wanted("t9", "t8", "t4", "t3"), limit=2)
    ask(store, "b", wanted("t4", "t3"), limit=2)
    held = [HeldPermit(QUEUE, entry["task_id"], entry["token"]) for entry in running(store)]
    store.run(permits.give_back(held[:1], "a", 1))
    assert called(store) == []
    store.run(permits.give_back(held, "a", 1))  # two permits, and it has room for one more run
    assert called(store) == ["b"]


@pytest.mark.parametrize(("at_hand", "names"), [(2, []), (1, ["b"])])
def test_for_the_tasks_that_a_worker_asks_for_next_no_other_one_is_called(
    store: SyncStore, at_hand: int, names: list[str]
) -> None:
    ask(store, "holder", wanted("h1", "h2", "h3"), limit=3)
    ask(store, "b", wanted("t4", "t3"), limit=3)
    store.collections["places"].update_one({}, {"$set": {"running": []}})
    first = ask(store, "a", wanted("t5"), limit=3, waiting=wanted("t4", "t3"), at_hand=at_hand)
    assert first.task_ids == {"t5"}
    assert first.left == 2
    assert called(store) == names


@pytest.mark.parametrize(("rooms", "name"), [((0, 0), "c"), ((1, 0), "b"), ((1, 1), "c"), ((0, 1), "c")])
def test_of_the_workers_that_list_a_task_one_is_called_that_has_room_and_has_asked_last(
    store: SyncStore, rooms: tuple[int, int], name: str
) -> None:
    ask(store, "a", wanted("t9"))
    for worker, at_hand in zip("bc", rooms, strict=True):
        ask(store, worker, wanted("t4", "t3"), at_hand=at_hand)
    give_back_all(store, "a")
    assert called(store) == [name]


def test_worker_is_called_when_others_have_taken_all_of_its_tasks_that_are_listed(store: SyncStore) -> None:
    """It may have more: it lists only the first ones, and some may have come since."""
    ask(store, "holder", wanted("t9", "t8"), limit=2)
    ask(store, "b", wanted("t4", "t3"), limit=2)
    ask(store, "c", wanted("t3"), limit=2)
    one, _ = running(store)
    store.run(permits.give_back([HeldPermit(QUEUE, one["task_id"], one["token"])], "a"))
    before = called(store)
    assert ask(store, "a", wanted("t4", "t3"), limit=2).task_ids == {"t4"}
    assert called(store) == before  # t3 is left of both
    give_back_all(store, "a")
    assert ask(store, "a", wanted("t3"), limit=2).task_ids == {"t3"}
    assert called(store) == ["b", "c"]


def test_interrupted_tasks_go_before_any_priority(store: SyncStore) -> None:
    ask(store, "a", wanted("t9"))
    ask(store, "b", wanted("u1", begins=0))
    give_back_all(store, "a")
    assert not ask(store, "a", wanted("t9")).task_ids
    assert ask(store, "b", wanted("u1", begins=0)).task_ids == {"u1"}


def test_of_several_free_permits_as_many_are_left_as_better_tasks_wait(store: SyncStore) -> None:
    ask(store, "a", wanted("t9", "t8", "t7", "t6"), limit=4)
    ask(store, "b", wanted("u9", "u5"), limit=4)
    ask(store, "c", wanted("u9", "v1"), limit=4)  # the same task in two workers counts once
    give_back_all(store, "a")
    assert sorted(called(store)) == ["b", "c"]
    assert ask(store, "a", wanted("t6", "t4", "t3", "t2", "t1"), limit=4).task_ids == {"t6", "t4"}


def test_a_waiting_worker_that_has_died_keeps_permits_for_a_while_only(store: SyncStore) -> None:
    ask(store, "a", wanted("t5"))
    ask(store, "b", wanted("u9"))
    give_back_all(store, "a")
    assert not ask(store, "a", wanted("t5")).task_ids
    over = {"$set": {"waiting.$[of].until": store.run(setup.check_server()) - timedelta(milliseconds=1)}}
    store.collections["places"].update_one({}, over, array_filters=[{"of.worker_id": "b"}])
    assert ask(store, "a", wanted("t5")).task_ids == {"t5"}


def test_a_worker_without_room_withdraws_and_the_next_one_is_called(store: SyncStore) -> None:
    ask(store, "a", wanted("t5"))
    ask(store, "b", wanted("u9"))
    ask(store, "c", wanted("v3"))
    give_back_all(store, "a")
    assert called(store) == ["b"]
    assert not ask(store, "b", []).is_listed
    assert called(store) == ["c"]


def test_what_nobody_waits_for_is_told_to_nobody(store: SyncStore) -> None:
    ask(store, "a", wanted("t5", "t4"))
    before = stored(store)["quiet_time"]
    give_back_all(store, "a")
    after = stored(store)
    assert after["quiet_time"] > before  # the only task that waits is its own
    assert "call" not in after


def test_another_worker_gets_no_second_permit_for_a_task_whose_claim_is_under_way(store: SyncStore) -> None:
    ask(store, "a", wanted("t5"), limit=3)
    second = ask(store, "b", wanted("t5", "t4", "t3"), limit=3, most=2)
    assert second.task_ids == {"t4", "t3"}
    assert second.under_way == {"t5"}


def test_tenants_take_turns_over_all_workers(store: SyncStore) -> None:
    """Each asks for its own tenant, and the permits go round, whoever asks more often."""
    order: list[str] = []
    tasks = {
        "a": wanted(*(f"a{n}" for n in range(9)), tenant="a"),
        "b": wanted(*(f"b{n}" for n in range(3)), tenant="b"),
    }
    ask(store, "c", wanted("c0", tenant="c"), is_fair=True)
    for _ in range(12):
        for worker in "aab":
            if not tasks[worker]:
                continue
            got = ask(store, worker, tasks[worker], is_fair=True).task_ids
            tasks[worker] = [task for task in tasks[worker] if task.task_id not in got]
            order += sorted(got)
        give_back_all(store, "c")
    assert "".join(task_id[0] for task_id in order)[:6] in ("ababab", "bababa"), order


def test_tasks_of_one_tenant_keep_their_order_over_all_workers(store: SyncStore) -> None:
    ask(store, "holder", wanted("h0", "h1"), limit=2, is_fair=True)
    ask(store, "a", wanted("b9", "b8", tenant="b"), limit=2, is_fair=True)
    ask(store, "b", wanted("b1", tenant="b"), limit=2, is_fair=True)
    give_back_all(store, "holder")
    assert called(store) == ["a"]
    assert not ask(store, "b", wanted("b1", tenant="b"), limit=2, is_fair=True).task_ids
    assert ask(store, "a", wanted("b9", "b8", tenant="b"), limit=2, is_fair=True).task_ids == {"b9", "b8"}


def test_one_request_takes_equal_turns_of_its_tenants(store: SyncStore) -> None:
    mixed = [*wanted("a9", "a8", "a7", tenant="a"), *wanted("b1", "b0", tenant="b"), *wanted("c5", tenant="c")]
    first = ask(store, "w", mixed, limit=4, is_fair=True)
    assert first.task_ids == {"a9", "b1", "c5", "a8"}
    assert (first.turn, first.turns) == (4, {"a": 4, "c": 2, "b": 3})
    give_back_all(store, "w")
    rest = [*wanted("a7", tenant="a"), *wanted("b0", tenant="b")]
    assert ask(store, "w", rest, limit=1, is_fair=True).task_ids == {"b0"}


@pytest.mark.parametrize("spoiled", [5, [5], [{"worker_id": "x"}], [{"worker_id": "x", "until": "y", "tasks": 1}]])
@pytest.mark.parametrize("name", ["waiting", "turns", "turn", "call", "concurrency", "start_times"])
def test_what_is_malformed_in_the_order_hinders_nothing(store: SyncStore, name: str, spoiled: Any) -> None:
    for is_fair in (False, True):
        ask(store, "a", wanted("t5"), is_fair=is_fair)
        ask(store, "b", wanted("u1"), is_fair=is_fair)
        store.collections["places"].update_one({}, {"$set": {name: spoiled}}, bypass_document_validation=True)
        give_back_all(store, "a")
        assert ask(store, "b", wanted("u1"), is_fair=is_fair).task_ids == {"u1"}
        give_back_all(store, "b")


def test_start_is_permitted_a_moment_before_the_window_has_room_and_waits_for_its_time(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtask.features.limits.statements.LEAD_MS", 30_000)  # however slow the machine is
    limit = Limit(starts=2, window_ms=60_000)
    take(store, limit, ["a", "b"], "1")
    now = store.run(setup.check_server())
    times = {"a": now - timedelta(seconds=45), "b": now}
    store.run(permits.settle([QUEUE], "w", {(task_id, "1"): time for task_id, time in times.items()}))
    third = take(store, limit, ["c", "d"], "2")
    assert third.task_ids == {"c"}
    assert third.not_before == {"c": times["a"] + timedelta(seconds=60)}
    store.run(permits.settle([QUEUE], "w", {}, [("c", "2")]))  # it was not claimed: the next one waits as long
    assert take(store, limit, ["e"], "3").not_before == {"e": third.not_before["c"]}
