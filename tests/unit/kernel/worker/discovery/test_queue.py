"""The preemption queue's order: priority, then age, with a head start for what this worker ranks first for."""

from __future__ import annotations

import pytest

from mtask.features.controls.fair_turns import Turns
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.ready import MAX_STAGGER, PREFERENCE
from mtask.kernel.worker.process.state import Served

NOW = 1000.0


def taken(queue: PreemptionQueue, now: float) -> list[str]:
    """Take all that is ready, one by one."""
    order: list[str] = []
    while entries := queue.take(1, now):
        order.extend(entry.task_id for entry in entries)
    return order


def test_of_tasks_due_together_those_that_this_worker_ranks_first_for_go_first() -> None:
    queue = PreemptionQueue(100)
    queue.push("other", "work", 0, NOW - 1.0, 1)
    queue.push("own", "work", 0, NOW, 0)
    assert taken(queue, NOW + MAX_STAGGER) == ["own", "other"]


def test_task_that_others_rank_first_for_is_not_left_behind_by_younger_ones_without_end() -> None:
    queue = PreemptionQueue(100)
    queue.push("other", "work", 0, NOW, 1)
    order: list[str] = []
    step = PREFERENCE / 4
    for turn in range(20):  # each turn brings one of its own, and takes one
        now = NOW + turn * step
        queue.push(f"own-{turn}", "work", 0, now, 0)
        order.extend(entry.task_id for entry in queue.take(1, now + MAX_STAGGER))
        queue.push(f"own-{turn}-more", "work", 0, now, 0)
    assert "other" in order
    rest = taken(queue, NOW + 20 * step)
    assert sorted([*order, *rest]) == sorted(
        ["other", *(f"own-{turn}" for turn in range(20)), *(f"own-{turn}-more" for turn in range(20))]
    )


def test_priority_goes_before_any_preference() -> None:
    queue = PreemptionQueue(100)
    queue.push("own", "work", 0, NOW - 10 * PREFERENCE, 0)
    queue.push("urgent", "work", 1, NOW, 5)
    assert taken(queue, NOW + MAX_STAGGER) == ["urgent", "own"]


def test_those_that_help_begin_with_the_tasks_for_which_they_rank_second() -> None:
    queue = PreemptionQueue(100)
    queue.push("third", "work", 0, NOW - 0.5, 2)
    queue.push("second", "work", 0, NOW, 1)
    assert taken(queue, NOW + MAX_STAGGER) == ["second", "third"]


def test_tasks_of_others_that_come_behind_its_own_are_dropped_and_no_others() -> None:
    queue = PreemptionQueue(100)
    queue.push("own", "work", 1, NOW, 0)
    queue.push("aged", "work", 1, NOW - PREFERENCE - 1, 1)
    queue.push("urgent", "work", 2, NOW, 1)
    queue.push("begun", "work", 0, NOW, 1, is_begun=True)
    queue.push("young", "work", 1, NOW - MAX_STAGGER, 1)
    queue.push("minor", "work", 0, NOW - 60.0, 3)
    assert queue.ready_count(NOW + MAX_STAGGER) == 6
    queue.drop_behind_own()
    assert queue.ready_count(NOW + MAX_STAGGER) == 4
    assert taken(queue, NOW + MAX_STAGGER) == ["begun", "urgent", "aged", "own"]


def test_nothing_is_dropped_by_a_worker_that_has_no_task_of_its_own() -> None:
    queue = PreemptionQueue(100)
    queue.push("other", "work", 0, NOW, 1)
    assert queue.ready_count(NOW + MAX_STAGGER) == 1
    queue.drop_behind_own()
    assert taken(queue, NOW + MAX_STAGGER) == ["other"]


def test_priority_of_the_next_task_is_known() -> None:
    queue = PreemptionQueue(100)
    assert queue.next_priority(NOW) is None
    queue.push("own", "work", 3, NOW, 0)
    queue.push("later", "work", 9, NOW + 1, 0)
    assert (queue.next_priority(NOW), queue.next_priority(NOW + 1)) == (3, 9)


