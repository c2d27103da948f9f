"""The project of examples/django: its server, its workers and its admin are real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtask import Client
from mtask.errors import TaskNotFound
from tests.mongo import PATIENCE, eventually
from tests.workers import ROOT

PROJECT = ROOT / "examples" / "django"
_ADMIN = """
from django.contrib.auth.models import User
from django.test import Client
client = Client(SERVER_NAME="localhost")
client.force_login(User.objects.create_superuser("ann", "ann@example.com", "secret"))
index = client.get("/admin/").content.decode()
print("LISTED", "/admin/mtask/tasks/" in index, "/admin/shop/order/" in index)
print("LEADS", client.get("/admin/mtask/tasks/")["Location"])
client.force_login(User.objects.create_user("bob", is_staff=True))
print("REFUSED", client.get("/admin/mtask/tasks/").status_code)
"""


class Project:
    """The project, with a database of its own."""

    def __init__(self, uri: str, database: str, folder: Path) -> None:
        self._variables = {
            **os.environ,
            "MTASK_URI": uri,
            "SHOP_DATABASE": database,
            "DJANGO_SETTINGS_MODULE": "tests.integration.contrib.django.project_settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def manage(self, *arguments: str) -> str:
        """Run a command of `manage.py`; return what it prints."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=PROJECT,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command of `manage.py`; return its process, and its log."""
        log = self._folder / f"{arguments[0]}-{len(self._processes)}.log"
        with log.open("wb") as out:
            made = subprocess.Popen(
                [sys.executable, "manage.py", *arguments],
                cwd=PROJECT,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._processes.append(made)
        return made, log

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE)


@pytest.fixture(scope="module")
def started(
    mongo_uri: str, dropping: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Project, str]]:
    """Run `migrate` of the project; return it, and the name of its database."""
    database = f"test_{uuid.uuid4().hex}"
    made = Project(mongo_uri, database, tmp_path_factory.mktemp("project"))
    made.manage("migrate", "--run-syncdb")
    yield made, database
    made.end()
    dropping(database)


@pytest.fixture
def client(started: tuple[Project, str], mongo_uri: str) -> Iterator[Client]:
    """Return a client of the project's database."""
    with Client(mongo_uri, database=started[1], check=False) as made:
        yield made


def test_orders_and_their_mails(started: tuple[Project, str], client: Client) -> None:
    project, _ = started
    _, log = project.start("runserver", "--noreload", "127.0.0.1:0")
    worker, told = project.start("mtask_worker", "-c", "5")

    def address() -> str | None:
        found = re.search(r"http://127\.0\.0\.1:[1-9]\d+", log.read_text())
        return found[0] if found else None

    base = eventually(address, PATIENCE, "an address")
    assert base is not None
    with httpx.Client(base_url=base, timeout=PATIENCE) as http:
        taken = http.post("/orders/7", json={"item": "book", "to": "ada@example.com"})
        assert (taken.status_code, taken.json()) == (202, {"order": 7, "mail": "shop.tasks.confirm:order/7"})
        refused = http.post("/orders/8", json={"item": "unicorn", "to": "ada@example.com"})
        assert (refused.status_code, refused.json()["problem"]) == (409, "sold out")
        assert http.get("/orders/8").status_code == 404
        with pytest.raises(TaskNotFound):
            client.get("shop.tasks.confirm", "order/8")
        expected = {"order": 7, "mailed": True, "mail": "SUCCESSFUL"}
        eventually(lambda: http.get("/orders/7").json() == expected, PATIENCE, "the mail is sent")
    assert "mail to ada@example.com: your book" in told.read_text()
    assert client.get("shop.tasks.confirm", "order/7").returns == "book confirmed to ada@example.com"
    assert [schedule.id for schedule in client.schedules()] == ["shop.tasks.report"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0


def test_task_of_a_killed_worker_runs_again(started: tuple[Project, str], client: Client, tmp_path: Path) -> None:
    project, _ = started
    first, _ = project.start("mtask_worker", "--worker-id", "first")
    name = "tests.integration.contrib.django.slow.wait_for"
    client.publish(name, {"folder": str(tmp_path)}, key="k", ping_interval=0.3, worker_timeout=1)
    eventually(lambda: list(tmp_path.glob("begun-*")), PATIENCE, "the task has begun")
    first.kill()
    first.wait(PATIENCE)
    (tmp_path / "go").touch()
    project.start("mtask_worker", "--worker-id", "second")
    done = client.wait(name, "k", timeout=PATIENCE)
    assert [(run.worker_id, run.status.value) for run in done.runs] == [("first", "TIMEOUT"), ("second", "SUCCESS")]
    assert done.returns == "gone"


def test_admin_leads_to_the_page(started: tuple[Project, str]) -> None:
    project, _ = started
    told = project.manage("shell", "-c", _ADMIN)
    assert "LISTED True True" in told
    assert "LEADS http://localhost:8080/" in told
    assert "REFUSED 404" in told or "REFUSED 403" in told
