"""The demo's queries, and the state that they bring: progress, the holders of tasks, and the preemptions."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from mtask import Client, RunStatus, Task, TaskStatus
from mtask.demo import database
from mtask.demo.app import Totals, count
from mtask.kernel.document.handlers import handler_of
from mtask.kernel.document.status import FINAL

Document = dict[str, Any]


def task_name() -> str:
    """Return the name of the demo's tasks."""
    handler = handler_of(count)
    assert handler is not None
    return handler.name


@dataclass(frozen=True, slots=True)
class Look:
    """The tasks at one moment: the numbers of tasks by status, and of runs by worker and status."""

    tasks: Counter[str] = field(default_factory=Counter)
    runs: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def finished(self) -> int:
        """The number of finished tasks."""
        return sum(number for status, number in self.tasks.items() if status in FINAL)

    @property
    def begun(self) -> int:
        """The number of tasks that run or have finished."""
        return self.finished + self.tasks[TaskStatus.RUNNING.value]

    def running(self, worker_id: str) -> int:
        """The number of runs that a worker holds. Lapsed runs are included."""
        return self.runs[worker_id, RunStatus.RUNNING.value]

    def ended(self, worker_id: str) -> int:
        """The number of runs that the worker itself ended as SUCCESS or FAIL."""
        return self.runs[worker_id, RunStatus.SUCCESS.value] + self.runs[worker_id, RunStatus.FAIL.value]


@dataclass(frozen=True, slots=True)
class Rescue:
    """A task of the killed worker: when its lease lapsed, and when it was preempted, by the server's clock."""

    task_id: str
    key: str
    lapse_time: datetime
    preempt_time: datetime | None = None
    preempted_by: str | None = None
    status: str = TaskStatus.RUNNING.value

    @property
    def delay(self) -> timedelta | None:
        """The time from the lapse to the preemption."""
        return None if self.preempt_time is None else self.preempt_time - self.lapse_time


@dataclass(slots=True)
class Outcome:
    """The result of the whole demo, counted from the documents in the database."""

    totals: Totals = field(default_factory=Totals)
    runs: int = 0
    timeouts: int = 0
    create_time: datetime | None = None
    finish_times: list[datetime] = field(default_factory=list)


class Watch:
    """Reads the demo's documents."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._name = task_name()

    def server_version(self) -> str:
        """Return MongoDB's version."""
        return database.server_version(self._client.tasks)

    def look(self) -> Look:
        """Return the progress of the tasks."""
        tasks: Counter[str] = Counter()
        for row in self._client.stats():
            tasks[row.status] += row.count
        return Look(tasks, Counter(database.runs_by_worker(self._client.tasks, self._name)))

    def ready_workers(self) -> set[str]:
        """Return the workers that are ready to take tasks."""
        return {worker.worker_id for worker in self._client.workers() if worker.status.value == "running"}

    def holder_in_a_pause(self, pause: timedelta, *, is_any_enough: bool = False) -> str | None:
        """Return the worker that holds the most tasks that are in the first half of their pause, or None.

        `is_any_enough`: if no worker holds a task in that half, return the worker that holds the most tasks.
        """
        now = self._client.server_time()
        holders: Counter[str] = Counter()
        others: Counter[str] = Counter()
        for task in self._client.find(status=TaskStatus.RUNNING.value, name=self._name, limit=0):
            run = task.runs[-1]
            if (
                task.params.get("pause_ms")
                and run.is_live(now)
                and run.attempt == 1
                and now - run.claim_time < pause / 2
            ):
                holders[run.worker_id] += 1
            elif is_any_enough and run.is_live(now):
                others[run.worker_id] += 1
        found = (holders or others).most_common(1)
        return found[0][0] if found else None

    def rescues(self, victim: str, killed_time: datetime) -> list[Rescue]:
        """Return the rescues of the killed worker's tasks, in the order in which the leases lapsed."""
        documents = database.leased_beyond(self._client.tasks, self._name, victim, killed_time)
        found = [rescue_of(Task.model_validate(document), victim, killed_time) for document in documents]
        return sorted((r for r in found if r is not None), key=lambda r: (r.lapse_time, r.key))

    def documents(self) -> Iterator[Document]:
        """Return all tasks' documents, as they are stored."""
        return database.documents(self._client.tasks, self._name)


