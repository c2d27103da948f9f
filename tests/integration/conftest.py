"""Fixtures of several modules: the command line, a store, a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mtask import Client
from mtask.settings import Settings
from mtask.store.driver.stores import SyncStore
from tests.clients import open_store
from tests.integration.cli.commands import Commands


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave no variable of ours, and no .env file."""
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
    """Give the command line, on a database for one test."""
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    return Commands(mongo_uri, database_name, capsys)


@pytest.fixture
def store(mongo_uri: str, database_name: str) -> Iterator[SyncStore]:
    """Connect to the test's database as the engine does."""
    with open_store(mongo_uri, database_name) as opened:
        yield opened


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Iterator[Client]:
    """Give a client of the test's database."""
    with Client(mongo_uri, database=database_name) as made:
        yield made
