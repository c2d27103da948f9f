"""flows: four workers drain the children of one parent, or the dependencies of one step, against tasks of no flow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Any

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost, cost_figures, cpu_parts
from benchmarks.measuring.draining import LABEL, Backlog, drain_together
from benchmarks.measuring.server import Scratch, Server, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Target, compared, figure, turns

Document = dict[str, Any]

TASKS = 10_000
WORKERS = 4
PLAIN, CHILDREN, LISTED = "no flow", "children of one parent", "dependencies of one step"
_FLOW = "fan-in"
_LAST = f"noop:{_FLOW}/last"
_PARENT = f"noop:{_FLOW}/parent"
#: At least this share of the throughput without a flow.
_SHARE = Target.at_least(0.7)
_LARGEST = 16 * 1024
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class _Measured:
    cost: Cost
    released: float  #: seconds from the last success to the release of the step that waited
    largest: int  #: bytes of the largest document


def measure(server: Server, options: Options) -> Result:
    """Drain equal backlogs by four workers: tasks of no flow, children of one parent, dependencies of one step."""
    count, workers = options.tasks_or(TASKS), WORKERS if options.workers is None else options.workers
    found: dict[str, list[_Measured]] = {side: [] for side in (PLAIN, CHILDREN, LISTED)}
    for run in range(options.runs):
        for side in turns(list(found), run):
            server.say(f"flows: run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch:
                found[side].append(_one_side(server, scratch, side, count, workers))
    costs = {side: [one.cost for one in several] for side, several in found.items()}
    figures = [f for side in (CHILDREN, LISTED) for f in _figures(side, found[side], found[PLAIN])]
    return Result(
        "flows",
        f"{workers} worker processes, {count:,} tasks that come due at one instant and one step that waits for all",
        figures,
        {"tasks": count, "workers": workers, "runs": options.runs},
        cpu={side: cpu_parts(several) for side, several in costs.items()},
        notes=[
            "The throughput of a flow counts from the first claim to the release of the step that waits for all.",
            "The largest document is that of the step that waits: with a list of all dependencies, it holds their ids.",
        ],
    )


def _figures(side: str, found: list[_Measured], plain: list[_Measured]) -> list[Figure]:
    costs, against = [one.cost for one in found], [one.cost for one in plain]
    rates = [one.cost.tasks / (one.cost.seconds + one.released) for one in found]
    largest = Target.at_most(_LARGEST, "value", "bytes") if side == CHILDREN else None
    return [
        compared(f"{side}", "tasks/s", rates, [cost.rate for cost in against], _SHARE, against_name=PLAIN),
        *cost_figures(side, costs, against, None, has_rate=False),
        figure(f"{side}: from the last success to the release", "ms", [1_000 * one.released for one in found]),
        figure(f"{side}: largest document", "bytes", [one.largest for one in found], largest),
    ]


def _one_side(server: Server, scratch: Scratch, side: str, count: int, workers: int) -> _Measured:
    def insert(delay: timedelta) -> Backlog:
        ids = raw.insert(scratch.tasks, documents(side, count, scratch.now, delay))
        scratch.settle()
        return Backlog("noop", LABEL, ids[:count])

    drained = drain_together(server, scratch, "noop", count, workers, insert)
    largest: int = scratch.tasks.aggregate([{"$group": {"_id": None, "n": {"$max": {"$bsonSize": "$$ROOT"}}}}]).next()[
        "n"
    ]
    released = 0.0
    if side != PLAIN:
        wait_until(lambda: _released(scratch) is not None, _PATIENCE, "the release of the step that waits for all")
        last = scratch.tasks.find_one(
            {"_id": {"$regex": f"^noop:{LABEL}/"}}, sort=[("task_state.finish_time", -1)], projection={"task_state": 1}
        )
        assert last is not None
        moment = _released(scratch)
        assert moment is not None
        released = (moment - last["task_state"]["finish_time"]).total_seconds()
    return _Measured(drained.cost, max(0.0, released), largest)


def _released(scratch: Scratch) -> datetime | None:
    found = scratch.tasks.find_one({"_id": _LAST}, {"flow.release_time": 1})
    moment: datetime | None = (found or {}).get("flow", {}).get("release_time")
    return moment


def documents(side: str, count: int, now: datetime, delay: timedelta) -> Iterator[Document]:
    """Make the tasks; of a flow, also the step that waits for all, and the parent of the children."""
    keys = [f"{LABEL}/{number:07}" for number in range(count)]
    watched = Random(count).choice(keys)
    for number, key in enumerate(keys):
        made = raw.document("noop", key, now, delay=delay)
        if side != PLAIN:
            part = _part(f"s{number}", [])
            made["flow"] = part | {"release_time": now} | ({"ancestors": [_PARENT]} if side == CHILDREN else {})
            made["flow"] |= {} if key == watched else {"unwatched": True}
        yield made
    if side == PLAIN:
        return
    waits = raw.document("noop", f"{_FLOW}/last", now)
    after = [_PARENT] if side == CHILDREN else [f"noop:{key}" for key in keys]
    waits["flow"] = _part("last", after) | {"held_by": f"noop:{watched}"}
    waits["task_state"]["status"] = "WAITING"
    del waits["task_state"]["next_preempt_time"]
    yield waits
    parent = raw.finished_document("noop", f"{_FLOW}/parent", now)
    parent["flow"] = _part("parent", []) | {"release_time": now, "has_children": True}
    yield parent


def _part(step: str, after: list[str]) -> Document:
    return {"key": _FLOW, "step": step, "after": after, "on_failed": "cancel"}
