"""The report's text: what was violated first, then what was run, what came of it, and what was left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.chaos import picture
from tests.chaos.history import Document
from tests.chaos.judge.record.verdict import KINDS, Distribution, Rescue, Verdict, in_words
from tests.chaos.measures import ENOUGH, GROWTH, STEEPEST, Leftover, Memory, Recovery
from tests.chaos.picture import PROMISE, UP, Scene, groups_of

PICTURE = "picture.png"
#: In the order in which a task passes through them.
_STATUSES = ("INIT", "RUNNING", "SUCCESS", "FAIL", "CANCELED")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that the report tells."""

    facts: Document
    verdict: Verdict
    scene: Scene
    recoveries: Sequence[Recovery] = ()
    memory: Sequence[Memory] = ()
    leftovers: Sequence[Leftover] = ()
    #: Processes that ended without being told to, by place and exit code.
    ends: Mapping[str, int] = field(default_factory=dict)


# --- words --------------------------------------------------------------------------------------------------------


def title_of(facts: Document) -> str:
    """Name the run."""
    parts = [f"{facts.get('minutes', 0):g} min", f"seed {facts.get('seed', 'unknown')}"]
    if "nodes" in facts:
        parts.append(_many(facts["nodes"], "node"))
    if "worker_kinds" in facts:
        parts.append(_many(len(facts["worker_kinds"]), "worker"))
    return f"mtask under faults: {', '.join(parts)}"


def verdict_line(verdict: Verdict) -> str:
    """Say the verdict in one line."""
    figures = verdict.figures
    tasks = _many(figures.tasks, "task")
    if verdict.violations:
        return f"{verdict.word}: {_many(sum(verdict.violations.values()), 'violation')} in {tasks}"
    if verdict.not_proven:
        return f"{verdict.word}: {'; '.join(verdict.not_proven)}"
    faults = _many(sum(figures.faults.values()), "fault")
    rescues = f", {_many(len(figures.rescues), 'rescue')}" if figures.rescues else ""
    share = f" (p99 {_time(figures.rescue_up.p99)} with the database up)" if figures.rescue_up.count else ""
    return f"{verdict.word}: 0 violations in {tasks}, {faults}{rescues}{share}"


def repeat_command(facts: Document) -> str:
    """Return the command that runs the same load under the same faults."""
    given: str | None = facts.get("command")
    return given or f"make chaos MINUTES={facts.get('minutes', 15):g} SEED={facts.get('seed', '')}"


def markdown(outcome: Outcome) -> str:
    """Return the whole report."""
    sections = (
        _verdict(outcome),
        _evidence(outcome.verdict),
        [f"![The run: its flow, its faults, its backlog, rescues and memory over time]({PICTURE})"],
        _setting(outcome),
        _work(outcome),
        _controls(outcome.verdict),
        _executors(outcome.verdict),
        _rescues(outcome.verdict),
        _failovers(outcome.verdict),
        _faults(outcome.recoveries),
        _memory(outcome.memory),
        _leftovers(outcome),
    )
    return "\n\n".join("\n".join(block) for section in sections for block in _blocks(section)) + "\n"


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Split a section where an empty line stands."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line:
            block.append(line)
        elif block:
            yield block
            block = []


def _verdict(outcome: Outcome) -> list[str]:
    verdict = outcome.verdict
    line = f"**{verdict_line(verdict)}.**"
    if verdict.violations:
        line += " The evidence is below."
    elif verdict.not_proven:
        line += " The zeros below are no proof."
    rows = [
        [KINDS[kind], f"**{finding.count:,}**" if finding.count else "0"] for kind, finding in verdict.findings.items()
    ]
    doubts = [f"- not proven: {_cell(reason)}" for reason in verdict.not_proven] if verdict.violations else []
    return [
        f"# {title_of(outcome.facts)}",
        "",
        line,
        "",
        *doubts,
        "",
        *_table(["What must not happen", "times"], rows, "lr"),
        "",
        "The same load under the same faults: the seed decides what is published, which fault comes when, and whom it",
        "hits. How threads and processes interleave is the machine's choice.",
        "",
        "```",
        repeat_command(outcome.facts),
        "```",
    ]


def _evidence(verdict: Verdict) -> list[str]:
    lines = ["## Violations", ""] if verdict.violations else []
    for kind in verdict.violations:
        finding = verdict.findings[kind]
        lines += [f"### {finding.count:,} {KINDS[kind]}", ""]
        for example in finding.examples:
            evidence = f" ({_cell(example.evidence)})" if example.evidence else ""
            lines.append(f"- `{example.task_id}`: {_cell(example.what)}{evidence}")
        left = finding.count - len(finding.examples)
        lines += ["", f"And {left:,} more, of which no evidence was kept.", ""] if left > 0 else [""]
    return lines


