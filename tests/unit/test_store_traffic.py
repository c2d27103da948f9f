"""How dense the writes are, from the server's times: replies of made-up instants, and a real second's numbers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mtask.store.traffic import DENSE, LASTS, SPARSE, WINDOW, Traffic


def after(replies: Iterable[tuple[int, int, float]], now: float = 0.0) -> Traffic:
    traffic = Traffic(now)
    for second, number, when in replies:
        traffic.note(second, number, when)
    return traffic


def steady(rate: float, every: float, until: float, *, begin: float = 0.0) -> list[tuple[int, int, float]]:
    """Return the replies of a server that is written to at this rate, one each `every` seconds."""
    times = [begin + turn * every for turn in range(1, round((until - begin) / every) + 1)]
    return [(int(when), 1 + int(rate * (when % 1)), when) for when in times]


def test_it_is_dense_until_something_else_is_known() -> None:
    assert Traffic(5.0).is_dense
    assert after([(1, 1, 0.1)]).is_dense


@pytest.mark.parametrize("every", [0.02, 0.1, 0.35, 0.5, 0.703])
def test_it_is_told_from_replies_however_often_they_come(every: float) -> None:
    calm = after(steady(SPARSE / 4, every, 4 * LASTS))
    assert not calm.is_dense
    # Where a reply falls early into a second, it tells of few writes; not all do.
    assert any(after(steady(2 * DENSE, every, until)).is_dense for until in (6.0, 6.5, 7.0))


def test_it_gets_dense_at_once_and_calm_only_after_a_while() -> None:
    traffic = after(steady(1, 0.1, 3.0))
    seen = [traffic.is_dense]
    traffic.note(3, 1, 3.1)
    many = 1 + int(DENSE)
    traffic.note(3, many, 3.4)
    seen.append(traffic.is_dense)
    for turn in range(1, 11):
        traffic.note(3, many + turn, 3.4 + turn * LASTS / 10)
        seen.append(traffic.is_dense)
    assert seen == [False, *[True] * 10, False]


def test_between_its_bounds_it_stays_as_it_is() -> None:
    between = (SPARSE + DENSE) / 2
    begun_calm = after([*steady(1, 0.25, 3.0), *steady(between, 0.25, 8.0, begin=3.0)])
    assert not begun_calm.is_dense
    assert after(steady(between, 0.25, 8.0)).is_dense


def test_a_few_writes_at_one_instant_are_no_density() -> None:
    traffic = after(steady(1, 0.1, 3.0))
    traffic.note(3, 1, 3.0)
    traffic.note(3, int(DENSE * WINDOW / 2), 3.0 + WINDOW / 10)
    assert not traffic.is_dense
