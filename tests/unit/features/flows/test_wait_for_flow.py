"""When a wait for a flow looks at the flow again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.features.flows import requests as flow_requests
from mtask.features.flows.requests import WaitForFlow
from mtask.kernel.document.status import TaskStatus

WATCHED, OTHER = "work:f/b", "work:f/a"


def waiting(status: str = "WAITING") -> WaitForFlow:
    """Return a wait that has looked, and that watches a step."""
    made = flow_requests.wait("f", None)
    assert made.is_to_look
    made.is_to_look, made.watched = False, (WATCHED, status)
    return made


def event(task_id: str, kind: EventKind, status: TaskStatus | None = None) -> TaskEvent:
    return TaskEvent(kind, task_id, datetime(2030, 1, 1, tzinfo=UTC), task_status=status)


@pytest.mark.parametrize(
    ("happened", "looks"),
    [
        (event(WATCHED, EventKind.SUCCEEDED, TaskStatus.SUCCESS), True),
        (event(WATCHED, EventKind.CANCELED, TaskStatus.CANCELED), True),
        (event(WATCHED, EventKind.REMOVED), True),
        (event(WATCHED, EventKind.RELEASED, TaskStatus.INIT), False),
        (event(OTHER, EventKind.SUCCEEDED, TaskStatus.SUCCESS), False),
        (event(OTHER, EventKind.REMOVED), False),
        (None, True),  # no event came in time
    ],
)
def test_only_the_end_of_the_watched_step_counts(happened: TaskEvent | None, looks: bool) -> None:
    made = waiting()
    made.note(happened, 1.0)
    assert made.is_to_look is looks


def test_among_many_events_it_looks_after_half_a_minute() -> None:
    made = waiting()
    made.note(event(OTHER, EventKind.SUCCEEDED, TaskStatus.SUCCESS), 29.0)
    assert not made.is_to_look
    made.note(event(OTHER, EventKind.SUCCEEDED, TaskStatus.SUCCESS), 31.0)
    assert made.is_to_look


def test_a_step_that_has_ended_and_still_owes_is_read_and_not_followed() -> None:
    assert waiting("WAITING").patience(2.0) is not None
    assert waiting("SUCCESS").patience(2.0) is None
    assert waiting("WAITING").patience(0.5) is None  # most waits are short: they open no stream
