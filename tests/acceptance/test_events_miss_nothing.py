"""Events: every transition of many tasks once, in order for each; after a restart with the token nothing is missing."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta

from mtask import Client, TaskSpec
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.kernel.document.options import TaskOptions
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, runs_of

_TASKS = 400
_ENDED = {
    "SUCCESS": EventKind.SUCCEEDED,
    "FAIL": EventKind.FAILED,
    "TIMEOUT": EventKind.TIMED_OUT,
    "CANCELED": EventKind.CANCELED,
}


class Reader:
    """Reads events in a thread, and is stopped and started again with the last token."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.found: list[TaskEvent] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Go on behind what was read last."""
        self._stop.clear()
        client = Client(self._stage.uri, database=self._stage.database)
        happening = client.events(after=self.found[-1].token if self.found else None)

        def read() -> None:
            with client, happening:
                while not self._stop.is_set():
                    event = happening.poll(0.1)
                    if event is not None:
                        self.found.append(event)

        self._thread = threading.Thread(target=read)
        self._thread.start()

    def stop(self) -> None:
        """Read no more; what is buffered is not read either."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def expected(stage: Stage) -> dict[str, list[tuple[EventKind, str | None]]]:
    """Return by task what must have been told, from the documents: their runs stay in the order of the claims."""
    told: dict[str, list[tuple[EventKind, str | None]]] = {}
    for document in stage.mongo[stage.database]["tasks"].find():
        events: list[tuple[EventKind, str | None]] = [(EventKind.PUBLISHED, None)]
        for run in runs_of(document):
            events += [(EventKind.CLAIMED, run["run_id"]), (_ENDED[run["status"]], run["run_id"])]
        if document["task_state"]["status"] == "CANCELED" and not runs_of(document):
            events.append((EventKind.CANCELED, None))
        told[document["_id"]] = events
    return told


def told(events: Iterable[TaskEvent]) -> dict[str, list[tuple[EventKind, str | None]]]:
    """Return by task what was told, in order."""
    found: dict[str, list[tuple[EventKind, str | None]]] = defaultdict(list)
    for event in events:
        found[event.task_id].append((event.kind, event.run_id))
    return dict(found)


def holder_of(stage: Stage, name: str) -> str | None:
    """Return a worker that holds a task of this name now."""
    for task in stage.client.find(name=name, status="RUNNING"):
        for run in task.runs:
            if run.status == "RUNNING":
                return run.worker_id
    return None


def test_every_transition_of_hundreds_of_tasks_once_and_in_order_across_restarts(stage: Stage) -> None:
    workers = stage.start_all(["w1", "w2"])
    reader = Reader(stage)
    reader.start()
    # Short for all of them: the worker that is killed may hold any.
    lease: TaskOptions = {"ping_interval": 0.5, "worker_timeout": 1.5, "retry_delay": 0}
    specs = [TaskSpec("noop", key=str(n)) for n in range(_TASKS - 120)]
    specs += [TaskSpec("fail", key=str(n), max_retries=1) for n in range(100)]
    specs += [TaskSpec("hold", {"gate": stage.gate()}, key=str(n)) for n in range(10)]
    specs += [TaskSpec("noop", key=f"late {n}", delay=timedelta(hours=1)) for n in range(10)]
    for spec in specs:
        spec.options.update(lease)
    for start in range(0, len(specs), 50):
        stage.client.publish_many(specs[start : start + 50])
        reader.stop()
        reader.start()
    for n in range(10):
        stage.client.cancel("noop", f"late {n}")
    holder = eventually(lambda: holder_of(stage, "hold"), PATIENCE, "one that holds on")
    next(worker for worker in workers if worker.worker_id == holder).kill()
    stage.open_gate()
    open_tasks = ("INIT", "RUNNING")
    eventually(lambda: stage.client.count(status=open_tasks) == 0, PATIENCE, "all have ended")
    wanted = expected(stage)
    count = sum(map(len, wanted.values()))
    eventually(lambda: len(reader.found) >= count, PATIENCE, "all was told")
    reader.stop()
    assert len(wanted) == _TASKS
    assert told(reader.found) == wanted
    ends = [event for event in reader.found if event.is_end]
    assert len({event.task_id for event in ends}) == len(ends) == _TASKS
    assert any(event.kind is EventKind.TIMED_OUT for event in reader.found)
