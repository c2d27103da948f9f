"""Claims for slots that are still taken: quick handlers are kept busy, and nobody waits behind slow ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

import pytest

from mtask import App, TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.discovery import fetch_loop as scans
from mtask.kernel.worker.running import slots
from mtask.kernel.worker.running.run import HeldRun
from tests.integration.stores import register
from tests.integration.worker_harness import Bench, Working
from tests.mongo import until

SLOTS = 5
QUICK, BLOCKING = 400, 60
#: The number of tasks that are claimed ahead where a test sets it.
AHEAD = 20
#: Longer than any test: nothing is handed back because it waited too long.
_FAR = 600.0


@dataclass
class Stage:
    """An app whose handlers end at once, or when the gate is opened, and what they were seen to do."""

    app: App = field(default_factory=App)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    overlaps: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        @self.app.task
        async def work(key: str, is_blocking: bool = False) -> None:
            self.starts[key] += 1
            self.overlaps["now"] += 1
            self.overlaps["most"] = max(self.overlaps["most"], self.overlaps["now"])
            await (self.gate.wait() if is_blocking else asyncio.sleep(0))
            self.overlaps["now"] -= 1


async def _publish(bench: Bench, label: str, count: int, *, is_blocking: bool = False, **options: Any) -> None:
    keys = [f"{label}-{number}" for number in range(count)]
    specs = [TaskSpec("work", {"key": key, "is_blocking": is_blocking}, key=key, **options) for key in keys]
    await bench.client.publish_many(specs)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what was claimed ahead wait without end for its slot."""
    monkeypatch.setattr(slots, "PATIENCE", _FAR)


async def _teach(bench: Bench) -> None:
    """Let quick tasks teach the worker its pace."""
    await _publish(bench, "quick", QUICK)
    await until(lambda: bench.count("SUCCESS") == QUICK, message="the quick ones")


async def _first_waiting(bench: Bench) -> HeldRun:
    """Return a run that waits for its slot, as soon as there is one."""
    waiting = bench.worker.parts.slots._waiting
    await until(lambda: len(waiting) > 0, message="claimed ahead")
    return next(iter(waiting))[1]


async def _until_ahead(bench: Bench, stage: Stage) -> None:
    """Let the worker learn its pace, then fill its slots; return when others wait for them."""
    await _teach(bench)
    await _publish(bench, "blocking", BLOCKING, is_blocking=True)
    await until(lambda: stage.overlaps["now"] == SLOTS, message="all slots taken")


async def _all_done_but(bench: Bench, stage: Stage, key: str) -> None:
    """Wait until all other tasks are done and the worker is at rest; see that this one never began."""
    await until(lambda: bench.count("SUCCESS") == QUICK + BLOCKING - 1, message="the others done")
    assert key not in stage.starts
    await bench.at_rest()


def _handed_back(bench: Bench, why: str = "no slot") -> int:
    reason = {"$regex": why}
    return bench.tasks.count_documents({"task_state.worker_states": {"$elemMatch": {"fail_reason": reason}}})


async def test_quick_handlers_are_claimed_ahead_and_never_overlap_beyond_the_concurrency(
    working: Working, stage: Stage
) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        waited, slots = Counter[str](), bench.worker.parts.slots
        add = slots.add

        def added(run: HeldRun, now: float) -> None:
            add(run, now)
            waited["most"] = max(waited["most"], len(slots._waiting))

        slots.add = added  # type: ignore[method-assign]
        await _publish(bench, "quick", 2_000)
        await until(lambda: bench.count("SUCCESS") == 2_000, message="all done")
        assert waited["most"] > SLOTS
        assert stage.overlaps["most"] <= SLOTS
        assert set(stage.starts.values()) == {1}
        await bench.at_rest()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("is_own", "has_more"), [(False, False), (True, False), (False, True)])
async def test_last_tasks_of_another_worker_are_claimed_only_for_free_slots(
    working: Working, store: SyncStore, stage: Stage, monkeypatch: pytest.MonkeyPatch, *, is_own: bool, has_more: bool
) -> None:
    monkeypatch.setattr(slots.Slots, "ahead_cnt", AHEAD)
    monkeypatch.setattr(scans.Scans, "is_low", False)  # no refill changes what the queue says of further tasks
    register(store, "w2", ["work"], concurrency=SLOTS)
    async with working(stage.app, concurrency=SLOTS) as bench:
        parts = bench.worker.parts
        await until(lambda: parts.ranks.has_others(["work"]), message="the other worker is known")
        keys = (str(number) for number in range(1_000))
        keys = (key for key in keys if (parts.ranks.rank(f"work:{key}", "work") == 0) == is_own)
        specs = [TaskSpec("work", {"key": key, "is_blocking": True}, key=key) for key in islice(keys, BLOCKING)]
        with bench.backed_up():
            bench.stop_scans()
            await bench.client.publish_many(specs)
            await until(lambda: parts.queue.ready_count(monotonic()) == BLOCKING, message="all are ready")
            parts.queue.has_more = has_more
        wanted = SLOTS if not (is_own or has_more) else SLOTS + AHEAD
        await until(lambda: bench.count("RUNNING") == wanted and parts.claimer.is_at_rest, message="claimed")
        assert parts.queue.ready_count(monotonic()) == BLOCKING - wanted
        stage.gate.set()
        await until(lambda: bench.count("SUCCESS") == BLOCKING, message="all done")
        await bench.at_rest()


