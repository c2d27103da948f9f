"""Due lookups: their times and order, and which entries are dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mtask.kernel.worker.discovery.inbox import DueLookups


def test_tasks_are_looked_up_when_they_become_due_the_longest_due_first() -> None:
    lookups = DueLookups(10)
    for task_id, when in (("late", 3.0), ("first", 1.0), ("second", 2.0)):
        lookups.put(task_id, when)
    assert lookups.next_time() == 1.0
    assert lookups.take(0.9, 10) == []
    assert lookups.take(2.0, 10) == ["first", "second"]
    assert (lookups.next_time(), len(lookups)) == (3.0, 1)


def test_lease_that_a_ping_moved_is_looked_up_once_and_at_the_later_time() -> None:
    lookups = DueLookups(10)
    lookups.put("task", 1.0)
    lookups.put("task", 2.0)
    assert lookups.take(1.5, 10) == []
    assert lookups.take(2.0, 10) == ["task"]
    assert lookups.next_time() is None


def test_time_that_comes_back_is_kept_once() -> None:
    lookups = DueLookups(10)
    for when in (1.0, 2.0, 1.0):
        lookups.put("task", when)
    assert lookups.take(3.0, 10) == ["task"]
    assert lookups.take(3.0, 10) == []


def test_discarded_task_is_not_looked_up() -> None:
    lookups = DueLookups(10)
    lookups.put("task", 1.0)
    lookups.discard("task")
    lookups.discard("unknown")
    assert (lookups.next_time(), lookups.take(2.0, 10), len(lookups)) == (None, [], 0)


def test_no_more_than_asked_for_are_taken() -> None:
    lookups = DueLookups(10)
    for number in range(5):
        lookups.put(str(number), float(number))
    assert lookups.take(9.0, 2) == ["0", "1"]
    assert lookups.take(9.0, 9) == ["2", "3", "4"]


def test_beyond_the_capacity_the_last_due_are_dropped_and_that_is_said() -> None:
    lookups = DueLookups(8)
    for number in range(10):
        lookups.put(str(number), float(number))
    assert len(lookups) == 10
    lookups.put("10", 10.0)
    assert lookups.was_cut
    assert lookups.take(99.0, 99) == [str(number) for number in range(8)]


def test_what_is_superseded_does_not_pile_up() -> None:
    lookups = DueLookups(8)
    for number in range(1000):
        lookups.put("task", float(number))
    assert len(lookups._heap) <= 4 * lookups.capacity
    assert not lookups.was_cut


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "discard", "take"]), st.sampled_from("abcdef"), st.integers(0, 20)),
        max_size=60,
    )
)
def test_it_does_as_a_plain_mapping_would(steps: list[tuple[str, str, int]]) -> None:
    lookups, model = DueLookups(100), dict[str, float]()
    for step, task_id, number in steps:
        if step == "put":
            lookups.put(task_id, float(number))
            model[task_id] = float(number)
        elif step == "discard":
            lookups.discard(task_id)
            model.pop(task_id, None)
        else:
            due = sorted((when, name) for name, when in model.items() if when <= number)
            assert lookups.take(float(number), 100) == [name for _, name in due]
            for _, name in due:
                del model[name]
        assert lookups.next_time() == min(model.values(), default=None)
        assert len(lookups) == len(model)
