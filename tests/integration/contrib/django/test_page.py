"""The code of docs/django.md is executed, as modules of a project of this process."""

from __future__ import annotations

import re
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.test.utils import override_settings

from mtask.contrib.django import api
from mtask.contrib.django.targets import NAMES
from mtask.contrib.django.testing import mtask_tasks
from tests.integration.contrib.django.shop import models

PAGE = (Path(__file__).parents[4] / "docs" / "django.md").read_text()
BACK_PORT = "from django_tasks import task"


def blocks(name: str) -> list[str]:
    """Return the blocks of a file, in their order."""
    found = re.findall(rf"^```python\n# {re.escape(name)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if api.Task.__module__.startswith("django_tasks"):
        assert BACK_PORT in PAGE
        return [re.sub(r"from django\.tasks import task\b.*", BACK_PORT, block) for block in found]
    return found


@pytest.fixture
def page(project: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make the modules that the page names; return that of its tasks."""
    made = {name: ModuleType(name) for name in ("shop", "shop.tasks", "shop.tests")}
    for name, module in {**made, "shop.models": models}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made["shop.tasks"]


def run(block: str, module: ModuleType) -> ModuleType:
    """Execute a block in a module."""
    exec(compile(block, f"docs/django.md: {module.__name__}", "exec", dont_inherit=True), vars(module))
    return module


def settings_of(block: str) -> dict[str, Any]:
    """Return the TASKS of a block of settings."""
    names: dict[str, Any] = {"INSTALLED_APPS": []}
    exec(block, names)
    found: dict[str, Any] = names["TASKS"]
    return found


def test_code_of_the_page_runs_as_written(page: ModuleType, mongo_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtask.contrib.django.testing.server_uri", lambda: mongo_uri)
    with_uri, with_database = blocks("settings.py")
    first, optioned, scheduled, in_context = blocks("shop/tasks.py")
    enqueued, in_transaction, on_commit = blocks("shop/views.py")
    (tested,) = blocks("shop/tests.py")
    assert len(re.findall("^```python", PAGE, re.MULTILINE)) == 10

    with override_settings(TASKS=settings_of(with_uri)):
        run(first, page)
        with mtask_tasks() as bench:
            result = run(enqueued, ModuleType("shop.views")).result
            bench.run()
            result.refresh()
            assert result.return_value == "'Welcome' sent to ada@example.com"
            run(on_commit, ModuleType("shop.views"))
            assert [task.returns for task in bench.run()] == ["'hi' sent to ada@example.com"]

    with override_settings(TASKS=settings_of(with_database)):
        for block in (optioned, scheduled, in_context):
            run(block, page)
        with mtask_tasks() as bench:
            run(in_transaction, ModuleType("shop.views"))
            (sent,) = bench.run()
            assert (sent.key, sent.returns) == ("order/7", "'hi' sent to ada@example.com")
            assert models.Order.objects.filter(number=7).exists()
            (reported,) = bench.fire("shop.tasks.send_report")
            assert reported.returns == "report sent to sales@example.com"
            imported = page.import_file.enqueue("a.csv")
            (done,) = bench.run()
            progress = done.runs[-1].progress
            assert progress is not None
            assert (done.id, done.returns, progress.message) == (imported.id, 1, "half of a.csv")
            changed = page.send_invoice.using(worker_timeout=120).enqueue(8)
            stored = bench.client.get(*changed.id.split(":")).task_option
            assert (stored.max_unexpected_retries, stored.worker_timeout_ms) == (5, 120_000)
        case = run(tested, ModuleType("shop.tests")).InvoiceTest
        outcome = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
        assert (outcome.testsRun, outcome.failures, outcome.errors) == (1, [], [])


def test_tables_of_the_page_are_complete() -> None:
    assert all(f"`{name}`" in PAGE for name in NAMES)
    numbers = [f"E{number:03}" for number in range(1, 7)]
    assert re.findall(r"^\| `(E\d+)`", PAGE, re.MULTILINE) == numbers
    assert all(f"`{status}`" in PAGE for status in api.TaskResultStatus.values)
