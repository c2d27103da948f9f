"""The live display of a run under faults: fits the terminal, names what matters, and does with lines elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.chaos.display import Display, Status, clock, sparkline

WORKERS = [(f"w{n}", "plain", "frozen" if n == 2 else "up") for n in range(1, 6)]
STATUS = Status(
    elapsed=65.0,
    minutes=15.0,
    seed=4711,
    published=6500,
    finished=6400,
    succeeded=6390,
    failed=10,
    backlog=88,
    workers=WORKERS,
    publishers=[("p1", "publisher", "up"), ("p2", "publisher", "down")],
    faults=["freeze worker w2"],
    recent=[f"kill worker w{n} (2.0 s)" for n in range(6)],
    primary="127.0.0.1:27018",
    running=12,
)


def at(elapsed: float) -> Status:
    return replace(STATUS, elapsed=elapsed, published=int(elapsed * 100), finished=int(elapsed * 90))


def plain(*statuses: Status) -> list[str]:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with console.capture() as capture, Display(console) as display:
        for status in statuses:
            display.show(status)
    return capture.get().splitlines()


def drawn(statuses: list[Status], width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    display = Display(console)
    for status in statuses:
        display.show(status)
    with console.capture() as capture:
        console.print(display)
    return capture.get().splitlines()


def test_display_without_a_terminal_prints_a_line_every_ten_seconds_and_a_last_one() -> None:
    lines = plain(*(at(quarter / 4) for quarter in range(4 * 25)))
    assert [line.split()[0] for line in lines] == ["0:00", "0:10", "0:20", "0:24"]
    assert lines[1] == (
        "0:10 of 15:00  published 1,000 (100/s)  finished 900 (90/s)  backlog 88  workers 4 up, 1 frozen  "
        "primary 127.0.0.1:27018  faults: freeze worker w2"
    )


def test_display_without_a_terminal_tells_of_messages_and_violations_at_once_and_once() -> None:
    wrong = replace(at(1.0), message="draining", violations=["quick:p1/7 is held twice"])
    lines = plain(at(0.0), wrong, replace(wrong, elapsed=2.0))
    assert lines[1:3] == ["0:01  draining", "0:01  VIOLATION  quick:p1/7 is held twice"]
    assert len(lines) == 4
    assert "  1 VIOLATION  " in lines[3]


def test_display_shows_zero_rates_when_counts_stay_as_they_are() -> None:
    display = Display(Console(file=io.StringIO()), live=True)
    for second in range(20):
        display.show(at(float(min(second, 10))) if second <= 10 else replace(at(10.0), elapsed=float(second)))
    assert display.rates() == (0.0, 0.0)
    assert display.history(12)[1] == [90.0, 90.0, 90.0] + [0.0] * 9


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_display_fits_the_terminal(width: int, height: int) -> None:
    crowd = [(f"worker-with-a-long-name-{n}", "proxied and late", "down") for n in range(40)]
    crowded = replace(at(64.0), workers=crowd, faults=["a fault with many words " * 9] * 30, violations=["v " * 200])
    lines = drawn([at(float(second)) for second in range(60)] + [crowded], width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width


def test_display_shows_counts_processes_faults_and_the_primary() -> None:
    text = "\n".join(drawn([at(float(second)) for second in range(66)], 100, 40))
    for words in (
        "seed 4711",
        "1:05 of 15:00",
        "13:55 left",
        "127.0.0.1:27018",
        "6,500",
        "100/s",
        "90/s",
        "12 running",
    ):
        assert words in text
    for words in (
        "w2       frozen  plain",
        "p2       down    publisher",
        "● freeze worker w2",
        "kill worker w5 (2.0 s)",
    ):
        assert words in text


def test_display_tells_that_there_is_no_primary_only_if_somebody_looked() -> None:
    assert "primary none" in "\n".join(drawn([replace(STATUS, primary="")], 100, 40))
    assert "primary" not in "\n".join(drawn([replace(STATUS, primary=None)], 100, 40))


def test_sparkline_shows_what_is_little_but_not_what_is_nothing() -> None:
    assert sparkline([0.0, 0.1, 50.0, 100.0], 100.0) == " ▁▄█"
    assert clock(187.9) == "3:07"
