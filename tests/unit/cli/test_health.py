"""`mtask-health`: its answers, its exit codes, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from mtask.cli.health import main
from mtask.errors import InvalidInput
from mtask.health import Health
from mtask.kernel.worker.process.health import check


@pytest.fixture
def well(tmp_path: Path) -> Path:
    path = tmp_path / "health"
    path.write_text(Health("w1", 7, "running", monotonic(), monotonic(), is_answered=True).dumped())
    return path


def test_probe_of_a_worker_that_is_well_says_yes(well: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(well)]) == main([str(well), "--ready", "--max-age", "5"]) == 0
    assert capsys.readouterr().out == "yes: worker 'w1' is running\n" * 2


def test_probe_says_why_not(tmp_path: Path, well: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = tmp_path / "stopping"
    stopping.write_text(well.read_text().replace("running", "stopping"))
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\xff\x00")
    for arguments, answer in (
        ([str(tmp_path / "none\n")], "the worker has not started, or has stopped"),
        ([str(stopping), "--ready"], "no: worker 'w1': its status is stopping, not running"),
        ([str(foreign)], "is no health file that can be read"),
        ([str(tmp_path)], "is no health file that can be read"),
    ):
        assert main(arguments) == 1
        printed = capsys.readouterr()
        assert answer in printed.err
        assert printed.err.count("\n") == 1
        assert printed.out == ""


def test_each_process_of_a_supervisor_must_be_well(well: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in (0, 1):
        well.with_name(f"health.{index}").write_text(well.read_text().replace("w1", f"w-{index}"))
    well.unlink()
    assert main([str(well)]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "yes: worker 'w-0' is running",
        "yes: worker 'w-1' is running",
    ]
    well.with_name("health.1").write_text(well.with_name("health.0").read_text().replace("running", "ready"))
    assert main([str(well), "--ready"]) == 1
    assert capsys.readouterr().err == "no: worker 'w-0': its status is ready, not running\n"


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--max-age", "0"], ["a", "--max-age", "nan"], ["-x"]])
def test_wrong_usage_has_its_own_exit_code(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mtask-health" in capsys.readouterr().err


def test_probe_imports_little(well: Path) -> None:
    code = f"""
import sys
from mtask.cli.health import main
assert main([{str(well)!r}]) == 0
print(*sys.modules, file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert {"asyncio", "bson", "pydantic", "pymongo", "rich", "typer"} & set(ended.stderr.split()) == set()


def test_worker_refuses_a_health_file_that_would_overwrite_another_file(tmp_path: Path, well: Path) -> None:
    check(well)
    assert not well.exists(), "the file of a former process is removed"
    check(well)
    numbered = well.with_name("health.7")
    numbered.write_text("precious")
    check(well)
    assert numbered.exists()
    other = tmp_path / "other"
    other.write_text("precious")
    for path, reason in (
        (other, "is no health file"),
        (tmp_path, "is no health file"),
        (tmp_path / "no" / "health", "is no folder that this process may write into"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            check(path)
    assert other.read_text() == "precious"
