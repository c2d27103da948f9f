"""Flows: the list, and the graph of one flow with the statuses of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from markupsafe import Markup
from starlette.responses import Response

from mtask.errors import InvalidInput
from mtask.features.flows.views import FlowRow, StepState, known_before, natural
from mtask.web.access import Role
from mtask.web.page.rendering import age, badge, brief, number, shown, url
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
#: The flows of one list, and the steps of one table.
_MOST_FLOWS, _MOST_ROWS = 100, 500
_WEIGHT = {"FAIL": 0, "CANCELED": 1, "RUNNING": 2, "INIT": 3, "WAITING": 4, "SUCCESS": 5}
#: The order of the statuses in a bar.
_BAR = ("SUCCESS", "RUNNING", "INIT", "WAITING", "CANCELED", "FAIL")


@addresses.get_at("/flows")
async def flows(visit: Visit) -> Response:
    """List the newest flows."""
    given = visit.query.exact("prefix") or ""
    prefix = visit.caller.stored_key(given) if given else None
    if visit.caller.tenant is not None and not given:
        prefix = f"{visit.caller.tenant}:"
    reads = visit.parts.reads
    found = await reads.within(visit.client.flows(prefix=prefix, limit=_MOST_FLOWS))
    rows = [(visit.caller.shown_key(row.key), row) for row in found]
    now = await reads.now()
    table = flow_rows(rows, now)
    return visit.html("flows.html", flows=rows, table=table, prefix=given, now=now, is_cut=len(found) == _MOST_FLOWS)


@addresses.get_at("/flow")
async def flow(visit: Visit) -> Response:
    """Show a flow."""
    key = _named(visit)
    caller, reads = visit.caller, visit.parts.reads
    found = await reads.within(visit.client.flow(caller.stored_key(key)))
    drawn = graph(found.steps)
    rows = sorted(found.steps, key=_weight) if drawn is None else list(found.steps)
    layers = [] if drawn is not None else Counter((step.step.rstrip("0123456789-_"), step.status) for step in rows)
    names = {step.task_id: step.step for step in found.steps}
    return visit.html(
        "flow.html",
        key=key,
        flow=found,
        graph=drawn,
        box=(BOX_WIDTH, BOX_HEIGHT),
        rows=[(step, *_split(visit, step.task_id), caller.shown_text(step.reason or "")) for step in rows[:_MOST_ROWS]],
        names=names,
        bar=bar(found.counts, len(found.steps)),
        left_out=max(0, len(rows) - _MOST_ROWS),
        groups=sorted(Counter(dict(layers)).items()),
        most=MOST_STEPS,
        now=found.now or await reads.now(),
        key_of=lambda step: _split(visit, step.task_id),
    )


def _weight(step: StepState) -> int:
    return _WEIGHT.get(step.status, 9)


def _split(visit: Visit, task_id: str) -> tuple[str, str]:
    name, _, key = visit.caller.shown_id(task_id).partition(":")
    return name, key


def _named(visit: Visit) -> str:
    key = visit.query.exact("key")
    if not key:
        raise InvalidInput("Name the flow: /flow?key=KEY.", field="key")
    return key


def _address(key: str) -> str:
    return url("/flow", key=key)


@addresses.post_at("/flow/cancel", Role.PUBLISH)
async def cancel(visit: Visit) -> Response:
    """Cancel the open steps of a flow."""
    key = _named(visit)
    everything = bool(visit.form.text("everything"))
    made = await visit.client.cancel_flow(visit.caller.stored_key(key), everything=everything)
    return visit.back(_address(key), f"Steps canceled or asked to stop: {len(made.task_ids)}.")


@addresses.post_at("/flow/retry", Role.PUBLISH)
async def retry(visit: Visit) -> Response:
    """Let all failed and canceled steps of a flow run again."""
    key = _named(visit)
    made = await visit.client.retry_flow(visit.caller.stored_key(key))
    return visit.back(_address(key), f"Steps opened again: {len(made.task_ids)}.")


@addresses.post_at("/flow/retry-step", Role.PUBLISH)
async def retry_step(visit: Visit) -> Response:
    """Let a step run again, with all that failed or was canceled because of it."""
    key = _named(visit)
    name, step_key = visit.query.exact("name") or "", visit.query.exact("step") or ""
    made = await visit.client.retry(name, visit.caller.stored_key(step_key))
    step = step_key if made.flow is None else made.flow.step
    return visit.back(_address(key), f"The step {step} runs again, with all that ended because of it.")


def flow_rows(rows: Iterable[tuple[str, FlowRow]], now: datetime) -> Markup:
    """Return the rows of a list of flows. Each row has the key that the reader knows."""
    return Markup("".join([_flow_row(key, flow, now) for key, flow in rows]))


def _flow_row(key: str, flow: FlowRow, now: datetime) -> str:
    counts = flow.counts
    steps, ended = flow.step_cnt, flow.ended_cnt
    if counts.get("FAIL"):
        status = "FAIL"
    elif ended == steps:
        status = "CANCELED" if counts.get("CANCELED") else "SUCCESS"
    else:
        status = "RUNNING" if counts.get("RUNNING") else "INIT"
    return (
        f'<tr><td class="grow"><a href="{shown(url("/flow", key=key))}" title="{shown(key)}">'
        f"<bdi>{shown(brief(key, 64))}</bdi></a></td>\n"
        f'<td>{badge(status)}</td>\n<td class="progress-col">{bar(counts, steps)}</td>'
        f'<td class="n">{number(ended)}/{number(steps)}</td><td class="n wide">{age(flow.create_time, now)}</td></tr>\n'
    )


def bar(counts: Mapping[str, int], total: int) -> Markup:
    """Return a bar with the numbers of steps by status."""
    if not total:
        return Markup("")
    words = "".join([f"{shown(count)} {shown(status)} " for status, count in counts.items()])
    parts, at = [], 0.0
    for status in _BAR:
        if count := counts.get(status):
            width = 100.0 * count / total
            parts.append(f'<rect class="f-{status}" x="{round(at, 2)}" y="0" width="{round(width, 2)}" height="8"/>')
            at += width
    return Markup(
        '<svg class="stack" viewBox="0 0 100 8" preserveAspectRatio="none" width="100%" height="8" role="img" '
        f'aria-label="{words}">\n{"".join(parts)}</svg>'
    )


# --- graph -----------------------------------------------------------------------------------------------

# The graph of a flow: a box for each step, in columns by depth, and a curve for each dependency.

#: The most steps that a graph draws: more would be no picture.
MOST_STEPS = 200
BOX_WIDTH, BOX_HEIGHT, _GAP_X, _GAP_Y, _EDGE, _LANE = 184, 46, 52, 14, 10, 10

#: What stands in a column: a step, by its id, or a lane on which the curves from a step pass, by its id and the depth.
_Node = str | tuple[str, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A step."""

    x: int
    y: int
    step: StepState


