"""Fixtures for the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtask.settings import Settings
from tests.integration.cli.commands import Commands


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
