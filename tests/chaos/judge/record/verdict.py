"""The verdict on a history: what must never happen, counted and with examples, and figures of what did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Kind = Literal[
    "lost",
    "over_held",
    "second_success",
    "stale_results",
    "over_tried",
    "wrong_effects",
    "wrong_fields",
    "unstarted",
    "double_acknowledgements",
    "over_limit",
    "wrong_order",
    "claimed_paused",
    "wrong_firings",
    "wrong_releases",
    "wrong_owed",
    "wrong_rounds",
    "wrong_executors",
    "wrong_ends",
    "engine_failures",
    "wasted_runs",
]

#: Each must be zero.
KINDS: Mapping[Kind, str] = {
    "lost": "tasks or changes that were acknowledged and lost",
    "over_held": "leases that should not have been held",
    "second_success": "successes beyond what was asked for, and ends that did not stay",
    "stale_results": "results of runs that held no lease, or that came from nowhere",
    "over_tried": "tries beyond the limit",
    "wrong_effects": "effects of transactions that are missing, doubled or stray",
    "wrong_fields": "documents that disagree with the rules",
    "unstarted": "results without a handler, and handlers without a claim",
    "double_acknowledgements": "tasks that were created twice, as publishers were told",
    "over_limit": "runs beyond a queue's limit, and places that were not given back",
    "wrong_order": "starts of limited tasks before those that should have gone first",
    "claimed_paused": "claims of what was paused",
    "wrong_firings": "firings of a schedule that are missing, doubled or stray",
    "wrong_releases": "releases of steps of flows that are missing, doubled or early",
    "wrong_owed": "children and next tasks that are missing, doubled or stray",
    "wrong_rounds": "calls that gather that are lost, or that made two rounds",
    "wrong_executors": "executors with two handlers, and deaths of executors that were not told at once",
    "wrong_ends": "ends that the handler cannot have",
    "engine_failures": "parts of the engine that failed by a fault of their own, as the workers' logs tell",
    "wasted_runs": "runs of what a worker had just handed on to another release",
}
#: Examples kept of each kind.
MAX_EXAMPLES = 10
MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class Example:
    """One violation."""

    task_id: str
    what: str
    evidence: str


@dataclass(slots=True)
class Finding:
    """Violations of one kind."""

    count: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a set of durations (seconds) looks like."""

    count: int = 0
    median: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    maximum: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """Summarise the values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        median, p90, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), median, p90, p99, ordered[-1])

    def __str__(self) -> str:
        if not self.count:
            return "none"
        values = {"median": self.median, "p90": self.p90, "p99": self.p99, "max": self.maximum}
        return f"{self.count}: " + ", ".join(f"{name} {value:.3f} s" for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Rescue:
    """A task that was claimed again after a lease had lapsed. Instants in seconds since the run began."""

    task_id: str
    free: float  #: since when it could have been claimed
    claimed: float
    is_database_away: bool
    #: Only workers that the task names could claim it.
    is_for_named: bool
    is_fleet_away: bool = False  #: there was no worker at all
    faults: tuple[str, ...] = ()
    claims_meanwhile: int = 0  #: of any task: many, where a backlog was being worked off

    @property
    def delay(self) -> float:
        """How long the task was free, in seconds."""
        return self.claimed - self.free

    @property
    def could_be_prompt(self) -> bool:
        """Whether the database and some worker were there, and any worker might have come."""
        return not (self.is_database_away or self.is_fleet_away or self.is_for_named)


@dataclass(slots=True)
class Timeline:
    """How much happened in each second since the run began."""

    published: list[int] = field(default_factory=list)
    claimed: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  #: handlers
    succeeded: list[int] = field(default_factory=list)  #: runs
    failed: list[int] = field(default_factory=list)  #: runs, those that timed out among them

    def add(self, line: str, second: float) -> None:
        """Count one."""
        counts: list[int] = getattr(self, line)
        place = max(0, int(second))
        if place >= len(counts):
            counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1

    def level(self) -> None:
        """Make all lines equally long."""
        lines: list[list[int]] = [getattr(self, item.name) for item in fields(self)]
        longest = max(len(line) for line in lines)
        for line in lines:
            line.extend([0] * (longest - len(line)))


@dataclass(slots=True)
class Overtime:
    """Handlers that went on after their lease had lapsed, in seconds."""

    excused: Distribution = field(default_factory=Distribution)  #: their worker was frozen, killed or blocked
    others: Distribution = field(default_factory=Distribution)
    worst: list[Example] = field(default_factory=list)  #: of the others


@dataclass(slots=True)
class Figures:
    """What happened, in numbers."""

    tasks: int = 0
    versions: int = 0
    runs: int = 0
    handler_starts: int = 0
    effects: int = 0
    by_name_and_status: dict[str, dict[str, int]] = field(default_factory=dict)
    runs_by_status: dict[str, int] = field(default_factory=dict)
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    controls: dict[str, dict[str, int]] = field(default_factory=dict)  #: limits, pauses, schedules
    first_claim: Distribution = field(default_factory=Distribution)  #: after a task was due for the first time
    rescue_up: Distribution = field(default_factory=Distribution)
    rescue_away: Distribution = field(default_factory=Distribution)
    rescue_no_worker: Distribution = field(default_factory=Distribution)
    rescue_named: Distribution = field(default_factory=Distribution)
    rescue_limited: Distribution = field(default_factory=Distribution)  #: behind a limit, from the free permit
    rescues: list[Rescue] = field(default_factory=list)
    failovers: list[dict[str, Any]] = field(default_factory=list)
    failover: Distribution = field(default_factory=Distribution)  #: from an election to the first claim
    overtime: Overtime = field(default_factory=Overtime)
    executors: dict[str, int] = field(default_factory=dict)  #: handlers in them, and what came of killed ones
    deaths: Distribution = field(default_factory=Distribution)  #: from the death of an executor to the FAIL of its run
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def worst_rescues(self) -> list[Rescue]:
        """The ten slowest while the database was up and any worker might have come."""
        up = [rescue for rescue in self.rescues if rescue.could_be_prompt]
        return sorted(up, key=lambda rescue: rescue.delay, reverse=True)[:10]


@dataclass(slots=True)
class Verdict:
    """What a history proves: clean if each kind of violation is zero and nothing stands against the proof."""

    lost: Finding = field(default_factory=Finding)
    over_held: Finding = field(default_factory=Finding)
    second_success: Finding = field(default_factory=Finding)
    stale_results: Finding = field(default_factory=Finding)
    over_tried: Finding = field(default_factory=Finding)
    wrong_effects: Finding = field(default_factory=Finding)
    wrong_fields: Finding = field(default_factory=Finding)
    unstarted: Finding = field(default_factory=Finding)
    double_acknowledgements: Finding = field(default_factory=Finding)
    over_limit: Finding = field(default_factory=Finding)
    wrong_order: Finding = field(default_factory=Finding)
    claimed_paused: Finding = field(default_factory=Finding)
    wrong_firings: Finding = field(default_factory=Finding)
    wrong_releases: Finding = field(default_factory=Finding)
    wrong_owed: Finding = field(default_factory=Finding)
    wrong_rounds: Finding = field(default_factory=Finding)
    wrong_executors: Finding = field(default_factory=Finding)
    wrong_ends: Finding = field(default_factory=Finding)
    engine_failures: Finding = field(default_factory=Finding)
    wasted_runs: Finding = field(default_factory=Finding)
    #: Why the history proves nothing, whatever the counts say: the first reasons, and how many there are.
    not_proven: list[str] = field(default_factory=list)
    doubts: int = 0
    figures: Figures = field(default_factory=Figures)

    def report(self, kind: Kind, task_id: str, what: str, **evidence: object) -> None:
        """Count a violation."""
        finding: Finding = getattr(self, kind)
        finding.count += 1
        if len(finding.examples) < MAX_EXAMPLES:
            told = ", ".join(f"{name} {value}" for name, value in evidence.items())
            finding.examples.append(Example(str(task_id), what, told))

    def doubt(self, reason: str) -> None:
        """Note why the history proves nothing."""
        self.doubts += 1
        if len(self.not_proven) < MAX_REASONS:
            self.not_proven.append(reason)

    @property
    def findings(self) -> dict[Kind, Finding]:
        """All kinds."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def violations(self) -> dict[Kind, int]:
        """The kinds that are not zero."""
        return {kind: finding.count for kind, finding in self.findings.items() if finding.count}

    @property
    def is_clean(self) -> bool:
        """Whether all is proven to be well."""
        return not self.not_proven and not self.violations

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.violations:
            return "VIOLATED" + (", and not all of it seen" if self.not_proven else "")
        return "NOT PROVEN" if self.not_proven else "CLEAN"

    def describe(self) -> str:
        """Return all of it as plain text."""
        lines = [f"verdict: {self.word}"]
        lines += [f"not proven: {reason}" for reason in self.not_proven]
        if self.doubts > len(self.not_proven):
            lines.append(f"not proven: and {self.doubts - len(self.not_proven):,} reasons more")
        lines.append("")
        for kind, finding in self.findings.items():
            lines.append(f"{finding.count:>9,}  {kind}: {KINDS[kind]}")
            for example in finding.examples:
                lines.append(f"           - {example.task_id}: {example.what} ({example.evidence})")
        return "\n".join([*lines, "", *_figures(self.figures)])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {"is_clean": self.is_clean, "word": self.word, **asdict(self)}


