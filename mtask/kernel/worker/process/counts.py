"""The meter: counts what this worker does, in memory. `mtask.features.metrics.worker` stores the counts.

The meter is no middleware: transactions end runs without a finish, and executors run their middleware in a child
process. A run costs it a few microseconds, and no round trip.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, StoredTask
from mtask.kernel.operations.claim import RunFacts
from mtask.kernel.operations.find_due import Lapse
from mtask.kernel.worker.running.run import HeldRun

#: The name of each status: an enum takes longer to tell it.
_NAMES = {status: status.value for status in RunStatus}


class Meter:
    """The tally of this worker. Only the event loop changes it; any thread may read it."""

    def __init__(self) -> None:
        self.tally = Tally()

    def claimed(self, facts: RunFacts, since: datetime | None) -> None:
        """Count the time for which a task was due before this run claimed it. `since`: see `due_since`."""
        if since is not None:
            self.tally.of(facts.queue, facts.name).wait.observe((facts.claim_time - since).total_seconds())

    def ended(self, run: HeldRun, status: RunStatus) -> None:
        """Count a run whose end is written, and the time that its handler took."""
        counts = self.tally.of(run.queue, run.name)
        name = _NAMES[status]
        counts.runs[name] = counts.runs.get(name, 0) + 1
        if run.took is not None:
            counts.run.observe(run.took)

    def refused(self, queue: object, name: object) -> None:
        """Count a claimed run that could not be started, and was closed with FAIL."""
        counts = self.tally.of(str(queue), str(name)).runs
        counts[RunStatus.FAIL.value] = counts.get(RunStatus.FAIL.value, 0) + 1

    def lapsed(self, lapses: Iterable[Lapse]) -> None:
        """Count lapsed runs that this worker has closed."""
        for lapse in lapses:
            counts = self.tally.of(lapse.queue, lapse.name).runs
            counts[RunStatus.TIMEOUT.value] = counts.get(RunStatus.TIMEOUT.value, 0) + lapse.run_cnt
            self.tally.leases_lapsed += lapse.run_cnt

    def lost(self, claim_cnt: int) -> None:
        """Count claims that did not win their task."""
        if claim_cnt:
            self.tally.claims_lost += claim_cnt
            self.tally.revision += 1

    def fired(self, seconds: float) -> None:
        """Count a firing of a schedule that came this late."""
        self.tally.lateness.observe(seconds)
        self.tally.revision += 1


def due_since(task: StoredTask) -> datetime | None:
    """Return the time since which the task was due when its newest run claimed it; None: the document does not tell.

    A run that ended without a success makes the task due again: at the end of its lease, after its retry delay, or at
    its end. A retry or rerun by hand leaves no time in the document.
    """
    since = rules.due_time(task)
    if len(task.runs) == 1 and not task.task_state.clean_cnt:
        return since
    ends = [end for run in task.runs if not run.past and (end := _due_again(run)) is not None]
    if ends:
        return max(since, *ends)
    former = [run.end_time or run.ping_expire_time for run in task.runs if run.past]
    if task.task_state.clean_cnt and task.task_state.start_time is None:
        return None
    return None if former and since <= max(former) else since


def _due_again(run: Run) -> datetime | None:
    """Return the time at which the task was due again after this run; None: the run is under way, or has succeeded."""
    if run.status is RunStatus.TIMEOUT:
        return run.ping_expire_time
    return run.retry_time or run.fail_time


# --- tally -----------------------------------------------------------------------------------------------

# The tally: counts that only grow. Each worker has one, and the tally of the fleet is the sum of all.

#: The upper bounds of the buckets, in seconds. A last bucket has no bound. Documents hold the counts without the
#: bounds: other bounds need a field of their own.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
#: The most pairs of a queue and a name that one tally keeps apart. Further pairs count under `OTHER`.
MAX_PAIRS = 500


class Pair(NamedTuple):
    """A queue and the name of a task in it."""

    queue: str
    name: str


OTHER = Pair("other", "other")


class Histogram:
    """Durations, counted by buckets."""

    __slots__ = ("counts", "seconds")

    def __init__(self, counts: Iterable[int] = (), seconds: float = 0.0) -> None:
        given = list(counts)[: len(BOUNDS) + 1]
        self.counts = given + [0] * (len(BOUNDS) + 1 - len(given))
        self.seconds = seconds

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)

    def observe(self, seconds: float) -> None:
        """Count a duration. Clocks of publishers may be fast, so a negative one counts as 0."""
        length = seconds if seconds > 0.0 else 0.0
        self.counts[bisect_left(BOUNDS, length)] += 1
        self.seconds += length

    def add(self, other: Histogram, sign: int = 1) -> None:
        """Add the counts of another histogram, or take them off with the sign -1."""
        self.counts = [mine + sign * theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.seconds = max(0.0, self.seconds + sign * other.seconds)

    def quantile(self, part: float) -> float | None:
        """Return the bound below which this part of the durations lies; None: there is none, or no bound."""
        left = part * self.count
        for bound, count in zip(BOUNDS, self.counts, strict=False):
            left -= count
            if left <= 0 and self.count:
                return bound
        return None

    def document(self) -> dict[str, Any]:
        """Return the histogram as it is stored: without the empty buckets at the end."""
        counts = list(self.counts)
        while counts and not counts[-1]:
            counts.pop()
        return {"counts": counts, "seconds": self.seconds}


class PairCounts:
    """What is counted of the runs of one pair."""

    __slots__ = ("run", "runs", "wait")

    def __init__(self) -> None:
        self.runs: dict[str, int] = {}  #: the ended runs by their status
        self.wait = Histogram()  #: from the time at which a task was due to its claim
        self.run = Histogram()  #: from the begin of a handler to its end

    def add(self, other: PairCounts, sign: int = 1) -> None:
        """Add other counts, or take them off with the sign -1."""
        for outcome, count in list(other.runs.items()):
            self.runs[outcome] = self.runs.get(outcome, 0) + sign * count
        self.wait.add(other.wait, sign)
        self.run.add(other.run, sign)


class Tally:
    """All counts of a worker, or of several."""

    __slots__ = ("claims_lost", "lateness", "leases_lapsed", "pairs", "revision")

    def __init__(self) -> None:
        self.pairs: dict[Pair, PairCounts] = {}
        self.leases_lapsed = 0
        self.claims_lost = 0
        self.lateness = Histogram()
        #: The number of changes. It tells whether there is something new to write.
        self.revision = 0

    @property
    def run_cnt(self) -> int:
        """The number of ended runs."""
        return sum(sum(counts.runs.values()) for counts in self.pairs.values())

    def of(self, queue: str, name: str) -> PairCounts:
        """Return the counts of a pair, to be changed. If there are too many pairs, return those of `OTHER`."""
        self.revision += 1
        # A plain tuple is equal to the pair, and made faster.
        found: PairCounts | None = self.pairs.get((queue, name))  # type: ignore[call-overload]
        if found is None:
            pair = Pair(queue, name) if len(self.pairs) < MAX_PAIRS else OTHER
            found = self.pairs.setdefault(pair, PairCounts())
        return found

    def add(self, other: Tally, sign: int = 1) -> None:
        """Add another tally, or take it off with the sign -1. Each pair stays apart, however many there are."""
        for pair, counts in list(other.pairs.items()):
            self.pairs.setdefault(pair, PairCounts()).add(counts, sign)
        self.leases_lapsed += sign * other.leases_lapsed
        self.claims_lost += sign * other.claims_lost
        self.lateness.add(other.lateness, sign)
        self.revision += 1

    def limited(self, admitted: Mapping[Pair, Any], *, is_full: bool) -> Tally:
        """Return the tally with only the admitted pairs, and the others as `OTHER` if the list is full.

        A pair that is neither admitted nor `OTHER` is left out: it would have to leave `OTHER` later, and a counter
        must never fall.
        """
        made = Tally()
        made.leases_lapsed, made.claims_lost, made.lateness = self.leases_lapsed, self.claims_lost, self.lateness
        for pair, counts in list(self.pairs.items()):
            shown = pair if pair in admitted or pair == OTHER else OTHER if is_full else None
            if shown is not None:
                made.pairs.setdefault(shown, PairCounts()).add(counts)
        return made

    def document(self) -> dict[str, Any]:
        """Return the tally as it is stored."""
        # `list` copies the items in one step, so another thread may call this while the event loop counts.
        pairs = [
            {
                "queue": pair.queue,
                "name": pair.name,
                "runs": dict(counts.runs),
                "wait": counts.wait.document(),
                "run": counts.run.document(),
            }
            for pair, counts in list(self.pairs.items())
        ]
        return {
            "pairs": pairs,
            "leases_lapsed": self.leases_lapsed,
            "claims_lost": self.claims_lost,
            "lateness": self.lateness.document(),
        }


def tally_of(document: Mapping[str, Any]) -> Tally:
    """Return the tally that a document holds. What cannot be read counts as 0."""
    made = Tally()
    made.leases_lapsed = _number(document.get("leases_lapsed"))
    made.claims_lost = _number(document.get("claims_lost"))
    made.lateness = _histogram(document.get("lateness"))
    pairs = document.get("pairs")
    for found in pairs if isinstance(pairs, list) else ():
        if isinstance(found, Mapping):
            counts = PairCounts()
            runs = found.get("runs")
            counts.runs = {k: _number(v) for k, v in runs.items()} if isinstance(runs, Mapping) else {}
            counts.wait, counts.run = _histogram(found.get("wait")), _histogram(found.get("run"))
            made.pairs.setdefault(Pair(str(found.get("queue")), str(found.get("name"))), PairCounts()).add(counts)
    return made


def _histogram(found: Any) -> Histogram:
    if not isinstance(found, Mapping) or not isinstance(found.get("counts"), list):
        return Histogram()
    seconds = found.get("seconds")
    known = float(seconds) if isinstance(seconds, int | float) and not isinstance(seconds, bool) else 0.0
    return Histogram([_number(count) for count in found["counts"]], known)


def _number(found: Any) -> int:
    return int(found) if isinstance(found, int | float) and not isinstance(found, bool) and found >= 0 else 0


def total(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of tallies."""
    made = Tally()
    for tally in tallies:
        made.add(tally)
    return made
