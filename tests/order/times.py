"""Lists of times: each begins after the end of the one before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.order.history import Up

Times = list[Up]


def joined(times: Iterable[Up]) -> Times:
    """Return the times in which one of these is, in their order."""
    found: Times = []
    for since, until in sorted(times):
        if found and since <= found[-1].until:
            found[-1] = Up(found[-1].since, max(found[-1].until, until))
        elif since < until:
            found.append(Up(since, until))
    return found


def within(times: Sequence[Up], bounds: Sequence[Up]) -> Times:
    """Return the times that are in both lists."""
    found: Times = []
    place = 0
    for since, until in times:
        while place < len(bounds) and bounds[place].until <= since:
            place += 1
        for bound in bounds[place:]:
            if bound.since >= until:
                break
            found.append(Up(max(since, bound.since), min(until, bound.until)))
    return found


def without(times: Iterable[Up], gaps: Iterable[Up]) -> Times:
    """Return what is left of the times outside of these."""
    closed = joined(gaps)
    found: Times = []
    place = 0
    for since, until in times:
        while place < len(closed) and closed[place].until <= since:
            place += 1
        for gap in closed[place:]:
            if gap.since >= until:
                break
            if since < gap.since:
                found.append(Up(since, gap.since))
            since = gap.until
        if since < until:
            found.append(Up(since, until))
    return found
