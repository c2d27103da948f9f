"""The report of a run under faults: Markdown, one picture, and the verdict as JSON.

`python -m tests.chaos.report FOLDER` makes them from a stored history; `make chaos` does so at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.chaos import measures, picture
from tests.chaos.history import Document, History
from tests.chaos.judge.checker import check
from tests.chaos.judge.record.verdict import Verdict
from tests.chaos.markdown import PICTURE, Outcome, markdown, title_of, verdict_line
from tests.chaos.picture import Scene, Span

REPORT, VERDICT = "report.md", "verdict.json"
T = TypeVar("T")
_UNREADABLE = (ValueError, TypeError, OSError)


def write(history: History, verdict: Verdict) -> Path:
    """Write report, picture and verdict into the history's folder; return the report's path."""
    outcome = outcome_of(history, verdict)
    picture.draw(outcome.scene, history.folder / PICTURE)
    (history.folder / VERDICT).write_text(json.dumps(verdict.as_dict(), indent=1, default=str) + "\n")
    path = history.folder / REPORT
    path.write_text(markdown(outcome))
    return path


def outcome_of(history: History, verdict: Verdict) -> Outcome:
    """Read from the history what the checker does not tell."""
    facts = _facts(history)
    faults = sorted(_readable(history.faults), key=lambda fault: fault.start)
    samples = _readable(history.samples)
    starts = [note.at for note in _readable(history.notes) if note.event == "start"]
    began = float(facts.get("started") or min((sample.at for sample in samples), default=0.0))
    stopped = float(facts.get("stopped_at") or max((sample.at for sample in samples), default=began))
    whole = [(sample.at - began, sample.values) for sample in samples if sample.pid is None]
    kinds = facts.get("worker_kinds", {})
    line = verdict.figures.timeline
    scene = Scene(
        title_of(facts),
        verdict_line(verdict),
        verdict.is_clean,
        stopped - began,
        line.published,
        line.succeeded,
        line.failed,
        [Span(f.nemesis, f.target, f.start - began, f.end - began, f.is_database_away) for f in faults],
        [(at, values.get("INIT", 0.0)) for at, values in whole],
        [(at, values.get("RUNNING", 0.0)) for at, values in whole],
        verdict.figures.rescues,
        {place: lives for place, lives in measures.lives_of(samples, began).items() if place in kinds or not kinds},
    )
    unasked = [end for end in facts.get("ends", []) if not end.get("expected")]
    return Outcome(
        facts,
        verdict,
        scene,
        measures.recoveries(faults, starts),
        measures.memory_of(samples, kinds, began),
        measures.leftovers(facts),
        Counter(f"{end['place']}, exit code {end['exit_code']}" for end in unasked),
    )


def _facts(history: History) -> Document:
    try:
        return history.facts()
    except _UNREADABLE:
        return {}


def _readable(read: Callable[[], Iterable[T]]) -> list[T]:
    """Return what can be read; the checker tells what cannot, and that it proves nothing."""
    found: list[T] = []
    try:
        found.extend(read())
    except _UNREADABLE:
        return found
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Check a stored history and write its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the history's")
    history = History(parser.parse_args(given).folder)
    verdict = check(history)
    path = write(history, verdict)
    print(verdict.describe())
    print(f"report: {path}")
    return 0 if verdict.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
