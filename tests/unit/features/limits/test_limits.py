"""What a task is told that waits for a permit: of which limit, who holds the permits, and who goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from mtask.doctor.explain import waits_for
from mtask.features.controls.rules import Limit
from mtask.features.limits import doctor as limits
from mtask.features.limits.doctor import Bound, limited_pools, name_of, unasked
from mtask.features.limits.operations import PermitPool
from mtask.features.limits.usage import Held, Holder, Listed, PoolContent, Waiter
from mtask.kernel.document.task import Task
from mtask.search.findings import Reason
from tests import build
from tests.unit.doctor.test_explain import NOW, after, control, task, worker

POOL = PermitPool("default")
LONG_AGO, _EARLIER, _SOON = after(-3600), after(-20), after(4)


def content(
    *,
    running: Sequence[str] = (),
    starts: Sequence[datetime] = (),
    waiting: dict[str, list[tuple[str, int]]] | None = None,
    turns: dict[str, float] | None = None,
    until: datetime = _SOON,
    updated: datetime | None = LONG_AGO,
    claim_by: datetime = _EARLIER,
) -> PoolContent:
    """Return what a pool holds. `waiting`: by worker, tasks and their priorities. The tenant begins an id's key."""
    held = [Held(task_id, "t", claim_by) for task_id in running]
    made = PoolContent(POOL, held, starts, (), turns, updated, NOW)
    waiters = []
    for worker_id, tasks in (waiting or {}).items():
        listed, counts = [], dict[str, int]()
        for task_id, priority in tasks:
            tenant = task_id.split(":")[1]
            index = counts.setdefault(tenant, 0)
            counts[tenant] += 1
            key = made.key((1, -priority, after(-60).timestamp()), tenant=tenant, index=index)
            listed.append(Listed(task_id, key, tenant))
        waiters.append(Waiter(worker_id, until, len(listed), listed))
    return PoolContent(POOL, held, starts, waiters, turns, updated, NOW)


def reasons(found: PoolContent | None, of: Task | None = None, viewer: str | None = None, **limit: Any) -> list[Reason]:
    """Return the reasons of a due task in a limited queue, beside a worker with free slots."""
    limit = limit or {"concurrency": 2}
    runs = {
        ("a:1", "t"): Holder("w1", False, None),
        ("a:2", "t"): Holder("w2", True, after(-1)),
        ("a:acme:1", "t"): Holder("w1", False, None, "acme"),
        ("a:acme:nobody", "t"): Holder("w1", False, None),
    }
    bounds = {POOL: Bound(POOL, Limit.model_validate(limit), found, runs)}
    return waits_for(of or task(), [worker()], NOW, [control("queue", "default", limit=limit)], bounds, viewer)


def texts(found: Sequence[Reason]) -> list[tuple[str, str]]:
    return [(reason.code, reason.message) for reason in found]


def test_who_holds_the_permits_is_named_with_the_worker() -> None:
    assert texts(reasons(content(running=["a:1", "a:2"]))) == [
        (
            "limited",
            "the limit of the queue 'default', 2 at once, is reached: "
            "a:1 (running in w1), a:2 (ended in w2) hold its permits",
        )
    ]
    many = reasons(content(running=[f"a:{n}" for n in range(1, 8)]), concurrency=7)[0].message
    assert many.endswith("a:1 (running in w1), a:2 (ended in w2), a:3 and 4 more hold its permits")
    one = reasons(content(running=["a:" + "x" * 500]), concurrency=1)[0].message
    assert one.endswith("x… holds its permit")
    assert len(one) < 200


def test_better_tasks_and_their_workers_are_counted_once_each() -> None:
    waiting = {"w1": [("a:9", 9), ("a:8", 8)], "w2": [("a:9", 9), ("a:0", -1)], "w3": [("a:0", -1)]}
    found = reasons(content(running=["a:1", "a:2"], waiting=waiting))
    assert [reason.code for reason in found] == ["limited", "behind"]
    assert found[1].message == "2 better tasks wait for a permit of the queue 'default' before it, in w1, w2"
    found = reasons(content(running=["a:1", "a:2"], waiting={"w1": [("a:9", 9)]}))
    assert found[1].message == "1 better task waits for a permit of the queue 'default' before it, in w1"


