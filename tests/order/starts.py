"""Judges each start by the tasks that waited meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from tests.order.history import History, Limit
from tests.order.permits import Book, Pledges, Pool
from tests.order.spells import Rank, Spell, Waiting
from tests.order.tolerance import Tolerance


class Overtaking(NamedTuple):
    """A start before that of a task that should have gone first."""

    task_id: str
    at: float
    what: str


@dataclass(frozen=True, slots=True)
class Start:
    """A start that is judged, and what it took."""

    spell: Spell
    at: float
    since: float  #: a task that could have been started since then should have been started first
    worker: str
    pools: Pledges
    taken: frozenset[Pool]  #: those of its pools of which no permit was left
    is_last_slot: bool  #: whether it took the last slot of its worker


class StartJudge:
    """Finds the starts that took what a task of a better rank needed."""

    def __init__(self, history: History, book: Book, tolerance: Tolerance) -> None:
        self._book = book
        self._tolerance = tolerance
        self._troubles = history.troubles
        self._unsure = history.unsure
        self.judged_cnt = 0

    def judge(self, spells: Sequence[Spell]) -> Iterator[Overtaking]:
        """Yield the starts that break the order."""
        waiting = Waiting(spells)
        tolerance = self._tolerance
        for spell in sorted((spell for spell in spells if spell.run is not None), key=lambda spell: spell.until):
            at = spell.until
            waiting.advance(at - tolerance.grace, at + tolerance.under_way)
            grace = max([tolerance.grace, *(t.grace for t in self._troubles if t.since <= at <= t.until)])
            if not spell.task.is_judged or grace == inf:
                continue
            self.judged_cnt += 1
            better = [u for entries in waiting.groups.values() if (u := _best(entries, spell, at - grace)) is not None]
            start = self._start(spell, at - grace) if better else None
            if start is None:
                continue
            for other in better:
                lost = self._lost(other, start)
                if lost is not None:
                    told = f"{_told(other)} waited since {other.since:.3f} for {lost}, and {_told(spell)} got it"
                    yield Overtaking(spell.task.id, at, told)
                    break

    def _start(self, spell: Spell, since: float) -> Start | None:
        """Return what a start took; None: the limits were being changed."""
        at, until = spell.until, spell.until + self._tolerance.filled
        pools = self._book.rules.pledges(spell.task, since, until)
        if pools is None or spell.run is None:
            return None
        taken = [
            pool
            for pool, pledge in pools.items()
            if self._book.permits(pool, pledge).was_taken(pledge.limit, at, until)
        ]
        worker = self._book.workers.get(spell.run.worker)
        up = worker.up_at(at, at) if worker is not None else None
        is_last_slot = (
            worker is not None
            and up is not None
            and self._book.slots(worker, up).was_taken(Limit(worker.slots), at, until)
        )
        return Start(spell, at, since, spell.run.worker, pools, frozenset(taken), is_last_slot)

    def _lost(self, other: Spell, start: Start) -> str | None:
        """Return what the start took, if the other task could have had it, and was to go first."""
        if not self._precedes(other, start):
            return None
        since, at = start.since, start.at
        needed = self._book.rules.pledges(other.task, since, at)
        if needed is None or not self._has_others(needed, start, since):
            return None
        pool = next((pool for pool in needed if pool in start.taken), None)
        if pool is not None:
            has_worker = self._book.has_worker(other.task, since, at, self._tolerance.lag, start.worker)
            return f"a permit of {'/'.join(map(str, filter(None, pool)))}" if has_worker else None
        return self._lost_slot(other, start, is_limited=bool(needed))

    def _has_others(self, needed: Pledges, start: Start, since: float) -> bool:
        """Whether all permits were free all the time that the other task needs, and the start did not."""
        apart = [(pool, pledge) for pool, pledge in needed.items() if pool not in start.pools]
        if apart and any(up.since <= start.at <= up.until for up in self._unsure):
            return False
        lag = self._tolerance.lag
        return not any(
            self._book.permits(pool, pledge).was_taken(pledge.limit, since, start.at, lag) for pool, pledge in apart
        )

    def _lost_slot(self, other: Spell, start: Start, *, is_limited: bool) -> str | None:
        worker = self._book.workers.get(start.worker)
        if not start.is_last_slot or worker is None or not worker.serves(other.task):
            return None
        since, spell, tolerance = start.since, start.spell, self._tolerance
        if not is_limited:
            since = min(since, start.at - tolerance.slot_grace)
            is_alike = other.last[:2] == spell.first[:2] and not start.pools
            if is_alike and spell.first.position - other.last.position <= tolerance.preference:
                return None
        if other.since > since or worker.up_at(since, start.at) is None:
            return None
        return f"a slot of {start.worker}"

    def _precedes(self, other: Spell, start: Start) -> bool:
        """Whether a task of a better rank goes first, or turns decide."""
        spell = start.spell
        fairness = [self._book.rules.is_fair(each.task.queue, start.since, start.at) for each in (other, spell)]
        if None in fairness:
            return False
        if other.is_interrupted and not spell.is_interrupted:
            return True
        is_one_lane = (other.task.queue, other.task.tenant) == (spell.task.queue, spell.task.tenant)
        return is_one_lane or not any(fairness)


def _best(entries: Sequence[tuple[Rank, str, Spell]], spell: Spell, since: float) -> Spell | None:
    """Return the first of these tasks that has waited long enough, if it goes before this one."""
    for rank, _, other in entries:
        if rank >= spell.first:
            return None
        if other.since <= since:
            return other
    return None


def _told(spell: Spell) -> str:
    interrupted = "interrupted, " if spell.is_interrupted else ""
    return f"{spell.task.id} ({interrupted}priority {spell.task.priority}, {spell.last.position:.3f})"
