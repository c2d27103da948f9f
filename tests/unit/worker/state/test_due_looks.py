"""Due looks: when, in which order, and what is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mtask.worker.state.due import DueLooks


def test_tasks_are_looked_at_when_they_come_due_the_longest_due_first() -> None:
    looks = DueLooks(10)
    for task_id, when in (("late", 3.0), ("first", 1.0), ("second", 2.0)):
        looks.put(task_id, when)
    assert looks.next_time() == 1.0
    assert looks.take(0.9, 10) == []
    assert looks.take(2.0, 10) == ["first", "second"]
    assert (looks.next_time(), len(looks)) == (3.0, 1)


def test_lease_that_a_ping_moved_is_looked_at_once_and_then() -> None:
    looks = DueLooks(10)
    looks.put("task", 1.0)
    looks.put("task", 2.0)
    assert looks.take(1.5, 10) == []
    assert looks.take(2.0, 10) == ["task"]
    assert looks.next_time() is None


def test_time_that_comes_back_is_kept_once() -> None:
    looks = DueLooks(10)
    for when in (1.0, 2.0, 1.0):
        looks.put("task", when)
    assert looks.take(3.0, 10) == ["task"]
    assert looks.take(3.0, 10) == []


def test_what_was_discarded_is_not_looked_at() -> None:
    looks = DueLooks(10)
    looks.put("task", 1.0)
    looks.discard("task")
    looks.discard("unknown")
    assert (looks.next_time(), looks.take(2.0, 10), len(looks)) == (None, [], 0)


def test_no_more_than_asked_for_are_taken() -> None:
    looks = DueLooks(10)
    for number in range(5):
        looks.put(str(number), float(number))
    assert looks.take(9.0, 2) == ["0", "1"]
    assert looks.take(9.0, 9) == ["2", "3", "4"]


def test_beyond_the_capacity_the_last_due_are_dropped_and_that_is_said() -> None:
    looks = DueLooks(8)
    for number in range(10):
        looks.put(str(number), float(number))
    assert len(looks) == 10
    looks.put("10", 10.0)
    assert looks.was_cut
    assert looks.take(99.0, 99) == [str(number) for number in range(8)]


def test_what_is_superseded_does_not_pile_up() -> None:
    looks = DueLooks(8)
    for number in range(1000):
        looks.put("task", float(number))
    assert len(looks._heap) <= 4 * looks.capacity
    assert not looks.was_cut


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "discard", "take"]), st.sampled_from("abcdef"), st.integers(0, 20)),
        max_size=60,
    )
)
def test_it_does_as_a_plain_mapping_would(steps: list[tuple[str, str, int]]) -> None:
    looks, model = DueLooks(100), dict[str, float]()
    for step, task_id, number in steps:
        if step == "put":
            looks.put(task_id, float(number))
            model[task_id] = float(number)
        elif step == "discard":
            looks.discard(task_id)
            model.pop(task_id, None)
        else:
            due = sorted((when, name) for name, when in model.items() if when <= number)
            assert looks.take(float(number), 100) == [name for _, name in due]
            for _, name in due:
                del model[name]
        assert looks.next_time() == min(model.values(), default=None)
        assert len(looks) == len(model)
