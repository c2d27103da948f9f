"""Flows as trees of lines."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.cells import cell_len

from mtask.features.flows.cli import draw
from mtask.features.flows.views import natural, state_of

NOW = datetime(2030, 1, 1, tzinfo=UTC)
Row = dict[str, Any]


def step(name: str, *after: str, status: str = "SUCCESS", **other: Any) -> Row:
    """Return a step as a read of its flow returns it. It was claimed 50 s ago, and ended 20 s ago."""
    made: Row = {
        "_id": f"work:f/{name}",
        "step": name,
        "after": [f"work:f/{one}" for one in after],
        "on_failed": "cancel",
        "status": status,
        "create_time": NOW - timedelta(seconds=100),
        "now": NOW,
    }
    if status in ("SUCCESS", "FAIL", "RUNNING"):
        made["run"] = {"worker_id": "w", "status": status, "attempt": 1, "claim_time": NOW - timedelta(seconds=50)}
    if status in ("SUCCESS", "FAIL", "CANCELED"):
        made["finish_time"] = NOW - timedelta(seconds=20)
    if status == "INIT":
        made["next_preempt_time"] = NOW - timedelta(seconds=3)
    return made | other


def drawn(*rows: Row, width: int = 200, **flags: Any) -> list[str]:
    """Return the lines below the heading, with single spaces between the columns."""
    shuffled = list(rows)
    random.Random(7).shuffle(shuffled)
    lines = [line.plain for line in draw(state_of("f", shuffled), width, **flags)]
    for line in lines:
        assert cell_len(line) <= width
        assert line.isprintable()
    return lines[1:]


def shapes(lines: list[str]) -> list[str]:
    """Return only the tree and the names."""
    return [line.split("  SUCCESS")[0].split("  WAITING")[0].rstrip() for line in lines]


def test_a_chain_is_drawn_downwards_and_a_fork_to_the_right() -> None:
    rows = [step("a"), step("b", "a"), step("left", "b"), step("right", "b"), step("end", "left", "right")]
    assert shapes(drawn(*rows)) == ["a", "b", "├─ left", "└─ right", "   end"]
    assert drawn(*rows)[-1].endswith("after left, right")
    assert shapes(drawn(*rows, is_ascii=True)) == ["a", "b", "|- left", "`- right", "   end"]


def test_several_first_steps_stand_side_by_side() -> None:
    rows = [step("a"), step("b", "a"), step("c"), step("d", "c")]
    assert shapes(drawn(*rows)) == ["├─ a", "│  b", "└─ c", "   d"]


def test_steps_that_are_alike_are_folded() -> None:
    parts = [f"part-{number}" for number in range(12)]
    rows = [step("first"), *(step(name, "first") for name in parts), step("total", *parts)]
    assert shapes(drawn(*rows)) == ["first", "12x part-0 … part-11", "total"]
    assert len(drawn(*rows, is_full=True)) == 14
    few = [step("first"), *(step(name, "first") for name in parts[:5]), step("total", *parts[:5])]
    assert len(drawn(*few)) == 7


def test_each_place_in_the_flow_is_folded_by_itself() -> None:
    names = [f"{number}" for number in range(30)]
    loads = [step(f"load-{name}", "first") for name in names]
    sends = [step(f"send-{name}", f"load-{name}") for name in names]
    rows = [step("first"), *loads, *sends, step("report", *(f"send-{name}" for name in names))]
    expected = ["first", "30x load-0 … load-29", "30x send-0 … send-29", "report"]
    assert shapes(drawn(*rows)) == expected
    rows[1] = step("load-0", "first", on_failed="run")  # what becomes of it differs, and of what comes after it
    assert any("29x load-1 … load-29" in line for line in drawn(*rows))


def test_another_handler_is_not_alike() -> None:
    rows = [step("first"), *(step(f"a{n}", "first") for n in range(6))]
    rows += [step(f"b{n}", "first", _id=f"other:f/b{n}") for n in range(6)]
    assert shapes(drawn(*rows)) == ["first", "├─ 6x a0 … a5", "└─ 6x b0 … b5"]


def test_the_statuses_of_folded_steps_are_counted() -> None:
    statuses = ["SUCCESS"] * 5 + ["RUNNING"] * 2 + ["WAITING", "odd"]
    (line,) = drawn(*(step(f"s{n}", status=status) for n, status in enumerate(statuses)))
    assert line.split()[:6] == ["9x", "s0", "…", "s8", "2", "RUNNING"]
    assert line.endswith("1 WAITING, 5 SUCCESS, 1 odd")


def test_the_middle_of_a_long_chain_is_folded() -> None:
    rows = [step("s0"), *(step(f"s{n}", f"s{n - 1}", status="WAITING") for n in range(1, 50))]
    assert shapes(drawn(*rows)) == ["s0", "s1", "46x s2 … s47", "s48", "s49"]
    assert drawn(*rows)[2].endswith("one after the other")
    assert len(drawn(*rows, is_full=True)) == 50
    assert len(drawn(*rows[:9])) == 9


def test_times_and_notes_of_a_step() -> None:
    progress = {"fraction": 0.4, "message": "half\x1b[31m"}
    running = step("a", status="RUNNING")
    running["run"]["progress"] = progress
    later = step("c", "a", status="INIT", next_preempt_time=NOW + timedelta(minutes=5))
    rows = [
        running,
        step("b", "a", status="CANCELED", held_by="work:f/a"),
        later,
        step("d", "a", status="INIT"),
        step("e", "a", status="FAIL", on_failed="run"),
        step("g", "a", "gone", status="RUNNING", cancel_requested=True),
        step("h", ancestors=["work:f/a"]),
    ]
    texts = [" ".join(line.split()) for line in drawn(*rows)]
    assert texts == [
        "a RUNNING 50.0s 40% half\\x1b[31m",
        "├─ b CANCELED because of a",
        "├─ c INIT in 5m 00s",
        "├─ d INIT due 3.0s",
        "├─ e FAIL 30.0s on_failed run",
        "├─ g RUNNING 50.0s asked to stop, after a, work:f/gone (removed)",
        "└─ h SUCCESS 30.0s added by a",
    ]


def test_a_next_task_stands_below_the_task_that_went_on() -> None:
    chain = [
        step(f"a/next-{n}", ancestors=["work:f/a"], continues="work:f/a" if n == 1 else f"work:f/a/next-{n - 1}")
        for n in range(1, 4)
    ]
    child = step("child", ancestors=["work:f/a/next-2"])
    lines = drawn(step("a"), *chain, child, step("end", "a", status="WAITING"))
    assert shapes(lines) == ["a", "├─ a/next-1", "│  a/next-2", "│  ├─ a/next-3", "│  └─ child", "└─ end"]
    notes = [line.rpartition("30.0s")[2].strip() for line in lines[1:5]]
    assert notes == ["next task of a", "next task of a/next-1", "next task of a/next-2", "added by a/next-2"]
    removed = drawn(step("a"), chain[1])  # a/next-1 was removed
    assert removed[1].endswith("next task of work:f/a/next-1 (removed)")


def test_a_circle_that_no_client_publishes_is_drawn_all_the_same() -> None:
    rows = [step("a", "b", status="WAITING"), step("b", "a", status="WAITING"), step("c")]
    assert shapes(drawn(*rows)) == ["├─ c", "└─ a", "   b"]


@pytest.mark.parametrize("width", [60, 120])
def test_hostile_names_and_deep_trees_fit(width: int) -> None:
    names = ["\x1b[2Jboom", "日本語のステップ" * 10, "x" * 400, "a\nb\tc", "[bold]rich[/bold]", "\u202eltr", "-"]
    rows = [step("first"), *(step(name, "first", _id=f"n{n}:f/{name}") for n, name in enumerate(names))]
    last = "first"
    for number in range(40):
        rows += [step(f"deep{number}", last), step(f"side{number}", last, status="FAIL")]
        last = f"deep{number}"
    lines = drawn(*rows, width=width)
    assert len(lines) == 88
    assert all("SUCCESS" in line or "FAIL" in line for line in lines)


@pytest.mark.parametrize("width", [60, 120])
def test_long_names_that_begin_alike_are_told_apart(width: int) -> None:
    rows = [step("first"), *(step(f"{'x' * 200}-{n}", "first", _id=f"n{n}:f/{n}") for n in range(4))]
    rows.append(step("total", *(f"{'x' * 200}-{n}" for n in range(4)), status="WAITING"))
    lines = drawn(*rows, width=width)
    assert all(f"x-{n}  " in line for n, line in enumerate(lines[1:5]))


def test_a_drawing_is_cut_after_the_limit() -> None:
    generator = random.Random(1)
    rows = [step(f"n{i}", *(f"n{j}" for j in generator.sample(range(i), min(i, 2)))) for i in range(1_000)]
    lines = drawn(*rows, width=60, limit=20)
    assert len(lines) == 21
    assert lines[-1] == "… and 980 lines more"


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted(["a10", "a9", "b", "a", "10", "9", "²", "a" + "1" * 5000], key=natural) == [
        "9", "10", "a", "a9", "a10", "a" + "1" * 5000, "b", "²",
    ]  # fmt: skip