def test_free_permit_that_is_kept_for_a_better_task_is_told() -> None:
    kept = content(running=["a:1"], waiting={"w2": [("a:9", 9), ("a:8", 8)]})
    (found,) = reasons(kept)
    assert found.code == "reserved"
    assert found.message.startswith("a free permit of the queue 'default' is kept for a better task: a:9, and 1 more")
    assert found.message.endswith(", which wait in w2")
    assert [reason.code for reason in reasons(kept, concurrency=9)] == ["not_taken"], "permits are left for it"
    over = content(running=["a:1"], waiting={"w2": [("a:9", 9)]}, until=after(-1))
    assert [reason.code for reason in reasons(over)] == ["not_taken"], "nobody asks any more"


def test_used_up_starts_tell_when_the_next_one_is_permitted() -> None:
    starts = [after(-70), after(-50), after(-40)]
    (found,) = reasons(content(starts=starts), starts=2, window_ms=60_000)
    assert found.message == "the limit of the queue 'default', 2 starts in 60 s, is reached"
    assert found.until == after(10)
    (found,) = reasons(content(starts=[*starts, after(-1)]), starts=2, window_ms=60_000)
    assert found.until == after(20), "the limit was lowered: two starts count too many"
    (found,) = reasons(content(starts=[after(1)]), starts=1, window_ms=60_000)
    assert (found.code, found.until) == ("limited", None), "the start under way has no time yet"
    assert [r.code for r in reasons(content(starts=starts), starts=3, window_ms=60_000)] == ["not_taken"]


def test_pool_that_is_in_use_hands_its_free_permits_on_and_an_idle_one_is_conspicuous() -> None:
    (found,) = reasons(content(running=["a:1"], updated=after(-1)))
    assert texts([found]) == [
        ("limited", "the limit of the queue 'default', 2 at once, is shared with tasks that go before it; 1 in use now")
    ]
    assert [reason.code for reason in reasons(content(running=["a:1"]))] == ["not_taken"]
    assert [reason.code for reason in reasons(None)] == ["not_taken"]
    new = task(state={"create_time": after(-1)})
    assert [reason.code for reason in reasons(content(updated=after(-1)), new)] == ["due"]


def test_task_with_a_permit_of_its_own_waits_for_nobody() -> None:
    assert [r.code for r in reasons(content(running=["a:1", "a:b"], claim_by=after(1)))] == ["not_taken"]


def test_interrupted_task_is_behind_no_priority() -> None:
    begun = task(build.run("CANCELED", after(-5), after(30), fail_time=after(-3)))
    full = content(running=["a:1", "a:2"], waiting={"w1": [("a:9", 9)]})
    assert [reason.code for reason in reasons(full, begun)] == ["limited"]


def test_where_tenants_take_turns_the_better_tasks_are_those_of_the_next_turns() -> None:
    mine = task().model_copy(update={"tenant": "acme", "key": "acme:k", "id": "a:acme:k"})
    waiting = {"w1": [("a:acme:1", 5), ("a:beta:1", 0), ("a:beta:2", 0), ("a:beta:3", 0)]}
    full = content(running=["a:1", "a:2"], waiting=waiting, turns={"acme": 7, "beta": 9})
    # The first tasks of both, and then: acme's turn came longer ago than beta's.
    assert reasons(full, mine)[1].message.startswith("2 better tasks wait")
    full = content(running=["a:1", "a:2"], waiting=waiting, turns={"acme": 7, "beta": 6})
    assert reasons(full, mine)[1].message.startswith("3 better tasks wait")


