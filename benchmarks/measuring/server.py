"""Where is measured: a MongoDB, databases on it that are dropped again, and its counters."""

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
from mtask.settings import read_settings
from mtask.store.layout.schema import STATUS_INDEX

Document = dict[str, Any]

#: Databases of benchmarks begin so.
PREFIX = "mtask_benchmark_"
EMBEDDED = "local"
#: The engine's guarantees, for the bare calls too.
GUARANTEES: dict[str, Any] = {
    "write_concern": WriteConcern(w="majority", j=True),
    "read_concern": ReadConcern("majority"),
}
_SERVER_TIMEOUT = timedelta(seconds=8)
#: Between two looks whether the work is done, in seconds.
LOOK_INTERVAL = 0.05
_CALIBRATION = 50
#: What is due later than this is not waited for.
_SOON = timedelta(hours=6)
_TICK = 0.01
#: The letter that follows "/" in the order of ids.
_BEHIND_SLASH = chr(ord("/") + 1)


class NotMeasured(MtaskError):
    """Something that was to be measured did not happen; the message says what and where to look."""


@dataclass(frozen=True, slots=True)
class Span:
    """From the first claim to the last success, by the server's clock."""

    seconds: float
    succeeded: int
    runs: int


class Ground:
    """A database of its own for one measurement, set up as mtask does it: validators and indexes."""

    def __init__(self, uri: str, database: Database[Document], now: datetime) -> None:
        self.uri = uri
        self.name = database.name
        #: The server's time when it was set up.
        self.now = now
        self.database = database
        self.tasks: Collection[Document] = database.get_collection("tasks", **GUARANTEES)
        self.workers: Collection[Document] = database.get_collection("workers", **GUARANTEES)

    def is_drained(self) -> bool:
        """Tell whether nothing waits or runs: the measurement's own look, which reads one key of an index."""
        open_and_due = {
            "task_state.status": {"$in": ["INIT", "RUNNING"]},
            "task_state.next_preempt_time": {"$lt": self.now + _SOON},
        }
        # From the far end of the index: at the near one lie the keys that the drain has just removed.
        backwards = [("task_state.status", -1), ("task_state.next_preempt_time", -1)]
        found = self.tasks.find_one(open_and_due, {"_id": 0, "task_state.status": 1}, sort=backwards, hint=STATUS_INDEX)
        return found is None

    def span(self, name: str, label: str) -> Span:
        """Return what became of the tasks of this name whose keys begin with `label/`."""
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
        # The server's clock ticks in milliseconds: what takes less counts as one.
        seconds = max(0.001, (found["last"] - found["first"]).total_seconds())
        return Span(seconds, found["succeeded"], found["runs"])

    def age(self) -> timedelta:
        """Return how long ago it was set up, by the server's clock."""
        now: datetime = self.database.command("hello")["localTime"]
        return now.replace(tzinfo=UTC) - self.now

    def settle(self) -> None:
        """Have the server write down what went before, so that it does not do so while something is measured."""
        with suppress(OperationFailure):  # it takes an administrator; without one the figures spread more
            self.database.client.admin.command("fsync")


def ids_under(name: str, label: str) -> tuple[str, str]:
    """Return the first id, and the first one behind the last, of the tasks whose keys begin with `label/`."""
    return f"{name}:{label}/", f"{name}:{label}{_BEHIND_SLASH}"


class Meter:
    """What happens in a block costs: use `Place.metered`. `cost` tells, after the block."""

    def __init__(self, place: Place, pids: Sequence[int]) -> None:
        self._place = place
        self._pids = list(pids)
        self._looks = 0
        self._server = place.counters()
        self._client = self._cpu()
        self._began = time.monotonic()
        self.seconds = 0.0

    def _cpu(self) -> float:
        return cpu_of(self._pids) if self._pids else time.process_time()

    def look(self, ground: Ground) -> bool:
        """Tell whether nothing waits or runs any more; what the looks cost is left out."""
        self._looks += 1
        return ground.is_drained()

    def stop(self) -> None:
        """Take what the counters show now."""
        self.seconds = time.monotonic() - self._began
        self._client = self._cpu() - self._client
        self._server = self._place.counters() - self._server - self._place.own(self._looks)

    def cost(self, tasks: int, seconds: float | None = None) -> Cost:
        """Return what so many tasks took; by the clock of this process, unless the seconds are known better."""
        return Cost(tasks, self.seconds if seconds is None else seconds, self._server, self._client)


