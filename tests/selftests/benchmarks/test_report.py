"""What a run of benchmarks leaves behind: table, JSON and pictures; and how the command line refuses bad input."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.report import files
from benchmarks.report.figures import Result, Target, compared, figure
from benchmarks.report.table import cells, shown, table

AROUND = {"mtask": "0.1.0", "mongod": "7.0.2", "cores": 2}
RATE = compared("async handler", "tasks/s", [6000.0, 6100.0, 6400.0], [10_000.0] * 3, Target.at_least(0.6))
LOST = figure("claims lost", "%", [1.0, math.nan, 2.0], Target.at_most(5.0, "value", "%"))
BARE = figure("cores busy", "", [1.5, 1.6])


def result(name: str = "drain", *, has_more: bool = True) -> Result:
    more = {"raw": [1.0, 2.0, 3.0], "mtask": [1.5, 2.5, 30.0]} if has_more else {}
    cpu = {"raw": {"server": 80.0, "client": 20.0}, "mtask": {"server": 90.0, "client": math.nan}} if has_more else {}
    figures = [RATE, LOST, BARE] if has_more else [LOST]
    return Result(
        name, "one worker", figures, {"tasks": 20_000}, samples=more, cpu=cpu, notes=["by the server's clock"]
    )


def printed(width: int) -> str:
    target = io.StringIO()
    Console(file=target, width=width, color_system=None).print(table(result(), width))
    return target.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(12_345.6, "12,346"), (0.61234, "0.612"), (0.0, "0"), (1.3, "1.30"), (-25.04, "-25.0"), (math.nan, "-")],
)
def test_numbers_are_shown_with_three_digits_that_count(value: float, text: str) -> None:
    assert shown(value) == text


def test_row_says_value_spread_ceiling_ratio_and_target() -> None:
    assert cells(RATE) == [
        "async handler",
        "6,100 tasks/s",
        "6,000 to 6,400",
        "6,050 to 6,250",
        "raw 10,000",
        "0.610",
        "0.600 to 0.640",
        "0.605 to 0.625",
        "≥ 0.6 x",
    ]


def test_row_of_a_figure_that_stands_for_itself_leaves_the_comparison_empty() -> None:
    assert cells(LOST) == ["claims lost", "1.50 %", "1.00 to 2.00", "1.25 to 1.75", "", "", "", "", "≤ 5 %"]


def test_wide_table_shows_all_and_a_narrow_one_leaves_out_the_spread_of_the_values() -> None:
    wide, narrow = printed(200), printed(110)
    for text in ("drain: one worker", "6,100 tasks/s", "0.600 to 0.640", "≥ 0.6 x", "20,000", "by the server"):
        assert text in wide
        assert text in narrow
    assert "6,000 to 6,400" in wide
    assert "6,000 to 6,400" not in narrow


def test_report_of_one_benchmark_is_json_without_nan_and_a_picture(tmp_path: Path) -> None:
    paths = files.write(result(), AROUND, tmp_path)
    assert [path.name for path in paths] == ["drain.json", "drain.png"]
    written = json.loads(paths[0].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert written["environment"] == AROUND
    assert [found["name"] for found in written["figures"]] == ["async handler", "claims lost", "cores busy"]
    assert written["figures"][1]["measured"]["values"] == [1.0, 2.0]
    assert written["cpu_us_per_task"]["mtask"] == {"server": 90.0, "client": None}
    assert matplotlib.image.imread(paths[1]).shape[1] == 1400


def test_report_of_several_benchmarks_has_one_of_all(tmp_path: Path) -> None:
    paths = files.write_together([result(), result("scale", has_more=False)], AROUND, tmp_path)
    assert [path.name for path in paths] == ["all.json", "all.png"]
    together = json.loads((tmp_path / "all.json").read_text())
    assert [found["benchmark"] for found in together["benchmarks"]] == ["drain", "scale"]
    assert together["environment"] == AROUND
    assert matplotlib.image.imread(tmp_path / "all.png").shape[1] == 1400


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in [*BENCHMARKS, files.ALL])


@pytest.mark.parametrize("name", [*BENCHMARKS, files.ALL])
def test_every_benchmark_refuses_a_uri_that_is_none(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--uri", "postgres://nowhere", "--folder", str(tmp_path)]) == 2
    assert "the MongoDB URI cannot be used" in capsys.readouterr().err


def test_empty_uri_is_not_taken_for_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--uri", " ", "--folder", str(tmp_path)]) == 2
    assert "--uri is empty" in capsys.readouterr().err


def test_folder_that_cannot_be_made_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["drain", "--uri", "mongodb://nowhere", "--folder", str(tmp_path / "file" / "below")]) == 2
    assert "--folder" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--runs", "0"], ["--tasks", "none"], ["--nonsense"]])
def test_wrong_flags_are_bad_input(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", *flag]) == 2
    assert "error" in capsys.readouterr().err