def in_words(counts: Mapping[str, int]) -> str:
    """Say counts in one line."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _figures(figures: Figures) -> list[str]:
    lines = [
        f"{figures.tasks:,} tasks in {figures.versions:,} versions, {figures.runs:,} runs, "
        f"{figures.handler_starts:,} handler starts, {figures.effects:,} effects",
        f"first claim after due: {figures.first_claim}",
        f"rescued, database up: {figures.rescue_up}",
        f"rescued, database away: {figures.rescue_away}",
        f"rescued, all workers killed: {figures.rescue_no_worker}",
        f"rescued by named workers: {figures.rescue_named}",
        f"rescued behind a limit, nothing else broken: {figures.rescue_limited}",
        f"from an election to the first claim: {figures.failover}",
        f"handlers beyond their lease, worker disturbed: {figures.overtime.excused}",
        f"handlers beyond their lease, worker undisturbed: {figures.overtime.others}",
    ]
    lines += [f"  {worst.task_id}: {worst.what} ({worst.evidence})" for worst in figures.overtime.worst]
    if figures.worst_rescues:
        lines += ["", "slowest rescues while the database was up:"]
        lines += [
            f"  {rescue.delay:8.3f} s from {rescue.free:.1f} s  {rescue.task_id}  "
            f"{rescue.claims_meanwhile:,} claims meanwhile  {'; '.join(rescue.faults) or '-'}"
            for rescue in figures.worst_rescues
        ]
    if figures.executors:
        lines += ["", f"executors: {in_words(figures.executors)}", f"from a death to the FAIL: {figures.deaths}"]
    if figures.controls:
        lines += ["", "limits, pauses, schedules:"]
        lines += [f"  {name}: {in_words(counts)}" for name, counts in figures.controls.items()]
    tables = {"tasks": figures.by_name_and_status, "calls": figures.calls}
    for title, table in tables.items():
        lines += ["", f"{title}:"]
        lines += [
            f"  {name}: " + ", ".join(f"{column} {count:,}" for column, count in sorted(row.items()))
            for name, row in sorted(table.items())
        ]
    for title, counts in {"runs": figures.runs_by_status, "faults": figures.faults}.items():
        lines += ["", f"{title}: " + (", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "-")]
    return lines
