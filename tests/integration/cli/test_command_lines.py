"""What every user of the machine can read in the process list holds no password.

The marker stands for a password: it goes where one would, into the connection string.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtask.demo.play import Fleet
from tests.clients import with_options
from tests.mongo import PATIENCE, eventually
from tests.processes import kill_marked, marked
from tests.workers import APP, ROOT, Stage, open_stage

_MARK = "MTASK_TEST_COMMAND_LINES"
SECRET = "hunter2hunter2"


@pytest.mark.parametrize("given", ["environment", pytest.param(".env", marks=pytest.mark.long)])
def test_supervised_workers_do_not_show_the_uri_in_the_process_list(
    given: str, mongo_uri: str, database_name: str, tmp_path: Path
) -> None:
    uri = with_options(mongo_uri, f"appname={SECRET}")
    environment = {**os.environ, "MTASK_DATABASE": database_name, "PYTHONPATH": str(ROOT), _MARK: database_name}
    environment.pop("MTASK_URI", None)
    if given == ".env":
        (tmp_path / ".env").write_text(f"MTASK_URI={uri}\n")
    else:
        environment["MTASK_URI"] = uri
    command = [sys.executable, "-m", "mtask.cli.worker", APP, "--processes", "2", "--worker-id", "S"]
    with (tmp_path / "log").open("wb") as log, open_stage(mongo_uri, database_name, tmp_path) as stage:
        supervisor = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            _wait_running(stage, "S-0", "S-1")
            shown = marked(_MARK, database_name)
            assert len(shown) == 3, shown
            assert SECRET not in str(shown)
        finally:
            supervisor.terminate()
            supervisor.wait(PATIENCE)
            kill_marked(_MARK, database_name)
    assert SECRET not in (tmp_path / "log").read_text()


def test_workers_of_the_demo_do_not_show_the_uri_in_the_process_list(mongo_uri: str, database_name: str) -> None:
    with Fleet(with_options(mongo_uri, f"appname={SECRET}"), database_name, 2) as fleet:
        fleet.start(1)
        lines = Path(f"/proc/{fleet.workers[0].pid}/cmdline")
        eventually(lambda: b"mtask.cli.worker" in lines.read_bytes(), PATIENCE, "the worker's own command line")
        assert SECRET not in lines.read_text()


def _wait_running(stage: Stage, *worker_ids: str) -> None:
    def all_run() -> bool:
        found = [stage.worker_document(worker_id) for worker_id in worker_ids]
        return all(document is not None and document["status"] == "running" for document in found)

    eventually(all_run, PATIENCE, f"{worker_ids} running")
