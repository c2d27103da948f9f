"""Mistakes in the settings: each has a check, before a task is enqueued. And the command that starts workers."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import modify_settings, override_settings

from mtask.contrib.django import options, schedule
from mtask.contrib.django.connections import uri_of
from mtask.contrib.django.declaring import worker_app
from mtask.contrib.django.management.commands.mtask_worker import worker_process
from mtask.contrib.django.targets import Target
from mtask.errors import InvalidInput, UnknownOption
from tests.integration.contrib.django.conftest import BACKEND
from tests.integration.contrib.django.shop import tasks
from tests.integration.contrib.django.shop.models import Order

pytestmark = pytest.mark.usefixtures("project")


def told(**backends: Any) -> list[str]:
    """Return what the checks tell of these backends, with their hints."""
    made = {"default": {}, **backends}
    with override_settings(TASKS={alias: {"BACKEND": BACKEND, **given} for alias, given in made.items()}):
        return [f"{found.id} {found.msg} {found.hint}" for found in run_checks() if str(found.id).startswith("mtask")]


URI = {"URI": "mongodb://a/b"}


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ({}, []),
        ({"default": {"OPTIONS": URI}}, []),
        ({"default": {"OPTIONS": {"DATBASE": "default"}}}, ["mtask.E002", "no 'DATBASE'", "Did you mean 'DATABASE'?"]),
        ({"default": {"OPTIONS": {"xyz": 1}}}, ["mtask.E002", "The names are DATABASE, URI, NAME, MODULES, WEB_URL"]),
        ({"default": {"OPTIONS": {"DATABASE": "default", **URI}}}, ["mtask.E002", "give one of them"]),
        ({"default": {"OPTIONS": {"NAME": "b"}}}, ["mtask.E002", "NAME without a URI"]),
        ({"default": {"OPTIONS": {"DATABASE": "orders"}}}, ["mtask.E003", "no DATABASES['orders']", "'lite'"]),
        ({"default": {"OPTIONS": {"DATABASE": "lite"}}}, ["mtask.E004", "is SQLite, not MongoDB", "Name a"]),
        ({"other": {}}, ["mtask.E006", "TASKS['other'] and TASKS['default'] share the queue 'default'"]),
        ({"other": {"QUEUES": ["mail"]}}, []),
        ({"other": {"OPTIONS": URI}}, []),
    ],
)  # fmt: skip
def test_check_tells_of_a_mistake(backends: dict[str, Any], expected: list[str]) -> None:
    found = told(**backends)
    assert len(found) == bool(expected), found
    assert all(part in found[0] for part in expected), found


def test_check_tells_of_a_missing_app() -> None:
    with modify_settings(INSTALLED_APPS={"remove": "mtask.contrib.django"}):
        (found,) = told()
    assert found.startswith("mtask.E001 TASKS['default']: \"mtask.contrib.django\" is not in INSTALLED_APPS.")


def test_check_tells_of_a_model_in_a_collection_of_mtask(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = Order._meta
    monkeypatch.setattr(meta, "db_table", "tasks")
    (found,) = told()
    assert "mtask.E005 TASKS['default']: shop.Order uses the collection 'tasks', which is mtask's." in found
    assert told(default={"OPTIONS": URI}) == []
    monkeypatch.setattr(meta, "managed", False)
    assert told() == []


def test_database_that_is_no_mongodb_refuses_tasks() -> None:
    changed = {"default": {"BACKEND": BACKEND, "OPTIONS": {"DATABASE": "lite"}}}
    with override_settings(TASKS=changed), pytest.raises(ImproperlyConfigured, match="is SQLite, and mtask stores"):
        tasks.add.enqueue(1)


def test_decorators_tell_of_mistakes() -> None:
    with pytest.raises(UnknownOption, match="did you mean 'retry_backoff'"):
        options(retry_backof=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="give the priority to @task"):
        options(priority=2)
    for decorator in (options(retry_backoff=2), schedule("0 7 * * *")):
        with pytest.raises(InvalidInput, match="below @task"):
            decorator(tasks.add)


# --- workers -------------------------------------------------------------------------------------------------


def test_command_becomes_a_worker(project: str, mongo_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: made.append(given))
    call_command("mtask_worker", "-Q", "mail", "-c", "20", "-l", "debug", "--processes", "4", "--isolation=process")
    call_command("mtask_worker", "--backend", "lite")
    (program, arguments, variables), (_, others, of_others) = made
    assert program == arguments[0] == sys.executable
    assert arguments[1:] == [
        "-m", "mtask.cli.worker", "mtask.contrib.django.worker:app", "--queues", "mail", "--concurrency", "20",
        "--log-level", "DEBUG", "--processes", "4", "--isolation=process",
    ]  # fmt: skip
    assert (variables["MTASK_URI"], variables["MTASK_DATABASE"]) == (mongo_uri, project)
    assert others[3:] == ["mtask.contrib.django.worker:backends.lite", "--queues", "default"]
    assert of_others["MTASK_DATABASE"] != project
    with pytest.raises(CommandError, match=r"TASKS\['unknown'\] is no mtask"):
        call_command("mtask_worker", "--backend", "unknown")


def test_worker_serves_the_queues_of_its_backend() -> None:
    assert worker_process("default")[0][3:] == ["--queues", "default,mail"]


@pytest.mark.parametrize(
    ("database", "uri"),
    [
        ({"HOST": ""}, "mongodb://localhost/"),
        ({"HOST": "a.example", "PORT": 27018}, "mongodb://a.example:27018/"),
        ({"HOST": "mongodb://a,b/?tls=true"}, "mongodb://a,b/?tls=true"),
        (
            {"HOST": "mongodb+srv://old:one@a.example", "USER": "ann@x", "PASSWORD": "p:/?", "OPTIONS": {"tls": False}},
            "mongodb+srv://ann%40x:p%3A%2F%3F@a.example/?tls=false",
        ),
        ({"HOST": "mongodb://a/?w=1", "OPTIONS": {"replicaSet": "rs 0"}}, "mongodb://a/?w=1&replicaSet=rs+0"),
    ],
)
def test_worker_gets_the_database_of_django_as_a_uri(
    monkeypatch: pytest.MonkeyPatch, database: dict[str, Any], uri: str
) -> None:
    plain = {"HOST": "", "PORT": "", "USER": "", "PASSWORD": "", "OPTIONS": {}}
    for name, value in {**plain, **database}.items():
        monkeypatch.setitem(connections["default"].settings_dict, name, value)
    assert uri_of(Target("default")) == uri


def test_option_that_fits_into_no_uri_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {"event_listeners": [object()]})
    with pytest.raises(ImproperlyConfigured, match=r"'event_listeners'.*does not fit into a URI"):
        uri_of(Target("default"))


def test_modules_of_the_settings_are_imported() -> None:
    def app_with(*modules: str) -> object:
        changed = {**settings.TASKS["default"], "OPTIONS": {"MODULES": [*modules]}}
        with override_settings(TASKS={"default": changed}):
            return worker_app("default")

    with pytest.raises(ImproperlyConfigured, match=r"MODULES.*No module named 'no_such_module'"):
        app_with("no_such_module")
    path = "tests.integration.contrib.django.shop.elsewhere"
    assert path not in sys.modules
    assert f"{path}.far" in app_with(path).handlers  # type: ignore[attr-defined]
