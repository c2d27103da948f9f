"""The command line under test: in this process for speed, or as the real entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from mtask import Client
from mtask.cli.main import run


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """Its error, as JSON."""
        return json.loads(self.err)


class Commands:
    """`mtask` on one database."""

    def __init__(self, uri: str, database: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.uri = uri
        self.database = database
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Ended:
        """Run a command in this process."""
        self._capsys.readouterr()
        code = run([*arguments])
        captured = self._capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    def ok(self, *arguments: str) -> Ended:
        """Run a command that must succeed."""
        ended = self(*arguments)
        assert ended.code == 0, (arguments, ended)
        return ended

    def entry(self, *arguments: str, stdin: str | None = None, timeout: float = 60) -> Ended:
        """Run the real entry point."""
        done = subprocess.run(
            [sys.executable, "-m", "mtask.cli.main", *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Ended(done.returncode, done.stdout, done.stderr)


def client_of(commands: Commands) -> Client:
    """Return a client on the same database."""
    return Client(commands.uri, database=commands.database)
