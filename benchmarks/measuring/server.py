"""The MongoDB server to measure on: databases for single measurements, and the server's counters."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database
from pymongo.write_concern import WriteConcern

import mtask
from benchmarks.measuring.counters import Cost, Counters, cpu_of
from mtask import local
from mtask.errors import MtaskError
from mtask.kernel.driver.indexes import STATUS_INDEX
from mtask.settings import read_settings

Document = dict[str, Any]

#: The names of the benchmarks' databases begin with this.
PREFIX = "mtask_benchmark_"
EMBEDDED = "local"
#: The engine's guarantees, for the bare calls too.
GUARANTEES: dict[str, Any] = {
    "write_concern": WriteConcern(w="majority", j=True),
    "read_concern": ReadConcern("majority"),
}
_SERVER_TIMEOUT = timedelta(seconds=8)
#: Seconds between two checks whether the work is done.
CHECK_INTERVAL = 0.05
_CALIBRATION = 50
#: Tasks that are due later than this do not count as waiting.
_SOON = timedelta(hours=6)
_TICK = 0.01
#: The letter that follows "/" in the order of ids.
_BEHIND_SLASH = chr(ord("/") + 1)


class NotMeasured(MtaskError):
    """The measurement failed, because something did not happen in time; the message says what."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time from the first claim to the last success, by the server's clock."""

    seconds: float
    succeeded: int
    runs: int


class Scratch:
    """A database for one measurement, with mtask's validators and indexes."""

    def __init__(self, uri: str, database: Database[Document], now: datetime) -> None:
        self.uri = uri
        self.name = database.name
        #: The server's time at its creation.
        self.now = now
        self.database = database
        self.tasks: Collection[Document] = database.get_collection("tasks", **GUARANTEES)
        self.workers: Collection[Document] = database.get_collection("workers", **GUARANTEES)

    def is_drained(self) -> bool:
        """Tell whether no task waits or runs; this reads one key of an index."""
        open_and_due = {
            "task_state.status": {"$in": ["INIT", "RUNNING"]},
            "task_state.next_preempt_time": {"$lt": self.now + _SOON},
        }
        # Backwards, because the keys that the drain has just removed lie at the index's beginning.
        backwards = [("task_state.status", -1), ("task_state.next_preempt_time", -1)]
        found = self.tasks.find_one(open_and_due, {"_id": 0, "task_state.status": 1}, sort=backwards, hint=STATUS_INDEX)
        return found is None

    def span(self, name: str, label: str) -> Span:
        """Return time and number of the runs of this name's tasks whose keys begin with `label/`."""
        first, behind = ids_under(name, label)
        run = "$task_state.worker_states"
        rows = self.tasks.aggregate(
            [
                {"$match": {"_id": {"$gte": first, "$lt": behind}}},
                {"$unwind": run},
                {
                    "$group": {
                        "_id": None,
                        "first": {"$min": f"{run}.claim_time"},
                        "last": {"$max": f"{run}.success_time"},
                        "runs": {"$sum": 1},
                        "succeeded": {"$sum": {"$cond": [{"$eq": [f"{run}.status", "SUCCESS"]}, 1, 0]}},
                    }
                },
            ]
        ).to_list()
        if not rows or rows[0]["last"] is None:
            return Span(0.0, 0, 0)
        found = rows[0]
        # The server's clock has milliseconds: anything shorter counts as one.
        seconds = max(0.001, (found["last"] - found["first"]).total_seconds())
        return Span(seconds, found["succeeded"], found["runs"])

    def age(self) -> timedelta:
        """Return the time since its creation, by the server's clock."""
        now: datetime = self.database.command("hello")["localTime"]
        return now.replace(tzinfo=UTC) - self.now

    def settle(self) -> None:
        """Flush earlier writes to disk, so that the server does not do so during a measurement."""
        with suppress(OperationFailure):  # needs an administrator; without it the figures vary more
            self.database.client.admin.command("fsync")


def ids_under(name: str, label: str) -> tuple[str, str]:
    """Return the first id, and the first one behind the last, of the tasks whose keys begin with `label/`."""
    return f"{name}:{label}/", f"{name}:{label}{_BEHIND_SLASH}"


