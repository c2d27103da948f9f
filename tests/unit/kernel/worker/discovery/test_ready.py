"""Ready tasks of one kind come out in their order, however they went in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mtask.kernel.worker.discovery.ready import Entry, Order, Ready

_ORDERS = st.tuples(st.booleans(), st.integers(-1, 1), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]))
_ACTIONS = st.lists(st.one_of(_ORDERS, st.sampled_from(["pop", "clear"]), st.integers(0, 30)), max_size=60)


def entry_of(order: Order) -> Entry:
    is_new, priority, moment = order
    return Entry("work:k", "work", -priority, 0.0, 0, is_begun=not is_new, moment=moment)


@given(_ACTIONS)
def test_first_is_always_the_least_of_those_that_are_left(actions: list[Order | str | int]) -> None:
    ready = Ready()
    left: list[tuple[Order, int, Entry]] = []
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            entry = entry_of(action)
            ready.push(entry, number)
            left.append((action, number, entry))
        elif action == "pop" and left:
            least = min(left, key=lambda item: item[:2])
            assert ready.head(0.0) is least[2]
            ready.pop(least[2])
            left.remove(least)
        elif action == "clear":
            ready.clear_dropped()
            assert len(ready) == len(left)
        elif isinstance(action, int) and action < len(left):  # drop one of those that wait
            left.pop(action)[2].is_dropped = True
        assert sorted(item[:2] for item in ready) == sorted(item[:2] for item in left)
        assert ready.first() == min(left, key=lambda item: item[:2], default=None)


def test_tasks_that_come_in_order_are_compared_with_one_other_each() -> None:
    compared = 0

    class Counted(float):
        def __lt__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return float(self) < float(other)

    ready = Ready()
    for number in range(1_000):
        ready.push(entry_of((True, 0, Counted(number))), number)
    while (entry := ready.head(0.0)) is not None:
        ready.pop(entry)
    assert compared < 1_000