def _setting(outcome: Outcome) -> list[str]:
    facts = outcome.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    kinds = Counter(facts.get("worker_kinds", {}).values())
    workers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    rows = [
        ["seed", str(facts.get("seed", "unknown"))],
        ["faults for", f"{facts.get('minutes', 0):g} min; the whole run {outcome.scene.seconds / 60:.1f} min"],
        ["load", f"{facts['rate']:g} tasks a second asked for" if "rate" in facts else ""],
        ["database", f"replica set of {_many(facts['nodes'], 'node')}" if "nodes" in facts else ""],
        ["workers", workers],
        ["publishers", ", ".join(sorted(facts.get("publishers", ())))],
        ["versions", versions],
        ["cores", f"{facts['cores']}, for all of it together" if "cores" in facts else ""],
    ]
    return ["## What was run", "", *_table(["", ""], [row for row in rows if row[1]], "ll")]


def _work(outcome: Outcome) -> list[str]:
    figures = outcome.verdict.figures
    line = figures.timeline
    flows = (
        ("tasks published", line.published),
        ("runs claimed", line.claimed),
        ("runs succeeded", line.succeeded),
        ("runs failed or timed out", line.failed),
    )
    rows = [
        [name, f"{sum(flow):,}", f"{sum(flow) / len(flow):,.1f}", f"{max(picture.smoothed(flow)):,.0f}"]
        for name, flow in flows
        if flow
    ]
    durations = [
        ("from due to the first claim", figures.first_claim),
        ("handlers beyond their lease, worker frozen, killed or blocked", figures.overtime.excused),
        ("handlers beyond their lease, other workers", figures.overtime.others),
    ]
    return [
        "## Work",
        "",
        f"{_many(figures.tasks, 'task')} in {_many(figures.versions, 'version')} of their documents, "
        f"{_many(figures.runs, 'run')}, {_many(figures.handler_starts, 'start')} of handlers,",
        f"{_many(figures.effects, 'effect')} of transactions.",
        "",
        *_table(["", "in all", "per second", "highest (mean of 3 s)"], rows, "lrrr"),
        "",
        *_distributions(durations),
        "",
        *_cross("task", figures.by_name_and_status, _STATUSES),
        "",
        *_cross("call", figures.calls, ()),
    ]


def _controls(verdict: Verdict) -> list[str]:
    rows = [[name, in_words(counts)] for name, counts in verdict.figures.controls.items()]
    return ["## Limits, pauses, schedules", "", *_table(["", ""], rows, "ll")] if rows else []


def _executors(verdict: Verdict) -> list[str]:
    figures = verdict.figures
    if not figures.executors.get("handlers"):
        return []
    return [
        "## Executors",
        "",
        *_table(["", "times"], [[name, f"{count:,}"] for name, count in figures.executors.items()], "lr"),
        "",
        *_distributions([("from the death of an executor to the FAIL of its run", figures.deaths)]),
    ]


def _rescues(verdict: Verdict) -> list[str]:
    figures = verdict.figures
    lines = ["## Rescues", ""]
    if not figures.rescues:
        return [*lines, "No task had to be rescued."]
    lines += [
        "A rescue is the claim of a task whose run's lease had lapsed. Its time is counted from the instant at which",
        "the document allowed the claim, by the server's clock. Where a task names its workers, it may have to wait",
        "for one of them to come back; and where all workers were killed at once, for any.",
        "",
    ]
    groups = groups_of(figures.rescues)
    up = groups[UP]
    if up:
        within = sum(rescue.delay <= PROMISE for rescue in up)
        share = within / len(up) * 100
        lines += [f"With the database up, {within:,} of {len(up):,} ({share:.2f} %) came within 500 ms.", ""]
    lines += _distributions([(name, Distribution.of(r.delay for r in found)) for name, found in groups.items()])
    if figures.worst_rescues:
        rows = [_rescue(rescue) for rescue in figures.worst_rescues]
        lines += ["", "The slowest with the database up:", ""]
        lines += _table(["task", "free at", "claimed after", "faults at that time"], rows, "lrrl")
    return lines


def _rescue(rescue: Rescue) -> list[str]:
    minutes, seconds = divmod(rescue.free, 60)
    return [
        f"`{_cell(rescue.task_id)}`",
        f"{minutes:.0f}:{seconds:04.1f}",
        _time(rescue.delay),
        _cell("; ".join(rescue.faults)),
    ]