def test_tenant_that_looks_sees_no_task_of_others() -> None:
    mine = task().model_copy(update={"tenant": "acme", "key": "acme:k", "id": "a:acme:k"})
    # Who publishes for no tenant may give a key that begins like acme's.
    full = content(running=["a:acme:nobody", "a:acme:1"], waiting={"w1": [("a:beta:9", 9)]})
    text = " ".join(reason.message for reason in reasons(full, mine, "acme"))
    assert "is reached: a:acme:1 (running in w1) and 1 more hold its permits" in text
    assert "beta" not in text
    assert "nobody" not in text
    full = content(running=["a:beta:1", "a:beta:2"])
    assert "is reached: 2 other tasks hold its permits" in reasons(full, mine, "acme")[0].message
    kept = content(running=["a:beta:1"], waiting={"w1": [("a:beta:9", 9)]})
    assert reasons(kept, mine, "acme")[0].message.endswith("is kept for a better task, which waits in w1")
    assert "a:beta:9" in reasons(kept, mine)[0].message
    own = content(running=["a:beta:1"], waiting={"w1": [("a:acme:9", 9)]})
    assert "a better task: a:acme:9, which" in reasons(own, mine, "acme")[0].message
    (waiter,) = own.asking
    listed = [replace(each, tenant="") for each in waiter.tasks]
    of_nobody = replace(own, waiters=[replace(waiter, tasks=listed)])
    assert "a better task, which" in reasons(of_nobody, mine, "acme")[0].message


def test_limits_come_before_the_workers_that_are_full() -> None:
    limit = Limit(concurrency=2)
    bounds = {POOL: Bound(POOL, limit, content(running=["a:1", "a:2"]), {})}
    holds = [control("queue", "default", limit={"concurrency": 2})]
    found = waits_for(task(), [worker(running_cnt=2)], NOW, holds, bounds)
    assert [reason.code for reason in found] == ["limited", "workers_busy"]
    assert waits_for(task(), [], NOW, holds, bounds)[0].code == "no_worker"


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        (PermitPool("mail"), "the queue 'mail'"),
        (PermitPool("mail", "k"), "the limit_key 'k' in the queue 'mail'"),
        (PermitPool("mail", "k", "acme"), "the limit_key 'k' of the tenant 'acme' in the queue 'mail'"),
        (PermitPool("mail", tenant="acme"), "the tenant 'acme' in the queue 'mail'"),
        (PermitPool(None, tenant="acme"), "the tenant 'acme'"),
    ],
)
def test_whose_permits_a_pool_holds_is_told_in_words(pool: PermitPool, name: str) -> None:
    assert name_of(pool) == name


def test_task_needs_a_permit_of_each_limit_and_keys_are_those_of_its_tenant() -> None:
    one = {"concurrency": 1}
    holds = [
        control("queue", "default", limit=one, key_limit={"concurrency": 2}, tenant_limit={"concurrency": 3}),
        control("tenant", "acme", limit={"concurrency": 4}),
        control("tenant", "beta", limit={"concurrency": 5}),
        control("queue", "other", limit={"concurrency": 6}),
    ]
    plain = task(limit_key="k")
    assert limited_pools(plain, holds) == {PermitPool("default", "k"): Limit(concurrency=2), POOL: Limit(concurrency=1)}
    mine = plain.model_copy(update={"tenant": "acme", "key": "acme:k", "id": "a:acme:k"})
    assert [(pool, limit.concurrency) for pool, limit in limited_pools(mine, holds).items()] == [
        (PermitPool("default", "k", "acme"), 2),
        (PermitPool("default", tenant="acme"), 3),
        (PermitPool(None, tenant="acme"), 4),
        (POOL, 1),
    ]
    assert limited_pools(mine, []) == {}
    assert limits.limit_of(PermitPool("default", "k"), holds[1:]) is None


def test_doctor_names_the_workers_that_asked_last_and_are_gone() -> None:
    found = content(waiting={"w1": [("a:9", 9)], "w2": [("a:9", 9)]}, until=after(-300))
    bound = Bound(POOL, Limit(concurrency=2), found, {})
    assert unasked([bound], ["w2"]) == ", and its limits have free permits; w1 asked last, and is gone"
    assert unasked([bound], ["w1", "w2"]) == ", and its limits have free permits"
    assert unasked([], ["w1"]) == ""


def test_limit_is_as_free_as_the_narrower_of_its_two_numbers() -> None:
    limit = Limit(concurrency=5, starts=3, window_ms=60_000)
    found = content(running=["a:1"], starts=[after(-10), after(-20), NOW - timedelta(days=1)])
    assert Bound(POOL, limit, found, {}).free == 1
    assert Bound(POOL, Limit(concurrency=1), found, {}).free == 0
    assert Bound(POOL, Limit(starts=3, window_ms=60_000), found, {}).running == ()
    assert Bound(POOL, limit, None, {}).free == 3
