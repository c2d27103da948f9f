"""Reads what decides on the steps of flows: the WAITING steps, for whom they wait, and the verdicts of the rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from bson.timestamp import Timestamp

from mtask.errors import OperationFailed
from mtask.features.flows import rules
from mtask.features.flows import statements as flows
from mtask.features.flows.rules import Awaited
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import MAX_STEPS, OnFailed
from mtask.kernel.driver.indexes import CHILDREN_INDEX
from mtask.kernel.driver.operation import Operation, command
from mtask.kernel.driver.stores import TASKS
from mtask.kernel.statements import filters

Document = dict[str, Any]
#: The most tasks that one statement changes or reads.
BATCH = 500
#: More tasks than a flow can have.
_MANY = 4 * MAX_STEPS
_STATUSES = frozenset(status.value for status in TaskStatus)


def look(task_ids: Sequence[str]) -> Operation[list[Document]]:
    """Decide on the WAITING tasks among these by the rules; change nothing.

    All is read as it was at one moment. A row holds `_id`, `held_by`, `owed_since`, `verdict`, `other`, and `now`, the
    server's time. For the verdict "wait", `other` is an open task: the watched one, if it is open. `unwatched` tells
    that the end of `other` would not be marked. For "cancel" and "fail", `other` is a task that has failed.
    """
    steps, moment = yield from at_one_moment(flows.waiting_now, task_ids, flows.STEP_VIEW)
    groups: dict[tuple[str, ...], list[Document]] = {}
    for step in steps:
        groups.setdefault(_after(step), []).append(step)
    found = yield from awaited_at([*{task_id for after in groups for task_id in after}], moment)
    below = yield from _descendants([task_id for task_id, one in found.items() if one.has_children], moment)
    rows = []
    for after, group in groups.items():
        awaited: list[Awaited] = [found.get(task_id) or Awaited(task_id, None) for task_id in after]
        awaited += {one.task_id: one for task_id in after for one in below.get(task_id, ())}.values()
        unwatched = {one.task_id for one in awaited if isinstance(one, _Found) and one.unwatched}
        holders, culprits = rules.holders(awaited), rules.culprits(awaited)
        verdicts = {on_failed: rules.verdict(on_failed, awaited) for on_failed in get_args(OnFailed)}
        among = frozenset(holders)
        for step in group:
            held_by = text_of(step, "held_by")
            # The holders of many dependents must differ, and none may be moved many times. So the choice is random.
            holder = held_by if held_by in among else random.choice(holders) if holders else None
            rows.append(
                {
                    "_id": step["_id"],
                    "held_by": held_by,
                    "owed_since": step.get("owed_since"),
                    "now": step["now"],
                    "verdict": verdicts.get(text_of(step, "on_failed"), verdicts["fail"]),
                    "other": holder or next(iter(culprits), None),
                    "unwatched": holder in unwatched,
                }
            )
    return rows


def _after(step: Document) -> tuple[str, ...]:
    """Return the dependencies. A malformed step may have none; whoever claims it finds out."""
    return texts(part_of(step).get("after"))


@dataclass(frozen=True, slots=True)
class _Found(Awaited):
    has_children: bool = False
    unwatched: bool = False
    ancestors: Sequence[str] = ()


def awaited_at(task_ids: Sequence[str], moment: Timestamp) -> Operation[dict[str, _Found]]:
    """Read these tasks as they were at that moment."""
    rows, _ = yield from at_one_moment(filters.by_ids, task_ids, flows.awaited_view(), moment)
    return {row["_id"]: _parsed(row) for row in rows}


def open_by_id(task_ids: Sequence[str]) -> Operation[dict[str, bool]]:
    """Return whether these tasks, or descendants of them, are open. Tasks that are not there are left out."""
    rows, moment = yield from at_one_moment(filters.by_ids, task_ids, flows.awaited_view())
    found = {row["_id"]: _parsed(row) for row in rows}
    below = yield from _descendants([task_id for task_id, one in found.items() if one.has_children], moment)
    return {task_id: any(map(rules.is_open, [one, *below.get(task_id, ())])) for task_id, one in found.items()}


def _descendants(parents: Sequence[str], moment: Timestamp) -> Operation[dict[str, list[Awaited]]]:
    """Read the descendants of each of these tasks as they were at that moment.

    Those that ended as SUCCESS are left out, unless one of them is all that is open.
    """
    below: dict[str, list[Awaited]] = {parent: [] for parent in parents}
    for matched in (flows.descendants, flows.owing_descendants):
        wanted = [parent for parent in parents if not any(map(rules.is_open, below[parent]))]
        rows, _ = yield from at_one_moment(matched, wanted, flows.awaited_view(), moment, CHILDREN_INDEX)
        for one in map(_parsed, rows):
            for parent in below.keys() & {*one.ancestors}:
                below[parent].append(one)
    return below


def _parsed(row: Document) -> _Found:
    status = status_of(row)
    # A task whose status is none is open until a worker marks it FAIL.
    known = TaskStatus(status) if status in _STATUSES else TaskStatus.INIT
    part = part_of(row)
    return _Found(
        row["_id"],
        known,
        row["owes"],
        has_children=bool(part.get("has_children")),
        unwatched=part.get("unwatched") is True,
        ancestors=texts(part.get("ancestors")),
    )


def part_of(row: Document) -> Document:
    """Return the task's part in its flow."""
    part = row.get("flow")
    return part if isinstance(part, dict) else {}


