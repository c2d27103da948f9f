"""Help: complete, and the same flags everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from mtask.cli.commands import app
from mtask.cli.failures import EXIT_CODES
from mtask.cli.main import run
from mtask.cli.values import flag_of
from mtask.kernel.document.options import STORED_NAMES

COMMANDS = (
    "publish",
    "show",
    "list",
    "cancel",
    "retry",
    "rerun",
    "remove",
    "update",
    "wait",
    "stats",
    "worker",
    "workers",
    "stop-worker",
    "set-worker",
    "init",
    "schema",
    "doctor",
    "local",
)


def commands(command: Any, path: str = "mtask") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from commands(command.get_command(None, name), f"{path} {name}")


ALL = dict(commands(typer.main.get_command(app)))


def test_the_promised_commands_are_there() -> None:
    assert {f"mtask {name}" for name in COMMANDS} <= set(ALL)
    assert {"mtask local start", "mtask local status", "mtask local stop"} <= set(ALL)


@pytest.mark.parametrize("path", ALL)
def test_every_command_and_flag_has_help(path: str) -> None:
    command = ALL[path]
    assert command.help, path
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{path}: {parameter.name}"


#: All but groups, and `mtask worker`, whose flags are those of `mtask-worker`.
COMMANDS_OF_MTASK = [path for path in ALL if not hasattr(ALL[path], "commands") and path != "mtask worker"]


@pytest.mark.parametrize("path", COMMANDS_OF_MTASK)
def test_every_command_takes_the_shared_flags(path: str) -> None:
    flags = {flag for parameter in ALL[path].params for flag in parameter.opts}
    assert {"--uri", "--database", "--json", "--no-color", "--quiet", "--verbose", "--debug"} <= flags


@pytest.mark.parametrize("path", ["mtask publish", "mtask update"])
def test_every_task_option_has_a_flag(path: str) -> None:
    flags = {flag for parameter in ALL[path].params for flag in parameter.opts}
    assert {flag_of(name) for name in STORED_NAMES} <= flags


def test_mtask_alone_prints_help_with_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    text = capsys.readouterr().out
    assert "Usage" in text
    for code in EXIT_CODES:
        assert f"{code}:" in text


@pytest.mark.parametrize("words", [["show"], ["local"], ["schedule", "add"]])
def test_only_the_help_of_mtask_lists_the_flags_of_all_commands(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    page = capsys.readouterr().out
    assert "Everywhere" not in page
    assert "--no-color" not in page
    assert page.count("mtask --help") == 1
    assert run(["--help"]) == 0
    assert "--no-color" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*COMMANDS, "local start"])
def test_help_of_every_command_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    assert f"mtask {name}" in capsys.readouterr().out
