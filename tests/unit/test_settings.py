from __future__ import annotations

from pathlib import Path

import pytest

from mtask.defaults import DEFAULT_URI
from mtask.errors import InvalidInput
from mtask.settings import Settings, read_settings


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of ours, and no .env file."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MTASK_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


def test_defaults_stand_where_nothing_is_set() -> None:
    settings = read_settings()
    assert (settings.uri, settings.database, settings.processes) == (DEFAULT_URI, None, 1)


def test_the_environment_is_read_by_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTASK_URI", "mongodb://db/?replicaSet=rs0")
    monkeypatch.setenv("MTASK_CONCURRENCY", "7")
    monkeypatch.setenv("CONCURRENCY", "8")
    settings = read_settings()
    assert (settings.uri, settings.concurrency) == ("mongodb://db/?replicaSet=rs0", 7)


def test_the_environment_goes_before_the_env_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MTASK_DATABASE=from_file\nMTASK_QUEUES=a,b\nOTHER=1\n")
    monkeypatch.setenv("MTASK_DATABASE", "from_environment")
    settings = read_settings()
    assert (settings.database, settings.queues) == ("from_environment", "a,b")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MTASK_CONCURRENCY", "many"),
        ("MTASK_CONCURRENCY", "-1"),
        ("MTASK_PROCESSES", "0"),
        ("MTASK_SHUTDOWN_TIMEOUT", "-0.5"),
        ("MTASK_SHUTDOWN_TIMEOUT", "soon"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput, match=f"{variable}='{value}'") as caught:
        read_settings()
    assert caught.value.field == variable


def test_env_file_in_the_working_folder_does_not_name_a_binary_that_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("MTASK_MONGOD=./mongod\nMTASK_DATABASE=shop\n")
    settings = read_settings()
    assert (settings.mongod, settings.database) == (None, "shop")
    monkeypatch.setenv("MTASK_MONGOD", "/opt/mongod")
    assert read_settings().mongod == Path("/opt/mongod")


def test_case_of_a_variable_does_not_matter_and_an_empty_one_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("mtask_queues=a\nMTASK_APP=${MTASK_QUEUES}\nMTASK_WORKER_ID=\nURI=mongodb://other\n")
    monkeypatch.setenv("mtask_database", "shop")
    monkeypatch.setenv("MTASK_CONCURRENCY", "")
    monkeypatch.setenv("MTASK_QUEUES", "")
    settings = read_settings()
    assert (settings.database, settings.concurrency, settings.queues) == ("shop", 100, "a")
    assert (settings.worker_id, settings.uri) == (None, DEFAULT_URI)


def test_env_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"MTASK_APP=\xff")
    with pytest.raises(InvalidInput, match=r"^\.env in the working folder cannot be read: "):
        read_settings()
