"""The world that nemeses work in: the database, the fleets, and the ledger of what was done to them."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

import pymongo
from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

import mtask
from mtask.arguments.publish import TaskRef
from mtask.errors import MtaskError, TaskError
from mtask.kernel.document.handlers import Handler
from mtask.local import ReplicaSet
from tests.chaos.controls import Controls
from tests.chaos.fleet import PATIENCE, Fleet, Place, State
from tests.chaos.history import Call, Document, Fault, Ledger, Operation
from tests.chaos.load.tasks import QUEUE, task_id_of
from tests.chaos.nemeses.network import ReplicaSetProxy
from tests.mongo import eventually

#: Seconds until a fleet that was killed works again. On a slow machine, elections and starts take turns meanwhile.
_RECOVERY = 180.0


@dataclass
class Episode:
    """A fault under way; what is found out on the way goes into `detail`."""

    nemesis: str
    target: str
    start: float
    detail: dict[str, Any] = field(default_factory=dict)


class World:
    """What a nemesis is given."""

    def __init__(
        self,
        replica_set: ReplicaSet,
        proxy: ReplicaSetProxy,
        database: str,
        workers: Fleet,
        publishers: Fleet,
        faults: Ledger,
        calls: Ledger,
        spared: str | None = None,
    ) -> None:
        self.replica_set = replica_set
        self.proxy = proxy
        self.database = database
        self.workers = workers
        self.publishers = publishers
        #: The worker that nobody ends.
        self.spared = spared
        #: For what is done to the servers, and to look at them.
        self.mongo: MongoClient[Document] = MongoClient(
            replica_set.uri, tz_aware=True, serverSelectionTimeoutMS=5000, socketTimeoutMS=20000
        )
        self.is_over = threading.Event()
        self.under_way: list[Episode] = []
        self.recent: deque[str] = deque(maxlen=6)
        self._faults = faults
        self._calls = calls
        self._client = mtask.Client(replica_set.uri, database=database, server_timeout=timedelta(seconds=5))
        self.controls = Controls(self._client)

    @property
    def primary(self) -> str:
        """The primary's address, as the harness's own client sees it; empty while there is none."""
        address = self.mongo.primary
        return f"{address[0]}:{address[1]}" if address else ""

    @property
    def mortals(self) -> list[Place]:
        """The workers that may be ended."""
        return [place for place in self.workers.places if place.name != self.spared]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self.mongo.close()

    @contextmanager
    def fault(self, nemesis: str, target: str = "", *, is_database_away: bool = False) -> Iterator[Episode]:
        """Write down that something was done to the target meanwhile."""
        episode = Episode(nemesis, target, time.monotonic())
        self.under_way.append(episode)
        try:
            yield episode
        finally:
            end = time.monotonic()
            self._faults.write(Fault(nemesis, target, episode.start, end, is_database_away, episode.detail))
            self.under_way.remove(episode)
            self.recent.appendleft(f"{nemesis} {target} ({end - episode.start:.1f} s)".replace("  ", " "))

    def wait(self, seconds: float) -> None:
        """Let time pass, at most until the run is over."""
        self.is_over.wait(seconds)

    @contextmanager
    def any_place(self, places: Sequence[Place], random: Random) -> Iterator[Place | None]:
        """Hold one of these places that works and that no other nemesis has; None if there is none."""
        for place in random.sample(places, len(places)):
            if place.lock.acquire(blocking=False):
                try:
                    if place.state == State.UP and place.pid is not None:
                        yield place
                        return
                finally:
                    place.lock.release()
        yield None

    def wait_committing(self) -> float:
        """Wait until the majority acknowledges a write again; return when it did (monotonic seconds).

        An elected primary may be unable to commit for a while: members that replicated from one that is frozen wait
        for it until they look for another source.
        """
        probe = self.mongo.get_database(f"{self.database}_probe", write_concern=WriteConcern("majority"))["probe"]

        def is_committed() -> bool:
            with suppress(PyMongoError), pymongo.timeout(2):
                probe.insert_one({})
                return True
            return False

        eventually(is_committed, PATIENCE, "the majority commits", interval=0.05)
        return time.monotonic()

    def wait_working(self, places: Sequence[Place]) -> None:
        """Wait until each of these workers has said of itself that it works; one that ended is started again.

        They need not all work at one instant: other nemeses go on meanwhile.
        """
        registry = self.mongo[self.database]["workers"]
        missing = {place.name: place for place in places}

        def have_worked() -> bool:
            for place in places:
                if place.notice_end():
                    place.start()
            try:
                running = {found["_id"]: found["pid"] for found in registry.find({"status": "running"})}
            except PyMongoError:
                return False
            for place in list(missing.values()):
                if running.get(place.name) == place.pid:
                    del missing[place.name]
            return not missing

        try:
            eventually(have_worked, _RECOVERY, "all work", interval=0.1)
        except AssertionError:
            raise AssertionError(f"not within {_RECOVERY:g} s: working: {', '.join(missing)}") from None

    def publish(self, task: TaskRef, params: Mapping[str, Any], **options: Any) -> str:
        """Publish a task on behalf of a nemesis; it counts among the load."""
        key = uuid.uuid4().hex
        task_id = f"{task.name if isinstance(task, Handler) else task}:{key}"

        def publish() -> str:
            done = self._client.publish(task, params, key=key, **{"queue": QUEUE, **options})
            return "created" if done.created else "kept"

        self._ask("publish", task_id, publish)
        return task_id

    def publish_all(self, specs: Sequence[mtask.TaskSpec]) -> None:
        """Publish tasks that no publisher asks for; they count among the load."""
        sent = [Call(uuid.uuid4().hex, "publish", task_id_of(spec), "nemesis", time.monotonic()) for spec in specs]
        self._calls.write_all(sent)
        self._client.publish_many(specs)
        self._calls.write_all([call.told_now("created") for call in sent])

    def have_ended(self, task_ids: Sequence[str]) -> bool:
        """Whether these tasks have all ended. False while the database does not answer."""
        tasks = self.mongo[self.database]["tasks"]
        open_ones = {"_id": {"$in": task_ids}, "task_state.status": {"$in": ["INIT", "RUNNING"]}}
        try:
            with pymongo.timeout(5):
                return tasks.count_documents(open_ones) == 0
        except PyMongoError:
            return False

    def cancel(self, task_id: str) -> None:
        """Cancel a task. It may have ended meanwhile."""

        def cancel() -> str:
            name, _, key = task_id.partition(":")
            self._client.cancel(name, key)
            return "done"

        self._ask("cancel", task_id, cancel)

    def _ask(self, operation: Operation, task_id: str, act: Callable[[], str]) -> None:
        """Ask until it is answered; each try is written down before and after."""
        while True:
            call = Call(uuid.uuid4().hex, operation, task_id, "nemesis", time.monotonic())
            self._calls.write(call)
            try:
                answer = act()
            except TaskError as error:
                self._calls.write(call.told_now("refused", str(error)))
                return
            except MtaskError as error:
                self._calls.write(call.told_now("unknown", str(error)))
                self.wait(0.2)
            else:
                self._calls.write(call.told_now(answer))
                return
