"""Rolls a fleet of worker processes from one version to the other and back, under load."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from mtask import Client
from tests.faults.upgrade.app import FOLDER_VARIABLE, NARROW, WIDTH
from tests.faults.upgrade.versions import Version
from tests.mongo import PATIENCE, eventually

_APP = "tests.faults.upgrade.app:app"
#: The part of the workers that are killed instead of stopped.
_KILLED = 0.4


@dataclass(slots=True)
class Process:
    """A process of the fleet."""

    name: str
    version: Version
    popen: subprocess.Popen[bytes]
    #: When it was killed (monotonic seconds). None: nobody killed it.
    killed: float | None = None


@dataclass(slots=True)
class Fleet:
    """The worker and publisher processes of a run, and what was done to them."""

    uri: str
    database: str
    folder: Path
    seed: int
    rate: float
    say: Callable[[str], object] = print
    workers: dict[str, Process] = field(default_factory=dict)
    publishers: list[Process] = field(default_factory=list)
    ended: list[Process] = field(default_factory=list)

    def start_worker(self, name: str, version: Version) -> None:
        """Start a worker and wait until it works."""
        given = ["--uri", self.uri, "--database", self.database, "--worker-id", name, "--shutdown-timeout", "5"]
        command = version.module("mtask.cli.worker", _APP, *given, "--concurrency", "20")
        self.workers[name] = self._start(name, version, command)

        def works() -> bool:
            process = self.workers[name].popen
            assert process.poll() is None, f"{name} ({version.name}) ended: {self._log(name)}"
            with Client(self.uri, database=self.database) as client:
                document = client.tasks.database["workers"].find_one({"_id": name, "pid": process.pid})
            return document is not None and document["status"] == "running" and self._is(document, version)

        eventually(works, PATIENCE, f"{name} works as {version.name}", interval=0.2)
        self.say(f"{name}: {version.name} works")

    @staticmethod
    def _is(document: dict[str, object], version: Version) -> bool:
        assert document.get("schema_revision") == version.revision, "another version than was meant has started"
        return True

    def start_publisher(self, version: Version) -> None:
        """Start a publisher."""
        given = (version.name, self.uri, self.database, str(self.folder), str(self.rate), str(self.seed))
        command = version.module("tests.faults.upgrade.publisher", *given)
        self.publishers.append(self._start(f"publisher-{version.name}", version, command))

    def _start(self, name: str, version: Version, command: Sequence[str]) -> Process:
        environment = {**os.environ, **version.environment, FOLDER_VARIABLE: str(self.folder)}
        empty = self.folder / "empty"  # with -m, Python imports from the working folder first
        empty.mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=empty, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return Process(name, version, process)

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def end_worker(self, name: str, *, is_killed: bool) -> None:
        """Kill a worker, or stop it in order."""
        process = self.workers.pop(name)
        process.popen.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
        code = process.popen.wait(PATIENCE)
        process.killed = time.monotonic() if is_killed else None
        self.ended.append(process)
        self.say(f"{name}: {process.version.name} {'killed' if is_killed else 'stopped'}")
        assert code == (-signal.SIGKILL if is_killed else 0), f"{name} ended with {code}: {self._log(name)}"

    def roll(self, version: Version, chance: Random, mixed: Callable[[], object]) -> None:
        """Replace each worker that is of another version, one after the other; some of them are killed.

        `mixed` is called when the first worker is replaced, so while workers of both versions live.
        """
        names = sorted(name for name, worker in self.workers.items() if worker.version != version)
        chance.shuffle(names)
        kills = [chance.random() < _KILLED for _ in names]
        if names and not any(kills):
            kills[0] = True
        for name, is_killed in zip(names, kills, strict=True):
            self.end_worker(name, is_killed=is_killed)
            self.start_worker(name, version)
            if name == names[0]:
                mixed()

    def stop_publishers(self) -> None:
        """Stop the publishers in order."""
        for publisher in self.publishers:
            publisher.popen.terminate()
        for publisher in self.publishers:
            code = publisher.popen.wait(PATIENCE)
            assert code == 0, f"{publisher.name} ended with {code}: {self._log(publisher.name)}"
        self.publishers.clear()

    def drain(self, client: Client) -> None:
        """Wait until every task has ended."""
        # A schedule goes on for ever, so it is paused first.
        for schedule in client.schedules():
            client.pause_schedule(schedule.id)

        def is_done() -> bool:
            left = client.tasks.count_documents({"task_state.status": {"$nin": ["SUCCESS", "FAIL", "CANCELED"]}})
            return left == 0

        eventually(is_done, 2 * PATIENCE, "all tasks have ended", interval=0.3)

    def reap(self) -> None:
        """Kill what is left."""
        for process in [*self.workers.values(), *self.publishers]:
            with suppress(ProcessLookupError):
                process.popen.kill()
            process.popen.wait(PATIENCE)


def narrow_queue(client: Client) -> None:
    """Limit the queue of narrow tasks."""
    client.limit(NARROW, concurrency=WIDTH)