def rescue_of(task: Task, victim: str, killed_time: datetime) -> Rescue | None:
    """Return the rescue of this task from the killed worker, or None if that worker did not hold it."""
    lost = (RunStatus.RUNNING, RunStatus.TIMEOUT)
    for run, following in pairwise([*task.runs, None]):
        assert run is not None
        if run.worker_id == victim and run.status in lost and run.ping_expire_time > killed_time:
            rescue = Rescue(task.id, task.key, run.ping_expire_time, status=task.status.value)
            if following is None:
                return rescue
            return Rescue(
                task.id, task.key, run.ping_expire_time, following.claim_time, following.worker_id, task.status.value
            )
    return None


def outcome_of(documents: Iterator[Document]) -> Outcome:
    """Return the demo's result, computed from the documents."""
    outcome = Outcome()
    for document in documents:
        task = Task.model_validate(document)
        if task.status is TaskStatus.SUCCESS:
            outcome.totals.add(task.key, task.returns)
        else:
            outcome.totals.fail(task.key, task.fail_reason or f"it is {task.status.value}")
        outcome.runs += len(task.runs)
        outcome.timeouts += sum(run.status is RunStatus.TIMEOUT for run in task.runs)
        created = task.task_state.create_time
        outcome.create_time = min(outcome.create_time or created, created)
        if task.task_state.finish_time is not None:
            outcome.finish_times.append(task.task_state.finish_time)
    outcome.finish_times.sort()
    return outcome


# --- scene -----------------------------------------------------------------------------------------------

# The state of the running demo: the demo writes it, and the displays read it.

#: The length of the period over which the displayed throughput is measured, in seconds. The period ends now.
_WINDOW = 2.0
#: The step in which the workers run the tasks.
WORKING = "working"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker in the display."""

    worker_id: str
    pid: int
    status: str
    running: int
    finished: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The kill of a worker by SIGKILL."""

    worker_id: str
    pid: int
    time: datetime


@dataclass(slots=True)
class Scene:
    """The progress of the demo. One thread writes it; readers may see a slightly older state."""

    title: str
    total: int
    #: Whether the demo kills a worker.
    has_kill: bool = False
    done: list[str] = field(default_factory=list)
    doing: str = ""
    #: The progress of the current step: the number of items that are done, and the number of all items.
    step: tuple[int, int] | None = None
    look: Look = field(default_factory=Look)
    workers: list[WorkerRow] = field(default_factory=list)
    kill: Kill | None = None
    rescues: list[Rescue] = field(default_factory=list)
    work_began: float | None = None
    work_ended: float | None = None
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def begin(self, doing: str, step: tuple[int, int] | None = None) -> None:
        """Note the next step."""
        self.doing, self.step = doing, step

    def finish(self, done: str) -> None:
        """Note a finished step."""
        self.done.append(done)
        self.doing, self.step = "", None

    def see(self, look: Look) -> None:
        """Store a new look at the tasks, with the current time."""
        now = time.monotonic()
        self.look = look
        self._seen.append((now, look.finished))
        while len(self._seen) > 2 and self._seen[0][0] < now - _WINDOW:
            self._seen.popleft()

    @property
    def elapsed(self) -> float:
        """The time since the first publish, in seconds. It stops when all tasks have finished."""
        if self.work_began is None:
            return 0.0
        return (self.work_ended or time.monotonic()) - self.work_began

    @property
    def rate(self) -> float:
        """The recent throughput, in finished tasks a second."""
        if len(self._seen) < 2:
            return 0.0
        (since, before), (until, after) = self._seen[0], self._seen[-1]
        return max(0.0, (after - before) / max(until - since, 1e-3))
