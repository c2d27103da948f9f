"""`mtask worker` is `mtask-worker`, with the shared flags that mean something there, and short flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from mtask.cli import words
from mtask.cli.commands import app
from mtask.cli.main import run
from mtask.cli.workers.command import cli
from mtask.settings import Settings


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MTASK_{name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


def flags(command: Any) -> set[str]:
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}


def test_mtask_worker_has_the_flags_of_mtask_worker() -> None:
    group: Any = typer.main.get_command(app)
    own: Any = typer.main.get_command(cli)
    assert (
        flags(group.get_command(None, "worker")) == flags(own) >= {"--queues", "-Q", "-c", "-l", "--reload", "--burst"}
    )


def test_short_flags_are_those_that_celery_has() -> None:
    given = ["shop:app", "-Q", "mail,default", "-c", "3", "-l", "info"]
    read = typer.main.get_command(cli).make_context("mtask worker", given).params
    known = {name: value for name, value in read.items() if value not in (None, False)}
    assert known == {"app": "shop:app", "queues": "mail,default", "concurrency": 3, "log_level": "info"}


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("worker", ""),
        ("worker shop:app -c 3", "shop:app -c 3"),
        ("--uri mongodb://db --database d worker shop:app", "--uri mongodb://db --database d shop:app"),
        ("--uri=x worker worker", "--uri=x worker"),
        ("--uri worker workers", None),
        ("show worker", None),
        ("--unknown worker", "--unknown"),
        ("--uri", None),
    ],
)
def test_line_of_mtask_worker_is_found(line: str, rest: str | None) -> None:
    assert words.without(line.split(), "worker") == (None if rest is None else rest.split())


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("worker", 2, "mtask worker: name the app: mtask worker package.module:app"),
        ("--uri mongodb://db worker", 2, "mtask worker: name the app"),
        ("--json worker shop:app", 2, "No such option: --json"),
        ("worker shop:app --burst --reload", 2, "--burst ends by itself, and --reload goes on: use one of them."),
        ("worker shop:app --burst -c 0", 2, "--burst with --concurrency 0 runs nothing: use 1 or more."),
    ],
)
def test_wrong_usage_says_what_to_do(line: str, code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == code
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("line", ["worker --help", "worker -h"])
def test_help_names_the_command_as_it_was_called(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 0
    page = capsys.readouterr().out
    assert page.split()[:3] == ["Usage:", "mtask", "worker"]
    assert "--reload" in page
