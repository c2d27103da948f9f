"""One run under faults: the database, the fleets and the nemeses, from the first task to the last, and its history."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import bson
import pymongo
from pymongo import MongoClient
from pymongo.errors import PyMongoError

import mtask
from mtask.kernel.driver.indexes import OWED_INDEX
from mtask.local import ReplicaSet, temporary
from tests import faketime
from tests.chaos import observer
from tests.chaos.controls import CONCURRENCY, KEY_CONCURRENCY, Controls
from tests.chaos.display import Display, Status
from tests.chaos.fleet import PATIENCE, Fleet, Place, Sampler, python
from tests.chaos.history import Clock, Document, History, Ledger, Sample
from tests.chaos.load import shifting
from tests.chaos.load.app import isolated_names
from tests.chaos.load.notes import HISTORY_VARIABLE
from tests.chaos.load.order import APPS, BACKLOG, BACKLOG_ONCE, ORDERED, WIDE, backlog
from tests.chaos.load.tasks import LIMIT_KEY, LIMITED, PATIENT, SHORT
from tests.chaos.nemeses import tracks
from tests.chaos.nemeses.network import ReplicaSetProxy
from tests.chaos.world import World
from tests.mongo import TEST_COMMANDS, eventually
from tests.processes import marked

DATABASE = "chaos"
#: When all faults are healed, some task of the backlog ends within this time, in seconds, however slow the machine is.
DRAIN_PATIENCE = 120.0
_SAMPLE_INTERVAL = 5.0  # a hundred thousand finished tasks take a while to count
_SHOW_INTERVAL = 0.25
#: How long others wait beside a limit that is filled, in seconds: an idle worker would have claimed them.
_CROWDED = 1.5
#: The workers, and what is particular about them.
WORKERS = {"w1": "plain", "w2": "plain", "w3": "proxied", "w4": "fast clock", "w5": "slow clock"}
#: The tasks of the long backlogs that are worked off in the end. The others are canceled, so many at once.
_DRAINED, _CANCELING = 1_500, 8
_OPEN = ("INIT", "RUNNING", "WAITING")
_MARKED = {"owed_since": {"$exists": True}}
_FINAL = ("SUCCESS", "FAIL", "CANCELED")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run."""

    folder: Path
    minutes: float
    seed: int
    rate: float = 120.0  #: tasks a second, of all publishers
    nemeses: Sequence[str] = ()  #: names; empty: all
    is_once: bool = False  #: every nemesis once, and then the end
    spared: str | None = None  #: a worker that no nemesis ends, so that its memory is seen over the whole run

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        once = [" --once"] if self.is_once else []
        only = [f" --nemesis '{name}'" for name in self.nemeses]
        spared = [f" --spare {self.spared}"] if self.spared else []
        parts = [f"--minutes {self.minutes:g} --seed {self.seed} --rate {self.rate:g}", *once, *only, *spared]
        return f"python -m tests.chaos {''.join(parts)}"