def _failovers(verdict: Verdict) -> list[str]:
    failovers = verdict.figures.failovers
    kinds: dict[str, list[float]] = {}
    for failover in failovers:
        if failover["first_claim_after"] is not None:
            kinds.setdefault(failover["nemesis"], []).append(failover["first_claim_after"])
    if not kinds:
        return []
    named = [(nemesis, Distribution.of(delays)) for nemesis, delays in sorted(kinds.items())]
    every = [("all", verdict.figures.failover)] if len(named) > 1 else []
    waits = (told.get("committing_after") for told in failovers)
    committing = Distribution.of(wait for wait in waits if wait is not None)
    if committing.count:
        every.append(("the majority acknowledges writes, beside mtask", committing))
    return [
        "## Failovers",
        "",
        "From the election of a new primary to the first claim after it, on any worker.",
        "",
        *_distributions([*named, *every]),
    ]


def _faults(recoveries: Sequence[Recovery]) -> list[str]:
    lines = ["## Faults", ""]
    if not recoveries:
        return [*lines, "There were none."]
    count, seconds = sum(kind.count for kind in recoveries), sum(kind.seconds for kind in recoveries)
    rows = [
        [
            kind.nemesis,
            f"{kind.count:,}",
            f"{kind.seconds:,.1f} s",
            f"{kind.away:,}" if kind.away else "",
            _time(median(kind.waits)) if kind.waits else "",
            _time(max(kind.waits)) if kind.waits else "",
        ]
        for kind in recoveries
    ]
    return [
        *lines,
        f"{_many(count, 'fault')}, {seconds:,.0f} s of them, several at a time. The last two columns: how long after",
        "the end of a fault the next handler started, on any worker.",
        "",
        *_table(["fault", "times", "in all", "database away", "next start, median", "longest"], rows, "lrrrrr"),
    ]


def _memory(memory: Sequence[Memory]) -> list[str]:
    lines = ["## Memory", ""]
    if not memory:
        return [*lines, "It was not measured."]
    rows = [
        [
            place.place,
            place.kind,
            f"{place.processes:,}",
            "" if place.first is None else f"{place.first:.1f}",
            "" if place.last is None else f"{place.last:.1f}",
            f"{place.highest:.1f}",
            "" if place.slope is None else f"{place.slope:+.2f}",
            str(place.threads),
            str(place.files),
            place.judgement,
        ]
        for place in memory
    ]
    return [
        *lines,
        "Resident MiB of each place, over those of its processes that lived for",
        f"{ENOUGH / 60:.0f} min or more, each from the middle of its life on. Flat means: within its",
        f"processes it grows by less than {STEEPEST:g} MiB a minute, and the median of its last minute is at",
        f"most {(GROWTH - 1) * 100:.0f} % above that of its first. With `--spare w1` no nemesis ends that worker.",
        "",
        *_table(
            ["place", "kind", "processes", "first", "last", "highest", "MiB/min", "threads", "files", ""],
            rows,
            "llrrrrrrrl",
        ),
    ]


def _leftovers(outcome: Outcome) -> list[str]:
    lines = ["## After the stop", ""]
    rows = [[left.what, _cell(left.found if left.is_fine else f"**{left.found}**")] for left in outcome.leftovers]
    lines += _table(["", ""], rows, "ll") if rows else ["It was not looked at."]
    if outcome.ends:
        ends = [[_cell(name), f"{count:,}"] for name, count in sorted(outcome.ends.items())]
        lines += [
            "",
            "Processes that ended without the harness's doing; a task that kills its worker is one cause:",
            "",
        ]
        lines += _table(["place", "times"], ends, "lr")
    return lines


# --- parts --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    if not rows:
        return []
    rule = ["---:" if side == "r" else "---" for side in alignment]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def _cross(what: str, counts: Mapping[str, Mapping[str, int]], order: Sequence[str]) -> list[str]:
    """Tabulate counts by two names, with sums on both sides."""
    present = {name for row in counts.values() for name in row}
    columns = [name for name in order if name in present] + sorted(present - set(order))
    rows = [
        [name, *(f"{row[column]:,}" if row.get(column) else "" for column in columns), f"{sum(row.values()):,}"]
        for name, row in sorted(counts.items())
    ]
    sums = [f"{sum(row.get(column, 0) for row in counts.values()):,}" for column in columns]
    total = f"{sum(sum(row.values()) for row in counts.values()):,}"
    rows += [["all", *sums, total]] if rows else []
    return _table([what, *columns, "all"], rows, "l" + "r" * (len(columns) + 1))


def _distributions(named: Sequence[tuple[str, Distribution]]) -> list[str]:
    rows = [
        [name, f"{of.count:,}", *(_time(value) for value in (of.median, of.p90, of.p99, of.maximum))]
        for name, of in named
        if of.count
    ]
    return _table(["", "times", "p50", "p90", "p99", "longest"], rows, "lrrrrr")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _time(seconds: float) -> str:
    if seconds >= 60:
        return f"{seconds:,.1f} s"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:,.0f} ms"
