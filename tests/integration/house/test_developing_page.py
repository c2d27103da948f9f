"""What docs/developing.md shows is executed: the app, the reload with its log, and the burst."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.commands import Commands, client_of
from tests.mongo import PATIENCE, eventually

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(mtask: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the app of the page."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    [code] = blocks("python")
    (tmp_path / "shop.py").write_text(code)
    return tmp_path


def test_saved_code_runs_and_the_log_is_that_of_the_page(mtask: Commands, folder: Path) -> None:
    [command] = blocks("sh")[0].splitlines()
    [shown] = blocks("text")
    log = folder / "log"
    with log.open("w") as out, client_of(mtask) as client:
        worker = subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=out, stderr=out, start_new_session=True)
        try:
            client.publish("price", {"item": "tea"}, key="before")
            assert client.result("price", "before", timeout=PATIENCE) == 3
            code = (folder / "shop.py").read_text()
            (folder / "shop.py").write_text(code.replace("len(item)", "2 * len(item)"))
            eventually(lambda: log.read_text().count("worker started") == 2, message=f"see {log}")
            client.publish("price", {"item": "tea"}, key="after")
            assert client.result("price", "after", timeout=PATIENCE) == 6
            told = messages(log.read_text())
        finally:
            worker.send_signal(signal.SIGINT)
            assert worker.wait(PATIENCE) == 0, log.read_text()
    assert told == messages(shown)


def messages(log: str) -> list[str]:
    """Return each line of a log without its time and the values of its fields."""
    lines = [line.partition(" INFO ")[2].split() for line in log.splitlines()]
    return [" ".join(word.partition("=")[0] for word in line) for line in lines]


def test_burst_runs_as_written(mtask: Commands, folder: Path) -> None:
    printed = []
    for line in blocks("sh")[1].splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "mtask"
        done = mtask.entry(*words) if words[0] == "worker" else mtask(*words)
        assert done.code == 0, done.err
        printed.append(done.out)
    assert printed[3].strip() == "3"
    assert "price:2" in printed[4]
    with client_of(mtask) as client:
        assert {task.key: str(task.status) for task in client.find()} == {"1": "SUCCESS", "2": "INIT"}
