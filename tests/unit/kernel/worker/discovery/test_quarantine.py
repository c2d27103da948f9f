"""Tasks that are left alone for a while: for how long, and that this is remembered no longer than it must be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.worker.discovery import quarantine
from mtask.kernel.worker.discovery.quarantine import Quarantine


class _Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(quarantine, "monotonic", made)
    return made


@pytest.fixture
def kept() -> Quarantine:
    return Quarantine(cast(AsyncStore, None), "w1")


def _pause(kept: Quarantine, clock: _Clock, task_id: Any) -> float:
    return kept.left_alone_until(task_id) - clock.now


def test_task_that_is_held_up_is_tried_ever_more_rarely(kept: Quarantine, clock: _Clock) -> None:
    pauses = []
    for _ in range(5):
        kept.hold_up("work:1")
        assert kept.is_left_alone("work:1")
        pauses.append(_pause(kept, clock, "work:1"))
        clock.now = kept.left_alone_until("work:1") + 4.0
        assert not kept.is_left_alone("work:1")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0]
    kept.hold_up("work:2")
    assert _pause(kept, clock, "work:2") == 0.5


def test_task_that_was_not_held_up_for_long_begins_anew(kept: Quarantine, clock: _Clock) -> None:
    for _ in range(3):
        kept.hold_up("work:1")
    clock.now = kept.left_alone_until("work:1") + 61.0
    kept.hold_up("work:1")
    assert _pause(kept, clock, "work:1") == 0.5


def test_what_is_over_is_forgotten_where_there_is_much(
    kept: Quarantine, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "MAX_REMEMBERED", 100)
    for number in range(1_000):
        kept.hold_up(f"work:{number}")
        clock.now += 1.0
    assert len(kept._left_alone) <= 101
    assert len(kept._held_up) <= 101
