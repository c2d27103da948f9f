"""Claims in vain: ever rarer, once examined, and forgotten with the first that was not."""

from __future__ import annotations

import pytest

from mtask.kernel.worker.discovery import quarantine
from mtask.kernel.worker.discovery.quarantine import Losses


def _pauses(kept: Losses, times: int) -> list[float]:
    pauses = []
    for _ in range(times):
        kept.add(["a"])
        pauses.append(kept.pause("a"))
    return pauses


def test_first_losses_are_usual_and_each_further_one_is_paused_for_twice_as_long() -> None:
    kept = Losses()
    assert _pauses(kept, 12) == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]


def test_each_loss_is_paused_for_once_so_that_the_task_is_tried_after_it() -> None:
    kept = Losses()
    _pauses(kept, 5)
    assert kept.pause("a") == 0
    kept.add(["a"])
    assert kept.pause("a") > 0


def test_task_is_examined_once_in_a_row_of_losses() -> None:
    kept = Losses()
    found = []
    for _ in range(10):
        kept.add(["a"])
        found.append(kept.is_suspicious("a"))
    assert found == [False] * 5 + [True] + [False] * 4


def test_task_that_was_taken_begins_anew() -> None:
    kept = Losses()
    _pauses(kept, 8)
    kept.forget("a")
    assert _pauses(kept, 3) == [0, 0, 0.1]


def test_few_tasks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_LOSSES", 10)
    kept = Losses()
    kept.add(str(number) for number in range(1_000))
    assert len(kept) == 10
