"""Which runs of a task a change of its document touched, and what it made of them; pure.

A change names by their places the runs that differ from those that stood there before. Most of the time these are the
same runs. Where old ones were left out, others stand in their places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from mtask.model.rules import KEPT_RUNS
from mtask.model.status import RunStatus, TaskStatus
from mtask.store.filters import RUNS

Document = Mapping[str, Any]
_RUN_FIELD = re.compile(r"^task_state\.worker_states\.(\d+)(?:\.(\w+))?(?:\.(\w+))?(?:\.\w+)*$")
_FAILED_CNT = "task_state.failed_cnt"
END_TIMES = ("success_time", "fail_time")
_RUNNING, _TIMEOUT = RunStatus.RUNNING.value, RunStatus.TIMEOUT.value


def changed_runs(description: Document, runs: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    """Yield each run that the change touched and what was changed of it; the oldest first.

    `runs`: those of the document as it is now. They add what the change does not say of a run, if it is still there.
    How many are yielded, and what has become of them, does not depend on them.
    """
    removed = dict.fromkeys(description.get("removedFields") or ())
    updated: Document = {**removed, **(description.get("updatedFields") or {})}  # None: taken out
    is_cut = any(array.get("field") == RUNS for array in description.get("truncatedArrays") or ())
    changed, written = _by_place(updated)
    named = {place: changed[place] for place in sorted(changed) if "run_id" in changed[place]}
    if named.keys() <= written and len(named) == 1 and not is_cut and RUNS not in updated:
        named = {}  # it was added, and the others stand where they did
    in_place = [place for place in sorted(changed) if place not in named]
    for place in in_place:
        yield _run_at(place, changed, runs), changed[place]
    if named:
        has_closed = any(changed[place].get("status") == _TIMEOUT for place in in_place)
        yield from _just_claimed(named, updated, runs, has_closed=has_closed)


def _by_place(updated: Document) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Return what was changed of the run in each place, and the places of those that were written whole."""
    values, whole = dict(updated), updated.get(RUNS)
    if isinstance(whole, list):
        runs = ((place, run) for place, run in enumerate(whole) if isinstance(run, Mapping) and "run_id" in run)
        values |= {f"{RUNS}.{place}": run for place, run in runs}
    changed: dict[int, dict[str, Any]] = {}
    written: set[int] = set()
    for path, value in values.items():
        matched = _RUN_FIELD.match(path)
        if matched is None:
            continue
        place, field, part = int(matched[1]), matched[2], matched[3]
        if field is None and isinstance(value, Mapping):
            changed.setdefault(place, {}).update(value)
            written.add(place)
        elif field == "progress" and part is not None:
            changed.setdefault(place, {}).setdefault(field, {})[part] = value
        elif field == "progress":
            given = value if isinstance(value, Mapping) else {}
            changed.setdefault(place, {})[field] = {"fraction": None, "message": None, **given}
        elif field is not None:
            changed.setdefault(place, {})[field] = value
    return changed, written


def _run_at(place: int, changed: Mapping[int, Document], runs: Sequence[Document]) -> Document:
    """Return the run that stood there when it was changed, if it is still there: others may stand there by now."""
    fields = changed[place]
    if "run_id" in fields:
        return fields
    at_place = runs[place] if place < len(runs) else {}
    for name in END_TIMES:
        if fields.get(name) is not None:
            ended = (fields[name], fields.get("status"))
            same = [run for run in runs if (run.get(name), run.get("status")) == ended]
            places = [p for p in sorted(changed) if (changed[p].get(name), changed[p].get("status")) == ended]
            if len(same) == len(places):
                return same[places.index(place)]
            return at_place if at_place in same else {}
    return at_place if _has_told(at_place, fields.get("progress")) else {}


def _has_told(run: Document, progress: Document | None) -> bool:
    """Whether it is this run that told that progress."""
    last = run.get("progress")
    first, told = run.get("claim_time"), (progress or {}).get("time")
    until = last.get("time") if isinstance(last, Mapping) else None
    if isinstance(first, datetime) and isinstance(told, datetime) and isinstance(until, datetime):
        return first <= told <= until
    return False


def _just_claimed(
    named: Mapping[int, Document], updated: Document, runs: Sequence[Document], *, has_closed: bool
) -> Iterator[tuple[Document, Document]]:
    """Yield the run that a claim has added where it left old ones out, after those that it closed.

    The others stand in other places since, told whole or by the fields in which they differ from who stood there
    before: a status that is the same is not among these. `has_closed`: it was told of one that stands where it did.
    """
    place = max(named)
    newest = named[place]
    if not _is_claim(place, newest, updated):
        return

    def known(run: Document) -> Document:
        return {**next((r for r in runs if r.get("run_id") == run["run_id"]), {}), **run}

    if _FAILED_CNT in updated:  # else no lease had lapsed
        closed = [run for run in named.values() if _is_closed_at(newest.get("claim_time"), run)]
        for run in closed:
            yield known(run), {"status": _TIMEOUT}
        if not closed and not has_closed:  # left out as soon as it was closed
            yield {}, {"status": _TIMEOUT}
    yield known(newest), {"status": _RUNNING}


def _is_claim(place: int, run: Document, updated: Document) -> bool:
    """Whether the change that moved the runs, or wrote them all, has added this one, which is the last."""
    has_ended = any(run.get(name) is not None for name in END_TIMES)
    if has_ended or run.get("status", _RUNNING) != _RUNNING:
        return False
    if "task_state.finish_time" in updated or updated.get(_FAILED_CNT) == 0:
        return False  # a new round, or published again, and cleaned
    # A claim leaves old ones out beyond these; it writes them all where there was none.
    return place >= KEPT_RUNS or updated.get("task_state.status") == TaskStatus.RUNNING.value


def _is_closed_at(claim_time: datetime | None, run: Document) -> bool:
    """Whether the claim of that instant has closed this run; one that ended in the same ms still had its lease."""
    fail_time, lease = run.get("fail_time"), run.get("ping_expire_time")
    if fail_time is None or fail_time != claim_time or run.get("status", _TIMEOUT) != _TIMEOUT:
        return False
    return lease is None or bool(lease <= fail_time)
