"""The model of the order in which tasks start. It judges a history, and tells which starts break the order.

A limit changes when, never in which order. The rank of a task: interrupted tasks first, then the higher priority, then
the earlier next_preempt_time. The next free permit goes to the task of the best rank that is due, has a worker with a
free slot, and has all its other permits free, over all workers and apps.

So a start breaks the order if it took a permit that a task of a better rank needed, if none was left for that task, if
that task could have been started for the whole of the last `grace`, and if its own claim was not under way. Without a
limit, the same holds for the slots of one worker.

In a queue with fair turns, ranks order the tasks of one tenant. Between two starts of a tenant that has a task to
start, each other tenant starts at most once. Interrupted tasks go before all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tests.order import admission, turns
from tests.order.delays import Delay, Delays, Wait
from tests.order.history import History
from tests.order.permits import Book
from tests.order.spells import all_spells
from tests.order.starts import StartJudge
from tests.order.tolerance import USUAL, Tolerance

Kind = Literal["order", "turn", "too many runs", "too many starts"]
_SHOWN = 10


class Violation(NamedTuple):
    """A start that should not have been."""

    kind: Kind
    task_id: str
    at: float
    what: str


@dataclass(slots=True)
class Judgement:
    """What a history proves."""

    violations: list[Violation] = field(default_factory=list)
    starts: int = 0  #: that were judged
    delays: list[Delay] = field(default_factory=list)

    def of(self, *kinds: Kind) -> list[Violation]:
        """Return the violations of these kinds."""
        return [violation for violation in self.violations if violation.kind in kinds]

    def seconds(self, *waits: Wait) -> list[float]:
        """Return the delays of these kinds, the shortest first."""
        return sorted(delay.seconds for delay in self.delays if delay.wait in waits)

    def __str__(self) -> str:
        told = [f"{found.kind}: {found.task_id} at {found.at:.3f}: {found.what}" for found in self.violations[:_SHOWN]]
        return "\n".join([f"{len(self.violations)} violations in {self.starts} starts", *told])


def judge(history: History, tolerance: Tolerance = USUAL, *, urgent: int | None = None) -> Judgement:
    """Judge a history. `urgent`: the delays of first starts count from this priority on."""
    book, spells = Book(history), all_spells(history)
    starts = StartJudge(history, book, tolerance)
    found = [Violation("order", *overtaking) for overtaking in starts.judge(spells)]
    found += [Violation("turn", *turn) for turn in turns.broken(history, book, spells, tolerance)]
    found += [Violation(*extra) for extra in admission.beyond(history, book.rules, tolerance.clock)]
    found.sort(key=lambda violation: violation.at)
    return Judgement(found, starts.judged_cnt, list(Delays(book, spells, tolerance.under_way).measure(urgent)))


def share(ordered: list[float], part: float) -> float:
    """Return the value below which this part of the ordered values lies; 0 if there is none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0
