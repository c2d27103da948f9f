"""The summary: the totals from the tasks, the totals counted directly, the rescue, and the figures."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from mtask.demo.counting import Totals, differences
from mtask.demo.database import DemoDatabase
from mtask.demo.scene import Kill, Scene, WorkerRow
from mtask.demo.watch import Outcome, Rescue, task_name

#: The part of the tasks over which the throughput is measured. The last tasks may have to wait until the killed
#: worker's leases lapse.
_RATED_PART = 0.95
_SHOWN_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Publication:
    """The numbers of tasks that the two publishes created and kept."""

    created: int
    kept: int
    created_again: int
    kept_again: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of the demo."""

    folder: Path
    database: DemoDatabase
    publication: Publication
    workers: list[WorkerRow]
    tasks: Totals
    direct: Totals
    direct_seconds: float
    seconds: float
    tasks_per_second: float
    runs: int
    timeouts: int
    kill: Kill | None = None
    rescues: list[Rescue] = field(default_factory=list)

    @property
    def differences(self) -> list[str]:
        """The faults that the demo found; empty if the totals are equal and publishing again added nothing."""
        found = differences(self.tasks, self.direct)
        if self.publication.created_again:
            found.append(f"publishing again created {self.publication.created_again} tasks")
        return found

    @property
    def is_equal(self) -> bool:
        """Whether the demo found no faults: `differences` is empty."""
        return not self.differences

    @property
    def delays(self) -> list[timedelta]:
        """For each task of the killed worker, the time from the lapse of its lease to its preemption; sorted."""
        return sorted(rescue.delay for rescue in self.rescues if rescue.delay is not None)

    @property
    def commands(self) -> list[str]:
        """The command lines with which the user looks at the documents."""
        shown = self.rescues[0].task_id if self.rescues else f"{task_name()}:{next(iter(self.direct.hashes), '')}"
        find_one = f"db.tasks.findOne({{_id: {json.dumps(shown)}}})"
        return [self.database.mtask("show", shown), self.database.mtask("stats"), self.database.mongosh(find_one)]

    def document(self) -> dict[str, Any]:
        """Return the summary as one document, with instants as datetimes."""
        delays = [delay / timedelta(milliseconds=1) for delay in self.delays]
        database = self.database
        return {
            "equal": self.is_equal,
            "differences": self.differences,
            "folder": printable(self.folder),
            "published": asdict(self.publication),
            "workers": [asdict(worker) for worker in self.workers],
            "killed": None if self.kill is None else asdict(self.kill),
            "rescued": [_rescue_document(rescue) for rescue in self.rescues],
            "totals": self.tasks.document(),
            "direct": self.direct.document() | {"seconds": round(self.direct_seconds, 3)},
            "failures": [{"key": key, "reason": reason} for key, reason in sorted(self.tasks.failures.items())],
            "figures": {
                "seconds": round(self.seconds, 3),
                "tasks_per_second": round(self.tasks_per_second, 1),
                "runs": self.runs,
                "timeouts": self.timeouts,
                "rescued": len(delays),
                "rescue_delay_ms": (
                    {"least": delays[0], "median": median(delays), "most": delays[-1]} if delays else None
                ),
            },
            "kept": database.is_kept,
            "uri": database.shown_uri if database.is_kept else None,
            "database": database.name if database.is_kept else None,
            "look_into": self.commands if database.is_kept else [],
            "remove": database.ending if database.is_kept else [],
        }


def printable(path: Path) -> str:
    """Return a path as printable text. Bytes that are not UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _rescue_document(rescue: Rescue) -> dict[str, Any]:
    delay = rescue.delay
    return {
        "task_id": rescue.task_id,
        "lapse_time": rescue.lapse_time,
        "preempt_time": rescue.preempt_time,
        "preempted_by": rescue.preempted_by,
        "delay_ms": None if delay is None else delay / timedelta(milliseconds=1),
        "status": rescue.status,
    }


def summed_up(
    scene: Scene,
    folder: Path,
    database: DemoDatabase,
    publication: Publication,
    outcome: Outcome,
    direct: Totals,
    direct_seconds: float,
) -> Summary:
    """Make the summary from the results in the documents and from the scene."""
    return Summary(
        folder=folder,
        database=database,
        publication=publication,
        workers=list(scene.workers),
        tasks=outcome.totals,
        direct=direct,
        direct_seconds=direct_seconds,
        seconds=scene.elapsed,
        tasks_per_second=rate_of(outcome.create_time, outcome.finish_times),
        runs=outcome.runs,
        timeouts=outcome.timeouts,
        kill=scene.kill,
        rescues=list(scene.rescues),
    )


def rate_of(create_time: datetime | None, finish_times: list[datetime]) -> float:
    """Return the tasks finished per second, from the first task's creation until nearly all tasks had finished."""
    if create_time is None or not finish_times:
        return 0.0
    rated = max(1, int(len(finish_times) * _RATED_PART))
    return rated / max((finish_times[rated - 1] - create_time).total_seconds(), 1e-3)
