"""Judges a run: nothing was lost, and nothing happened twice, by the documents and by what handlers noted."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from mtask import Client
from tests.faults.upgrade.app import NARROW, WIDTH
from tests.faults.upgrade.rolling import Process

Document = dict[str, Any]
Span = tuple[float, float]
#: From when until when nobody may claim from the narrow queue, by the server's clock.
Pause = tuple[datetime, datetime]


@dataclass(slots=True)
class Verdict:
    """The figures of a run, and its violations."""

    figures: dict[str, int]
    violations: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the figures and the violations, one a line."""
        lines = [f"{name}: {count}" for name, count in self.figures.items()]
        lines += [f"VIOLATION {violation}" for violation in self.violations[:50]]
        return "\n".join([*lines, "NOT CLEAN" if self.violations else "CLEAN: nothing lost, nothing twice"])


def judge(
    client: Client, folder: Path, killed: Sequence[Process], pauses: Sequence[Pause] = (), limited_from: float = 0.0
) -> Verdict:
    """Judge the run whose ledgers lie in this folder, after its end.

    `limited_from`: when the limit of the narrow queue was in force (monotonic seconds). Runs that began before it may
    be more.
    """
    documents = {document["_id"]: document for document in client.tasks.find()}
    published = list(_lines(folder, "publisher-*.jsonl"))
    notes = sorted(_lines(folder, "handlers-*.jsonl"), key=lambda note: note["at"])
    deaths = {process.popen.pid: process.killed for process in killed if process.killed is not None}
    written = [(effect["task_id"], effect["run_id"]) for effect in client.tasks.database["effects"].find()]
    effects = Counter(task_id for task_id, _ in written)
    lapsed = {run["run_id"] for document in documents.values() for run in _runs(document) if run["status"] == "TIMEOUT"}
    spans = _spans(notes, deaths, lapsed)
    verdict = Verdict(_figures(documents, published, notes, deaths))
    verdict.violations += _publishing(documents, published)
    verdict.violations += _documents(documents, effects)
    verdict.violations += _handlers(documents, notes, spans, {run_id for _, run_id in written})
    verdict.violations += _limit(spans, limited_from)
    verdict.violations += _paused(documents, pauses)
    verdict.violations += _schedule(documents, client)
    return verdict


def _lines(folder: Path, pattern: str) -> Iterator[Document]:
    for path in sorted(folder.glob(pattern)):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def _runs(document: Document) -> list[Document]:
    found: list[Document] = document["task_state"]["worker_states"]
    return found


def _figures(
    documents: dict[str, Document], published: list[Document], notes: list[Document], deaths: dict[int, float]
) -> dict[str, int]:
    statuses = Counter(document["task_state"]["status"] for document in documents.values())
    starts = Counter(note["version"] for note in notes if note["event"] == "start")
    by_task = defaultdict(set)
    for note in notes:
        by_task[note["task_id"]].add(note["version"])
    timeouts = sum(run["status"] == "TIMEOUT" for document in documents.values() for run in _runs(document))
    return {
        "publish calls": len(published),
        "publish calls that failed": sum("error" in note for note in published),
        "tasks": len(documents),
        **{f"tasks {status}": count for status, count in sorted(statuses.items())},
        **{f"handlers started by {version}": count for version, count in sorted(starts.items())},
        "tasks that both versions ran": sum(len(versions) == 2 for versions in by_task.values()),
        "workers killed": len(deaths),
        "runs that a killed worker left": timeouts,
    }


def _publishing(documents: dict[str, Document], published: list[Document]) -> Iterator[str]:
    created = Counter(note["task_id"] for note in published if note["created"])
    for note in published:
        if note["created"] is not None and note["task_id"] not in documents:
            yield f"lost: {note['task_id']} was acknowledged and does not exist"
    for task_id, count in created.items():
        if count > 1:
            yield f"twice: {task_id} was created {count} times"


