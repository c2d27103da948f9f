"""Runs that wait for a slot or an executor start in their order. Those of a queue with fair turns keep their turns."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mtask.kernel.worker.running.slots import Line

_DAY = datetime(2030, 1, 1, tzinfo=UTC)
_ORDERS = st.tuples(st.booleans(), st.integers(-1, 1), st.integers(0, 2).map(lambda n: _DAY + timedelta(seconds=n)))
_ACTIONS = st.lists(st.one_of(_ORDERS, st.just("pop"), st.integers(0, 20)), max_size=60)


def a_run(priority: int, queue: str = "", *, is_interrupted: bool = False) -> Any:
    order = (not is_interrupted, -priority, _DAY)
    return SimpleNamespace(order=order, queue=queue, takes_turns=bool(queue) and not is_interrupted)


def starts(*runs: Any) -> list[int]:
    """Return the places of these runs, in the order in which they start."""
    line: Line[int] = Line()
    for place, run in enumerate(runs):
        line.push(run, place)
    return [line.pop() for _ in runs]


@given(_ACTIONS)
def test_the_next_one_is_always_the_least_of_those_that_wait_and_of_equal_ones_the_first(actions: list[Any]) -> None:
    line: Line[int] = Line()
    waiting: list[tuple[Any, int]] = []
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            line.push(SimpleNamespace(order=action, queue="q", takes_turns=False), number)  # type: ignore[arg-type]
            waiting.append((action, number))
        elif action == "pop" and waiting:
            least = min(waiting)
            waiting.remove(least)
            assert line.pop() == least[1]
        elif isinstance(action, int):  # those that came last leave
            out = {number for _, number in waiting[-action:]} if action else set()
            assert set(line.take_out(lambda item, out=out: item in out)) == out  # type: ignore[misc]
            waiting = [each for each in waiting if each[1] not in out]
        assert len(line) == len(waiting)
        assert sorted(line) == sorted(number for _, number in waiting)
        assert next(iter(line), None) == (min(waiting)[1] if waiting else None)


def test_runs_of_a_queue_with_fair_turns_start_as_they_were_claimed() -> None:
    assert starts(a_run(9, "fair"), a_run(0, "fair"), a_run(9, "fair"), a_run(1, "fair")) == [0, 1, 2, 3]


def test_the_turn_of_a_queue_competes_with_other_runs_by_the_order_of_the_tenant_whose_turn_it_is() -> None:
    assert starts(a_run(0, "fair"), a_run(9, "fair"), a_run(5), a_run(-1), a_run(7, "other")) == [4, 2, 0, 1, 3]


def test_interrupted_runs_go_before_the_turns() -> None:
    assert starts(a_run(9, "fair"), a_run(0, "fair", is_interrupted=True), a_run(9)) == [1, 0, 2]


def test_turns_that_are_over_hold_up_no_run_that_comes_later() -> None:
    line: Line[str] = Line()
    for left in ("popped", "taken out"):
        line.push(a_run(-5, "fair"), left)
        assert (line.pop() if left == "popped" else line.take_out(lambda _: True)[0]) == left
        line.push(a_run(3), "other")
        line.push(a_run(9, "fair"), "later")
        assert [line.pop(), line.pop()] == ["later", "other"]
