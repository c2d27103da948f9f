"""Runs as lines in time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.cells import cell_len

from mtask.cli.tasks.show import Scale, timeline
from mtask.kernel.document.task import Task
from tests import build

START = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def run(attempt: int, status: str, claimed: float, ended: float | None = None, **other: Any) -> dict[str, Any]:
    end = {} if ended is None else {"success_time" if status == "SUCCESS" else "fail_time": at(ended)}
    return build.run(status, at(claimed), None, attempt, worker_id=f"worker-{attempt}", **end) | other


def task(*runs: dict[str, Any], finished: float | None = None, start: float | None = None) -> Task:
    made = build.task("a:b", *runs, time=START, state={} if start is None else {"start_time": at(start)})
    if finished is not None:
        del made["task_state"]["next_preempt_time"]
        made["task_state"] |= {"status": "SUCCESS", "finish_time": at(finished)}
    return Task.model_validate(made)


def bars(lines: list[str]) -> list[str]:
    return [line.rsplit("  ", 1)[1] for line in lines if line.startswith("#")]


def drawn(of: Task, now: float, width: int = 100, **flags: bool) -> list[str]:
    return [line.plain for line in timeline(of, of.runs, at(now), width, **flags)]


def test_a_run_fills_its_share_of_the_time() -> None:
    lines = drawn(task(run(1, "FAIL", 0, 5, fail_reason="no"), run(2, "SUCCESS", 5, 10, returns=3), finished=10), 99)
    first, second = bars(lines)
    assert first.count("█") == pytest.approx(len(first) / 2, abs=1)
    assert second.lstrip("─") == "█" * second.count("█")
    assert "finished +10.0s" in lines[0]
    assert lines[2].strip() == "no"
    assert lines[4].strip() == "returns 3"


def test_a_live_run_reaches_now_with_an_open_end() -> None:
    lines = drawn(task(run(1, "RUNNING", 4)), 8)
    assert bars(lines)[0].endswith("▶")
    assert "now +8.0s" in lines[0]
    assert "4.0s" in lines[1]


def test_a_lapsed_run_ends_with_its_lease() -> None:
    lines = drawn(task(run(1, "RUNNING", 0)), 240)
    assert "LAPSED" in lines[1]
    assert "1m 00s" in lines[1]
    assert bars(lines)[0].count("█") == pytest.approx(len(bars(lines)[0]) / 4, abs=1)
    assert "▶" not in lines[1]


def test_the_time_before_the_start_time_looks_different() -> None:
    bar = bars(drawn(task(run(1, "RUNNING", 8), start=5), 10))[0]
    assert bar.startswith("·")
    assert bar.index("─") == pytest.approx(len(bar) / 2, abs=1)


def test_the_shortest_run_is_seen() -> None:
    assert bars(drawn(task(run(1, "SUCCESS", 0.001, 0.002), finished=0.002), 86_400))[0].count("█") >= 1
    assert bars(drawn(task(run(1, "FAIL", 1, 1.001)), 86_400))[0].count("█") == 1


@pytest.mark.parametrize("width", [20, 40, 60, 80, 140])
def test_every_line_fits_the_terminal_but_no_id_and_no_reason_is_cut(width: int) -> None:
    reason, worker_id = "many words " * 30 + "end", "w" * 100
    progress = {"fraction": 0.456, "message": "日本 " * 40 + "end", "time": at(8)}
    long = run(1, "FAIL", 1, 2, fail_reason=reason, worker_id=worker_id)
    lines = drawn(task(long, run(2, "RUNNING", 3, progress=progress)), 10, width)
    for line in lines:
        assert cell_len(line) <= max(width, 45) or worker_id in line, line
    whole = " ".join(line.strip() for line in lines)
    assert f"FAIL  {worker_id}" in re.sub(" +", "  ", whole)
    assert reason in whole
    assert f"progress 46% {progress['message']} (2.0s ago)" in whole


def test_a_terminal_without_these_letters_gets_plain_ones() -> None:
    lines = drawn(task(run(1, "RUNNING", 4)), 8, is_ascii=True)
    assert all(line.isascii() for line in lines)


def test_a_run_of_an_earlier_round_is_marked() -> None:
    assert "FAIL (past)" in drawn(task(run(1, "FAIL", 1, 2, past=True)), 8)[1]


def test_no_instant_falls_off_the_scale() -> None:
    scale = Scale(START, at(10), 10)
    assert [scale.column(at(second)) for second in (-5, 0, 5, 10, 99)] == [0, 0, 5, 9, 9]
    assert Scale(START, START, 10).column(START) == 0


def test_a_traceback_is_shown_in_full_where_it_is_asked_for() -> None:
    error = {"type": "shop.SoldOut", "traceback": "Traceback (most recent call last):\n  line\nshop.SoldOut: no\x1b[1m"}
    failed = task(run(1, "FAIL", 0, 5, fail_reason="SoldOut: no", error=error))
    assert not any("Traceback" in line for line in drawn(failed, 10))
    lines = [line.strip() for line in drawn(failed, 10, is_full=True)]
    at_reason = lines.index("SoldOut: no")
    assert lines[at_reason + 1 : at_reason + 3] == ["Traceback (most recent call last):", "line"]
    assert "\x1b" not in "".join(lines)
