"""Fixtures for the command line, and a worker in the process of the test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from mtask.settings import Settings
from tests.integration.cli.commands import Commands
from tests.integration.worker_harness import Working, working_on
from tests.mongo import Client


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove mtask's variables, and work in a folder without an .env file."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MTASK_{name.upper()}", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mtask(
    bare_environment: None,
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Commands:
    """Return the command line with a database for one test."""
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    return Commands(mongo_uri, database_name, capsys)


@pytest.fixture
def working(mongo_uri: str, database_name: str, mongo: Client) -> Working:
    """Return what runs a worker on the test's database: `async with working(app) as bench`."""
    return partial(working_on, mongo_uri, database_name, mongo)
