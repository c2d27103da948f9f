"""What holds for queues in a run, beside its tasks: a limit, a schedule, and pauses now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

import mtask
from mtask import Cron
from mtask.errors import ControlUnconfirmed, DatabaseError, MtaskError
from tests.chaos.fleet import PATIENCE
from tests.chaos.history import Document
from tests.chaos.load.order import FAIR, LIMITS
from tests.chaos.load.shifting import ZONES
from tests.chaos.load.tasks import LIMIT_KEY, LIMITED, PATIENT, TICK
from tests.mongo import eventually

T = TypeVar("T")
CONCURRENCY, KEY_CONCURRENCY = 3, 2
INTERVAL = timedelta(seconds=1)
#: The time between the firings of a schedule in a time zone whose clocks shift.
_SHIFTING_INTERVAL = timedelta(seconds=3)
#: How long a pause waits for workers that are frozen or out of touch: until their heartbeat has run out.
_UNCONFIRMED = timedelta(seconds=30)


class Controls:
    """Sets and lifts them by the client's API; what was told becomes facts for the checker."""

    def __init__(self, client: mtask.Client) -> None:
        self._client = client
        #: The limits of queues whose order is judged, with the instants at which they were asked for and in force.
        self.changes: list[Document] = []

    def prepare(self) -> Document:
        """Limit a queue, and begin schedules of which no firing is ever left out; return the facts of them."""
        self._client.limit(LIMITED, concurrency=CONCURRENCY, key_concurrency=KEY_CONCURRENCY)
        schedules = [self._begin(TICK, INTERVAL, INTERVAL)]
        for name, zone in ZONES.items():
            seconds = _SHIFTING_INTERVAL.total_seconds()
            schedules.append(self._begin(name, Cron(second=f"*/{seconds:.0f}", timezone=zone), _SHIFTING_INTERVAL))
        limits = [
            {"name": LIMITED, "key": None, "concurrency": CONCURRENCY},
            {"name": LIMITED, "key": LIMIT_KEY, "concurrency": KEY_CONCURRENCY},
        ]
        return {"limits": limits, "schedules": schedules}

    def _begin(self, name: str, when: timedelta | Cron, interval: timedelta) -> Document:
        schedule = self._client.add_schedule(name, name, when, queue=TICK, catch_up="all", **PATIENT)
        first = _seconds(schedule.schedule_state.next_fire_time)
        return {"name": name, "interval": interval.total_seconds(), "first": first}

    def prepare_order(self) -> None:
        """Set the first limits of the queues whose order is judged."""
        for queue, limits in LIMITS.items():
            self.bound(queue, limits)
        for queue in FAIR:
            self._change(queue, lambda queue=queue: self._client.set_fair(queue, timeout=_UNCONFIRMED))  # type: ignore[misc]

    def bound(self, queue: str, limits: Mapping[str, Any]) -> None:
        """Replace the limits of a queue whose order is judged."""
        self._change(queue, lambda: self._client.limit(queue, **limits, timeout=_UNCONFIRMED))

    def _change(self, queue: str, act: Callable[[], object]) -> None:
        """Change a control, and write down since when all workers apply it; nothing is known if they may not."""
        change: Document = {"asked": self._now(), "settled": None}
        with suppress(ControlUnconfirmed):  # it holds all the same, and some worker hears of it later
            self._insist(act)
            change["settled"] = self._now()
        control = next(control for control in self._insist(self._client.controls) if control.target == queue)
        self.changes.append(change | control.model_dump(mode="json"))

    def _now(self) -> float:
        return self._insist(self._client.server_time).timestamp()

    def pause(self, seconds: float, wait: Callable[[float], None], **target: Any) -> tuple[float, float] | None:
        """Pause a queue or a task name for so long; return when it stood by the server's clock, None if unknown."""
        stood = False
        with suppress(MtaskError):  # it may stand all the same, and nobody was told so
            self._client.pause(**target, timeout=_UNCONFIRMED)
            stood = True
        since = self._insist(self._client.server_time)
        wait(seconds)
        until = self._insist(self._client.server_time)
        with suppress(ControlUnconfirmed):  # it holds all the same, and the worker hears of it later
            self._insist(lambda: self._client.resume(**target, timeout=_UNCONFIRMED))
        return (since.timestamp(), until.timestamp()) if stood else None

    def end_schedule(self, name: str) -> Document:
        """Have a schedule fire no more; return until when it is to have fired, and what it says of itself."""
        until = self._insist(self._client.server_time)

        def is_past() -> bool:
            next_time = self._schedule(name).schedule_state.next_fire_time
            return next_time is not None and next_time > until

        with suppress(AssertionError):  # the checker misses the firings
            eventually(is_past, PATIENCE, "the schedule fires on", interval=0.1)
        self._insist(lambda: self._client.pause_schedule(name))
        with suppress(AssertionError):
            eventually(lambda: not self._schedule(name).schedule_state.pending, PATIENCE, "nothing pends", interval=0.1)
        state = self._schedule(name).schedule_state
        return {"until": until.timestamp(), "next": _seconds(state.next_fire_time), "fired": state.fired_cnt}

    def _schedule(self, name: str) -> Any:
        return self._insist(lambda: self._client.get_schedule(name))

    def _insist(self, act: Callable[[], T]) -> T:
        """Ask until it is answered."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return act()
            except DatabaseError:
                if time.monotonic() >= end:
                    raise
            time.sleep(0.2)


def _seconds(instant: datetime | None) -> float | None:
    return None if instant is None else instant.timestamp()
