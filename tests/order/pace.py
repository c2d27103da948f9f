"""How slow the machine is: probes are tasks without a limit, each due at a known time.

A promise about seconds holds while the machines are not saturated. What takes a probe long takes other tasks longer:
their way from a returned permit to a claim has more steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtask import TaskSpec
from tests.order.delays import Delay
from tests.order.history import History, Trouble
from tests.order.model import share
from tests.order.theatre import spec
from tests.order.tolerance import USUAL, Tolerance

#: The queue of the probes.
PROBES = "probes"
#: The seconds between two probes, and their number.
_EVERY, _COUNT = 0.5, 120
#: A task may be late by this multiple of the latest probe.
_TIMES = 8.0
#: Claims may be under way for this multiple of the probe that is later than nine of ten: a request for each kind of
#: permit comes before the claim, and what it cannot have is asked for by another worker.
_TIMES_UNDER_WAY = 4.0
#: The probes that count are due up to this time before the task was due, or after it was claimed, in seconds.
_AROUND = 2.0


def probes(*names: str) -> Iterator[TaskSpec]:
    """Yield probes of these names in turn."""
    for number in range(_COUNT):
        yield spec(PROBES, f"{number}", name=names[number % len(names)], delay=number * _EVERY)


class Pace:
    """What probes tell."""

    def __init__(self, history: History) -> None:
        self._late = [(task.due, task.runs[0].claimed - task.due) for task in history.tasks if task.runs]

    def beyond(self, delays: Sequence[Delay]) -> list[float]:
        """Return the part of each delay that is not due to the machine, the shortest first."""
        return sorted(max(0.0, delay.seconds - self._slack(delay)) for delay in delays)

    def tolerance(self, usual: Tolerance = USUAL) -> Tolerance:
        """Return what is not held against workers on this machine. `usual`: the same on one that is not busy."""
        if not self._late:
            return usual
        # The latest ones may have waited for a worker that was killed.
        late = _TIMES_UNDER_WAY * share(sorted(late for _, late in self._late), 0.9)
        return replace(usual, under_way=max(usual.under_way, late), lag=max(usual.lag, late))

    def troubles(self, usual: Tolerance) -> Iterator[Trouble]:
        """Yield the times in which the machine was slower than is usual, each with the grace of these times."""
        for due, late in self._late:
            if _TIMES * late > usual.grace:
                yield Trouble(due - _AROUND, due + late + _AROUND, _TIMES * late)

    def _slack(self, delay: Delay) -> float:
        first, last = delay.since - _AROUND, delay.claimed + _AROUND
        # After the last probe, the latest one tells what the machine may take.
        late = [late for due, late in self._late if first <= due <= last] or [late for _, late in self._late]
        return _TIMES * max(late)
