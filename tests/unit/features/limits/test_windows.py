"""Windows: what a worker offers of its limited queues, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast

import pytest

from mtask.features.controls.rules import Limit
from mtask.features.controls.worker import Controls
from mtask.features.limits.operations import PermitPool
from mtask.features.limits.pools import KEPT, Lane, Pools, PoolState
from mtask.features.limits.windows import SOON, Windows
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.ready import ALL
from mtask.kernel.worker.process.state import Served

NOW = 1000.0
QUEUE = PermitPool("q")


@dataclass
class _Control:
    """What windows read of the control of a queue."""

    limit: Limit | None = None
    key_limit: Limit | None = None
    tenant_limit: Limit | None = None


@dataclass
class _Controls:
    """What windows read of all controls."""

    limits: Mapping[str, _Control]
    tenant_limits: Mapping[str, Limit] = field(default_factory=dict)
    fair: Collection[str] = ()

    @property
    def served(self) -> _Controls:
        return self

    def is_fair(self, queue: str | None) -> bool:
        return queue in self.fair


class Scene:
    """A worker's queue, whose limited tasks wait in windows."""

    def __init__(self, *, fair: bool = False, tenant_limits: Mapping[str, Limit] | None = None, **limits: Any) -> None:
        """`limits`: how many runs at once `limit`, `key_limit` and `tenant_limit` allow."""
        control = _Control(**{kind: Limit(concurrency=most) for kind, most in limits.items()})
        controls = _Controls({"q": control, "other": control}, tenant_limits or {}, ("q",) if fair else ())
        self.pools = Pools(cast(Controls, controls), lambda: None)
        self.windows = Windows(self.pools)
        served = Served((), ())
        served.is_limited = True
        self.queue = PreemptionQueue(1_000, lambda: NOW, parking=self.windows, needs_gate=lambda _: True, served=served)

    def push(self, task_id: str, moment: float = 0.0, priority: int = 0, **fields: Any) -> None:
        """Queue a task that is due."""
        fields = {"queue": "q", "rank": 0, "due": NOW, **fields}
        self.queue.push(task_id, "work", priority, moment=moment, **fields)
        self.queue.has_ready(NOW)  # what is due is in the windows from now on

    def take(self, most: int = 100) -> list[str]:
        """Take what is offered, one by one."""
        taken: list[str] = []
        while len(taken) < most and (entries := self.queue.take(1, NOW)):
            taken += [entry.task_id for entry in entries]
        return taken

    def close(self, pool: PermitPool) -> None:
        """Let a pool have no permits."""
        self.pools.states[pool] = PoolState(budget=0, retry_at=monotonic() + SOON / 2)

    def open(self, pool: PermitPool, most: int = 1) -> None:
        """Let so many tasks ask a pool."""
        self.pools.give([pool], most)
        self.windows.reopen([pool])

    def best(self, pool: PermitPool, most: int = 100, free: Collection[PermitPool] = ()) -> list[str]:
        """Return what the pool is to list."""
        return [entry.task_id for entry in self.windows.best(pool, most, free)]


# --- the order --------------------------------------------------------------------------------------------------------


def test_tasks_go_in_the_order_of_their_documents_whenever_they_were_seen() -> None:
    scene = Scene(limit=10)
    scene.push("third", 30.0, due=NOW - 9)
    scene.push("second", 20.0, due=NOW - 1, rank=2)
    scene.push("first", 10.0, due=NOW - 5, rank=1)
    scene.push("urgent", 40.0, priority=1)
    assert scene.take() == ["urgent", "first", "second", "third"]


def test_interrupted_tasks_go_before_any_priority() -> None:
    scene = Scene(limit=10)
    scene.push("urgent", 1.0, priority=100)
    scene.push("interrupted", 9.0, is_begun=True)
    assert scene.best(QUEUE) == ["interrupted", "urgent"]
    assert scene.take() == ["interrupted", "urgent"]


def test_keys_and_tenants_do_not_change_the_order() -> None:
    scene = Scene(limit=10, key_limit=5)
    for number, (tenant, key) in enumerate([("a", "k"), ("b", None), ("a", None), (None, "k"), ("a", "k")]):
        scene.push(f"{number}", float(number), tenant=tenant, limit_key=key)
    assert scene.best(QUEUE) == ["0", "1", "2", "3", "4"]
    assert scene.take() == ["0", "1", "2", "3", "4"]


def test_task_with_a_lapsed_run_asks_though_all_permits_are_in_use() -> None:
    scene = Scene(limit=1)
    scene.close(QUEUE)
    scene.push("waits", 1.0, priority=9)
    scene.push("lapsed", 2.0, is_begun=True, is_lapsed=True)
    assert scene.take() == ["lapsed"]


# --- permits ----------------------------------------------------------------------------------------------------------


def test_no_more_tasks_ask_at_once_than_can_get_a_permit() -> None:
    scene = Scene(limit=3)
    for number in range(9):
        scene.push(f"{number}", float(number))
    assert scene.take() == ["0", "1", "2"]
    scene.open(QUEUE, 2)
    assert scene.take() == ["3", "4"]
    assert scene.best(QUEUE, 2) == ["5", "6"]


