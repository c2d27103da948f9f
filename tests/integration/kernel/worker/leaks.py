"""What a worker or a client could leave behind: in this process, and on the server."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from tests.mongo import PATIENCE, Client, Document, eventually


def open_files() -> dict[int, str]:
    """Return this process's open files and sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            continue
    return found


def connections(mongo: Client, app_name: str | Document) -> list[Document]:
    """Return what the server knows of clients of this name: connections, operations, cursors and sessions."""
    idle = {"allUsers": True, "idleConnections": True, "idleCursors": True, "idleSessions": True}
    return list(mongo.admin.aggregate([{"$currentOp": idle}, {"$match": {"appName": app_name}}]))


def _identity(found: Document) -> tuple[str, str]:
    """Return what tells one entry of the server's list from another: its cursor, its session or its connection."""
    of = found.get("cursor", {}).get("cursorId") or found.get("connectionId") or found.get("lsid")
    return found["type"], str(of)


def open_transactions(mongo: Client) -> int:
    """Return how many transactions are open on the server."""
    count: int = mongo.admin.command("serverStatus")["transactions"]["currentOpen"]
    return count


def open_cursors(mongo: Client) -> int:
    """Return how many cursors are open on the server."""
    count: int = mongo.admin.command("serverStatus")["metrics"]["cursor"]["open"]["total"]
    return count


def own_objects() -> Counter[str]:
    """Count the objects of mtask's own classes, and the futures, that are alive.

    The future of an open connection is left out: a worker opens further connections while its server is slow.
    """
    gc.collect()
    return uncollected_objects()


def uncollected_objects() -> Counter[str]:
    """Do as `own_objects` without a look for cycles first: what only such a look would free is counted."""
    counted: Counter[str] = Counter()
    objects = gc.get_objects()
    of_connections = {id(found._closed) for found in objects if type(found).__name__ == "PyMongoProtocol"}
    for found in objects:
        kind = type(found)
        if id(found) in of_connections:
            continue
        # Of some classes in C, `__module__` is no text.
        if str(kind.__module__).startswith("mtask.") or kind.__name__ in ("Future", "Task", "_WorkItem"):
            counted[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return counted


@dataclass
class Before:
    """How things were before, to be compared with how they are afterwards."""

    mongo: Client
    threads: set[threading.Thread]
    files: dict[int, str]
    cursors: int
    #: Of other tests: the server keeps the idle cursor of a process that was killed for ten minutes.
    known: set[tuple[str, str]]

    @classmethod
    def note(cls, mongo: Client) -> Self:
        """Take it all down; the test's own client has made its connections by then."""
        mongo.admin.command("ping")
        gc.collect()
        known = {_identity(found) for found in connections(mongo, {"$exists": True})}
        return cls(mongo, set(threading.enumerate()), open_files(), open_cursors(mongo), known)

    def new_files(self) -> dict[int, str]:
        """Return the files that are open and were not; those that the test's own client may have opened left out."""
        gc.collect()
        return {number: name for number, name in open_files().items() if self.files.get(number) != name}

    def new_connections(self, app_name: str) -> list[Document]:
        """Return what the server knows of clients of this name now, and did not know then."""
        return [found for found in connections(self.mongo, app_name) if _identity(found) not in self.known]

    def check_nothing_left(self, app_name: str) -> None:
        """See that nothing is left in this process, nor on the server of clients of this name."""
        wait = partial(eventually, timeout=PATIENCE)
        wait(lambda: not set(threading.enumerate()) - self.threads, message=f"threads end: {threading.enumerate()}")
        try:
            wait(lambda: not self.new_connections(app_name), message=f"connections of {app_name} end")
        except AssertionError:
            assert self.new_connections(app_name) == []  # tells what they are
        wait(lambda: open_transactions(self.mongo) == 0, message="transactions end")
        wait(lambda: open_cursors(self.mongo) <= self.cursors, message="cursors end")
        wait(lambda: len(self.new_files()) == 0, message=f"files and sockets are closed: {self.new_files()}")


def sizes_of(worker: Any) -> dict[str, int]:
    """Return how much a worker keeps in each of the places where runs and hints are kept."""
    parts = worker.parts
    ledger, questions, finisher = parts.scope.ledger, parts.questions, parts.finisher
    claims = len(parts.claimer._in_flight) + len(parts.sender._apart) + len(parts.recovery.jobs)
    return {
        "leases": len(parts.pinger.held()),
        "runs": len(ledger.running) + len(ledger._held),
        "claims": len(ledger.claiming) + claims,
        "slots": len(ledger.claiming) + parts.slots.running_cnt,
        "suspensions": len(parts.runner._caller._around.context.keywords["transactions"]._suspensions),
        "hints": len(questions.suspects) + len(questions.holders) + len(questions._missed) + len(questions.due),
        "endings": finisher.pending + sum(len(lane.waiting) + len(lane.in_flight) for lane in finisher._lanes),
        "queue": len(parts.queue),
    }
