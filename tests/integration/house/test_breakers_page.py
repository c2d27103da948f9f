"""The code and the commands of docs/breakers.md are executed, in the order of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.commands import Commands

PAGE = Path(__file__).parents[3] / "docs" / "breakers.md"


def test_code_and_commands_of_the_page_work(
    mtask: Commands,
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    blocks = re.findall(r"^```(python|console)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") == 5
    names: dict[str, Any] = {"__name__": "page"}
    printed = shown = ""
    try:
        for kind, block in blocks:
            if kind == "python":
                exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
                printed += capsys.readouterr().out
                continue
            for line in block.splitlines():
                program, *arguments = shlex.split(line.removeprefix("$ "))
                assert program == "mtask"
                shown += mtask.ok(*arguments).out
    finally:
        if "client" in names:
            names["client"].close()
    assert printed == "0:01:00\n0:30:00\n"
    assert "paused  queue mail  until" in shown
    assert "resumes" in shown
    assert "breaker: 20 failures in a row, 30 s" in shown
    assert set(names["app"].handlers) == {"send_code", "send_email", "charge"}
