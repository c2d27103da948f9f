"""When a worker reads the live workers: at once when one has come or gone, and seldom while many do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from math import inf
from typing import Any

import pytest

from mtask import App
from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver import connect
from mtask.kernel.driver.operation import Operation
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.operations import workers
from mtask.kernel.worker.discovery import fetch_loop as scans_module
from mtask.kernel.worker.discovery import fleet as roster_module
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fleet import Ranks, Roster
from mtask.kernel.worker.process.state import Scope, Vitals
from mtask.kernel.worker.process.time import ServerClock, Tempo
from tests.clients import server_now
from tests.integration.stores import register, registration
from tests.integration.worker_harness import Working
from tests.loops import in_loop
from tests.mongo import until

_BEGIN = 1_000.0


class Clock:
    """The roster's monotonic clock, which goes on only when the test says so."""

    def __init__(self) -> None:
        self.now = _BEGIN

    def __call__(self) -> float:
        return self.now


class Known:
    """A roster, and what is known of the other workers by it."""

    def __init__(self, store: AsyncStore, others: SyncStore) -> None:
        clock = ServerClock(server_now(others), _BEGIN, _BEGIN)
        scope = Scope(store, "me", ["default"], ["work"], clock, Tempo(1.0), Vitals(10))
        self.ranks = Ranks(scope, PreemptionQueue(10))
        self.roster = Roster(scope, self.ranks)
        #: What is done after the next read, before its result is used.
        self.amid: Callable[[], None] = lambda: None
        patched: Any = store
        run = store.run

        async def noted_run(operation: Operation[Any]) -> Any:
            found = await run(operation)
            self.amid()
            return found

        patched.run = noted_run

    @property
    def count(self) -> int:
        """The number of other workers that are known."""
        return len(self.ranks._peers._others.get("work", ()))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(roster_module, "monotonic", made)
    return made


@pytest.fixture
@in_loop
async def known(mongo_uri: str, database_name: str, store: SyncStore, clock: Clock) -> AsyncIterator[Known]:
    """Give a roster that has just been read."""
    made = connect.async_store(mongo_uri, database_name, "test")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.close)
        known = Known(made, store)
        assert known.roster.due_at == 0.0
        await known.roster.read_if_due()
        assert known.roster.due_at == inf
        yield known


async def test_first_change_is_read_at_once_and_those_of_the_next_second_together(
    known: Known, store: SyncStore, clock: Clock
) -> None:
    clock.now += 60
    register(store, "one", ["work"])
    known.roster.ask()
    assert known.roster.due_at <= clock.now
    assert await known.roster.read_if_due()
    for worker_id in ("two", "three"):
        register(store, worker_id, ["work"])
        known.roster.ask()
        clock.now += 0.3
        assert not await known.roster.read_if_due()
    assert (known.count, known.roster.due_at) == (1, _BEGIN + 60 + 1)
    clock.now = known.roster.due_at
    assert await known.roster.read_if_due()
    assert (known.count, known.roster.due_at) == (3, inf)
    known.roster.ask_now()  # it waits for nothing
    assert known.roster.due_at <= clock.now


async def test_change_amid_a_read_is_read_later(known: Known, store: SyncStore, clock: Clock) -> None:
    def change() -> None:
        register(store, "one", ["work"])
        known.roster.ask()
        known.amid = lambda: None

    clock.now += 60
    known.amid = change
    known.roster.ask()
    assert not await known.roster.read_if_due()
    assert known.roster.due_at == clock.now + 1
    clock.now += 1
    assert await known.roster.read_if_due()


async def test_pause_after_a_long_read_is_a_multiple_of_its_duration(known: Known, clock: Clock) -> None:
    def take_long() -> None:
        clock.now += 0.5

    known.amid = take_long
    known.roster.ask_now()
    await known.roster.read_if_due()
    known.roster.ask()
    assert known.roster.due_at == clock.now + 10


async def test_failed_read_is_repeated_after_a_pause_and_scans_go_on(
    known: Known, store: SyncStore, clock: Clock
) -> None:
    def fail() -> None:
        raise DatabaseUnavailable("gone")

    register(store, "one", ["work"])
    clock.now += 60
    known.amid = fail
    known.roster.ask()
    assert not await known.roster.read_if_due()  # and does not fail the scan that it is a part of
    known.amid = lambda: None
    assert not await known.roster.read_if_due()
    assert clock.now < known.roster.due_at < clock.now + 60
    clock.now = known.roster.due_at
    assert await known.roster.read_if_due()
    assert known.count == 1


async def test_ranks_stay_if_nothing_has_changed(known: Known, store: SyncStore, clock: Clock) -> None:
    register(store, "one", ["work"])
    known.roster.ask_now()
    assert await known.roster.read_if_due()
    version = known.ranks.version
    me = registration("one", ["default"], ["work"])
    store.run(workers.heartbeat(me, workers.Heartbeat(WorkerStatus.RUNNING, 4, 10, [], appeal_cnt=2)))
    known.roster.ask_now()
    assert not await known.roster.read_if_due()
    assert known.ranks.version == version


async def test_worker_knows_all_that_come_and_go_and_scans_for_none_of_them(
    working: Working, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans_module, "HORIZON", timedelta(hours=1))  # no regular scan reads what a change has left
    app = App()
    app.task(name="work")(lambda: None)
    async with working(app) as bench:
        scans: Any = bench.worker.parts.scans
        scan, scanned = scans.scan, []

        async def noted_scan(*, is_full: bool) -> None:
            scanned.append(is_full)
            await scan(is_full=is_full)

        async def known(*ids: str) -> None:
            await until(lambda: bench.others("work") == ids, message=f"{ids} are known")

        scans.scan = noted_scan
        for worker_id in ("a", "b", "c"):
            await asyncio.to_thread(register, store, worker_id, ["work"])
        await known("a", "b", "c")
        stopping = workers.Heartbeat(WorkerStatus.STOPPING, 0, 10, [])
        for worker_id in ("c", "a"):
            me = registration(worker_id, ["default"], ["work"])
            await asyncio.to_thread(store.run, workers.heartbeat(me, stopping))
        await known("b")
        assert False not in scanned  # a full scan may follow the opening of the stream