def test_tasks_stay_while_another_one_asks_for_the_permit_that_they_need() -> None:
    scene = Scene(limit=10, key_limit=1)
    for number in range(3):
        scene.push(f"{number}", float(number), limit_key="k")
    assert scene.take() == ["0"]
    assert len(scene.queue) == 2
    scene.open(PermitPool("q", "k"))
    assert scene.take() == ["1"]


def test_pool_without_permits_keeps_no_other_tasks_waiting() -> None:
    scene = Scene(limit=10, key_limit=1)
    scene.close(PermitPool("q", "k", "a"))
    scene.push("same key", 1.0, priority=9, limit_key="k", tenant="a")
    scene.push("other queue", 2.0, queue="other", limit_key="k", tenant="a")
    scene.push("other key", 3.0, limit_key="l", tenant="a")
    scene.push("no key", 4.0)
    assert scene.take() == ["other queue", "other key", "no key"]
    assert scene.best(QUEUE) == []
    scene.open(PermitPool("q", "k", "a"))
    assert scene.best(QUEUE) == ["same key"]
    assert scene.take() == ["same key"]


def test_equal_limit_keys_of_two_tenants_are_two_keys() -> None:
    scene = Scene(key_limit=1)
    for number, tenant in enumerate([None, "a", "b", "a"]):
        scene.push(f"{number}", float(number), limit_key="k", tenant=tenant)
    assert scene.take() == ["0", "1", "2"]


def test_tenant_at_its_limit_in_all_queues_keeps_no_other_waiting() -> None:
    scene = Scene(limit=10, tenant_limits={"a": Limit(concurrency=1)})
    scene.close(PermitPool(None, tenant="a"))
    scene.push("a", 1.0, tenant="a")
    scene.push("a too", 2.0, tenant="a", queue="other")
    scene.push("b", 3.0, tenant="b")
    assert scene.take() == ["b"]


@pytest.mark.parametrize(
    ("kind", "pool"),
    [
        ("limit", QUEUE),
        ("key_limit", PermitPool("q", "k")),
        ("key_limit", PermitPool("q", "k", "a")),
        ("tenant_limit", PermitPool("q", tenant="a")),
    ],
)
def test_each_kind_of_pool_has_its_limit(kind: str, pool: PermitPool) -> None:
    limits: dict[str, Any] = {kind: 7}
    assert Scene(**limits).pools.limit_of(pool) == Limit(concurrency=7)


def test_limit_of_a_tenant_is_found() -> None:
    pools = Scene(tenant_limits={"a": Limit(concurrency=7)}).pools
    assert pools.limit_of(PermitPool(None, tenant="a")) == Limit(concurrency=7)
    assert pools.limit_of(PermitPool(None, tenant="b")) is None


# --- bounds -----------------------------------------------------------------------------------------------------------


def found(scene: Scene, bound: tuple[bool, int, float]) -> None:
    scene.windows.found(["q"], bound, lanes=None, left_out=frozenset())


def test_nothing_behind_the_bound_is_offered_before_a_scan_has_brought_all_before_it() -> None:
    scene = Scene(limit=100)
    scene.push("near", 10.0)
    scene.push("far", 30.0)
    found(scene, (True, 0, 20.0))
    scene.push("farther", 40.0)
    scene.push("nearest", 5.0)
    assert scene.best(QUEUE) == ["nearest", "near"]
    assert scene.take() == ["nearest", "near"]
    assert scene.windows.wants_more("q")
    found(scene, ALL)
    assert scene.take() == ["far"]
    assert not scene.windows.wants_more("q")


def test_nothing_of_a_tenant_is_offered_that_lies_behind_the_bound_of_its_scan() -> None:
    scene = Scene(fair=True, limit=100)

    def found_of_a(bound: Any) -> None:
        scene.windows.found_of_tenants("q", {"a": bound}, is_cut=bound != ALL, lanes=None, left_out=frozenset())

    found_of_a((True, 0, 20.0))
    scene.push("far", 30.0, tenant="a", limit_key="k")  # the first one of its limit_key here
    scene.push("near", 10.0, tenant="a", limit_key="l")
    scene.push("of another", 40.0, tenant="b")
    assert sorted(scene.best(QUEUE)) == ["near", "of another"]
    assert sorted(scene.take()) == ["near", "of another"]
    found_of_a(ALL)
    scene.push("far", 30.0, tenant="a", limit_key="k")
    assert scene.take() == ["far"]


def test_interrupted_task_is_offered_though_it_lies_behind_the_bound() -> None:
    scene = Scene(limit=100)
    found(scene, (True, -5, 0.0))
    scene.push("new", 10.0)
    scene.push("interrupted", 10.0, is_begun=True)
    assert scene.take() == ["interrupted"]


def test_what_was_dropped_for_lack_of_room_bounds_what_is_offered() -> None:
    scene = Scene(limit=100)
    scene.queue.capacity = 8
    for number in range(11):
        scene.push(f"{number:02}", float(10 - number))
    assert scene.queue.has_more
    kept = scene.take()
    assert kept == sorted(kept, reverse=True)
    assert "00" not in kept
    scene.push("behind", 50.0)
    assert scene.take() == []


