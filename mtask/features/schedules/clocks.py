"""Wall clocks: a time zone's offset from UTC, and the instants at which it changes."""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

SECOND = timedelta(seconds=1)
#: An offset is less than a day. So a shift of the clocks skips and repeats only times that are nearer to it than this.
#: No zone has ever shifted its clocks twice within this time: the least on record is four days.
REACH = timedelta(days=2)


@lru_cache(maxsize=256)
def zone(name: str) -> ZoneInfo:
    """Return the time zone of this name; raise ValueError."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone: use a name such as 'Europe/Berlin', or 'UTC'") from None


def offset(where: ZoneInfo, at: datetime) -> timedelta:
    """Return by how much the wall clock is ahead of UTC at an instant."""
    found = at.astimezone(where).utcoffset()
    assert found is not None
    return found


def first_shift(where: ZoneInfo, begin: datetime, end: datetime) -> datetime | None:
    """Return the instant after `begin`, and not after `end`, at which the offset changes; None: there is none.

    `begin` is a whole second, as all changes are. `end` is at most REACH later.
    """
    before = offset(where, begin)
    if offset(where, end) == before:
        return None
    seconds = range((end - begin) // SECOND + 1)
    return begin + SECOND * bisect_left(seconds, True, key=lambda n: offset(where, begin + n * SECOND) != before)
