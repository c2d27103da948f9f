"""A real command of mtask that serves, such as `mtask web`, as users start it."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.measuring.counters import cpu_of
from benchmarks.measuring.fleet import Process
from benchmarks.measuring.server import Scratch, Server, wait_quiet, wait_until

_START_PATIENCE = 120.0


class Serving:
    """A command on a database that prints its address as JSON; a context manager that opens when it serves and is idle.

    What a subclass does in `opened` and `closed` happens while the command serves.
    """

    def __init__(self, server: Server, scratch: Scratch, command: str) -> None:
        self._command = command
        self._folder = Path(tempfile.mkdtemp(dir=server.folder))
        flags = ["--uri", scratch.uri, "--database", scratch.name, command, "--port", "0", "--json"]
        self._process = Process(command, self._folder, "mtask.cli.main", *flags)
        self.printed: Any = None  #: what the command has printed, from the start of the block

    def __enter__(self) -> Self:
        try:
            wait_until(self._is_serving, _START_PATIENCE, f"mtask {self._command}", interval=0.05)
            self.opened()
            wait_quiet([self.pid])
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.closed()
        finally:
            self._stop()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        parts = urlsplit(self.printed["url"])
        return str(parts.hostname), int(parts.port or 0)

    def cpu(self) -> float:
        """Return the CPU that the process has taken so far, in seconds."""
        return cpu_of([self.pid])

    def check(self) -> None:
        """Raise NotMeasured if it has ended."""
        self._process.check()

    def opened(self) -> None:
        """Prepare what needs the serving command."""

    def closed(self) -> None:
        """Release what `opened` has prepared."""

    def _is_serving(self) -> bool:
        self.check()
        try:
            self.printed = json.loads((self._folder / f"{self._command}.log").read_text())
        except ValueError:
            return False
        return True

    def _stop(self) -> None:
        self._process.send(signal.SIGTERM)
        self._process.end()
