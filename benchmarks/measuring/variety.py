"""A large collection as a web process meets it: tasks of many queues, names, users and statuses, and flows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from benchmarks.measuring import raw
from benchmarks.measuring.server import Scratch
from mtask import Client, Flow

Document = dict[str, Any]
#: Tasks of one queue, of one name and of one user are spread over all instants. A tie: the tasks of one instant.
QUEUES, NAMES, USERS, TIE = 70, 9, 1_000, 300
_FLOWS, _STEPS, _CANCELED, _SCHEDULES = 100, 5, 100, 10
_INSERTERS = 4
_DELAY = timedelta(days=1)


def fill(scratch: Scratch, finished: int, delayed: int) -> None:
    """Insert tasks of many queues, names, users and statuses; flows, schedules and entries of the action log."""

    def part(first: int) -> None:
        raw.insert(scratch.tasks, documents(scratch, first, finished, delayed))

    with ThreadPoolExecutor(_INSERTERS) as inserters:
        list(inserters.map(part, range(_INSERTERS)))
    with Client(scratch.uri, database=scratch.name) as client:
        for number in range(_FLOWS):
            flow = Flow(f"flow/{number}")
            before: list[str] = []
            for step in range(_STEPS):
                flow.add(f"s{step}", "n0", after=before, delay=None if before else _DELAY)
                before = [f"s{step}"]
            client.publish_flow(flow)
        for number in range(min(_CANCELED, delayed)):
            client.cancel(f"n{number % NAMES}", f"delayed/{number:08}")
        for number in range(_SCHEDULES):
            client.add_schedule(f"schedule-{number}", "noop", "0 0 1 1 *", paused=True)
    scratch.settle()


def documents(scratch: Scratch, first: int, finished: int, delayed: int) -> Iterator[Document]:
    """Yield every fourth task, from the first one of this number on."""
    for number in range(first, finished, _INSERTERS):
        made = raw.finished_document(f"n{number % NAMES}", f"old/{number:08}", scratch.now)
        _spread(made, number)
        if number % 50 == 0:
            _fail(made)
        yield made
    for number in range(first, delayed, _INSERTERS):
        made = raw.document(f"n{number % NAMES}", f"delayed/{number:08}", scratch.now, delay=_DELAY)
        yield _spread(made, number)


def _spread(made: Document, number: int) -> Document:
    """Give the task a queue, a user, and an instant that it shares with some others."""
    user = {"id": number % USERS}
    made |= {"queue": f"q{number % QUEUES:02}", "params": {"user": user}, "lookup": [{"k": "user_id", "v": user["id"]}]}
    state, earlier = made["task_state"], timedelta(milliseconds=number // TIE)
    for holder in (state, *state["worker_states"]):
        for name, value in holder.items():
            if name.endswith("_time") and name not in ("start_time", "next_preempt_time"):
                holder[name] = value - earlier
    return made


def _fail(made: Document) -> None:
    """Make a successful task a failed one."""
    (run,) = made["task_state"]["worker_states"]
    run |= {"status": "FAIL", "fail_time": run.pop("success_time"), "fail_reason": "declined", "final": True}
    made["task_state"] |= {"status": "FAIL", "failed_cnt": 1}
