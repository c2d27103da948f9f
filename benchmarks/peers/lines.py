"""What handlers noted, and the figures that follow from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.report.figures import quantile

BEGUN, ENDED = "b", "e"
_NANO = 1e-9
_MILLI = 1e-6


@dataclass(frozen=True, slots=True)
class Note:
    """A handler's start or end; instants are nanoseconds of the system's monotonic clock."""

    kind: str
    number: int  #: of the task
    sent: int  #: when its publish call began; 0 if that is not known
    at: int

    @classmethod
    def of(cls, line: str) -> Self:
        """Read one line."""
        kind, number, sent, at = line.split()
        return cls(kind, int(number), int(sent), int(at))


def notes_in(text: str) -> list[Note]:
    """Return the notes; a last line that is still being written is left out."""
    return [Note.of(line) for line in text.split("\n")[:-1]]


def starts(notes: Iterable[Note]) -> list[Note]:
    """Return the first start of each task, in the order of time."""
    first: dict[int, Note] = {}
    for note in sorted(notes, key=lambda note: note.at):
        if note.kind == BEGUN:
            first.setdefault(note.number, note)
    return list(first.values())


def pace(begun: Sequence[Note], skipped: int) -> float:
    """Return the tasks begun a second, without the first `skipped`, while the worker warms up."""
    counted = begun[skipped:]
    if len(counted) < 2 or counted[-1].at == counted[0].at:
        return float("nan")
    return (len(counted) - 1) / ((counted[-1].at - counted[0].at) * _NANO)


def latencies(begun: Iterable[Note]) -> list[float]:
    """Return the milliseconds from the publish call to the handler."""
    return [(note.at - note.sent) * _MILLI for note in begun if note.sent]


def median_and_p99(values: Sequence[float]) -> tuple[float, float]:
    """Return both quantiles."""
    return quantile(values, 0.5), quantile(values, 0.99)


@dataclass(frozen=True, slots=True)
class Survival:
    """What became of the tasks of a worker or of a server that was killed."""

    tasks: int
    done: int
    #: Tasks whose handler reached its end more than once.
    twice: int = 0
    #: Tasks that the killed worker was running.
    interrupted: int = 0
    #: How many of them another worker began again, and the seconds until the last of these.
    resumed: int = 0
    seconds: float = float("nan")

    @property
    def lost(self) -> int:
        """Tasks that were not done when the trial gave up."""
        return self.tasks - self.done


def survival(notes: Sequence[Note], tasks: int, killed_at: int) -> Survival:
    """Return what became of the tasks of a worker that was killed at this instant."""
    ends = Counter(note.number for note in notes if note.kind == ENDED)
    before = [note for note in notes if note.at <= killed_at]
    ended_before = {note.number for note in before if note.kind == ENDED}
    interrupted = {note.number for note in before if note.kind == BEGUN} - ended_before
    again: dict[int, int] = {}
    for note in notes:
        if note.kind == BEGUN and note.at > killed_at and note.number in interrupted:
            again.setdefault(note.number, note.at)
    last = max(again.values(), default=None)
    return Survival(
        tasks,
        done=len(ends),
        twice=sum(count > 1 for count in ends.values()),
        interrupted=len(interrupted),
        resumed=len(again),
        seconds=float("nan") if last is None else (last - killed_at) * _NANO,
    )
