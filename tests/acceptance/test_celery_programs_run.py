"""A program that was written for Celery runs on real workers. Nothing of it is changed but its imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtask import TaskStatus
from mtask.contrib.celery.canvas import chord
from tests.mongo import PATIENCE, eventually
from tests.workers import ROOT, Stage

_PROJECT = ROOT / "tests" / "data" / "celery_project"
#: The leases of tasks whose worker is to die. The survivor takes them over soon.
_SHORT = {"ping_interval": 0.2, "worker_timeout": 1}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of the program whose imports name the bridge."""
    copy = tmp_path / "project"
    shutil.copytree(_PROJECT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = 0
    for path in copy.rglob("*.py"):
        code, count = re.subn(r"^(\s*from) celery\b", r"\1 mtask.contrib.celery", path.read_text(), flags=re.MULTILINE)
        path.write_text(code)
        changed += count
    assert changed == 9
    return copy


def environment(stage: Stage, project: Path) -> dict[str, str]:
    """Return the environment of the program and of its workers."""
    own = {"MTASK_URI": stage.worker_uri, "MTASK_DATABASE": stage.database, "SHOP_FOLDER": str(project)}
    return {**os.environ, **own, "PYTHONPATH": f"{project}{os.pathsep}{ROOT}"}


@contextmanager
def worker(stage: Stage, project: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker process of the program. It serves the queues of its tasks and schedules."""
    code = "from mtask.cli.worker import run; run()"
    queues = ("--queues", "default,mail,reports", *flags)
    with (project / "worker.log").open("ab") as log:
        command = [sys.executable, "-c", code, "shop.celery:app.mtask", *queues]
        process = subprocess.Popen(
            command, cwd=project, env=environment(stage, project), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE)


def test_program_runs_unchanged_but_for_its_imports(stage: Stage, project: Path) -> None:
    with worker(stage, project):
        ran = subprocess.run(
            [sys.executable, "-m", "shop.run"],
            cwd=project,
            env=environment(stage, project),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr + (project / "worker.log").read_text()
        found = json.loads(ran.stdout)
        assert "ended as FAIL: ValueError: boom (tasks.py:" in found.pop("failed")[0]
        assert "ended as FAIL: KeyError: 'a' (tasks.py:" in found.pop("retried in vain")[0]
        assert found == {
            "delay": 3,
            "kwargs": 4,
            "countdown": 5,
            "eta": 6,
            "priority and queue": 7,
            "once": 8,
            "routed": "hi to a@b.c {'cc': 'd@e.f'}",
            "send_task": 9,
            "signature": 10,
            "partial": 11,
            "chain": 11,
            "pipe": 12,
            "group": [10, 11, 12],
            "chord": 12,
            "chain with a group": 7,
            "retry": ["http://a", 2],
            "max retries": "gave up after 1",
            "once more": 8,
            "same id": True,
            "another process": True,
            "waits": "PENDING",
            "revoked": ["REVOKED", True, False],
        }
        queues = {task.name: task.queue for task in stage.client.find(name=["shop.mail.send_email"], limit=0)}
        assert queues == {"shop.mail.send_email": "mail"}
        [summed] = [row for row in stage.client.find(name="shop.sum", limit=0) if row.returns == 24]
        assert summed.status is TaskStatus.SUCCESS  # the chord that the task `checkout` published
        schedules = {each.id: (str(each.trigger), each.queue, each.params) for each in stage.client.schedules()}
        assert schedules == {
            "nightly report": (
                "30 2 * * mon,tue,wed,thu,fri Europe/Berlin",
                "reports",
                {"day": "2026-03-02"},
            ),
            "hourly report": ("every 1h", "default", {"day": "today"}),
        }


def test_chord_ends_once_though_a_worker_is_killed_in_its_header(stage: Stage, project: Path) -> None:
    from mtask.contrib.celery import Celery

    app = Celery("sender")

    @app.task(name="shop.tasks.part")
    def part(number: int) -> int:
        return number

    @app.task(name="shop.sum")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    app.client = stage.client
    result = chord([part.s(number) for number in range(4)])(total.s())
    key = result.parent.id
    for step in range(1, 5):
        stage.client.update_option("shop.tasks.part", f"{key}/{step}", **_SHORT)  # type: ignore[arg-type]
    runs = project / "runs"
    with worker(stage, project) as first:

        def others_ended() -> bool:
            assert first.poll() is None, (project / "worker.log").read_text()
            return stage.client.flow(key).counts.get("SUCCESS") == 3

        eventually(lambda: others_ended() and "0" in runs.read_text().split(), PATIENCE, "only part 0 runs")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(PATIENCE)
    assert (result.state, result.ready()) == ("PENDING", False)
    (project / "gate").touch()
    with worker(stage, project):
        assert result.get(timeout=60) == 6
    assert sorted(runs.read_text().split()) == ["0", "0", "1", "2", "3"]
    assert stage.client.flow(key).counts == {"SUCCESS": 5}
    body = stage.client.get("shop.sum", f"{key}/5")
    assert len(body.runs) == 1
