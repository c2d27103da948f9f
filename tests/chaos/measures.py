"""What the report works out from a history itself: memory, how fast work went on after faults, what was left over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.chaos.history import Document, Fault, Sample
from tests.chaos.picture import Point

MEMORY = "memory_mib"
#: Only processes that lived for this long (seconds) are judged, each by the second half of its life: until it has met
#: its first great backlog and its first outage, it grows to the size that these need.
ENOUGH = 240.0
#: Flat: grows by less than this while its processes live (MiB a minute) ...
STEEPEST = 0.5
#: ... and ends no more than so much above where it began.
GROWTH = 1.10


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one place, in MiB, over the second halves of those processes that lived long enough."""

    place: str
    kind: str
    processes: int
    #: Medians of its first and of its last minute, and the highest value of all.
    first: float | None
    last: float | None
    highest: float
    #: MiB a minute within its processes; None where none lived long enough.
    slope: float | None
    threads: int
    files: int

    @property
    def judgement(self) -> str:
        """Whether it is flat, by the criterion that the report states."""
        if self.slope is None or self.first is None or self.last is None:
            return "lived too briefly"
        return "flat" if self.slope < STEEPEST and self.last <= self.first * GROWTH else "**grows**"


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kind of fault: how often, how long, and how long after its ends the next handler started anywhere."""

    nemesis: str
    count: int
    seconds: float
    away: int
    #: In seconds; empty where nothing started any more.
    waits: Sequence[float]


def lives_of(samples: Iterable[Sample], began: float) -> dict[str, list[list[Point]]]:
    """Return the memory of each place as one series for each process, in seconds since the run began."""
    found: dict[str, dict[int, list[Point]]] = {}
    for sample in samples:
        if sample.pid is not None and MEMORY in sample.values:
            lives = found.setdefault(sample.subject, {})
            lives.setdefault(sample.pid, []).append((sample.at - began, sample.values[MEMORY]))
    return {place: list(lives.values()) for place, lives in sorted(found.items())}


def memory_of(samples: Sequence[Sample], kinds: Mapping[str, str], began: float) -> list[Memory]:
    """Return the memory of each place."""
    threads: dict[str, int] = {}
    files: dict[str, int] = {}
    for sample in samples:
        if sample.pid is not None:
            threads[sample.subject] = max(threads.get(sample.subject, 0), int(sample.values.get("threads", 0)))
            files[sample.subject] = max(files.get(sample.subject, 0), int(sample.values.get("files", 0)))
    return [
        _memory(place, kinds.get(place, "publisher"), lives, threads[place], files[place])
        for place, lives in lives_of(samples, began).items()
    ]


def _memory(place: str, kind: str, lives: Sequence[Sequence[Point]], threads: int, files: int) -> Memory:
    long = [life for life in lives if life[-1][0] - life[0][0] >= ENOUGH]
    warm = [[point for point in life if point[0] >= (life[0][0] + life[-1][0]) / 2] for life in long]
    points = sorted(point for life in warm for point in life)
    first = last = None
    if points:
        first = median(value for at, value in points if at <= points[0][0] + 60)
        last = median(value for at, value in points if at >= points[-1][0] - 60)
    highest = max(value for life in lives for _, value in life)
    return Memory(place, kind, len(lives), first, last, highest, slope(warm), threads, files)


def slope(lives: Iterable[Sequence[Point]]) -> float | None:
    """Return the common slope of several series, per minute: least squares, each with a level of its own."""
    together = spread = 0.0
    for life in lives:
        if len(life) < 2:
            continue
        middle = sum(at for at, _ in life) / len(life)
        level = sum(value for _, value in life) / len(life)
        together += sum((at - middle) * (value - level) for at, value in life)
        spread += sum((at - middle) ** 2 for at, _ in life)
    return together / spread * 60 if spread else None


def recoveries(faults: Iterable[Fault], starts: Iterable[float]) -> list[Recovery]:
    """Return what came of each kind of fault, by name; `starts` are those of all handlers."""
    ordered = sorted(starts)
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.nemesis, []).append(fault)
    found = []
    for nemesis, members in sorted(kinds.items()):
        places = [(fault, bisect_left(ordered, fault.end)) for fault in members]
        found.append(
            Recovery(
                nemesis,
                len(members),
                sum(fault.end - fault.start for fault in members),
                sum(fault.is_database_away for fault in members),
                [ordered[place] - fault.end for fault, place in places if place < len(ordered)],
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that was looked at after the workers had stopped."""

    what: str
    found: str
    is_fine: bool


def leftovers(facts: Document) -> list[Leftover]:
    """Return what the run's facts say of the stop and of what it left on the servers."""
    found = []
    for title, key in (("workers", "exit_codes"), ("publishers", "publishers")):
        if isinstance(facts.get(key), dict):
            codes: dict[str, int] = facts[key]
            wrong = {name: code for name, code in codes.items() if code}
            said = ", ".join(f"{name} with {code}" for name, code in sorted(wrong.items()))
            found.append(Leftover(f"{title} that ended otherwise than in good order", said or "none", not wrong))
    if "connections_after" in facts:
        left: dict[str, int] = facts["connections_after"]
        said = ", ".join(f"{name}: {count}" for name, count in sorted(left.items()))
        found.append(Leftover("connections of workers still open on the servers", said or "none", not left))
    if "cursors_after" in facts:
        count = int(facts["cursors_after"])
        found.append(
            Leftover("cursors still open that were used after the last fault", str(count or "none"), not count)
        )
    if "processes_left" in facts:
        count = int(facts["processes_left"])
        found.append(Leftover("processes that workers started and left behind", str(count or "none"), not count))
    if "not_drained" in facts:
        found.append(Leftover("backlog after the faults", str(facts["not_drained"]), False))
    elif "drain_s" in facts:
        found.append(Leftover("backlog after the faults", f"drained within {facts['drain_s']:,.1f} s", True))
    return found
