"""The checker finds each use that does not map, with its file and line, and nothing in a program that runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtask.contrib.celery.check import check, main

_ROOT = Path(__file__).parents[4]
_PROJECT = _ROOT / "tests" / "data" / "celery_project"
#: Each line that ends in `# !` does not map.
_PROGRAM = """
import celery
import kombu  # !
from celery import Celery, Task, current_task, shared_task, signals  # !
from celery.exceptions import Ignore, Retry  # !
from celery.schedules import crontab, solar  # !
from celery.signals import worker_ready  # !
from celery.utils.log import get_task_logger
from django_celery_beat.models import PeriodicTask  # !
from .kombu import mine

app = Celery("shop", broker="redis://host/0", include=["shop.tasks"])  # !
app.conf.task_routes = {}
app.conf.worker_concurrency = 4  # !
app.conf.update(task_acks_late=True, task_soft_time_limit=3)  # !
app.conf.update({"beat_scheduler": "x", "timezone": "UTC"})  # !
CELERY_RESULT_BACKEND = "django-db"  # !
CELERY_TASK_TIME_LIMIT = 30


class Base(Task):  # !
    def other(self): ...


@app.task(bind=True, base=Base, rate_limit="10/m", max_retries=3)  # !
def add(self, x, y):
    self.update_state(state="PROGRESS")  # !
    print(self.request.headers, self.request.retries)  # !
    if x:
        raise self.retry(exc=None, queue="slow")  # !
    return self.replace(mail.s(1))  # !


@shared_task(serializer="pickle")  # !
def mail(*to): ...  # !


@shared_task
async def sends(): ...  # !


@signals.task_failure.connect  # !
def failed(**kwargs): ...


def calls():
    mail.delay(1)
    mail.apply_async((1,), countdown=3, headers={"a": 1})  # !
    mail.apply_async((1,), link=None, queue="q")
    mail.s(1).set(link_error=mail.s(2))  # !
    mail.s(1).link(mail.s(2))  # !
    (mail.s(1) | mail.s(2)).on_error(mail.s(3))  # !
    "text".replace("a", "b")
    app.control.inspect().active()  # !
    app.control.revoke("a:b")
    app.send_task("shop.add", kwargs={}, shadow="other")  # !
    requests.request.headers
"""


def test_each_use_that_does_not_map_is_found_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "src" / "tasks.py"
    file.parent.mkdir()
    file.write_text(_PROGRAM)
    (tmp_path / "src" / ".venv").mkdir()
    (tmp_path / "src" / ".venv" / "other.py").write_text(_PROGRAM)
    checked = check([tmp_path / "src"])
    marked = [number for number, line in enumerate(_PROGRAM.splitlines(), 1) if line.endswith("# !")]
    assert sorted({found.line for found in checked.findings}) == marked
    assert {found.path for found in checked.findings} == {file}
    said = {str(found) for found in checked.findings}
    rate = "a rate belongs to a queue: `mtask limit QUEUE --rate 100/1m`"
    line = next(number for number, text in enumerate(_PROGRAM.splitlines(), 1) if "rate_limit" in text)
    assert f"{file}:{line}: the option 'rate_limit' of task add: {rate}" in said
    assert not [found for found in checked.findings if not found.instead]
    assert (checked.task_cnt, checked.call_cnt) == (3, 4)


def test_a_program_that_runs_has_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(_PROJECT)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("; everything maps\n")
    assert not printed.err.startswith("0 tasks")


def test_the_checker_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text('from celery import shared_task\n\n@shared_task(rate_limit="1/s")\ndef f(): ...\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    command = [sys.executable, "-m", "mtask.contrib.celery.check"]
    ran = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(_ROOT)})
    assert ran.returncode == 1, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first.startswith("broken.py:1: this file cannot be read: ")
    assert second.startswith("old.py:3: the option 'rate_limit' of task f: a rate belongs to a queue")
    assert ran.stderr == "1 tasks and 0 calls were seen; 2 uses do not map\n"
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([]) == 2
