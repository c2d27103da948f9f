"""Completions and the list of commands come from a table: it is that of the commands, and the answers are typer's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from mtask.cli import words
from mtask.cli.commands import Commands, app
from mtask.cli.main import COMPLETE, run
from tools.generate_words import generated

#: Lines that the table answers alone: the last word is completed.
KNOWN = [
    "mtask ",
    "mtask p",
    "mtask zzz",
    "mtask --",
    "mtask --json --j",
    "mtask --uri mongodb://h ",
    "mtask --uri ",
    "mtask publish ",
    "mtask publish --",
    "mtask publish --priority 3 --lookup a=1 --",
    "mtask publish send --priority ",
    "mtask --json publish --js",
    "mtask schedule ",
    "mtask schedule add --c",
    "mtask local st",
]
#: Lines that are left to typer.
LEFT = [
    "mtask unknown --",
    "mtask --unknown ",
    "mtask publish --priority=",
    "mtask publish 'a b",
    "mtask publish --uri --json ",
    "mtask ./",
]


def environment(shell: str, line: str) -> dict[str, str]:
    if shell == "bash":
        given = line.split()
        return {"COMP_WORDS": line, "COMP_CWORD": str(len(given) if line.endswith(" ") else len(given) - 1)}
    return {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


def test_the_table_is_that_of_the_commands() -> None:
    assert Path(words.FILE).read_text(encoding="utf-8") == generated(), "run `make generate`"


def test_help_lists_the_commands_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)

    def text() -> str:
        group(["--help"], prog_name="mtask", standalone_mode=False)
        return capsys.readouterr().out

    listed = text()
    monkeypatch.setattr("mtask.cli.commands.outline", lambda name, _: group._command(name))
    assert text() == listed
    assert "publish" in listed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("line", KNOWN)
def test_the_answer_of_the_table_is_that_of_typer(
    line: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {COMPLETE: f"complete_{shell}", **environment(shell, line)}
    made = words.answer(given, given[COMPLETE])
    assert made is not None
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(words, "answer", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["mtask"])
    with pytest.raises(SystemExit) as ended:
        run()
    # typer breaks long lines of help, which a shell then takes for further words.
    assert made.text.split() == capsys.readouterr().out.split()
    assert made.code == (ended.value.code or 0)


@pytest.mark.parametrize("line", LEFT)
def test_what_the_table_cannot_tell_is_left_to_typer(line: str) -> None:
    given = environment("bash", line)
    assert words.answer(given, "complete_bash") is None


@pytest.mark.parametrize("question", ["source_bash", "complete_powershell", "complete_", "x"])
def test_other_questions_are_left_to_typer(question: str) -> None:
    assert words.answer(environment("bash", "mtask p"), question) is None


@pytest.mark.parametrize(("line", "code"), [("mtask p", 0), ("mtask zzz", 1)])
def test_fish_is_told_whether_there_are_words(
    line: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {COMPLETE: "complete_fish", **environment("fish", line), "_TYPER_COMPLETE_FISH_ACTION": "is-args"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert (run([]), capsys.readouterr().out) == (code, "")
