"""Claimed runs that wait for a slot: which one starts next, and which are handed back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from mtask.kernel.worker.running import slots as module
from mtask.kernel.worker.running.run import EndReason
from mtask.kernel.worker.running.slots import PATIENCE, Pace, Slots

NOW = 1000.0


class Run(SimpleNamespace):
    """The part of a held run that slots read."""

    def __init__(self, name: str, priority: int = 0) -> None:
        super().__init__(order=(True, -priority, datetime(2030, 1, 1, tzinfo=UTC)), queue="q", takes_turns=False)
        self.name, self.is_lease_valid = name, True
        self.end_reason: EndReason | None = None

    def end(self, reason: EndReason) -> None:
        self.end_reason = reason


class Stage:
    """Slots whose runner notes what it is told."""

    def __init__(self, concurrency: int) -> None:
        self.started: list[str] = []
        self.handed_back: list[str] = []
        runner: Any = SimpleNamespace(
            start=lambda run: self.started.append(run.name), hand_back=lambda run: self.handed_back.append(run.name)
        )
        signal = SimpleNamespace(send=lambda: None)
        scope: Any = SimpleNamespace(
            vitals=SimpleNamespace(concurrency=concurrency),
            ledger=SimpleNamespace(claiming={"under way"}),
            signals=SimpleNamespace(slot_left=signal, room_made=signal),
        )
        self.slots = Slots(scope, runner, Pace())

    def add(self, *runs: Any, now: float = NOW) -> None:
        for run in runs:
            self.slots.add(run, now)
        self.slots.start_waiting()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock of the slots."""

    def put(now: float) -> None:
        monkeypatch.setattr(module, "monotonic", lambda: now)

    put(NOW)
    return put


async def test_a_free_slot_starts_the_run_of_the_highest_priority_whichever_claim_brought_it(
    clock: Callable[[float], None],
) -> None:
    stage = Stage(2)
    stage.add(Run("c", 1), Run("d", 0), Run("a", 3))
    stage.add(Run("b", 2), Run("e", 0))
    assert (stage.started, stage.slots.free_cnt) == (["a", "c"], 2 - 1 - 2 - 3)
    for _ in range(3):
        stage.slots.free()
    assert stage.started == ["a", "c", "b", "d", "e"]
    assert (stage.slots.free_cnt, stage.handed_back) == (-1, [])
    stage.slots.close()


async def test_run_that_has_waited_longest_is_handed_back_first_though_it_would_start_first_or_last(
    clock: Callable[[float], None],
) -> None:
    stage, late = Stage(0), NOW + PATIENCE / 2
    stage.add(Run("old, low", -1), Run("old, high", 9))
    clock(late)
    stage.add(Run("new", 5), now=late)
    stage.add(Run("newest", 9), now=NOW + PATIENCE)
    clock(NOW + PATIENCE)
    stage.slots._lose_patience(NOW + PATIENCE)
    assert sorted(stage.handed_back) == ["old, high", "old, low"]
    timer = stage.slots._impatience  # it waits for the oldest run, and not for the one that starts next
    assert timer is not None
    assert timer.when() - asyncio.get_running_loop().time() <= PATIENCE / 2
    stage.slots.set_concurrency(2)
    assert stage.started == ["newest", "new"]
    stage.slots.close()


async def test_what_has_ended_lost_its_lease_or_meets_a_stop_is_handed_back(clock: Callable[[float], None]) -> None:
    stage = Stage(0)
    canceled, lost = Run("canceled", 9), Run("lost", 8)
    stage.add(canceled, lost, Run("c", 1), Run("b", 2))
    canceled.end(EndReason.CANCELED)
    lost.is_lease_valid = False
    stage.slots.set_concurrency(1)
    assert (stage.started, stage.handed_back) == (["b"], ["canceled", "lost"])
    stage.slots.stop()
    stage.add(Run("late"))
    assert (stage.started, stage.handed_back) == (["b"], ["canceled", "lost", "c", "late"])
    stage.slots.close()
