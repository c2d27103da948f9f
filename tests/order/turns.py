"""Judges fair turns: between two starts of a tenant that has a task to start, each other tenant starts at most once.

Several permits may be free at once, and then the order of the starts that take them tells nothing. A start that leaves
one has not had the turn of another tenant, whose worker may be about to take it. Nor do the workers know at once of
each other's starts. So over a longer time, another tenant may be ahead by `_AHEAD` more turns, but it does not get more
turns again and again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from tests.order.history import History, Limit, Settings, Task, Up, Worker
from tests.order.permits import Book, Permits, Pool
from tests.order.spells import Group, Spell
from tests.order.times import Times, joined, within, without
from tests.order.tolerance import Tolerance

_AHEAD = 2


class Turn(NamedTuple):
    """A start of a tenant that had had its turn."""

    task_id: str
    at: float
    what: str


def broken(history: History, book: Book, spells: Sequence[Spell], tolerance: Tolerance) -> Iterator[Turn]:
    """Yield the starts out of turn."""
    for queue, up, settings in book.rules.fair_times():
        own = [spell for spell in spells if spell.task.queue == queue]
        judge = TurnJudge(history, book, own, up, tolerance)
        yield from judge.broken(settings)


class TurnJudge:
    """Judges the turns of one queue while its settings stay."""

    def __init__(self, history: History, book: Book, spells: Iterable[Spell], up: Up, tolerance: Tolerance) -> None:
        self._book = book
        self._tolerance = tolerance
        self._spells = list(spells)
        self._up = up
        self._troubles = [Up(trouble.since, trouble.until) for trouble in history.troubles]
        self._unsure = list(history.unsure)
        self._limited = {change.target for change in history.changes}

    def broken(self, settings: Settings) -> Iterator[Turn]:
        """Yield the starts out of turn: of the whole queue if it has a limit, else of each worker."""
        # Without a limit of the queue, nobody counts the turns of all workers together.
        domains: list[Worker | None] = [None] if settings.limit else [*self._book.workers.values()]
        for worker in domains:
            starts = [spell for spell in self._spells if spell.run is not None and self._is_of(spell, worker)]
            by_tenant: dict[str | None, list[Spell]] = defaultdict(list)
            for spell in sorted(starts, key=lambda spell: spell.until):
                by_tenant[spell.task.tenant].append(spell)
            for tenant in {spell.task.tenant for spell in self._spells}:
                ready = self._ready(tenant, worker)
                own = [spell.until for spell in by_tenant[tenant]]
                for other, others in by_tenant.items():
                    if other != tenant:
                        # A task that was interrupted goes first whoever has the turn.
                        routine = [spell for spell in others if not spell.is_interrupted]
                        yield from self._out_of_turn(str(tenant), ready, own, routine, worker)

    def _took(self, spell: Spell, worker: Worker | None) -> bool:
        """Whether a start took what others needed. A permit that was left may have been left for their turns."""
        at = spell.until
        pool = Pool(spell.task.queue)
        pledge = None if worker is not None else (self._book.rules.pledges(spell.task, at, at) or {}).get(pool)
        if pledge is None:
            return True
        return self._book.permits(pool, pledge).was_taken(pledge.limit, at, at + self._tolerance.filled)

    def _is_of(self, spell: Spell, worker: Worker | None) -> bool:
        assert spell.run is not None
        is_own = worker is None or spell.run.worker == worker.id
        return is_own and self._up.since <= spell.until <= self._up.until

    def _out_of_turn(
        self, tenant: str, ready: Times, own: Sequence[float], others: Sequence[Spell], worker: Worker | None
    ) -> Iterator[Turn]:
        """Yield the starts of another tenant for which this tenant waited too long, while it had a task to start.

        A start of this tenant that was under way at either end counts as one in between.
        """
        under_way, turns = self._tolerance.under_way, self._tolerance.turns
        for since, until in ready:
            first = bisect_left(others, since + under_way, key=lambda spell: spell.until)
            last = bisect_right(others, until - under_way, key=lambda spell: spell.until)
            least: float = inf  # how far the other was behind at most, before one of its starts
            for number, spell in enumerate(others[first:last]):
                so_far = bisect_right(own, spell.until + under_way)
                begun = others[max(first, first + number - turns)].until - under_way
                at_once = min(number, turns) + 1 if bisect_left(own, begun) == so_far else 0
                least = min(least, number - bisect_left(own, spell.until - under_way))
                ahead = number + 1 - so_far - least
                if (at_once > turns and self._took(spell, worker)) or ahead > turns + _AHEAD:
                    what = f"{max(at_once, ahead):.0f} turns, and {tenant} had a task to start since {since:.3f}"
                    yield Turn(spell.task.id, spell.until, what)
                    break

    # --- when a tenant had a task to start ------------------------------------------------------------------------

    def _ready(self, tenant: str | None, worker: Worker | None) -> Times:
        """Return when the tenant had a task that only waited for its turn."""
        grace = self._tolerance.grace if worker is None else self._tolerance.slot_grace
        waits: dict[Group, list[Spell]] = defaultdict(list)
        for spell in self._spells:
            if spell.task.tenant == tenant and spell.task.is_judged and (worker is None or worker.serves(spell.task)):
                waits[Group.of(spell.task)].append(spell)
        found: Times = []
        for spells in waits.values():
            times = within(joined(Up(spell.since + grace, spell.until) for spell in spells), [self._up])
            found += self._could_start(spells[0].task, times, worker)
        return without(joined(found), self._troubles)

    def _could_start(self, task: Task, times: Times, worker: Worker | None) -> Times:
        """Leave those times in which a task like this one had all other permits, and a worker with a free slot."""
        if f"tenant:{task.tenant}" in self._limited:
            return []  # of the tasks of its tenant in all queues, others may go first
        for pool, pledge in (self._book.rules.pledges(task, self._up.since, self._up.since) or {}).items():
            if pool != Pool(task.queue):
                # A claim that came to nothing may hold one of these permits.
                times = without(times, self._unsure)
                times = without(times, self._taken(self._book.permits(pool, pledge), pledge.limit))
        if worker is not None:
            return [time for up in worker.ups for time in within(times, [up])]
        return [
            time
            for each in self._book.serving(task)
            for up in each.ups
            for time in within(self._served(each, up), times)
        ]

    def _served(self, worker: Worker, up: Up) -> Times:
        works = [Up(up.since + self._tolerance.grace, up.until)]
        return without(works, self._taken(self._book.slots(worker, up), Limit(worker.slots)))

    def _taken(self, permits: Permits, limit: Limit) -> Times:
        """Return when none was free, or none had been free for long enough."""
        taken = permits.taken(limit, self._tolerance.lag)
        return [Up(since, until + self._tolerance.grace) for since, until in taken]
