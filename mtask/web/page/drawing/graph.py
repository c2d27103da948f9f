"""The graph of a flow: a box for each step, in columns by depth, and a curve for each dependency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mtask.client.reading.flows import StepState, known_before, natural

#: The most steps that a graph draws: more would be no picture.
MOST_STEPS = 200
BOX_WIDTH, BOX_HEIGHT, _GAP_X, _GAP_Y, _EDGE = 184, 46, 52, 14, 10


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
    columns = _columns(steps, before)
    places: dict[str, tuple[int, int]] = {}
    tallest = max(len(column) for column in columns)
    for depth, column in enumerate(columns):
        top = _EDGE + (tallest - len(column)) * (BOX_HEIGHT + _GAP_Y) // 2
        for row, task_id in enumerate(column):
            places[task_id] = _EDGE + depth * (BOX_WIDTH + _GAP_X), top + row * (BOX_HEIGHT + _GAP_Y)
    curves = tuple(
        Curve(_path(places[other], places[task_id]), by_id[other].status)
        for task_id, others in before.items()
        for other in others
    )
    width = 2 * _EDGE + len(columns) * (BOX_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _EDGE + tallest * (BOX_HEIGHT + _GAP_Y) - _GAP_Y
    return Graph(tuple(Box(*places[step.task_id], step) for step in steps), curves, width, height)


def _columns(steps: Sequence[StepState], before: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the ids by depth. Within a column, a step stands near those on which it depends."""
    depths: dict[str, int] = {}
    columns: dict[int, list[StepState]] = defaultdict(list)
    for step in steps:
        depths[step.task_id] = 1 + max((depths.get(other, -1) for other in before[step.task_id]), default=-1)
        columns[depths[step.task_id]].append(step)
    rows: dict[str, float] = {}
    made: list[list[str]] = []
    for depth in sorted(columns):

        ids = [step.task_id for step in sorted(columns[depth], key=partial(_near, rows=rows, before=before))]
        middle = (len(ids) - 1) / 2
        rows |= {task_id: row - middle for row, task_id in enumerate(ids)}
        made.append(ids)
    return made


def _near(
    step: StepState, rows: Mapping[str, float], before: Mapping[str, Sequence[str]]
) -> tuple[float, list[tuple[int, int, str]]]:
    others = [rows[other] for other in before[step.task_id] if other in rows]
    return sum(others) / len(others) if others else 0.0, natural(step.step)


def _path(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT // 2
    x2, y2 = end[0], end[1] + BOX_HEIGHT // 2
    bend = max(20, (x2 - x1) // 2)
    return f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2 - 2} {y2}"
