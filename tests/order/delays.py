"""How long tasks waited that were due, had a free permit, and were next."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.order.history import End
from tests.order.permits import Book, Pool
from tests.order.spells import Spell

#: What a task waited for: its first run, or the next one after one that lapsed, was handed back, or is tried again.
Wait = Literal["first", "lapse", "hand-back", "again"]
_WAITS: Mapping[End | None, Wait] = {
    None: "first",
    "lapse": "lapse",
    "hand-back": "hand-back",
    "failure": "again",
    "retry": "again",
}


@dataclass(frozen=True, slots=True)
class Delay:
    """A start, and when it could have been."""

    wait: Wait
    task_id: str
    since: float  #: when the task was due, or the permit that it was to get was free, whichever came later
    claimed: float
    overtaken: int  #: how many tasks of a worse rank took one of its permits meanwhile

    @property
    def seconds(self) -> float:
        """The delay."""
        return self.claimed - self.since


class Delays:
    """Measures delays."""

    def __init__(self, book: Book, spells: Iterable[Spell], under_way: float) -> None:
        self._book = book
        self._spells = sorted((spell for spell in spells if spell.run is not None), key=lambda spell: spell.until)
        self._under_way = under_way
        self._by_queue: dict[str, list[Spell]] = defaultdict(list)
        for spell in self._spells:
            self._by_queue[spell.task.queue].append(spell)

    def measure(self, urgent: int | None = None) -> Iterator[Delay]:
        """Yield the delays of all starts but first ones; from this priority on, of first ones, too."""
        for spell in self._spells:
            is_wanted = spell.after is not None or (urgent is not None and spell.task.priority >= urgent)
            if is_wanted and spell.task.is_judged:
                delay = self._of(spell)
                if delay is not None:
                    yield delay

    def _of(self, spell: Spell) -> Delay | None:
        """Return the delay of a start; None: the limits were changed meanwhile."""
        pledges = self._book.rules.pledges(spell.task, spell.since, spell.until)
        if pledges is None:
            return None
        free, overtaken = spell.since, 0
        for pool, pledge in pledges.items():
            meanwhile = list(self._meanwhile(pool, spell))
            # Claims that were under way when the task became due could not wait for it.
            at_once = spell.since + self._under_way
            before = sum(other.first <= spell.last or other.until <= at_once for other in meanwhile)
            permits = self._book.permits(pool, pledge)
            free = max(free, permits.next_free(pledge.limit, spell.since, before + 1))
            overtaken += sum(
                other.first > spell.last and at_once < other.until < spell.until - self._under_way
                for other in meanwhile
            )
        free = max(free, self._book.first_slot(spell.task, free))
        return Delay(_WAITS[spell.after], spell.task.id, min(free, spell.until), spell.until, overtaken)

    def _meanwhile(self, pool: Pool, spell: Spell) -> Iterator[Spell]:
        """Yield the spells that ended by a claim in this pool while the task waited."""
        spells: Sequence[Spell] = self._spells if pool.queue is None else self._by_queue[pool.queue]
        first = bisect_left(spells, spell.since, key=lambda other: other.until)
        last = bisect_left(spells, spell.until, key=lambda other: other.until)
        for other in spells[first:last]:
            if pool.key in (None, other.task.key) and pool.tenant in (None, other.task.tenant):
                yield other
