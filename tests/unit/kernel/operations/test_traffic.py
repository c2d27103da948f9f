"""How dense the writes are, from the server's times: replies of made-up instants, as a server numbers its writes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mtask.kernel.operations.change_stream import (
    DENSE_FROM,
    DENSE_LASTS,
    DENSE_UNTIL,
    SOME_FROM,
    SOME_LASTS,
    WINDOW,
    Density,
    Traffic,
)

Reply = tuple[int, int, float]


def after(replies: Iterable[Reply], traffic: Traffic | None = None) -> Traffic:
    traffic = traffic or Traffic(0.0)
    for second, number, when in replies:
        traffic.note(second, number, when)
    return traffic


def steady(rate: float, every: float, until: float, *, begin: float = 0.0) -> list[Reply]:
    """Return the replies of a server that is written to at this rate, one each `every` seconds."""
    times = [begin + turn * every for turn in range(1, round((until - begin) / every) + 1)]
    return [(int(when), 1 + int(rate * (when % 1)), when) for when in times]


def still() -> Traffic:
    return after(steady(1, 0.25, 3 * SOME_LASTS))


def test_there_is_some_until_more_is_known() -> None:
    assert Traffic(5.0).density is Density.SOME
    assert after([(1, 5_000, 0.1)]).density is Density.SOME


@pytest.mark.parametrize("every", [0.02, 0.1, 0.35, 0.5, 0.703])
@pytest.mark.parametrize(
    ("rate", "density"),
    [(SOME_FROM / 10, Density.STILL), (DENSE_UNTIL / 2, Density.SOME), (2 * DENSE_FROM, Density.DENSE)],
)
def test_it_is_told_from_replies_however_often_they_come(rate: float, density: Density, every: float) -> None:
    for seconds in range(15, 25):
        assert after(steady(rate, every, seconds)).density is density


def test_it_gets_dense_at_once_and_calm_only_after_a_while() -> None:
    traffic = still()
    begin = 3 * SOME_LASTS + 0.1
    traffic.note(100, 1, begin)
    seen = [traffic.density]
    many = 1 + int(DENSE_FROM)
    traffic.note(100, many, begin + 0.3)
    for turn in range(1, 11):
        seen.append(traffic.density)
        traffic.note(100, many + turn, begin + 0.3 + turn * DENSE_LASTS / 9.9)
    seen.append(traffic.density)
    assert seen == [Density.STILL, *[Density.DENSE] * 10, Density.SOME]


def test_between_its_bounds_it_stays_as_it_is() -> None:
    between = (DENSE_UNTIL + DENSE_FROM) / 2
    assert after(steady(between, 0.25, 25.0, begin=15.0), still()).density is Density.SOME
    dense = after(steady(2 * DENSE_FROM, 0.25, 15.0))
    assert after(steady(between, 0.25, 25.0, begin=15.0), dense).density is Density.DENSE


def test_a_few_writes_at_one_instant_are_no_density() -> None:
    traffic = still()
    traffic.note(100, 1, 20.0)
    traffic.note(100, int(DENSE_FROM * WINDOW / 2), 20.0 + WINDOW / 10)
    assert traffic.density is Density.STILL


def test_news_is_traffic_for_a_while() -> None:
    traffic = still()
    traffic.note(100, 1, 20.0)
    traffic.note(100, 2, 20.01, is_news=True)
    seen = [traffic.density]
    for turn in range(1, 4):
        traffic.note(100 + turn, 1, 20.0 + turn * SOME_LASTS / 3)
        seen.append(traffic.density)
    traffic.note(110, 1, 20.02 + SOME_LASTS)
    assert [*seen, traffic.density] == [*[Density.SOME] * 4, Density.STILL]
