"""A real `mtask metrics --port` process, and scrapes of it over one connection, as Prometheus keeps it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from http.client import HTTPConnection

from benchmarks.measuring.server import NotMeasured, Scratch, Server
from benchmarks.measuring.serving import Serving

#: The longest time of one scrape, in seconds. The first one waits for the count of all tasks.
_PATIENCE = 120.0
_AGE = re.compile(rb"^mtask_counts_age_seconds (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answer."""

    seconds: float
    size: int  #: bytes
    age: float  #: seconds since the tasks were counted


class Exporter(Serving):
    """`mtask metrics --port` on a database."""

    def __init__(self, server: Server, scratch: Scratch) -> None:
        super().__init__(server, scratch, "metrics")
        self._connection: HTTPConnection

    def opened(self) -> None:
        """Make the connection that all scrapes share."""
        self._connection = HTTPConnection(*self.address, timeout=_PATIENCE)

    def closed(self) -> None:
        """Close it."""
        self._connection.close()

    def scrape(self) -> Scrape:
        """Read the metrics once. Raises NotMeasured if they do not tell the age of the counts."""
        self.check()
        began = time.monotonic()
        self._connection.request("GET", "/metrics")
        answer = self._connection.getresponse()
        body = answer.read()
        took = time.monotonic() - began
        age = _AGE.search(body)
        if answer.status != 200 or age is None:
            raise NotMeasured(f"a scrape had status {answer.status}, and tells no age of the counts.")
        return Scrape(took, len(body), float(age[1]))
