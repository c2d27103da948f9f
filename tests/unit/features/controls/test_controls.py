"""How long a worker goes by what it has read: its heartbeat, and what it reads anew where that had run out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from mtask.features.controls.worker import Controls
from mtask.kernel.statements.filters import in_time
from mtask.kernel.worker.process.state import Scope, Vitals
from mtask.kernel.worker.process.time import ServerClock, Tempo

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


class Nothing:
    """A store without controls; it can be told what to do while it is read."""

    def __init__(self) -> None:
        self.amid: Callable[[], None] = lambda: None

    async def run(self, operation: Any) -> list[dict[str, Any]]:
        operation.close()
        self.amid()
        return []


class Worker:
    """What a worker knows whose heartbeats hold for ten seconds; the first is sent at 0."""

    def __init__(self) -> None:
        store: Any = Nothing()
        self.store: Nothing = store
        clock = ServerClock(NOON, 0.0, 0.0)
        scope = Scope(store, "w1", ["mail"], ["send"], clock, Tempo(0.001), Vitals(10))
        self.controls, self.validity = Controls(scope), scope.validity
        self.beat(0)

    def beat(self, seconds: float, *, was_silent: bool = False) -> None:
        self.validity.heard(at(seconds + 10), at=at(seconds), was_silent=was_silent)

    def read(self) -> None:
        asyncio.run(self.controls.refresh())

    def is_valid_until(self, seconds: float) -> bool:
        return self.validity.guard() == [in_time(at(seconds))]

    @property
    def is_valid(self) -> bool:
        return self.validity.guard() != [in_time(datetime(2000, 1, 1, tzinfo=UTC))]


def test_heartbeats_in_time_move_it_on() -> None:
    worker = Worker()
    worker.beat(5)
    worker.beat(14.9)
    assert worker.is_valid_until(24.9)


def test_silence_that_the_server_tells_of_lasts_until_what_holds_is_read() -> None:
    worker = Worker()
    worker.beat(11, was_silent=True)
    worker.beat(14)
    assert not worker.is_valid
    worker.read()
    assert worker.is_valid_until(24)


def test_silence_whose_end_was_not_heard_is_one_too() -> None:
    worker = Worker()
    worker.beat(13)  # one at 11 came through, and its reply did not
    assert not worker.is_valid
    assert worker.controls._wake.is_set()
    worker.beat(18)
    assert not worker.is_valid
    worker.read()
    assert worker.is_valid_until(28)


def test_heartbeat_that_ends_with_the_last_answered_one_is_too_late() -> None:
    worker = Worker()
    worker.beat(10)
    assert not worker.is_valid


def test_read_that_was_begun_before_a_silence_ends_none() -> None:
    worker = Worker()
    worker.beat(11, was_silent=True)
    worker.store.amid = lambda: worker.beat(30, was_silent=True)
    worker.read()
    assert not worker.is_valid
    worker.store.amid = lambda: None
    worker.read()
    assert worker.is_valid_until(40)


def test_after_its_place_was_gone_the_first_heartbeat_ends_a_silence() -> None:
    worker = Worker()
    worker.validity.lost()
    worker.beat(5)  # registered anew, and the reply was lost
    assert not worker.is_valid
    worker.read()
    assert worker.is_valid_until(15)
