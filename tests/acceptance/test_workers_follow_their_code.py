"""`mtask worker --reload` runs the code that was saved last, and leaves no process; `--burst` ends by itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.mongo import PATIENCE, eventually
from tests.processes import kill_marked, marked
from tests.workers import ROOT, Stage, runs_of

_MARK = "MTASK_TEST_RELOADED"
_APP = """\
import asyncio
from datetime import timedelta
from pathlib import Path

from mtask import App

app = App()


@app.schedule(timedelta(seconds=1), id="pulse", retain_success_ms=60_000)
@app.task
async def answer() -> int:
    return {answer}


@app.task
async def hold() -> int:
    Path("held").touch()
    await asyncio.sleep(3600 if {answer} == 1 else 0)
    return {answer}
"""


class Shop:
    """A folder with an app, and `mtask worker` in it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = stage.folder / "shop"
        self.folder.mkdir()
        self.log_path = stage.folder / "worker.log"
        self.process: subprocess.Popen[bytes] | None = None

    def save(self, answer: int) -> None:
        (self.folder / "shop.py").write_text(_APP.replace("{answer}", str(answer)))

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mtask.cli.main", "worker", "shop:app", *flags]
        known = {name: value for name, value in os.environ.items() if not name.startswith("MTASK_")}
        uri, database = self.stage.worker_uri, self.stage.database
        own = {"PYTHONPATH": str(ROOT), "MTASK_URI": uri, "MTASK_DATABASE": database, _MARK: database}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env={**known, **own}, stdout=log, stderr=log, start_new_session=True
            )
        return self.process

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def logged(self, text: str, count: int = 1) -> None:
        """Wait until the log holds this text so often."""
        eventually(lambda: self.log.count(text) >= count, message=f"{count} times {text!r} in:\n{self.log}")

    def processes(self) -> list[int]:
        return list(marked(_MARK, self.stage.database))

    def returns(self, key: str) -> object:
        """Publish a task; return what the worker's code returns."""
        task_id = self.stage.client.publish("answer", key=key).task_id
        return runs_of(self.stage.wait_status(task_id, "SUCCESS"))[-1]["returns"]

    def ended(self) -> int:
        """Wait for the end of all processes; return the exit code."""
        assert self.process is not None
        code = self.process.wait(PATIENCE)
        eventually(lambda: not self.processes(), message=f"no process left: {self.processes()}")
        return code


@pytest.fixture
def shop(stage: Stage) -> Iterator[Shop]:
    made = Shop(stage)
    made.save(1)
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait(PATIENCE)
        kill_marked(_MARK, stage.database)
        print(f"--- log\n{made.log}")


def test_saved_code_runs_and_what_cannot_be_imported_waits_for_the_next_save(shop: Shop) -> None:
    stage = shop.stage
    parent = shop.start("--reload", "--no-scheduler", "-l", "info")
    held = stage.client.publish("hold", key="held", max_retries=0).task_id
    eventually((shop.folder / "held").exists, message=f"the handler runs: {shop.log}")

    shop.save(2)  # as long as before, and perhaps in the same second
    first, second = runs_of(stage.wait_status(held, "SUCCESS"))
    assert (first["status"], second["status"], second["returns"]) == ("CANCELED", "SUCCESS", 2)
    assert stage.document(held)["task_state"]["failed_cnt"] == 0, "the stop did not count"
    assert "files=shop.py" in shop.log

    (shop.folder / "shop.py").write_text("app = (\n")
    shop.logged("waiting for a file to be saved")
    assert re.search(r'File ".*/shop\.py", line 1\n +app = \(\n', shop.log), shop.log
    assert "SyntaxError: '(' was never closed" in shop.log
    assert "importlib" not in shop.log
    assert shop.processes() == [parent.pid]

    (shop.folder / ".env").write_text("MTASK_CONCURRENCY=7\n")
    shop.logged("waiting for a file to be saved", 2)  # .env counts, too
    shop.save(3)
    assert shop.returns("three") == 3
    assert [worker.concurrency for worker in stage.client.workers()] == [7]
    parent.terminate()
    assert shop.ended() == 0
    assert [worker.status for worker in stage.client.workers(live_only=False)] == ["stopped"] * 3


def sigint(shop: Shop) -> None:
    assert shop.process is not None
    shop.process.send_signal(signal.SIGINT)


def kill(shop: Shop) -> None:
    assert shop.process is not None
    shop.process.kill()


@pytest.mark.parametrize("end", [pytest.param(sigint, marks=pytest.mark.long), kill])
def test_worker_ends_with_its_parent_and_hands_its_runs_back(shop: Shop, end: Callable[[Shop], None]) -> None:
    shop.start("--reload", "--shutdown-timeout", "0.2")
    held = shop.stage.client.publish("hold", key="held").task_id
    eventually((shop.folder / "held").exists, message="the handler runs")
    end(shop)
    assert shop.ended() == (0 if end is sigint else -signal.SIGKILL)
    state = shop.stage.document(held)["task_state"]
    assert (state["status"], state["failed_cnt"]) == ("INIT", 0)
    assert [run["status"] for run in state["worker_states"]] == ["CANCELED"]


def test_reloader_of_code_that_fails_ends_by_a_signal(shop: Shop) -> None:
    (shop.folder / "shop.py").write_text("import nothing_like_this\n")
    parent = shop.start("--reload")
    shop.logged("waiting for a file to be saved")
    assert "its import needs module 'nothing_like_this', which is not installed" in shop.log
    parent.send_signal(signal.SIGINT)
    assert shop.ended() == 0


def test_burst_of_several_processes_ends_with_0_and_fires_no_schedules(shop: Shop) -> None:
    stage = shop.stage
    stage.client.publish("answer", key="due")
    stage.client.publish("answer", key="later", delay=3600)
    shop.start("--burst", "--processes", "2", "-Q", "default")
    assert shop.ended() == 0
    assert {task.key: str(task.status) for task in stage.client.find()} == {"due": "SUCCESS", "later": "INIT"}
    assert stage.client.schedules() == []


def test_stop_of_a_worker_ends_its_reloader(shop: Shop) -> None:
    shop.start("--reload", "--worker-id", "w")
    eventually(lambda: [w for w in shop.stage.client.workers() if w.status == "running"], message="running")
    shop.stage.client.stop_worker("w")
    assert shop.ended() == 0
