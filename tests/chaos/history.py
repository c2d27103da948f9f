"""What a run under faults leaves behind: five kinds of record, in files that no worker's death can take along.

Every record is written whole by one `write` to a file opened for appending, before whatever it tells of goes on:
SIGKILL can cut a process off between two records, not within one. Instants of this machine are on its monotonic
clock, one for all processes and never false; `Clock` turns them into the servers' wall clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import bson
from bson.codec_options import CodecOptions

Document = dict[str, Any]
R = TypeVar("R", bound="Call | Note | Fault | Sample")
#: What a handler notes: it wrote into its transaction, was told that its children exist, returns a next task.
Event = Literal["start", "written", "added", "next", "end", "raised", "cancelled"]
#: "gather" is a publish that gathers: with if_running="again", debounce or collect.
Operation = Literal["publish", "update", "cancel", "retry", "rerun", "remove", "gather"]

_AWARE: CodecOptions[Document] = CodecOptions(tz_aware=True)


@dataclass(frozen=True, slots=True)
class Clock:
    """How this machine's monotonic clock and the servers' wall clock go together: `epoch` is their difference."""

    epoch: float

    @classmethod
    def now(cls) -> Clock:
        """Read both clocks of a process whose clock is right."""
        return cls(time.time() - time.monotonic())

    def wall(self, monotonic: float) -> datetime:
        """Return the instant on the servers' clock."""
        return datetime.fromtimestamp(self.epoch + monotonic, UTC)

    def monotonic(self, wall: datetime) -> float:
        """Return the instant on the monotonic clock."""
        return wall.timestamp() - self.epoch


@dataclass(frozen=True, slots=True)
class Call:
    """What a publisher asked of mtask about one task, and what it was told.

    Written twice under one `call_id`: when it is sent (`told` is None), and when the answer is there.
    """

    call_id: str
    operation: Operation
    task_id: str
    publisher: str
    sent: float
    told: float | None = None
    #: What mtask said: "created", "updated", "kept", "done", "refused", or "unknown" where it raised.
    answer: str | None = None
    error: str | None = None
    #: The id under which a call that gathers was sent: the same, however often it is sent.
    gather_id: str | None = None

    @classmethod
    def parse(cls, line: bytes) -> Call:
        """Read one line of a ledger."""
        return cls(**json.loads(line))

    def told_now(self, answer: str, error: str | None = None) -> Call:
        """Return the second record of this call."""
        return replace(self, told=time.monotonic(), answer=answer, error=error)


@dataclass(frozen=True, slots=True)
class Note:
    """What a handler did: "start", then what it wrote or was told, then "end", "raised" or "cancelled"."""

    event: Event
    task_id: str
    run_id: str
    worker_id: str
    attempt: int
    pid: int
    at: float
    #: The ids of the children, if the event is "added". With "start", the calls whose params the handler of a task has
    #: that gathers calls.
    detail: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that a nemesis did, and when it was over. `detail` holds what is particular to its kind."""

    nemesis: str
    target: str
    start: float
    end: float
    #: The database as a whole was away or without a primary meanwhile.
    is_database_away: bool = False
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured at one instant: of one process, or with an empty pid of the whole."""

    at: float
    subject: str
    pid: int | None
    values: dict[str, float]


class Ledger:
    """A file of records, one JSON object a line, to which any number of processes may append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, record: Call | Note | Fault | Sample) -> None:
        """Append one record; it is the kernel's when this returns."""
        os.write(self._descriptor, json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n")

    def write_all(self, records: Sequence[Call | Note | Fault]) -> None:
        """Append several records by one write."""
        lines = (json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n" for record in records)
        os.write(self._descriptor, b"".join(lines))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a task's document, as the change stream of the database brought it: none is left out.

    `at` is the server's wall clock at the write, or a little before it (see `LOG_LAG`); `document` is the document
    after it, without params and returns, or None where it was deleted.
    """

    task_id: str
    at: datetime
    document: Document | None


class History:
    """The folder of one run, for reading and for writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    # --- where everything lies --------------------------------------------------------------------------------

    def calls_path(self, publisher: str) -> Path:
        """Name the ledger of one publisher; it goes on in it after its death."""
        return self.folder / f"calls-{publisher}.jsonl"

    def notes_path(self, pid: int) -> Path:
        """Name the ledger of the handlers of one worker process."""
        return self.folder / f"notes-{pid}.jsonl"

    @property
    def faults_path(self) -> Path:
        """Name the ledger of what the nemeses did."""
        return self.folder / "faults.jsonl"

    @property
    def samples_path(self) -> Path:
        """Name the ledger of what was measured."""
        return self.folder / "samples.jsonl"

    @property
    def versions_path(self) -> Path:
        """Name the file of all versions of all tasks, in BSON."""
        return self.folder / "versions.bson"

    @property
    def documents_path(self) -> Path:
        """Name the file of the tasks as they were at the end, in BSON, whole."""
        return self.folder / "documents.bson"

    @property
    def effects_path(self) -> Path:
        """Name the file of what transactions wrote ({task_id, run_id, worker_id}), in BSON."""
        return self.folder / "effects.bson"

    @property
    def places_path(self) -> Path:
        """Name the file of the places of limits as they were at the end, in BSON."""
        return self.folder / "places.bson"

    @property
    def facts_path(self) -> Path:
        """Name the file of what holds for the whole run: epoch, seed, durations, the workers' ends."""
        return self.folder / "facts.json"

    # --- reading ----------------------------------------------------------------------------------------------

    def calls(self) -> Iterator[Call]:
        """Read what publishers asked and were told, publisher by publisher."""
        for path in sorted(self.folder.glob("calls-*.jsonl")):
            yield from _read(path, Call)

    def notes(self) -> Iterator[Note]:
        """Read what handlers did, process by process."""
        for path in sorted(self.folder.glob("notes-*.jsonl")):
            yield from _read(path, Note)

    def faults(self) -> list[Fault]:
        """Read what the nemeses did, in the order of their ends."""
        return list(_read(self.faults_path, Fault))

    def samples(self) -> Iterator[Sample]:
        """Read what was measured."""
        return _read(self.samples_path, Sample)

    def versions(self) -> Iterator[Version]:
        """Read all versions of all tasks in the order in which the database wrote them."""
        for entry in _read_bson(self.versions_path):
            yield Version(entry["_id"], entry["at"], entry.get("document"))

    def documents(self) -> Iterator[Document]:
        """Read the tasks as they were at the end."""
        return _read_bson(self.documents_path)

    def effects(self) -> Iterator[Document]:
        """Read what transactions wrote."""
        return _read_bson(self.effects_path)

    def places(self) -> Iterator[Document]:
        """Read the places of limits as they were at the end."""
        return _read_bson(self.places_path)

    def logs(self) -> Iterator[tuple[str, list[str]]]:
        """Read the log of each worker: its name and the lines."""
        for path in sorted(self.folder.glob("*.log")):
            yield path.stem, path.read_text(errors="replace").splitlines()

    def facts(self) -> Document:
        """Read what holds for the whole run."""
        facts: Document = json.loads(self.facts_path.read_text())
        return facts

    @property
    def clock(self) -> Clock:
        """The run's clock."""
        return Clock(self.facts()["epoch"])


def _read(path: Path, kind: type[R]) -> Iterator[R]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield kind(**json.loads(line))


def _read_bson(path: Path) -> Iterator[Document]:
    if path.exists():
        with path.open("rb") as file:
            yield from bson.decode_file_iter(file, _AWARE)