async def test_rest_after_the_last_run_is_no_time_of_runs(working: Working, stage: Stage) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        pace = bench.worker.parts.slots._pace
        await _publish(bench, "quick", 40)
        await until(lambda: bench.count("SUCCESS") == 40 and pace._rests_since is not None)
        await _publish(bench, "blocking", SLOTS, is_blocking=True)
        await until(lambda: stage.overlaps["now"] == SLOTS and pace._rests_since is None)
        stage.gate.set()
        await until(lambda: pace._rests_since is not None, message="at rest again")
        await bench.at_rest()


async def test_what_was_claimed_ahead_is_handed_back_where_slots_do_not_become_free(
    working: Working, stage: Stage
) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        await _until_ahead(bench, stage)
        await until(lambda: (bench.count("RUNNING"), bench.count("INIT")) == (SLOTS, BLOCKING - SLOTS))
        assert _handed_back(bench) > 0
        stage.gate.set()
        await until(lambda: bench.count("SUCCESS") == QUICK + BLOCKING, message="all done")
        assert bench.tasks.count_documents({"task_state.failed_cnt": {"$ne": 0}}) == 0
        assert set(stage.starts.values()) == {1}
        await bench.at_rest()


async def test_task_that_waits_for_a_slot_can_be_canceled(working: Working, stage: Stage) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        await _until_ahead(bench, stage)
        waiting = next(key for key in (f"blocking-{n}" for n in range(BLOCKING)) if key not in stage.starts)
        await bench.client.cancel("work", waiting)
        await bench.status(f"work:{waiting}", "CANCELED")
        stage.gate.set()
        await _all_done_but(bench, stage, waiting)


@pytest.mark.usefixtures("patient")
async def test_stop_hands_back_at_once_what_waits_for_a_slot(working: Working, stage: Stage) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        await _until_ahead(bench, stage)
        await until(lambda: bench.count("RUNNING") > SLOTS, message="claimed ahead")
        bench.worker.stop()
        await until(lambda: bench.life.done(), message="stopped")
        assert bench.count("RUNNING") == 0
        assert _handed_back(bench, "the worker stopped") > SLOTS
        assert len([key for key in stage.starts if key.startswith("blocking")]) == SLOTS


@pytest.mark.usefixtures("patient")
async def test_run_whose_lease_was_lost_while_it_waited_is_not_started(working: Working, stage: Stage) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        await _teach(bench)

        def be_unavailable(_: object) -> None:
            raise DatabaseUnavailable("cut off")

        bench.pings.run = be_unavailable  # type: ignore[method-assign, assignment]
        bench.stop_scans()
        leases = {"worker_timeout": 1.5, "ping_interval": 0.3}
        # What runs keeps its lease: with it, it would lose its slot to what waits.
        await _publish(bench, "blocking", SLOTS, is_blocking=True)
        await until(lambda: stage.overlaps["now"] == SLOTS, message="all slots taken")
        await _publish(bench, "late", BLOCKING, is_blocking=True, **leases)
        run = await _first_waiting(bench)
        waiting = bench.worker.parts.slots._waiting
        await until(lambda: not run.is_lease_valid, message="its lease is lost")
        stage.gate.set()
        await until(lambda: run not in [held for _, held in waiting], message="it waits no longer")
        assert run.asyncio_task is None
        assert run.loop is None


@pytest.mark.usefixtures("patient")
async def test_run_that_is_canceled_while_it_waits_is_not_started_when_a_slot_is_free(
    working: Working, stage: Stage
) -> None:
    async with working(stage.app, concurrency=SLOTS) as bench:
        await _until_ahead(bench, stage)
        run = await _first_waiting(bench)
        key = run.task.key
        await bench.client.cancel("work", key)
        await until(lambda: run.end_reason is not None, message="told")
        stage.gate.set()
        await bench.status(f"work:{key}", "CANCELED")
        await _all_done_but(bench, stage, key)


@pytest.mark.usefixtures("patient")
async def test_time_spent_waiting_for_a_slot_does_not_count_against_run_timeout(working: Working, stage: Stage) -> None:
    limit_ms = 400
    async with working(stage.app, concurrency=SLOTS) as bench:
        await _teach(bench)
        blocking = [TaskSpec("work", {"key": f"b{n}", "is_blocking": True}, priority=1) for n in range(SLOTS)]
        limited = [TaskSpec("work", {"key": f"l{n}"}, run_timeout=limit_ms / 1000) for n in range(BLOCKING)]
        await bench.client.publish_many([*blocking, *limited])
        await _first_waiting(bench)
        landed, _ = next(iter(bench.worker.parts.slots._waiting))
        await until(lambda: monotonic() > landed + limit_ms / 1000, message="it has waited long")
        stage.gate.set()
        await until(lambda: bench.count("SUCCESS") == QUICK + SLOTS + BLOCKING, message="all done")
        assert bench.tasks.count_documents({"task_state.failed_cnt": {"$ne": 0}}) == 0
