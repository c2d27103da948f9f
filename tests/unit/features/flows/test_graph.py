"""The graph of a flow: columns by depth, curves that pass beside the boxes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from mtask.features.flows.page import BOX_HEIGHT, BOX_WIDTH, MOST_STEPS, Graph, graph
from mtask.features.flows.views import StepState, sorted_steps


def step(name: str, *after: str, status: str = "INIT") -> StepState:
    ids = tuple(f"t:f/{other}" for other in after)
    return StepState(
        task_id=f"t:f/{name}", step=name, status=status, after=ids, on_failed="cancel", parent=None, held_by=None,
        cancel_requested=False, create_time=None, release_time=None, next_preempt_time=None, finish_time=None,
        reason=None, run=None,
    )  # fmt: skip


def drawn(flow: Mapping[str, tuple[str, ...]]) -> Graph:
    made = graph(sorted_steps([step(name, *after) for name, after in flow.items()]))
    assert made is not None
    return made


def test_steps_stand_in_columns_by_depth() -> None:
    made = drawn({"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ("a", "d")})
    lefts = {box.step.step: box.x for box in made.boxes}
    assert lefts["a"] < lefts["b"] == lefts["c"] < lefts["d"] < lefts["e"]
    assert len(made.curves) == 6


@given(st.data())
def test_boxes_never_overlap_and_curves_begin_and_end_at_their_boxes(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 25))
    flow: dict[str, tuple[str, ...]] = {}
    for index in range(count):
        names = sorted(flow)
        flow[f"s{index}"] = tuple(data.draw(st.sets(st.sampled_from(names), max_size=4))) if names else ()
    made = drawn(flow)
    places = {(box.x, box.y) for box in made.boxes}
    assert len(places) == count
    for box in made.boxes:
        assert 0 <= box.x <= made.width - BOX_WIDTH
        assert 0 <= box.y <= made.height - BOX_HEIGHT
        for other in made.boxes:
            assert other is box or box.x != other.x or abs(box.y - other.y) >= BOX_HEIGHT
    starts = {(box.x + BOX_WIDTH, box.y + BOX_HEIGHT // 2) for box in made.boxes}
    ends = {(box.x, box.y + BOX_HEIGHT // 2) for box in made.boxes}
    for curve in made.curves:
        numbers = [int(part) for part in re.findall(r"-?\d+", curve.path)]
        assert (numbers[0], numbers[1]) in starts
        assert (numbers[-2], numbers[-1]) in ends


def test_flow_with_too_many_steps_is_not_drawn() -> None:
    assert graph([]) is None
    assert graph([step(str(index)) for index in range(MOST_STEPS + 1)]) is None
    assert graph([step(str(index)) for index in range(MOST_STEPS)]) is not None


def test_circle_and_removed_dependencies_are_drawn_as_far_as_they_go() -> None:
    made = drawn({"a": ("b",), "b": ("a",), "c": ("gone",)})
    assert len(made.boxes) == 3
