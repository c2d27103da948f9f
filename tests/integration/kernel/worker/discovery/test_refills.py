"""When a worker in a backlog reads further tasks, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from mtask import App, TaskSpec
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import find_due as finding
from mtask.kernel.worker.discovery import fetch as batches
from tests.integration.stores import register
from tests.integration.worker_harness import Bench, Working, set_queue_capacity
from tests.loops import in_loop
from tests.mongo import until

CAPACITY = 40
LOOK = CAPACITY // batches._ENOUGH
PUBLISHED = 100
IDS = [f"work:{number}" for number in range(PUBLISHED)]


class Queries:
    """Stands in for `finding.scan`: notes the limit of each query, and whether it was for a share."""

    def __init__(self) -> None:
        self._scan = finding.scan
        self.of_all: list[int] = []
        self.of_share: list[int] = []
        #: Called while a query is under way.
        self.amid: Callable[[], None] = lambda: None

    def __call__(self, *given: Any, **others: Any) -> Operation[finding.Scan]:
        found = yield from self._scan(*given, **others)
        (self.of_share if others.get("also") else self.of_all).append(given[4])
        self.amid()
        return found

    def clear(self) -> None:
        """Forget the queries so far."""
        self.of_all, self.of_share = [], []


class Backlogged:
    """A worker that claims nothing, beside another one that never comes. The test makes its scans."""

    def __init__(self, bench: Bench, queries: Queries, scan: Callable[..., Awaitable[None]]) -> None:
        self.bench = bench
        self.queries = queries
        parts = bench.worker.parts
        self.scans: Any = parts.scans
        self.batches: Any = self.scans._batches
        self.queue, self.ranks, self.ledger = parts.queue, parts.ranks, parts.scope.ledger
        self._scan = scan

    async def scan(self, *, is_refill: bool, is_full: bool = False) -> None:
        """Scan as `Scans.run` does."""
        self.queries.clear()
        self.scans.is_refill = is_refill
        await self._scan(is_full=is_full)

    def make_older(self, task_ids: Iterable[str], seconds: Any) -> None:
        """Let these tasks have been due for this time; negative: they will be due."""
        ago = {"$dateSubtract": {"startDate": "$$NOW", "unit": "second", "amount": seconds}}
        changed = [{"$set": {"task_state.next_preempt_time": ago}}]
        self.bench.tasks.update_many({"_id": {"$in": list(task_ids)}}, changed)

    def forget_queued(self) -> None:
        """Empty the queue."""
        for task_id, _ in self.queue.names():
            self.queue.discard(task_id)

    def is_own(self, task_id: str) -> bool:
        """Whether this worker ranks first for the task."""
        return self.ranks.rank(task_id, "work") == 0

    @property
    def is_refill_due(self) -> bool:
        """Whether a refill follows, now or by the timer."""
        return self.scans.is_refill or self.scans.refill_timer is not None


@pytest.fixture
@in_loop
async def worker(working: Working, store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backlogged]:
    """Run a worker beside a backlog of 100 tasks, of which its queue holds 40."""
    app = App()

    @app.task
    async def work() -> None:
        return None

    register(store, "idle", ["work"])
    queries = Queries()
    set_queue_capacity(monkeypatch, CAPACITY)
    monkeypatch.setattr(finding, "scan", queries)
    async with working(app) as bench:
        parts = bench.worker.parts
        await until(lambda: parts.ranks.has_others(["work"]), message="the other worker is known")
        scan = parts.scans.scan
        bench.stop_scans()
        bench.stop_stream()
        with bench.backed_up():
            await bench.client.publish_many([TaskSpec("work", {}, key=f"{n}") for n in range(PUBLISHED)])
            setup = Backlogged(bench, queries, scan)
            yield setup
            if setup.scans.refill_timer is not None:
                setup.scans.refill_timer.cancel()


async def test_refill_that_is_asked_for_while_a_scan_is_under_way_waits_for_what_the_scan_brings(
    worker: Backlogged,
) -> None:
    worker.scans.scanned = 10_000  # nearly all that the scan before has brought is done
    worker.queue.has_more = True
    worker.queries.amid = worker.scans.refill
    await worker.scan(is_refill=True)
    assert worker.queue.ready_count(monotonic()) > 0
    assert not worker.is_refill_due


async def test_refill_that_was_asked_for_follows_a_scan_that_has_brought_nothing(worker: Backlogged) -> None:
    worker.ledger.claiming.update(IDS)  # so all that the scan finds is not queued
    worker.queries.amid = worker.scans.refill
    await worker.scan(is_refill=True)
    worker.ledger.claiming.difference_update(IDS)
    assert len(worker.queue) == 0
    assert worker.is_refill_due


@pytest.mark.parametrize(
    ("is_refill", "was_cut", "are_others_older", "limits"),
    [
        (True, True, False, [LOOK]),
        (False, True, False, [LOOK]),
        (True, True, True, [LOOK, CAPACITY]),
        (False, True, True, [LOOK, CAPACITY]),
        (False, False, False, [CAPACITY]),
    ],
    ids=["refill", "regular", "refill-behind-others", "regular-behind-others", "regular-without-a-backlog"],
)
async def test_worker_with_tasks_of_its_own_only_looks_at_those_of_all_unless_others_go_first(
    worker: Backlogged, is_refill: bool, was_cut: bool, are_others_older: bool, limits: list[int]
) -> None:
    older = [task_id for task_id in IDS if worker.is_own(task_id) != are_others_older]
    worker.make_older(older[:5], 30)
    worker.scans._note_cut(was_cut=was_cut)
    worker.batches.all_at = 0.0  # long ago
    await worker.scan(is_refill=is_refill)
    assert worker.queries.of_all[: len(limits)] == limits
    assert CAPACITY not in worker.queries.of_all[len(limits) :]
    assert worker.scans.was_cut.is_set()
    assert worker.queue.has_more


async def test_look_amid_a_backlog_does_not_put_off_the_next_refill(worker: Backlogged) -> None:
    await worker.scan(is_refill=True)
    assert worker.queries.of_share  # the queue is full of this worker's own
    worker.forget_queued()
    await worker.scan(is_refill=False)
    assert worker.queries.of_all == [LOOK]
    assert 0 < worker.queue.ready_count(monotonic(), own_only=True) <= LOOK
    worker.scans.refill()
    assert worker.is_refill_due


async def test_share_that_ends_behind_the_position_is_read_from_the_beginning_only_if_that_is_not_enough(
    worker: Backlogged,
) -> None:
    own = sum(map(worker.is_own, IDS))
    assert CAPACITY < own < 2 * CAPACITY
    # Each has another age: the position goes by it.
    worker.make_older(IDS, {"$subtract": [PUBLISHED + 1, {"$toInt": "$key"}]})
    worker.batches.all_at = monotonic()
    assert await worker.batches.scan_share()
    assert worker.batches.position is not None
    worker.queries.clear()
    assert await worker.batches.scan_share()  # the rest of the share
    assert len(worker.queries.of_share) == 1
    assert worker.batches.position is None

    worker.batches.position = {"task_option.priority": -1}  # behind all
    worker.forget_queued()
    worker.queries.clear()
    assert await worker.batches.scan_share()
    assert len(worker.queries.of_share) == 2


async def test_worker_that_may_not_ask_for_its_share_reads_the_tasks_of_all(worker: Backlogged) -> None:
    worker.batches.next_share = monotonic() + 60
    worker.scans._note_cut(was_cut=True)
    await worker.scan(is_refill=True)
    assert worker.queries.of_all == [CAPACITY]


async def test_worker_with_room_whose_queue_the_others_have_emptied_asks_for_a_refill(worker: Backlogged) -> None:
    await worker.scan(is_refill=True)
    assert worker.queue.has_more
    worker.forget_queued()
    claimer: Any = worker.bench.worker.parts.claimer
    claimer.wake()  # as a hint does
    await until(lambda: not claimer._wake.is_set(), message="the claimer has checked the queue")
    assert not worker.is_refill_due  # it may not claim now
    claimer.is_backed_up = lambda: False
    claimer.wake()
    await until(lambda: worker.is_refill_due, message="a refill is due")


async def test_regular_look_brings_a_task_of_a_higher_priority_that_will_be_due(worker: Backlogged) -> None:
    spec = TaskSpec("work", {}, key="urgent", delay=timedelta(seconds=9), priority=9)
    await worker.bench.client.publish_many([spec])
    worker.scans._note_cut(was_cut=True)
    await worker.scan(is_refill=False)
    assert "work:urgent" in worker.queue
    assert worker.scans.was_cut.is_set()


async def test_worker_whose_share_is_nearly_done_reads_the_tasks_of_all_though_its_own_go_first(
    worker: Backlogged,
) -> None:
    own = [task_id for task_id in IDS if worker.is_own(task_id)]
    worker.make_older(own[:5], 30)
    worker.make_older(own[5:], -3600)
    worker.batches.all_at = 0.0  # long ago
    await worker.scan(is_refill=True)
    assert worker.queries.of_all == [LOOK, CAPACITY]
    assert len(worker.queue) == CAPACITY


async def test_full_scan_that_is_asked_for_amid_a_scan_follows_it(worker: Backlogged) -> None:
    scans, full = worker.scans, asyncio.Event()
    scans._wake.clear()
    fulls: list[bool] = []

    async def scan(*, is_full: bool) -> None:
        scans._wake.clear()
        fulls.append(is_full)
        if len(fulls) == 2:
            scans.ask_full()
        elif len(fulls) == 4:
            full.set()

    scans.scan = scan
    scans.ask_soon()
    await until(lambda: len(fulls) == 1, message="a scan that is not full")
    scans.ask_full()
    await until(lambda: len(fulls) == 3, message="the full scan, and the one that was asked for amid it")
    scans.ask_soon()
    await full.wait()
    assert fulls == [False, True, True, False]