def test_what_is_ready_is_counted() -> None:
    queue = PreemptionQueue(100)
    for number in range(5):
        queue.push(f"own-{number}", "work", 0, NOW + number, 0)
        queue.push(f"other-{number}", "work", 0, NOW + number - MAX_STAGGER, 2)
    assert (queue.ready_count(NOW - 1), queue.ready_count(NOW - 1, own_only=True)) == (0, 0)
    assert (queue.ready_count(NOW + 2), queue.ready_count(NOW + 2, own_only=True)) == (6, 3)
    queue.take(2, NOW + 2)
    queue.discard("own-2")
    queue.discard("own-4")  # not yet due
    queue.move("other-0", NOW + 10)
    assert (queue.ready_count(NOW + 2), queue.ready_count(NOW + 2, own_only=True)) == (2, 0)
    assert queue.ready_count(NOW + 20) == len(queue) == 6


def test_what_ranks_differently_is_taken_apart() -> None:
    queue = PreemptionQueue(100)
    for number in range(3):
        queue.push(f"own-{number}", "work", 0, NOW, 0)
        queue.push(f"other-{number}", "work", 0, NOW, 1)
    now = NOW + MAX_STAGGER
    groups = [{entry.task_id.partition("-")[0] for entry in queue.take(6, now)} for _ in range(2)]
    assert groups == [{"own"}, {"other"}]


def test_what_was_interrupted_goes_before_any_priority() -> None:
    queue = PreemptionQueue(100)
    queue.push("old", "work", 0, NOW - 60.0, 0)
    queue.push("lapsed", "work", 0, NOW, 1, is_begun=True)
    queue.push("urgent", "work", 1, NOW, 0)
    assert taken(queue, NOW + MAX_STAGGER) == ["lapsed", "urgent", "old"]


def test_task_that_another_worker_takes_counts_as_begun_when_its_lease_lapses() -> None:
    queue = PreemptionQueue(100)
    queue.push("a", "work", 0, NOW - 60.0, 0)
    queue.push("b", "work", 0, NOW - 50.0, 0)
    assert queue.move("b", NOW + 4.0, is_begun=True)
    assert queue.move("b", NOW + 5.0)  # a ping: still begun
    assert taken(queue, NOW + 4.9) == ["a"]
    queue.push("c", "work", 0, NOW - 40.0, 0)
    assert taken(queue, NOW + 5.0 + MAX_STAGGER) == ["b", "c"]
    queue.push("b", "work", 0, NOW, 0, is_begun=True)
    assert queue.move("b", NOW, is_begun=False)  # handed back
    queue.push("c", "work", 0, NOW - 40.0, 0)
    assert taken(queue, NOW + MAX_STAGGER) == ["c", "b"]


def test_groups_stay_large_where_own_tasks_and_others_interleave() -> None:
    # As a long backlog has it: the own tasks of the head start, and others that have been due for that much longer.
    queue = PreemptionQueue(1000)
    for number in range(100):
        queue.push(f"own-{number}", "work", 0, NOW - 60.0 + PREFERENCE + number, 0)
        queue.push(f"other-{number}", "work", 0, NOW - 60.0 + number + 0.5, 2)
    sizes = []
    while group := queue.take(50, NOW + 60.0):
        assert len({entry.rank for entry in group}) == 1
        sizes.append(len(group))
    assert sizes == [50, 50, 50, 50]


def test_no_group_goes_below_the_priority_of_what_it_leaves_behind() -> None:
    queue = PreemptionQueue(100)
    for priority in (9, 7, 5, 3, 1):
        queue.push(f"own-{priority}", "work", priority, NOW, 0)
    queue.push("other-5", "work", 5, NOW, 1)
    groups = []
    while group := queue.take(10, NOW + MAX_STAGGER):
        groups.append([entry.task_id for entry in group])
    assert groups == [["own-9", "own-7", "own-5"], ["other-5"], ["own-3", "own-1"]]