def test_more_is_wanted_of_a_queue_whose_tasks_were_all_dropped_for_lack_of_room() -> None:
    """Nobody has looked between the scan that brought them and the drop."""
    scene = Scene(limit=100)
    scene.queue.capacity = 8
    found(scene, ALL)
    scene.push("youngest", 50.0)
    for number in range(10):
        scene.push(f"{number:02}", float(number), queue="other")
    assert "youngest" not in scene.queue
    assert scene.windows.wants_more("q")
    found(scene, ALL)
    assert not scene.windows.wants_more("q")


def test_flood_of_one_limit_key_takes_little_room_and_a_more_urgent_task_of_it_is_kept() -> None:
    scene = Scene(limit=10, key_limit=1)
    lane = Lane("q", "k", None)
    scene.close(PermitPool("q", "k"))
    for number in range(3 * KEPT):
        scene.push(f"{number:03}", float(number), limit_key="k")
        scene.take()
    assert KEPT <= len(scene.queue) <= 2 * KEPT
    scene.push("urgent", 2_000.0, priority=1, limit_key="k")
    assert "urgent" in scene.queue
    assert [(narrow.lane, narrow.is_cut) for narrow in scene.windows.narrow_lanes("q")] == [(lane, True)]
    scene.open(PermitPool("q", "k"), 3)
    assert scene.take() == ["urgent", "000", "001"]


def test_more_of_a_flood_is_wanted_before_the_last_one_has_its_permit() -> None:
    scene = Scene(limit=1_000, key_limit=1)
    key = PermitPool("q", "k")
    scene.close(key)
    for number in range(3 * KEPT):
        scene.push(f"{number:03}", float(number), limit_key="k")
        scene.take()
    assert not scene.windows.wants_more("q")
    while not scene.windows.wants_more("q"):
        scene.open(key)
        assert scene.take()
    assert len(scene.queue) >= KEPT // 4


def test_task_is_listed_though_another_pool_is_full_if_its_permits_come_together() -> None:
    tenant = PermitPool(None, tenant="t")
    scene = Scene(limit=1, tenant_limits={"t": Limit(concurrency=1)})
    scene.push("0", tenant="t")
    scene.close(QUEUE)
    assert scene.best(tenant) == []
    assert scene.best(tenant, free={QUEUE}) == ["0"]


# --- turns ------------------------------------------------------------------------------------------------------------


def push_for(scene: Scene, tenants: Sequence[str]) -> None:
    for number, tenant in enumerate(tenants):
        scene.push(f"{tenant}{number}", float(number), tenant=tenant)


def test_tenants_take_turns_whatever_the_age_and_the_priority_of_their_tasks() -> None:
    scene = Scene(limit=100, fair=True)
    push_for(scene, "aaabc")
    scene.push("b urgent", 9.0, priority=5, tenant="b")
    assert scene.best(QUEUE) == ["b urgent", "a0", "c4", "a1", "b3", "a2"]
    assert scene.take() == ["b urgent", "a0", "c4", "b3", "a1", "a2"]


def test_each_tenant_is_listed_though_few_permits_can_be_free() -> None:
    scene = Scene(limit=1, fair=True)
    push_for(scene, "aaabbcd")
    assert scene.best(QUEUE, 2) == ["a0", "b3", "c5", "d6"]


def test_turns_that_other_workers_have_granted_count() -> None:
    scene = Scene(limit=100, fair=True)
    push_for(scene, "aabb")
    scene.pools.note_turns("q", 7, {"a": 7, "b": 3})
    assert scene.best(QUEUE) == ["b2", "a0", "b3", "a1"]
    assert scene.take() == ["b2", "a0", "b3", "a1"]


def test_tenant_that_asked_in_vain_has_its_turn_again() -> None:
    scene = Scene(limit=100, fair=True)
    push_for(scene, "aabb")
    assert scene.take(2) == ["a0", "b2"]
    assert scene.queue.next_ready(NOW) == 0.0
    # There was one permit.
    scene.windows.advance("q", scene.pools.note_turns("q", 1, {"a": 1}))
    assert scene.take() == ["b3", "a1"]


def test_interrupted_task_waits_for_no_turn() -> None:
    scene = Scene(limit=100, fair=True)
    push_for(scene, "ab")
    scene.pools.note_turns("q", 9, {"c": 9})
    scene.push("c", 1.0, tenant="c", is_begun=True)
    assert scene.best(QUEUE)[0] == "c"
    assert scene.take(1) == ["c"]


# --- cost -------------------------------------------------------------------------------------------------------------


def test_row_is_offered_once_however_many_of_its_tasks_are_taken() -> None:
    scene = Scene(limit=1_000)
    for number in range(500):
        scene.push(f"{number}", float(number))
        scene.take(1)
        scene.push(f"more {number}", 1_000.0 + number)
    window = scene.windows._windows["q"]
    assert len(window.heads) <= 2 * len(window.rows) + 1