def _documents(documents: dict[str, Document], effects: Counter[str]) -> Iterator[str]:
    for task_id, document in documents.items():
        status, runs = document["task_state"]["status"], _runs(document)
        wanted = "FAIL" if document["name"] == "doomed" else "SUCCESS"
        if status != wanted:
            reasons = [run.get("fail_reason") for run in runs]
            yield f"lost: {task_id} is {status}, not {wanted}: {reasons}"
        successes = [run["worker_id"] for run in runs if run["status"] == "SUCCESS"]
        seats = document["task_option"]["concurrent_worker_cnt"]
        if wanted == "SUCCESS" and (len(successes) != seats or len(set(successes)) != seats):
            yield f"twice: {task_id} has successes of {successes}, and {seats} seats"
        if any(run["status"] == "RUNNING" for run in runs):
            yield f"lost: {task_id} has ended with a run that is RUNNING"
        if document["name"] == "deposit" and effects[task_id] != 1:
            yield f"twice: {task_id} has {effects[task_id]} effects of its transaction"


def _spans(notes: list[Document], deaths: dict[int, float], lapsed: set[str]) -> dict[str, list[Span]]:
    """Return the times of the handlers of each task, without those of runs that lost their lease.

    A handler that notes no end ended with its process.
    """
    ends = {(note["run_id"], note["pid"]): note["at"] for note in notes if note["event"] != "start"}
    found: dict[str, list[Span]] = defaultdict(list)
    for note in notes:
        if note["event"] == "start" and note["run_id"] not in lapsed:
            end = ends.get((note["run_id"], note["pid"]), deaths.get(note["pid"], inf))
            found[note["task_id"]].append((note["at"], end))
    return found


def _handlers(
    documents: dict[str, Document], notes: list[Document], spans: dict[str, list[Span]], committed: set[str]
) -> Iterator[str]:
    runs = {run["run_id"]: run for document in documents.values() for run in _runs(document)}
    starts = Counter(note["run_id"] for note in notes if note["event"] == "start")
    returned = {note["run_id"] for note in notes if note["event"] == "end"}
    for run_id, count in starts.items():
        if run_id not in runs:
            yield f"lost: the run {run_id} is in no document"
        if count > 1:
            yield f"twice: the run {run_id} has called its handler {count} times"
    for run_id, run in runs.items():
        # A transaction makes its run SUCCESS before the handler returns, and its process may die in between.
        is_backed = run_id in starts if run_id in committed else run_id in returned
        if run["status"] == "SUCCESS" and not is_backed:
            yield f"lost: the run {run_id} is SUCCESS, and no handler has returned"
    for task_id, document in documents.items():
        if document["task_option"]["concurrent_worker_cnt"] > 1:
            continue
        own = sorted(spans[task_id])
        if any(later[0] < earlier[1] for earlier, later in pairwise(own)):
            yield f"twice: two handlers of {task_id} ran at once"
        ended = sum(run["run_id"] in returned for run in _runs(document))
        excused = sum(run["status"] == "TIMEOUT" for run in _runs(document))
        if ended > 1 + excused:
            yield f"twice: {ended} handlers of {task_id} returned, and {excused} of its runs lapsed"


def _limit(spans: dict[str, list[Span]], limited_from: float) -> Iterator[str]:
    moments = [
        moment
        for task_id, own in spans.items()
        if task_id.startswith(f"{NARROW}:")
        for start, end in own
        if start >= limited_from
        for moment in ((start, 1), (end, -1))
    ]
    at_once = 0
    for at, step in sorted(moments):
        at_once += step
        if at_once > WIDTH:
            yield f"{at_once} runs of the queue {NARROW} at once, at {at:.3f}"


def _paused(documents: dict[str, Document], pauses: Sequence[Pause]) -> Iterator[str]:
    for task_id, document in documents.items():
        for run in _runs(document) if document["queue"] == NARROW else ():
            if any(paused < run["claim_time"] < resumed for paused, resumed in pauses):
                yield f"{task_id} was claimed at {run['claim_time']}, while its queue was paused"


def _schedule(documents: dict[str, Document], client: Client) -> Iterator[str]:
    """Each second since the first firing has one task, and none more."""
    (schedule,) = client.schedules()
    fired = sorted(document["key"] for document in documents.values() if document["name"] == "tick")
    last = schedule.schedule_state.last_fire_time
    if last is None or not fired:
        yield "firings: none was made"
        return
    seconds = range(int((last - schedule.anchor) / timedelta(seconds=1)) + 1)
    keys = [schedule.key_of(schedule.anchor + timedelta(seconds=second)) for second in seconds]
    wanted = keys[keys.index(fired[0]) :] if fired[0] in keys[:2] else keys
    if fired != wanted:
        yield f"firings: missing {sorted(set(wanted) - set(fired))[:5]}, stray {sorted(set(fired) - set(wanted))[:5]}"
