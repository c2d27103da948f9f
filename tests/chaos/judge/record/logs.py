"""What is remembered of each task and each run while its versions go by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import bson
from bson.codec_options import CodecOptions

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, StoredTask, Task

Document = dict[str, Any]
_AWARE: CodecOptions[Document] = CodecOptions(tz_aware=True)


@dataclass(slots=True)
class RunLog:
    """One run, as its latest version shows it. It stays when the document has gone."""

    task_id: str
    worker_id: str
    claim_time: datetime
    ping_expire_time: datetime
    lease: timedelta  #: as the claim gave it
    status: RunStatus
    end_time: datetime | None = None
    is_gone: bool = False  #: dropped from the document
    reason: str | None = None  #: of its end

    @classmethod
    def of(cls, task_id: str, run: Run) -> RunLog:
        """Begin with a run's first version."""
        lease = run.ping_expire_time - run.claim_time
        return cls(task_id, run.worker_id, run.claim_time, run.ping_expire_time, lease, run.status, run.end_time)

    def follow(self, run: Run) -> None:
        """Take over what a later version shows."""
        self.ping_expire_time, self.status, self.end_time = run.ping_expire_time, run.status, run.end_time
        self.reason = run.fail_reason


@dataclass(slots=True)
class Life:
    """A task's document from its creation to its removal."""

    created: float  #: the server's wall clock, in seconds
    removed: float | None = None
    is_acknowledged: bool = False

    def meets(self, start: float, end: float) -> bool:
        """Whether it was there at some time in between."""
        return self.created <= end and (self.removed is None or self.removed >= start)


class Write(NamedTuple):
    """A version: when it was written, in wall seconds, and what it made of the task."""

    at: float
    is_reopening: bool
    is_ending: bool  #: final, or asked to end


@dataclass(slots=True)
class TaskLog:
    """One task. Its last version is kept whole while it is open, and packed when it has ended: most have."""

    task_id: str
    is_asked: bool  #: some call is about it
    lives: list[Life] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)  #: if anything was asked of it
    tried: int = 0  #: counted runs of this round
    tried_by: Counter[str] | None = None  #: the same by worker, with retry_scope "worker"
    most_places: int = 0  #: the largest concurrent_worker_cnt of this round
    lapses: list[datetime] = field(default_factory=list)  #: ends of leases whose place nobody has claimed yet
    was_claimed: bool = False
    is_unreadable: bool = False  #: the last version is malformed
    is_final: bool = False  #: the last version is
    packed: bytes | None = None
    _task: Task | None = None

    @property
    def is_there(self) -> bool:
        """Whether the document exists."""
        return bool(self.lives) and self.lives[-1].removed is None

    @property
    def task(self) -> Task | None:
        """The last version, or None if there is none that can be read."""
        if self._task is None and self.packed is not None and not self.is_unreadable:
            return StoredTask.model_validate(self.document)
        return self._task

    @property
    def document(self) -> Document | None:
        """The last version as it is stored."""
        return None if self.packed is None else bson.decode(self.packed, _AWARE)

    def keep(self, document: Document, task: Task | None) -> None:
        """Take this version as the last one; without a task it is malformed."""
        self.packed = bson.encode(document)
        self.is_unreadable = task is None
        self.is_final = task is not None and task.status.is_final
        self._task = None if self.is_final else task

    def forget(self) -> None:
        """There is no document any more, and nothing of it counts for a later one."""
        self.packed, self._task, self.is_unreadable, self.is_final = None, None, False, False
        self.begin_round(0)
        self.was_claimed = False

    def begin_round(self, places: int) -> None:
        """Count from zero."""
        self.tried, self.tried_by, self.most_places = 0, None, places
        self.lapses.clear()

    def count(self, closed: list[Run]) -> None:
        """Count runs that failed or timed out."""
        self.tried += len(closed)
        if closed:
            self.tried_by = (self.tried_by or Counter()) + Counter(run.worker_id for run in closed)