@pytest.mark.parametrize("drift", [0.00025, -0.00025])
def test_clock_that_drifts_makes_no_queue_grow_that_nobody_takes_from(drift: float) -> None:
    """Each scan finds the same backlog, due some microseconds earlier or later: of a worker that is full, or paused."""
    queue = PreemptionQueue(2_000, clock=lambda: NOW)
    for scan in range(100):
        for number in range(2_000):
            queue.push(f"work:{number}", "work", 0, NOW - 10.0 + drift * scan, number % 3)
        queue.next_ready(NOW)
    assert len(queue) == 2_000
    assert held_items(queue) <= 2 * 2_000 + 1_001


def test_tasks_that_come_and_go_leave_nothing_in_a_queue_that_nobody_takes_from() -> None:
    queue = PreemptionQueue(2_000, clock=lambda: NOW)
    for number in range(20_000):
        queue.push(f"work:{number}", "work", number % 5, NOW - 1.0 + number % 7, number % 3)
        queue.discard(f"work:{number}")
    assert len(queue) == 0
    assert held_items(queue) <= 1_001


def test_task_whose_time_drifts_far_is_moved() -> None:
    queue = PreemptionQueue(100)
    for step in range(1, 101):
        queue.push("late", "work", 0, NOW + 0.001 * step, 0)
    assert taken(queue, NOW + 0.05) == []
    assert taken(queue, NOW + 0.1) == ["late"]


def held_items(queue: PreemptionQueue) -> int:
    """Return how many items its heaps hold, those of dropped tasks among them."""
    return len(queue._waiting) + sum(len(heap) for heap in queue._ready)


class _Room:
    """Room for a number of tasks named `isolated`."""

    def __init__(self, count: int, *, is_shared: bool = True) -> None:
        self.left = count
        self.is_shared = is_shared

    def isolates(self, name: str) -> bool:
        return name == "isolated"

    def count(self) -> int:
        return self.left

    count_idle = count


def test_tasks_of_isolated_handlers_stay_queued_while_there_is_no_room_and_others_pass_them() -> None:
    room = _Room(0)
    queue = PreemptionQueue(100, lambda: 10.0, isolated=room)
    for number in range(3):
        queue.push(f"i{number}", "isolated", 9, 1.0 + number, 0)
    assert (queue.next_ready(10.0), queue.take(5, 10.0)) == (None, [])
    queue.push("o1", "other", 0, 5.0, 0)
    queue.push("o2", "other", 0, 50.0, 0)
    assert queue.next_ready(10.0) == 0
    assert [entry.task_id for entry in queue.take(5, 10.0)] == ["o1"]
    assert queue.next_ready(10.0) == 40.0

    room.left = 2
    assert queue.next_ready(10.0) == 0
    queue.push("o3", "other", 0, 5.0, 0)
    assert [entry.task_id for entry in queue.take(5, 10.0)] == ["i0", "i1"]
    room.left = 0
    assert [entry.task_id for entry in queue.take(5, 10.0)] == ["o3"]
    assert len(queue) == 2
    assert queue.isolated_count(10.0) == 1


def test_tasks_of_isolated_handlers_are_counted_apart_only_beside_other_handlers() -> None:
    shared = PreemptionQueue(100, lambda: 10.0, isolated=_Room(0))
    alone = PreemptionQueue(100, lambda: 10.0, isolated=_Room(0, is_shared=False))
    for queue in (shared, alone):
        assert not queue.has_ready(10.0)
        for rank, name in enumerate(["isolated", "isolated", "other"]):
            queue.push(f"{rank}", name, 0, 1.0, rank)
        assert queue.has_ready(10.0)
        queue.push("2", "other", 0, 1.0, 0)  # of another rank now
    assert (shared.ready_count(10.0), shared.ready_count(10.0, own_only=True)) == (1, 1)
    assert (alone.ready_count(10.0), alone.ready_count(10.0, own_only=True)) == (3, 2)
    assert (shared.isolated_count(10.0), alone.isolated_count(10.0)) == (2, 0)
    assert [name for name in ("isolated", "other") if not shared.is_isolated(name)] == ["other"]
    shared.discard("2")
    assert shared.ready_count(10.0) == 0
    assert shared.has_ready(10.0), "these wait for an executor"