class Run:
    """One run. `go` returns when the backlog has drained and everything has stopped; the history is complete then."""

    def __init__(self, plan: Plan, display: Display) -> None:
        self._plan = plan
        self._display = display
        self._history = History(plan.folder)
        self._samples = Ledger(self._history.samples_path)
        self._began = time.monotonic()
        self._counts: dict[str, int] = {}
        self._healed = datetime.now(UTC)
        self._message = "starting the database"
        self._facts: Document = {
            "epoch": Clock.now().epoch,
            "seed": plan.seed,
            "minutes": plan.minutes,
            "rate": plan.rate,
            "nemeses": list(plan.nemeses) or tracks.names(),
            "is_once": plan.is_once,
            "command": plan.command,
            "database": DATABASE,
            "versions": {
                "mtask": mtask.__version__,
                "pymongo": pymongo.version,
                "python": platform.python_version(),
            },
            "cores": len(os.sched_getaffinity(0)),
            "nodes": 3,
            "isolated": isolated_names(),
        }

    def go(self) -> History:
        """Run it all."""
        with ExitStack() as stack:
            self._stack = stack
            stack.callback(self._samples.close)
            replica_set = stack.enter_context(temporary(nodes=3, parameters=TEST_COMMANDS, cache_mb=512))
            proxy = stack.enter_context(ReplicaSetProxy(replica_set))
            world = self._make_world(replica_set, proxy)
            stack.callback(world.close)
            self._facts["versions"]["mongod"] = world.mongo.server_info()["version"]
            self._prepare(world, replica_set)
            eye = self._start_observer(replica_set.uri, world)
            self._publish_backlogs(world)
            stack.callback(world.publishers.kill)
            stack.callback(world.workers.kill)
            self._facts["started"] = self._began = time.monotonic()
            world.workers.start()
            world.publishers.start()
            with self._watching(world):
                self._message = ""
                tracks.unleash(world, self._plan.seed, self._plan.minutes, self._plan.nemeses, self._plan.is_once)
                self._message = "letting everything recover"
                self._recover(world)
                self._drain(world)
                self._drain_backlogs(world)
                self._fill_limit(world)
            self._stop(world, eye)
        return self._history

    # --- beginning --------------------------------------------------------------------------------------------

    def _make_world(self, replica_set: ReplicaSet, proxy: ReplicaSetProxy) -> World:
        folder = self._history.folder
        kinds = WORKERS
        offsets = {"fast clock": timedelta(minutes=10), "slow clock": timedelta(minutes=-10)}
        zones = shifting.make(folder / "zones")
        workers = []
        for name, kind in kinds.items():
            uri = proxy.uri if kind == "proxied" else replica_set.uri
            command = python(
                "mtask.cli.worker", f"tests.chaos.load.app:{APPS[name]}", "--uri", uri, "--database", DATABASE,
                "--worker-id", name, "--shutdown-timeout", "3", "--executors", "1",
            )  # fmt: skip
            environment: Mapping[str, str] = faketime.environment(offsets[kind]) if kind in offsets else {}
            workers.append(Place(name, kind, command, {**environment, **zones, HISTORY_VARIABLE: str(folder)}, folder))
        publishers = []
        for name in ("p1", "p2"):
            command = python(
                "tests.chaos.load.publisher", "--name", name, "--uri", replica_set.uri, "--database", DATABASE,
                "--folder", str(folder), "--seed", str(self._plan.seed), "--rate", str(self._plan.rate / 2),
                "--workers", *kinds,
            )  # fmt: skip
            publishers.append(Place(name, "publisher", command, {}, folder))
        faults, calls = Ledger(self._history.faults_path), Ledger(self._history.calls_path("nemesis"))
        self._stack.callback(faults.close)
        self._stack.callback(calls.close)
        return World(replica_set, proxy, DATABASE, Fleet(workers), Fleet(publishers), faults, calls, self._plan.spared)

    def _prepare(self, world: World, replica_set: ReplicaSet) -> None:
        with mtask.Client(replica_set.uri, database=DATABASE) as client:
            client.init()
            self._facts |= Controls(client).prepare()
        for name in ("effects", observer.MARKS):
            world.mongo[DATABASE].create_collection(name)
        observer.prepare(world.mongo, DATABASE)
        world.controls.prepare_order()

    def _publish_backlogs(self, world: World) -> None:
        """Fill the queues whose order is judged, before the first worker works."""
        self._message = "publishing backlogs"
        for specs in backlog(self._plan.seed, BACKLOG_ONCE if self._plan.is_once else BACKLOG, PATIENT):
            world.publish_all(specs)

    def _start_observer(self, uri: str, world: World) -> subprocess.Popen[bytes]:
        folder = self._history.folder
        command = python("tests.chaos.observer", "--uri", uri, "--database", DATABASE, "--folder", str(folder))
        with (folder / "observer.log").open("wb") as log:
            eye = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._stack.callback(_end, eye)

        def sees() -> bool:
            world.mongo[DATABASE][observer.MARKS].insert_one({})
            return (folder / observer.READY).exists()

        eventually(sees, PATIENCE, "the observer sees what is written", interval=0.2)
        return eye

    # --- in between -------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, world: World) -> Iterator[None]:
        is_over = threading.Event()
        threads = [
            threading.Thread(target=_every, args=(interval, is_over, lambda act=act: act(world)), daemon=True)
            for interval, act in ((_SAMPLE_INTERVAL, self._sample), (_SHOW_INTERVAL, self._show))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _sample(self, world: World) -> None:
        now = time.monotonic()
        for place in (*world.workers.places, *world.publishers.places):
            pid = place.pid
            values = Sampler.of(pid) if pid is not None else None
            if values is not None:
                self._samples.write(Sample(now, place.name, pid, values))
        with pymongo.timeout(2):
            try:
                counts = _counts(world.mongo, (*_OPEN, *_FINAL))
            except PyMongoError:
                return  # the database is away, as it is meant to be now and then
        self._counts = counts
        self._samples.write(Sample(now, "tasks", None, {name: float(count) for name, count in counts.items()}))

    def _show(self, world: World) -> None:
        counts = self._counts
        done = sum(counts.get(status, 0) for status in _FINAL)
        now = time.monotonic()
        self._display.show(
            Status(
                elapsed=now - self._began,
                minutes=self._plan.minutes,
                seed=self._plan.seed,
                published=sum(counts.values()),
                finished=done,
                succeeded=counts.get("SUCCESS", 0),
                failed=counts.get("FAIL", 0),
                backlog=counts.get("INIT", 0),
                running=counts.get("RUNNING", 0),
                workers=[(place.name, place.kind, place.state) for place in world.workers.places],
                publishers=[(place.name, place.kind, place.state) for place in world.publishers.places],
                faults=[f"{episode.nemesis} {episode.target}" for episode in list(world.under_way)],
                recent=list(world.recent),
                primary=world.primary,
                message=self._message,
            )
        )

    # --- end --------------------------------------------------------------------------------------------------

    def _recover(self, world: World) -> None:
        """Stop publishing; the nemeses have mended what they broke, and nobody lends a hand beyond that."""
        self._facts["publishers"] = world.publishers.stop()
        self._healed = datetime.now(UTC)  # the servers' clock as well: they run on this machine
        for schedule in self._facts["schedules"]:
            schedule |= world.controls.end_schedule(schedule["name"])

    def _drain(self, world: World) -> None:
        self._message = "draining the backlog"
        since = time.monotonic()
        self._wait_drained(world, {"queue": {"$nin": ORDERED}})
        self._facts["drain_s"] = round(time.monotonic() - since, 2)

    def _drain_backlogs(self, world: World) -> None:
        """Let a part of the long backlogs go by wide limits, and cancel the rest: it is what was meant to wait."""
        self._message = "draining the queues with limits"
        for queue in ORDERED:
            world.controls.bound(queue, WIDE)
        waiting = {"queue": {"$in": ORDERED}, "task_state.status": "INIT"}
        task_ids = [task["_id"] for task in world.mongo[DATABASE]["tasks"].find(waiting, {"_id": True})]
        with ThreadPoolExecutor(_CANCELING) as pool:
            list(pool.map(world.cancel, task_ids[_DRAINED:]))
        self._facts["order"] = world.controls.changes
        self._wait_drained(world, {})
        if "not_drained" not in self._facts:
            self._facts["drained_at"] = time.monotonic()
            self._counts = _counts(world.mongo, (*_OPEN, *_FINAL))

    def _wait_drained(self, world: World, among: Document) -> None:
        least: float = inf

        def are_fewer() -> bool:
            nonlocal least
            try:
                self._counts |= _counts(world.mongo, _OPEN, among)
                # A value that a killed worker owes is told to be lost a minute later, and the mark goes with it.
                marked_cnt = world.mongo[DATABASE]["tasks"].count_documents(_MARKED, hint=OWED_INDEX)
            except PyMongoError:
                return False
            before, least = least, min(least, marked_cnt + sum(self._counts.get(status, 0) for status in _OPEN))
            return least < before

        while least:
            try:
                eventually(are_fewer, DRAIN_PATIENCE, "the backlog goes down", interval=0.5)
            except AssertionError as error:
                self._facts["not_drained"] = f"{error}: {least:.0f} tasks are left"
                return

    def _fill_limit(self, world: World) -> None:
        """Have as many run at once as the limit allows, since no place has leaked, and others wait; end them all."""
        if "not_drained" in self._facts:
            return
        self._message = "filling the limit"

        def publish() -> list[str]:
            keys = (*[LIMIT_KEY] * KEY_CONCURRENCY, *[None] * (CONCURRENCY - KEY_CONCURRENCY))
            return [world.publish(LIMITED, {"seconds": 120.0}, queue=LIMITED, limit_key=key, **SHORT) for key in keys]

        def are(task_ids: list[str], *statuses: str) -> bool:
            wanted = {"_id": {"$in": task_ids}, "task_state.status": {"$in": statuses}}
            return world.mongo[DATABASE]["tasks"].count_documents(wanted) == len(task_ids)

        task_ids = publish()
        with suppress(AssertionError):  # the checker says what was held
            eventually(lambda: are(task_ids, "RUNNING"), PATIENCE, "the limit is filled", interval=0.1)
        task_ids += publish()
        time.sleep(_CROWDED)
        for task_id in task_ids:
            world.cancel(task_id)
        with suppress(AssertionError):
            eventually(lambda: are(task_ids, *_FINAL), PATIENCE, "what filled the limit ends", interval=0.1)

    def _stop(self, world: World, eye: subprocess.Popen[bytes]) -> None:
        self._message = "stopping"
        self._show(world)
        codes = world.workers.stop()
        self._facts["stopped_at"] = time.monotonic()
        self._facts["processes_left"] = self._processes_left()
        world.mongo[DATABASE][observer.MARKS].insert_one({"_id": observer.END})
        eye.wait(PATIENCE * 3)
        self._facts |= json.loads((self._history.folder / observer.GAPS).read_text())
        _dump(world.mongo[DATABASE]["tasks"].find(), self._history.documents_path)
        _dump(world.mongo[DATABASE]["places"].find(), self._history.places_path)
        _dump(world.mongo[DATABASE]["effects"].find({}, {"_id": False}), self._history.effects_path)
        ends = [asdict(end) for place in world.workers.places for end in place.ends]
        eventually(lambda: _are_up(world.replica_set), PATIENCE, "all members are up again", interval=0.5)
        self._facts |= {
            "exit_codes": codes,
            "ends": ends,
            "worker_kinds": {place.name: place.kind for place in world.workers.places},
            "connections_after": _left(lambda: _connections(world.replica_set)),
            "operations_left": _in_words(world.replica_set),
            "cursors_before": 0,
            "cursors_after": sum(_left(lambda: _cursors(world.replica_set, self._healed)).values()),
        }
        self._history.facts_path.write_text(json.dumps(self._facts, indent=2))

    def _processes_left(self) -> int:
        """Return the number of processes that outlive the workers that started them. They have a moment to end."""
        folder = str(self._history.folder)
        with suppress(AssertionError):
            eventually(lambda: not marked(HISTORY_VARIABLE, folder), 20, interval=0.5)
        return len(marked(HISTORY_VARIABLE, folder))


#: Which entries, of those the server lists, are connections of worker processes. A transaction that a killed one left
#: open is listed too, without a connection, until MongoDB ends it.
_OF_WORKERS: Document = {"appName": {"$regex": "^mtask-worker"}, "type": "op"}


def _every(interval: float, is_over: threading.Event, act: Callable[[], None]) -> None:
    while not is_over.wait(interval):
        act()


def _counts(mongo: MongoClient[Document], statuses: Sequence[str], among: Document | None = None) -> dict[str, int]:
    # Counted over the index: what the server knows without counting is wrong after a crash.
    tasks = mongo[DATABASE]["tasks"]
    return {status: tasks.count_documents({"task_state.status": status, **(among or {})}) for status in statuses}


def _connections(replica_set: ReplicaSet) -> dict[str, int]:
    """Return how many connections of workers the members still have, per worker."""
    return _operations(replica_set, {"idleConnections": True}, _OF_WORKERS, "$appName")


def _are_up(replica_set: ReplicaSet) -> bool:
    """Whether each member is primary or secondary. In between, a member answers no question about its operations."""
    for node in replica_set.nodes:
        with MongoClient[Document](node.address, directConnection=True) as client:
            hello = client.admin.command("hello")
            if not (hello["isWritablePrimary"] or hello["secondary"]):
                return False
    return True


def _in_words(replica_set: ReplicaSet) -> list[str]:
    """Return what the servers say of each connection that workers left open, for whoever looks for its cause."""
    found = []
    for node in replica_set.nodes:
        with MongoClient[Document](node.address, directConnection=True) as client:
            stages = [{"$currentOp": {"allUsers": True, "idleConnections": True}}, {"$match": _OF_WORKERS}]
            found += [f"{node.address}: {operation}" for operation in client.admin.aggregate(stages)]
    return found


def _cursors(replica_set: ReplicaSet, since: datetime) -> dict[str, int]:
    """Return how many cursors are open that were used since then: those of killed workers are the server's to reap."""
    recent = {"type": "idleCursor", "ns": {"$regex": f"^{DATABASE}"}, "cursor.lastAccessDate": {"$gt": since}}
    return _operations(replica_set, {"idleCursors": True}, recent, "$ns")


def _operations(replica_set: ReplicaSet, of: Document, match: Document, by: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in replica_set.nodes:
        with MongoClient[Document](node.address, directConnection=True) as client:
            operations = client.admin.aggregate(
                [
                    {"$currentOp": {"allUsers": True, **of}},
                    {"$match": match},
                    {"$group": {"_id": by, "count": {"$sum": 1}}},
                ]
            )
            for operation in operations:
                found[operation["_id"]] = found.get(operation["_id"], 0) + operation["count"]
    return found


def _left(find: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return what is still there when the servers have had the time to notice that its owners are gone."""
    found: dict[str, int] = {}

    def is_gone() -> bool:
        nonlocal found
        try:
            found = find()
        except PyMongoError:  # a member that rolls back answers nobody
            return False
        return not found

    with suppress(AssertionError):
        eventually(is_gone, 20, interval=0.5)
    return found


def _dump(documents: Any, path: Path) -> None:
    with path.open("wb") as file:
        for document in documents:
            file.write(bson.encode(document))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(PATIENCE)


def fresh_folder(folder: Path) -> Path:
    """Return the folder, emptied if an earlier run used it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def seed_of(text: str | None) -> int:
    """Return the seed given, or a fresh one."""
    return int(text) if text is not None else Random().randrange(1_000_000)
