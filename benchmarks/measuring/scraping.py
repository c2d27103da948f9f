"""A real `mtask metrics --port` process, and scrapes of it over one connection, as Prometheus keeps it."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.measuring.counters import cpu_of
from benchmarks.measuring.fleet import Process
from benchmarks.measuring.server import NotMeasured, Scratch, Server, wait_quiet, wait_until

_START_PATIENCE = 120.0
#: The longest time of one scrape, in seconds. The first one waits for the count of all tasks.
_PATIENCE = 120.0
_AGE = re.compile(rb"^mtask_counts_age_seconds (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer."""

    seconds: float
    size: int  #: bytes
    age: float  #: seconds since the tasks were counted


class Exporter:
    """`mtask metrics --port` on a database, as users start it; a context manager that opens when it serves."""

    def __init__(self, server: Server, scratch: Scratch) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=server.folder))
        flags = ["--uri", scratch.uri, "--database", scratch.name, "metrics", "--port", "0", "--json"]
        self._process = Process("metrics", self._folder, "mtask.cli.main", *flags)
        self._printed: Any = None
        self._connection: HTTPConnection

    def __enter__(self) -> Self:
        try:
            wait_until(self._is_serving, _START_PATIENCE, "mtask metrics", interval=0.05)
            parts = urlsplit(self._printed["url"])
            self._connection = HTTPConnection(str(parts.hostname), parts.port, timeout=_PATIENCE)
            wait_quiet([self._process.pid])
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._stop()

    def cpu(self) -> float:
        """Return the CPU that the process has taken so far, in seconds."""
        return cpu_of([self._process.pid])

    def scrape(self) -> Scrape:
        """Read the metrics once. Raises NotMeasured if they do not tell the age of the counts."""
        self._process.check()
        began = time.monotonic()
        self._connection.request("GET", "/metrics")
        answer = self._connection.getresponse()
        body = answer.read()
        took = time.monotonic() - began
        age = _AGE.search(body)
        if answer.status != 200 or age is None:
            raise NotMeasured(f"a scrape had status {answer.status}, and tells no age of the counts.")
        return Scrape(took, len(body), float(age[1]))

    def _is_serving(self) -> bool:
        self._process.check()
        try:
            self._printed = json.loads((self._folder / "metrics.log").read_text())
        except ValueError:
            return False
        return True

    def _stop(self) -> None:
        self._process.send(signal.SIGTERM)
        self._process.end()
