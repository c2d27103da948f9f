"""Events of any kind of client, read one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mtask.features.events.events_aio import AsyncEvents
from mtask.features.events.events_sync import Events
from mtask.features.events.task_events import TaskEvent
from tests.clients import AnyClient

#: How long an event may take to come, in seconds.
SOON = 20.0
Told = list[tuple[str, str]]


class Reading:
    """Events of any kind of client, read one by one."""

    def __init__(self, client: AnyClient, **given: Any) -> None:
        self._client = client
        self._happening: Events | AsyncEvents = client.events(**given)
        self._do(self._happening.open)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._happening.close)

    def _do(self, method: Callable[..., Any], *args: Any) -> Any:
        if self._client.kind == "sync":
            return method(*args)

        async def awaited() -> Any:
            answer = method(*args)
            return await answer if inspect.isawaitable(answer) else answer

        return self._client.runner.run(awaited())

    @property
    def token(self) -> str | None:
        return self._happening.token

    def take(self, count: int) -> list[TaskEvent]:
        """Return so many events, and see that they come."""
        found: list[TaskEvent] = []
        while len(found) < count:
            event = self._do(self._happening.poll, SOON)
            assert event is not None, told(found)
            found.append(event)
        return found

    def is_silent(self) -> bool:
        """Whether nothing more has happened by now."""
        return self._do(self._happening.poll, 0.0) is None


def told(events: list[TaskEvent]) -> Told:
    return [(event.kind.value, event.task_id) for event in events]