def text_of(row: Document, name: str) -> str | None:
    """Return a field of the task's part in its flow. A malformed document may hold something other than text there."""
    value = part_of(row).get(name)
    return value if isinstance(value, str) else None


def texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a list. A malformed document may hold anything there."""
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def status_of(row: Document) -> str | None:
    """Return the task's status."""
    state = row.get("task_state")
    status = state.get("status") if isinstance(state, dict) else None
    return status if isinstance(status, str) else None


def newest(matched: filters.Filter, view: Document, hint: str) -> Operation[list[Document]]:
    """Return up to `BATCH` tasks as the primary has them now, even if no majority has them yet.

    Right after a failover, a majority read may show how things were before a change that is long acknowledged. A mark
    that is removed by such a read would be lost. What a majority does not have yet can be undone. Then each change that
    followed from it is undone, too, or its guard does not match.
    """
    answer = yield command(
        "find",
        TASKS,
        filter=matched,
        projection=view,
        hint=hint,
        limit=BATCH,
        batchSize=BATCH,
        singleBatch=True,
        readConcern={"level": "local"},
    )
    rows: list[Document] = answer["cursor"]["firstBatch"]
    return rows


def at_one_moment(
    match: Callable[[Sequence[str]], filters.Filter],
    values: Sequence[str],
    view: Document,
    moment: Timestamp | None = None,
    hint: str = "_id_",
) -> Operation[tuple[list[Document], Timestamp]]:
    """Read the tasks that match these values as a majority had them at one moment.

    Return the tasks, and the moment, for further reads of it. Without `moment`, the server chooses it.
    """
    rows: list[Document] = []
    parts = [values] if values else []
    while parts:
        part = parts.pop()
        concern = {"level": "snapshot"} if moment is None else {"level": "snapshot", "atClusterTime": moment}
        options = {"projection": view, "hint": hint, "batchSize": _MANY, "readConcern": concern}
        cursor = (yield command("find", TASKS, filter=match(part), **options))["cursor"]
        moment = cursor.get("atClusterTime", moment)
        if not cursor["id"]:
            rows += cursor["firstBatch"]
            continue
        # The reply is limited to 16 MB. What does not fit is read in parts.
        yield command("killCursors", TASKS, cursors=[cursor["id"]])
        if len(part) == 1:
            raise OperationFailed(f"too much to read for {part[0]}")
        parts += [part[: len(part) // 2], part[len(part) // 2 :]]
    return rows, moment or Timestamp(0, 0)
