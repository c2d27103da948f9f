"""The times in which tasks waited, and their ranks meanwhile."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from tests.order.history import End, History, Run, Task


class Rank(NamedTuple):
    """The place of a task in the order. The smaller one goes first."""

    is_not_interrupted: bool
    urgency: int  #: minus the priority
    position: float  #: next_preempt_time


@dataclass(frozen=True, slots=True)
class Spell:
    """A time in which a task was due and waited, up to its next run if one came."""

    task: Task
    since: float
    until: float
    #: The rank lies between these two. A lapsed lease moves next_preempt_time, and the write that closes the run moves
    #: it back. The model does not know which of the two a worker saw.
    first: Rank
    last: Rank
    after: End | None  #: the end of the run before
    run: Run | None  #: the run that ended it

    @property
    def is_interrupted(self) -> bool:
        """Whether the run before lapsed or was handed back."""
        return not self.first.is_not_interrupted


def spells_of(task: Task) -> Iterator[Spell]:
    """Yield the times in which a task waited."""
    since, position, lapsed_at = task.due, task.due, task.due
    after: End | None = None
    for run in (*task.runs, None):
        is_interrupted = after in ("lapse", "hand-back")
        first = Rank(not is_interrupted, -task.priority, position)
        last = first._replace(position=max(position, lapsed_at))
        until = task.gone if run is None else run.claimed
        if run is not None or since < until:
            yield Spell(task, since, until, first, last, after, run)
        if run is None or run.end in (None, "success", "cancel"):
            return
        after = run.end
        if run.retry_at is not None:
            position = max(position, run.retry_at)
        since = max(run.ended, position)
        lapsed_at = run.ended if after == "lapse" else position


class Group(NamedTuple):
    """What tasks have in common that need the same permits and workers."""

    queue: str
    name: str
    tenant: str | None
    key: str | None
    named: frozenset[str]

    @classmethod
    def of(cls, task: Task) -> Group:
        """Return the group of a task."""
        return cls(task.queue, task.name, task.tenant, task.key, task.named)


class Waiting:
    """The tasks that wait while time goes by, by group, the best rank first."""

    def __init__(self, spells: Sequence[Spell]) -> None:
        judged = [spell for spell in spells if spell.task.is_judged]
        self._coming = sorted(judged, key=lambda spell: spell.since, reverse=True)
        self._going = sorted(judged, key=lambda spell: spell.until, reverse=True)
        self.groups: dict[Group, list[tuple[Rank, str, Spell]]] = {}

    def advance(self, since: float, until: float) -> None:
        """Leave those tasks that waited at `since` and still wait after `until`. Both times only grow."""
        while self._going and self._going[-1].until <= until:
            spell = self._going.pop()
            entries = self.groups.get(Group.of(spell.task), [])
            place = bisect_left(entries, (spell.last, spell.task.id))
            if place < len(entries) and entries[place][-1] is spell:
                del entries[place]
        while self._coming and self._coming[-1].since <= since:
            spell = self._coming.pop()
            if spell.until > until:
                insort(self.groups.setdefault(Group.of(spell.task), []), (spell.last, spell.task.id, spell))


def all_spells(history: History) -> list[Spell]:
    """Return the spells of all tasks."""
    return list(chain.from_iterable(map(spells_of, history.tasks)))