@pytest.mark.parametrize(("isolated", "others", "kept"), [(80, 80, (20, 20)), (10, 80, (10, 30)), (80, 5, (35, 5))])
@pytest.mark.parametrize("is_ready", [True, False])
def test_tasks_of_isolated_handlers_and_of_others_push_out_their_own_kind(
    isolated: int, others: int, kept: tuple[int, int], is_ready: bool
) -> None:
    queue = PreemptionQueue(40, lambda: 10.0, isolated=_Room(0))
    for number in range(isolated):
        queue.push(f"i{number}", "isolated", 0, 1.0 + 20 * (not is_ready), 0)
    for number in range(others):
        queue.push(f"o{number}", "other", 0, 2.0 + 20 * (not is_ready), 0)
    queue._shrink()
    names = [name for _, name in queue.names()]
    assert (names.count("isolated"), names.count("other")) == kept
    assert queue.has_more
    assert queue.has_more_isolated == (isolated > kept[0])


def test_own_task_is_next_if_no_task_of_another_worker_goes_first_and_none_waits_for_an_executor() -> None:
    room = _Room(0)
    queue = PreemptionQueue(100, lambda: 10.0, isolated=room)
    assert not queue.is_own_next(10.0)
    queue.push("others", "other", 0, 1.0, 1)
    assert not queue.is_own_next(10.0)
    queue.push("own", "other", 0, 1.0 + PREFERENCE - 0.1, 0)
    assert queue.is_own_next(10.0)
    queue.push("isolated", "isolated", 0, 9.0, 0)
    assert not queue.is_own_next(10.0)
    assert queue.is_own_next(10.0, past_isolated=True)
    room.left = 1
    assert queue.is_own_next(10.0)
    queue.discard("own")
    assert not queue.is_own_next(10.0)


@pytest.mark.parametrize(("with_isolated", "left"), [(True, ["i0", "o0"]), (False, ["i0", "i1", "o0"])])
def test_isolated_tasks_of_others_are_dropped_behind_own_only_if_wanted(with_isolated: bool, left: list[str]) -> None:
    queue = PreemptionQueue(100, lambda: 10.0, isolated=_Room(0))
    for rank in (0, 1):
        queue.push(f"i{rank}", "isolated", 0, 1.0, rank)
        queue.push(f"o{rank}", "other", 0, 1.0, rank)
    assert queue.ready_count(10.0) == 2
    queue.drop_behind_own(with_isolated=with_isolated)
    assert sorted(task_id for task_id, _ in queue.names()) == left


def test_isolated_tasks_of_a_tenant_push_none_of_its_others_out() -> None:
    served = Served((), ())
    served.fair_queues = frozenset({"fair"})
    queue = PreemptionQueue(40, lambda: 10.0, isolated=_Room(0), served=served, turns=Turns)
    for number in range(30):
        queue.push(f"i{number}", "isolated", 0, 1.0, 0, queue="fair", tenant="t")
    for number in range(30):
        queue.push(f"o{number}", "other", 0, 2.0, 0, queue="fair", tenant="t")
    queue._shrink()
    names = [name for _, name in queue.names()]
    assert (names.count("isolated"), names.count("other")) == (20, 20)
    assert queue.has_more_isolated


def test_tasks_of_isolated_handlers_take_their_turn_among_others() -> None:
    queue = PreemptionQueue(100, lambda: 10.0, isolated=_Room(10))
    for number, name in enumerate(["other", "isolated", "isolated", "other"]):
        queue.push(f"{number}", name, 0, 1.0 + number, 0)
    queue.push("first", "isolated", 5, 9.0, 1)
    taken = []
    while entries := queue.take(5, 10.0):
        assert len({entry.name for entry in entries}) == 1
        taken += [entry.task_id for entry in entries]
    assert taken[0] == "first"
    assert sorted(taken) == ["0", "1", "2", "3", "first"]
