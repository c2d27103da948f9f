"""Fair turns in the memory of a worker: who is next, and who is dropped when there is no room."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mtask.features.controls.fair_turns import Turns
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.ready import MAX_STAGGER, PREFERENCE
from mtask.kernel.worker.process.state import Served

NOW = 1000.0


def fair_queue(capacity: int = 1_000) -> PreemptionQueue:
    served = Served((), ())
    served.fair_queues = frozenset({"fair"})
    return PreemptionQueue(capacity, lambda: NOW, served=served, turns=Turns)


def push(queue: PreemptionQueue, tenant: str | None, count: int, *, due: float = NOW - 100, **given: int) -> None:
    """Queue tasks of one tenant. They are due one after the other."""
    for number in range(count):
        task_id = f"work:{tenant}:{number}"
        rank, priority = given.get("rank", 0), given.get("priority", 0)
        queue.push(task_id, "work", priority, due + number / 100, rank, queue="fair", tenant=tenant)


def taken(queue: PreemptionQueue, limit: int = 1, now: float = NOW) -> list[str]:
    """Take all that is ready. Return the tenants, in order."""
    order: list[str] = []
    while entries := queue.take(limit, now):
        order.extend(str(entry.tenant) for entry in entries)
    return order


def test_tenants_take_turns_whatever_the_age_and_the_priority_of_their_tasks() -> None:
    queue = fair_queue()
    push(queue, "acme", 50, due=NOW - 500, priority=9)
    push(queue, "beta", 3)
    push(queue, "coro", 2)
    assert sorted(taken(queue)[:6]) == ["acme", "acme", "beta", "beta", "coro", "coro"]


def test_one_group_holds_tasks_of_all_tenants() -> None:
    queue = fair_queue()
    push(queue, "acme", 50)
    push(queue, "beta", 50)
    assert Counter(str(entry.tenant) for entry in queue.take(20, NOW)) == {"acme": 10, "beta": 10}


def test_priority_goes_first_within_one_tenant() -> None:
    queue = fair_queue()
    push(queue, "acme", 3)
    queue.push("work:acme:urgent", "work", 5, NOW - 1, 0, queue="fair", tenant="acme")
    assert [entry.task_id for entry in queue.take(2, NOW)] == ["work:acme:urgent", "work:acme:0"]


def test_tasks_of_no_tenant_have_a_turn_of_their_own() -> None:
    queue = fair_queue()
    push(queue, "acme", 20)
    push(queue, None, 3)
    assert taken(queue)[:6].count("None") == 3


def test_other_queues_keep_their_order_by_priority_and_age() -> None:
    queue = fair_queue()
    push(queue, "acme", 5)
    queue.push("work:urgent", "work", 1, NOW, 0, queue="plain")
    queue.push("work:old", "work", 0, NOW - 500, 0, queue="plain")
    queue.push("work:young", "work", 0, NOW, 0, queue="plain")
    found = [entry.task_id for _ in range(8) for entry in queue.take(1, NOW)]
    assert found == ["work:urgent", "work:old", *(f"work:acme:{number}" for number in range(5)), "work:young"]


def test_task_that_another_worker_ranks_first_for_gets_the_turn_of_its_tenant_after_a_while() -> None:
    queue = fair_queue()
    push(queue, "acme", 200)
    push(queue, "beta", 3, due=NOW, rank=2)
    assert "beta" not in taken_some(queue, 50, NOW + MAX_STAGGER)
    assert taken_some(queue, 8, NOW + PREFERENCE + 1).count("beta") == 3


def taken_some(queue: PreemptionQueue, count: int, now: float) -> list[str]:
    return [str(entry.tenant) for _ in range(count) for entry in queue.take(1, now)]


def test_hints_of_a_flooding_tenant_push_out_only_its_own() -> None:
    queue = fair_queue(capacity=20)
    push(queue, "beta", 3, due=NOW - 1)
    push(queue, "coro", 2, due=NOW - 1)
    push(queue, "acme", 500, due=NOW - 500)
    assert queue.has_more
    assert len(queue) <= 25
    order = taken(queue)
    assert (order.count("beta"), order.count("coro")) == (3, 2)


def test_floods_of_a_fair_queue_and_of_another_leave_each_other_half_of_the_room() -> None:
    queue = fair_queue(capacity=20)
    push(queue, "acme", 100)
    for number in range(100):
        queue.push(f"work:{number}", "work", 9, NOW - 500, 0, queue="plain")
    held = [queue_of for _ in range(25) for queue_of in (entry.queue for entry in queue.take(1, NOW))]
    assert min(Counter(held).values()) >= 8


def test_queue_that_becomes_fair_takes_its_tasks_along() -> None:
    served = Served((), ())
    queue = PreemptionQueue(100, lambda: NOW, served=served, turns=Turns)
    push(queue, "acme", 5, due=NOW - 500)
    push(queue, "beta", 1)
    served.fair_queues = frozenset({"fair"})
    push(queue, "acme", 5, due=NOW - 500)
    push(queue, "beta", 1)
    assert len(queue) == 6
    assert "beta" in taken(queue)[:2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_every_task_is_taken_once_and_no_tenant_is_passed_over_twice(
    pushed: list[tuple[str, int, int, bool]],
) -> None:
    queue = fair_queue()
    for number, (tenant, priority, rank, is_begun) in enumerate(pushed):
        queue.push(f"work:{number}", "work", priority, NOW - 50, rank, is_begun=is_begun, queue="fair", tenant=tenant)
    left = Counter(tenant for tenant, *_ in pushed)
    waited: Counter[str] = Counter()
    for tenant in (order := taken(queue)):
        left[tenant] -= 1
        waited[tenant] = 0
        for other in "abc":
            waited[other] += other != tenant and left[other] > 0
            assert waited[other] <= 4
    assert Counter(order) == Counter(tenant for tenant, *_ in pushed)
    assert queue.next_ready(NOW) is None