@dataclass(frozen=True, slots=True)
class Curve:
    """A dependency: the path of its curve. `kind`: the status of the step on which the other one depends."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A drawn flow."""

    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]
    width: int
    height: int


def graph(steps: Sequence[StepState]) -> Graph | None:
    """Return the graph of a flow; None: it has too many steps. Each step comes after those on which it depends."""
    if not steps or len(steps) > MOST_STEPS:
        return None
    by_id = {step.task_id: step for step in steps}
    before = {step.task_id: known_before(step, by_id) for step in steps}
    depths = _depths(steps, before)
    columns = _columns(by_id, before, depths)
    height = max(_height(column) for column in columns)
    places: dict[_Node, tuple[int, int]] = {}
    for depth, column in enumerate(columns):
        y = _EDGE + (height - _height(column)) // 2
        for node in column:
            size = BOX_HEIGHT if isinstance(node, str) else _LANE
            places[node] = _EDGE + depth * (BOX_WIDTH + _GAP_X), y + size // 2
            y += size + _GAP_Y
    curves = [
        Curve(_path([places[node] for node in _way(other, task_id, depths)]), by_id[other].status)
        for task_id, others in before.items()
        for other in others
    ]
    boxes = [Box(places[step.task_id][0], places[step.task_id][1] - BOX_HEIGHT // 2, step) for step in steps]
    width = 2 * _EDGE + len(columns) * (BOX_WIDTH + _GAP_X) - _GAP_X
    return Graph(tuple(boxes), tuple(curves), width, height + 2 * _EDGE)


def _depths(steps: Sequence[StepState], before: Mapping[str, Sequence[str]]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for step in steps:
        depths[step.task_id] = 1 + max((depths.get(other, -1) for other in before[step.task_id]), default=-1)
    return depths


def _way(start: str, end: str, depths: Mapping[str, int]) -> list[_Node]:
    """Return the nodes over which a dependency leads: both steps, and a lane in each column between them."""
    return [start, *((start, depth) for depth in range(depths[start] + 1, depths[end])), end]


def _columns(
    by_id: Mapping[str, StepState], before: Mapping[str, Sequence[str]], depths: Mapping[str, int]
) -> list[list[_Node]]:
    """Return the nodes by depth. Within a column, a node stands near those from which it comes."""
    origins: dict[_Node, list[_Node]] = {task_id: [] for task_id in by_id}
    for task_id, others in before.items():
        for other in others:
            way = _way(other, task_id, depths)
            for origin, node in pairwise(way):
                origins.setdefault(node, []).append(origin)
    columns: list[list[_Node]] = [[] for _ in range(max(depths.values()) + 1)]
    for node in origins:
        columns[depths[node] if isinstance(node, str) else node[1]].append(node)
    rows: dict[_Node, float] = {}
    for column in columns:
        near = {node: _middle([rows[origin] for origin in origins[node] if origin in rows]) for node in column}
        column.sort(key=lambda node: (near[node], natural(by_id[_step_of(node)].step)))
        rows |= {node: row - (len(column) - 1) / 2 for row, node in enumerate(column)}
    return columns


def _step_of(node: _Node) -> str:
    return node if isinstance(node, str) else node[0]


def _middle(rows: Sequence[float]) -> float:
    return sum(rows) / len(rows) if rows else 0.0


def _height(column: Sequence[_Node]) -> int:
    return sum((BOX_HEIGHT if isinstance(node, str) else _LANE) + _GAP_Y for node in column) - _GAP_Y


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Return a curve from the right edge of the first point's column to the left edge of the last point's."""
    x, y = points[0][0] + BOX_WIDTH, points[0][1]
    path = f"M{x} {y}"
    for index, (left, row) in enumerate(points[1:], 2):
        path += f"C{x + _GAP_X // 2} {y} {left - _GAP_X // 2} {row} {left} {row}"
        x, y = left, row
        if index < len(points):
            x = left + BOX_WIDTH
            path += f"H{x}"
    return path