class Place:
    """A MongoDB to measure on."""

    def __init__(self, uri: str, folder: Path, say: Callable[[str], None]) -> None:
        self.uri = uri
        self.folder = folder  #: for notes of workers, their logs and the like; it goes at the end
        self.say = say  #: tells who waits what is being done
        self._check()
        # It asks for nothing by itself, so that all that is counted comes from what is measured.
        self.mongo: MongoClient[Document] = MongoClient(
            uri,
            tz_aware=True,
            appname="mtask-benchmarks",
            serverMonitoringMode="poll",
            heartbeatFrequencyMS=3_600_000,
            serverSelectionTimeoutMS=int(_SERVER_TIMEOUT / timedelta(milliseconds=1)),
        )
        self._counted, self._looked = Counters(), Counters()
        try:
            with self.fresh() as ground:
                self._calibrate(ground)
        except BaseException:
            self.mongo.close()
            raise

    def _check(self) -> None:
        """Raise InvalidURI, DatabaseUnavailable or AccessDenied."""
        with mtask.Client(self.uri, database=f"{PREFIX}check", check=False, server_timeout=_SERVER_TIMEOUT) as client:
            client.server_time()

    def _calibrate(self, ground: Ground) -> None:
        """Find out what the measuring itself costs."""
        first = self.counters()
        for _ in range(_CALIBRATION):
            last = self.counters()
        self._counted = (last - first) * (1 / _CALIBRATION)
        first = self.counters()
        for _ in range(_CALIBRATION):
            ground.is_drained()
        self._looked = (self.counters() - first - self._counted) * (1 / _CALIBRATION)

    def counters(self) -> Counters:
        """Return what the server has counted so far."""
        return Counters.of(self.mongo.admin.command("serverStatus"))

    def own(self, looks: int) -> Counters:
        """Return what a measurement with so many looks costs by itself."""
        return self._counted + self._looked * looks

    @property
    def server_version(self) -> str:
        """The server's version."""
        return str(self.mongo.server_info()["version"])

    @contextmanager
    def fresh(self) -> Iterator[Ground]:
        """Make a database for one measurement, and drop it afterwards."""
        name = PREFIX + uuid.uuid4().hex[:12]
        try:
            # Closed at once: an open client asks the server for news now and then.
            with mtask.Client(self.uri, database=name) as client:
                now = client.init()
            yield Ground(self.uri, self.mongo[name], now)
        finally:
            self.mongo.drop_database(name)

    @contextmanager
    def metered(self, pids: Sequence[int] = ()) -> Iterator[Meter]:
        """Measure what the block costs the server, and these processes; without any: this one."""
        meter = Meter(self, pids)
        yield meter
        meter.stop()

    def close(self) -> None:
        """Close the connections."""
        self.mongo.close()


@contextmanager
def open_place(uri: str | None, cache_mb: int, say: Callable[[str], None]) -> Iterator[Place]:
    """Go to the server of this URI; without one, to an embedded mongod that is gone afterwards.

    Raises InvalidURI, DatabaseUnavailable, NotReplicaSet, MongodNotFound and their like.
    """
    with ExitStack() as stack:
        if uri is None or uri.strip() == EMBEDDED:
            say("starting the embedded mongod")
            uri = stack.enter_context(local.temporary(mongod=read_settings().mongod, cache_mb=cache_mb)).uri
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtask-benchmarks-")))
        place = Place(uri, folder, say)
        stack.callback(place.close)
        yield place


def wait_until(condition: Callable[[], bool], patience: float, what: str, interval: float = 0.02) -> None:
    """Wait until it holds; raise NotMeasured after so many seconds."""
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise NotMeasured(f"{what}: it did not come within {patience:g} s.")
        time.sleep(interval)


def wait_quiet(pids: Sequence[int], patience: float = 30.0) -> None:
    """Wait until these processes take next to no CPU: what they did to get ready is done. Not for ever."""
    end = time.monotonic() + patience
    before = cpu_of(pids)
    while time.monotonic() < end:
        time.sleep(0.3)
        now = cpu_of(pids)
        if now - before <= 2 * _TICK * len(pids):
            return
        before = now