class Meter:
    """Measures the cost of a block: use `Server.metered`, and read `cost` after the block."""

    def __init__(self, server: Server, pids: Sequence[int]) -> None:
        self._server = server
        self._pids = list(pids)
        self._checks = 0
        self._server_counters = server.counters()
        self._client = self._cpu()
        self._began = time.monotonic()
        self.seconds = 0.0

    def _cpu(self) -> float:
        return cpu_of(self._pids) if self._pids else time.process_time()

    def is_drained(self, scratch: Scratch) -> bool:
        """Tell whether no task waits or runs; the cost of this check is left out."""
        self._checks += 1
        return scratch.is_drained()

    def stop(self) -> None:
        """Read the counters for the end of the block."""
        self.seconds = time.monotonic() - self._began
        self._client = self._cpu() - self._client
        self._server_counters = self._server.counters() - self._server_counters - self._server.own(self._checks)

    def cost(self, tasks: int, seconds: float | None = None) -> Cost:
        """Return the cost of `tasks` tasks; without `seconds`, by the clock of this process."""
        return Cost(tasks, self.seconds if seconds is None else seconds, self._server_counters, self._client)


class Server:
    """A MongoDB server to measure on."""

    def __init__(self, uri: str, folder: Path, say: Callable[[str], None]) -> None:
        self.uri = uri
        self.folder = folder  #: for the workers' notes and logs; removed at the end
        self.say = say  #: shows the progress to the user
        self._check()
        # A client that sends nothing by itself: the server's counters then show the measured work alone.
        self.mongo: MongoClient[Document] = MongoClient(
            uri,
            tz_aware=True,
            appname="mtask-benchmarks",
            serverMonitoringMode="poll",
            heartbeatFrequencyMS=3_600_000,
            serverSelectionTimeoutMS=int(_SERVER_TIMEOUT / timedelta(milliseconds=1)),
        )
        self._per_reading, self._per_check = Counters(), Counters()
        try:
            with self.scratch() as scratch:
                self._calibrate(scratch)
        except BaseException:
            self.mongo.close()
            raise

    def _check(self) -> None:
        """Raise InvalidURI, DatabaseUnavailable or AccessDenied."""
        with mtask.Client(self.uri, database=f"{PREFIX}check", check=False, server_timeout=_SERVER_TIMEOUT) as client:
            client.server_time()

    def _calibrate(self, scratch: Scratch) -> None:
        """Measure the cost of measuring."""
        first = self.counters()
        for _ in range(_CALIBRATION):
            last = self.counters()
        self._per_reading = (last - first) * (1 / _CALIBRATION)
        first = self.counters()
        for _ in range(_CALIBRATION):
            scratch.is_drained()
        self._per_check = (self.counters() - first - self._per_reading) * (1 / _CALIBRATION)

    def counters(self) -> Counters:
        """Read the server's counters."""
        return Counters.of(self.mongo.admin.command("serverStatus"))

    def own(self, checks: int) -> Counters:
        """Return the cost of a measurement itself, with this number of checks."""
        return self._per_reading + self._per_check * checks

    @property
    def version(self) -> str:
        """The server's version."""
        return str(self.mongo.server_info()["version"])

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """Make a database for one measurement, and drop it afterwards."""
        name = PREFIX + uuid.uuid4().hex[:12]
        try:
            # Closed at once, because an open client polls the server.
            with mtask.Client(self.uri, database=name) as client:
                now = client.init()
            yield Scratch(self.uri, self.mongo[name], now)
        finally:
            self.mongo.drop_database(name)

    @contextmanager
    def metered(self, pids: Sequence[int] = ()) -> Iterator[Meter]:
        """Measure the cost of the block to the server and to these processes; by default, to this process."""
        meter = Meter(self, pids)
        yield meter
        meter.stop()

    def close(self) -> None:
        """Close the connections."""
        self.mongo.close()


@contextmanager
def open_server(uri: str | None, cache_mb: int, say: Callable[[str], None]) -> Iterator[Server]:
    """Connect to the server of this URI; without a URI, start an embedded mongod for the block.

    Raises InvalidURI, DatabaseUnavailable, NotReplicaSet, MongodNotFound.
    """
    with ExitStack() as stack:
        if uri is None or uri.strip() == EMBEDDED:
            say("starting the embedded mongod")
            uri = stack.enter_context(local.temporary(mongod=read_settings().mongod, cache_mb=cache_mb)).uri
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtask-benchmarks-")))
        server = Server(uri, folder, say)
        stack.callback(server.close)
        yield server


def wait_until(condition: Callable[[], bool], patience: float, what: str, interval: float = 0.02) -> None:
    """Wait until the condition holds; raise NotMeasured after `patience` seconds."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise NotMeasured(f"waited {patience:g} s in vain for {what}.")
        time.sleep(interval)


def wait_quiet(pids: Sequence[int], patience: float = 30.0) -> None:
    """Wait until these processes have started up and take next to no CPU, or `patience` seconds have passed."""
    end = time.monotonic() + patience
    before = cpu_of(pids)
    while time.monotonic() < end:
        time.sleep(0.3)
        now = cpu_of(pids)
        if now - before <= 2 * _TICK * len(pids):
            return
        before = now
