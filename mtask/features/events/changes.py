"""Finds the runs that a change of a task's document touched, and the changed fields of each. The functions are pure.

A change names a run by its index in the array. Usually a run keeps its index. But when old runs are dropped, the other
runs move to lower indexes. Then the change compares the new run at an index with the former run at the same index. It
names the fields in which the two differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.kernel.document.rules import KEPT_RUNS
from mtask.kernel.document.status import RunStatus, TaskStatus
from mtask.kernel.document.task import runs_in
from mtask.kernel.statements.filters import RUNS

Document = Mapping[str, Any]
_RUN_FIELD = re.compile(r"^task_state\.worker_states\.([0-9]{1,8})(?:\.(\w+))?(?:\.(\w+))?(?:\.\w+)*$")
_STATE = "task_state"
_FAILED_CNT = f"{_STATE}.failed_cnt"
_CLEAN_CNT = f"{_STATE}.clean_cnt"
END_TIMES = ("success_time", "fail_time")
_RUNNING, _TIMEOUT = RunStatus.RUNNING.value, RunStatus.TIMEOUT.value


class Runs:
    """The runs of a document, with a fast search by the values of their fields."""

    def __init__(self, runs: Sequence[Document]) -> None:
        self._runs = runs
        self._found: dict[tuple[str, ...], dict[Any, list[Document]]] = {}

    def at(self, index: int) -> Document:
        """Return the run at this index, or an empty one."""
        return self._runs[index] if index < len(self._runs) else {}

    def having(self, fields: Mapping[str, Any]) -> Sequence[Document]:
        """Return the runs with these values. The values must be strings or instants."""
        values = tuple(fields.values())
        if not all(map(_can_be_found, values)):
            return ()
        names = tuple(fields)
        if names not in self._found:
            self._found[names] = by_values(self._runs, names)
        return self._found[names].get(values, ())


def by_values(runs: Iterable[Document], names: Sequence[str]) -> dict[Any, list[Document]]:
    """Return the runs, grouped by their values of these fields.

    A run is left out if one of its values is neither a string nor an instant.
    """
    found: dict[Any, list[Document]] = {}
    for run in runs:
        values = tuple(run.get(name) for name in names)
        if all(map(_can_be_found, values)):
            found.setdefault(values, []).append(run)
    return found


def _can_be_found(value: Any) -> bool:
    return type(value) is str or isinstance(value, datetime)  # BSON code is a subclass of str that cannot be hashed


def updated_fields(description: Document) -> dict[str, Any]:
    """Return the fields that a change has set, by path."""
    updated = dict(description.get("updatedFields") or {})
    state = updated.get(_STATE)
    if isinstance(state, Mapping):  # task_state was no document before, so the change wrote it whole
        updated |= {f"{_STATE}.{field}": value for field, value in state.items()}
    return updated


def changed_runs(description: Document, runs: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    """Yield each run that the change touched, with its changed fields. The oldest run comes first.

    `runs` are the runs of the document as it is now. If a touched run still exists, its entry in `runs` supplies the
    fields that the change does not name. The number of yielded runs and their changed fields do not depend on `runs`.
    """
    removed = dict.fromkeys(description.get("removedFields") or ())
    updated: Document = {**removed, **updated_fields(description)}  # the value None marks a removed field
    is_cut = any(array.get("field") == RUNS for array in description.get("truncatedArrays") or ())
    changed, written = by_index(updated)
    stored = Runs(runs)
    named = {index: changed[index] for index in sorted(changed) if "run_id" in changed[index]}
    if named.keys() <= written and len(named) == 1 and not is_cut and RUNS not in updated:
        named = {}  # one run was appended, and no other run moved
    in_order = [index for index in sorted(changed) if index not in named]
    ends = _ends(changed)
    for index in in_order:
        yield _run_at(index, changed[index], stored, ends.get(index)), changed[index]
    if named:
        has_closed = any(changed[index].get("status") == _TIMEOUT for index in in_order)
        yield from _just_claimed(named, updated, stored, has_closed=has_closed)


def by_index(updated: Document) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Return the changed fields of each run, by its index; and the indexes of runs that were written whole."""
    values, whole = dict(updated), updated.get(RUNS)
    if isinstance(whole, list):
        runs = ((index, run) for index, run in enumerate(whole) if isinstance(run, Mapping) and "run_id" in run)
        values |= {f"{RUNS}.{index}": run for index, run in runs}
    changed: dict[int, dict[str, Any]] = {}
    written: set[int] = set()
    for path, value in values.items():
        matched = _RUN_FIELD.match(path)
        if matched is None:
            continue
        index, field, part = int(matched[1]), matched[2], matched[3]
        if field is None and isinstance(value, Mapping):
            changed.setdefault(index, {}).update(value)
            written.add(index)
        elif field == "progress" and part is not None:
            changed.setdefault(index, {}).setdefault(field, {})[part] = value
        elif field == "progress":
            given = value if isinstance(value, Mapping) else {}
            changed.setdefault(index, {})[field] = {"fraction": None, "message": None, **given}
        elif field is not None:
            changed.setdefault(index, {})[field] = value
    return changed, written


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a run, as a change wrote it.

    A change may write the same end for several runs. `count` is the number of these runs. `rank` is the position of
    this run among them, from 0.
    """

    fields: Mapping[str, Any]
    rank: int
    count: int


def _ends(changed: Mapping[int, Document]) -> dict[int, _End]:
    fields = {
        index: {name: changed[index][name], "status": changed[index].get("status")}
        for index in sorted(changed)
        for name in reversed(END_TIMES)
        if changed[index].get(name) is not None
    }
    alike: dict[Any, list[int]] = {}
    for index, end in fields.items():
        if all(map(_can_be_found, end.values())):
            alike.setdefault(tuple(end.items()), []).append(index)
    ranked = ((index, rank, len(indexes)) for indexes in alike.values() for rank, index in enumerate(indexes))
    ends = {index: _End(fields[index], rank, count) for index, rank, count in ranked}
    return {index: ends.get(index, _End(end, 0, 1)) for index, end in fields.items()}


def _run_at(index: int, fields: Document, runs: Runs, end: _End | None) -> Document:
    """Return the run that the change touched, or an empty one if the document no longer has the run.

    The document may be newer than the change, so another run may now be at the run's former index.
    """
    if "run_id" in fields:
        return fields
    at_index = runs.at(index)
    if end is None:
        return at_index if has_reported(at_index, fields.get("progress")) else {}
    same = runs.having(end.fields)
    if len(same) == end.count:
        return same[end.rank]
    return at_index if same and all(at_index.get(name) == end.fields[name] for name in end.fields) else {}


def has_reported(run: Document, progress: Any) -> bool:
    """Whether this run reported the given progress, judging by the times of both."""
    last = run.get("progress")
    first, reported = run.get("claim_time"), progress.get("time") if isinstance(progress, Mapping) else None
    until = last.get("time") if isinstance(last, Mapping) else None
    if isinstance(first, datetime) and isinstance(reported, datetime) and isinstance(until, datetime):
        return first <= reported <= until
    return False


def _just_claimed(
    named: Mapping[int, Document], updated: Document, runs: Runs, *, has_closed: bool
) -> Iterator[tuple[Document, Document]]:
    """Yield the runs that a claim closed, then the run that the claim appended. The claim also dropped old runs.

    Because old runs were dropped, each remaining run moved to a lower index. The change may contain a moved run whole.
    Or it contains only the fields that differ from the run that had this index before the claim. Then the status is
    missing if both runs have the same status. `has_closed`: a closed run that did not move was already yielded.
    """
    index = max(named)
    newest = named[index]
    if not _is_claim(index, newest, updated):
        return

    def known(run: Document) -> Document:
        return {**next(iter(runs.having({"run_id": run["run_id"]})), {}), **run}

    if _FAILED_CNT in updated:  # at least one lease had lapsed
        closed = [run for run in named.values() if _is_closed_at(newest.get("claim_time"), run)]
        for run in closed:
            yield known(run), {"status": _TIMEOUT}
        if not closed and not has_closed:  # the claim also dropped the run that it closed
            yield {}, {"status": _TIMEOUT}
    yield known(newest), {"status": _RUNNING}


def _is_claim(index: int, run: Document, updated: Document) -> bool:
    """Whether this change is a claim that appended `run`, the last run. The change moved or rewrote runs."""
    has_ended = any(run.get(name) is not None for name in END_TIMES)
    if has_ended or run.get("status", _RUNNING) != _RUNNING:
        return False
    if _CLEAN_CNT in updated or "task_state.finish_time" in updated or updated.get(_FAILED_CNT) == 0:
        return False  # a publish dropped runs, or a new round began; older versions of mtask wrote no clean_cnt
    # A claim drops runs only if there are more than KEPT_RUNS. If the array was empty, the claim writes the whole
    # array.
    return index >= KEPT_RUNS or updated.get("task_state.status") == TaskStatus.RUNNING.value


def _is_closed_at(claim_time: datetime | None, run: Document) -> bool:
    """Whether the claim at this instant closed this run.

    A run that its worker closed in the same ms still had its lease.
    """
    fail_time, lease = run.get("fail_time"), run.get("ping_expire_time")
    if not isinstance(fail_time, datetime) or fail_time != claim_time or run.get("status", _TIMEOUT) != _TIMEOUT:
        return False
    return lease is None or (isinstance(lease, datetime) and lease <= fail_time)


# --- looked up -------------------------------------------------------------------------------------------

# Checks that a looked-up document belongs to the task of a change. Other documents are not used.
#
# A change names only the changed fields. The document supplies the other fields, such as the run's worker and the
# queue. But the document is read some time after the change. Meanwhile, the task may have moved to another queue. Or it
# may have been removed and published again under the same key, with other data. The functions are pure.

#: A field of a change. If it is true, the change carries the document exactly as it was right after the change.
IS_EXACT = "is_exact"
_NONE: Document = {}
#: Fields of a run that never change once they are written.
_LASTING = ("run_id", "claim_time", "success_time", "fail_time")
#: The least distance in time between a change and a move to another queue that proves their order. At a smaller
#: distance, their times prove nothing, because an update that had to wait has the `$$NOW` of its start.
_NEAR = timedelta(seconds=60)


def document_of(change: Document) -> Document:
    """Return the document of a change, or an empty one if it may belong to another task."""
    document = change.get("fullDocument")
    if not isinstance(document, Mapping):
        return _NONE
    is_known = change["operationType"] != "update" or change.get(IS_EXACT) is True
    return document if is_known or _is_same(change["updateDescription"], document) else _NONE


def queue_of(change: Document, document: Document) -> str | None:
    """Return the queue of the task at the time of the change, or None if the queue is not certain."""
    queue = updated_fields(change.get("updateDescription") or _NONE).get("queue", _NONE)
    if queue is _NONE:
        was_known = change["operationType"] != "update" or change.get(IS_EXACT) is True
        queue = document.get("queue") if was_known or _is_before(document, change["wallTime"]) else None
    return queue if type(queue) is str else None


def _is_before(document: Document, instant: datetime) -> bool:
    """Whether the task was certainly in its present queue at that instant."""
    state = document.get("task_state")
    moved = state.get("queue_time") if isinstance(state, Mapping) else None
    return moved is None or (isinstance(moved, datetime) and instant - moved >= _NEAR)


def _is_same(described: Document, document: Document) -> bool:
    """Whether the document still contains an instant that the change wrote.

    If so, the document and the change belong to the same task.
    """
    updated, state = updated_fields(described), document.get("task_state")
    if _has_instant(updated, "quiet_time", document):
        return True
    if isinstance(state, Mapping) and _has_instant(updated, "task_state.finish_time", state):
        return True
    step = document.get("flow")
    if isinstance(step, Mapping) and _has_instant(updated, "flow.release_time", step):
        return True
    runs = Runs(runs_in(document))
    for index, fields in by_index(updated)[0].items():
        written = {name: fields[name] for name in _LASTING if fields.get(name) is not None}
        is_telling = any(isinstance(value, datetime) for value in written.values())
        if is_telling and runs.having(written):
            return True
        if has_reported(runs.at(index), fields.get("progress")):
            return True
    return False


def _has_instant(updated: Document, path: str, document: Document) -> bool:
    instant = updated.get(path)
    return isinstance(instant, datetime) and document.get(path.rpartition(".")[2]) == instant
