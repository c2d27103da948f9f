"""Of which new tasks a worker of a fleet hears, and what it does when the workers that hear of a task have no room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from mtask import App, Context
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import workers
from mtask.kernel.operations.change_stream import Stream
from mtask.kernel.statements.filters import Shares
from mtask.kernel.worker.discovery import stream
from mtask.kernel.worker.discovery.fleet import Peers
from tests.integration.stores import claim, register, registration
from tests.integration.worker_harness import Bench, Working
from tests.mongo import until

OTHERS = [f"idle-{number}" for number in range(4)]
#: Longer than any test waits, in seconds.
_FOR_EVER = 3_600.0


class Work:
    """An app whose handlers for keys that begin with "held" wait until the test lets them end."""

    def __init__(self) -> None:
        self.app = App()
        self.is_open = asyncio.Event()

        @self.app.task
        async def task(context: Context) -> None:
            if context.task.key.startswith("held"):
                await self.is_open.wait()


class Heard:
    """Notes the shares of which the worker's stream tells."""

    shares: Shares | None = None


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Return what the worker's stream tells of. The worker hears of all tasks no longer than needed."""
    monkeypatch.setattr(stream, "WIDE_FOR", 0.0)
    noted, hear = Heard(), Stream.hear

    async def noted_hear(self: Stream, shares: Shares | None) -> bool:
        tells_more = await hear(self, shares)
        noted.shares = self.shares
        return tells_more

    monkeypatch.setattr(Stream, "hear", noted_hear)
    return noted


def keys_of_rank(rank: int, prefix: str = "") -> list[str]:
    """Return keys for which w1 has this rank in the fleet."""
    peers = Peers("w1")
    peers.update([{"_id": other, "concurrency": 10, "names": ["task"]} for other in OTHERS])
    keys = [f"{prefix}{number}" for number in range(200)]
    return [key for key in keys if peers.rank(f"task:{key}", "task") == rank]


@asynccontextmanager
async def in_fleet(
    working: Working, store: SyncStore, heard: Heard, work: Work, concurrency: int = 10
) -> AsyncIterator[Bench]:
    """Run a worker among others that take nothing, until it hears only of its shares. Then it scans no more."""
    for other in OTHERS:
        register(store, other, ["task"])
    async with working(work.app, concurrency=concurrency) as bench:
        await until(lambda: heard.shares is not None, message="it hears only of its shares")
        bench.stop_scans()
        try:
            yield bench
        finally:
            work.is_open.set()


async def wide(heard: Heard) -> None:
    """Wait until the worker hears of all tasks."""
    await until(lambda: heard.shares is None, message="it hears of all")


def stay(bench: Bench) -> None:
    """Have the worker keep its ranks, whoever comes and goes."""
    ranks: Any = bench.worker.parts.ranks

    async def keep(live: object) -> bool:
        return False

    ranks.take = keep


def appeals_of(bench: Bench) -> int:
    found: dict[str, Any] = bench.registry.find_one({"_id": "w1"}) or {}
    count: int = found["appeal_cnt"]
    return count


def beat(store: SyncStore, worker_id: str, **fields: Any) -> None:
    """Send a heartbeat of another worker."""
    me = registration(worker_id, ["default"], ["task"])
    given: dict[str, Any] = {"status": WorkerStatus.RUNNING, "running_cnt": 0, "concurrency": 10, "unserved_names": []}
    assert store.run(workers.heartbeat(me, workers.Heartbeat(**{**given, **fields})))


async def test_worker_hears_of_the_simple_tasks_for_which_it_ranks_first_or_second_and_of_all_others(
    working: Working, store: SyncStore, heard: Heard
) -> None:
    async with in_fleet(working, store, heard, Work()) as bench:
        far = keys_of_rank(2) + keys_of_rank(3) + keys_of_rank(4)
        mine = keys_of_rank(0)[:5] + keys_of_rank(1)[:5]
        await bench.client.publish("task", key=far[0])
        await bench.client.publish("task", key=far[1], concurrent_worker_cnt=2)
        await bench.client.publish("task", key=far[2], specific_worker_ids=["w1"])
        for key in mine:
            await bench.client.publish("task", key=key)
        for key in [*mine, far[2]]:
            await bench.status(f"task:{key}", "SUCCESS")
        await until(lambda: bench.state(f"task:{far[1]}")["worker_states"], message="it has its run of this one")
        assert bench.state(f"task:{far[0]}")["worker_states"] == []


async def test_appeal_of_another_worker_makes_it_hear_of_all_and_scan(
    working: Working, store: SyncStore, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_fleet(working, store, heard, Work()) as bench:
        before, after = keys_of_rank(3)[:2]
        await bench.client.publish("task", key=before)
        monkeypatch.setattr(stream, "WIDE_FOR", _FOR_EVER)
        scans: Any = bench.worker.parts.scans
        asked: list[Shares | None] = []
        scans.ask_soon = lambda: asked.append(heard.shares)
        await asyncio.to_thread(beat, store, OTHERS[0], appeal_cnt=1)
        await until(lambda: asked, message="a scan is asked for")
        assert asked == [None]  # the stream hears of all before the scan begins
        for name in ("ask_soon", "scan"):
            vars(scans).pop(name)
        scans.ask_soon()
        await bench.status(f"task:{before}", "SUCCESS")
        bench.stop_scans()
        await bench.client.publish("task", key=after)
        await bench.status(f"task:{after}", "SUCCESS")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda store: beat(store, OTHERS[0], status=WorkerStatus.STOPPING), id="a-worker-stops"),
        pytest.param(lambda store: beat(store, OTHERS[0], concurrency=0), id="a-worker-pauses"),
        pytest.param(lambda store: register(store, "new", ["task"]), id="a-worker-comes"),
        pytest.param(
            lambda store: store.database["controls"].insert_one({"_id": "queue:other", "kind": "queue"}), id="a-control"
        ),
    ],
)
async def test_changes_of_the_fleet_and_of_controls_make_it_hear_of_all(
    working: Working,
    store: SyncStore,
    heard: Heard,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[SyncStore], object],
) -> None:
    async with in_fleet(working, store, heard, Work()):
        monkeypatch.setattr(stream, "WIDE_FOR", _FOR_EVER)
        await asyncio.to_thread(change, store)
        await wide(heard)


async def test_limit_makes_it_hear_of_all(working: Working, store: SyncStore, heard: Heard) -> None:
    """While one queue has a limit, ranks alone do not tell who takes a task."""
    async with in_fleet(working, store, heard, Work()) as bench:
        stay(bench)
        for other in OTHERS:  # nobody would confirm the limit for them
            await asyncio.to_thread(store.database["workers"].delete_one, {"_id": other})
            await asyncio.to_thread(register, store, other, ["task"], queues=["elsewhere"])
        await bench.client.limit("default", concurrency=5)
        await wide(heard)
        assert bench.worker.parts.ranks.heard is not None


async def test_worker_beside_one_that_never_appeals_hears_of_all(
    working: Working, store: SyncStore, heard: Heard
) -> None:
    """A worker of an older version would leave the tasks to nobody when it has no room."""
    async with in_fleet(working, store, heard, Work()) as bench:
        store.database["workers"].update_one({"_id": OTHERS[2]}, {"$unset": {"appeal_cnt": ""}})
        bench.worker.parts.scans.ask_peers()
        await wide(heard)


@pytest.mark.parametrize("rank", [0, 1])
async def test_worker_without_room_appeals_for_a_task_that_nobody_takes(
    working: Working, store: SyncStore, heard: Heard, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Not for a task that another worker has taken unheard, nor for one that all workers know."""
    monkeypatch.setattr(stream, "APPEAL_PAUSES", (0.0, 0.0))
    reads: list[tuple[list[str], bool]] = []
    taken, left, named = keys_of_rank(rank)[:3]
    work = Work()
    async with in_fleet(working, store, heard, work, concurrency=1) as bench:
        lookups: Any = bench.worker.parts.lookups
        look = lookups.look_whether_due

        async def noted_look(task_ids: list[str], sent: float) -> bool:
            if task_ids == [f"task:{taken}"]:
                assert claim(store, OTHERS[0], taken) == [taken]
            reads.append((task_ids, await look(task_ids, sent)))
            return reads[-1][1]

        lookups.look_whether_due = noted_look
        held = keys_of_rank(0, "held")[0]
        await bench.client.publish("task", key=held)
        await bench.status(f"task:{held}", "RUNNING")
        queue = bench.worker.parts.queue
        await bench.client.publish("task", key=taken)
        await until(lambda: len(reads) == 1 and f"task:{taken}" not in queue, message="the taken task is forgotten")
        assert bench.worker.parts.scope.vitals.appeal_cnt == 0
        await bench.client.publish("task", key=named, specific_worker_ids=["w1"])
        await until(lambda: ([f"task:{named}"], False) in reads, message="it has read the task that names it")
        assert bench.worker.parts.scope.vitals.appeal_cnt == 0
        await bench.client.publish("task", key=left)
        await until(lambda: appeals_of(bench) > 0, message="it appeals")
        assert any(is_due and f"task:{left}" in task_ids for task_ids, is_due in reads)
        work.is_open.set()
        await bench.status(f"task:{left}", "SUCCESS")


async def test_worker_with_concurrency_0_appeals_for_nothing(working: Working, store: SyncStore, heard: Heard) -> None:
    """The others do not count on it."""
    async with in_fleet(working, store, heard, Work()) as bench:
        parts = bench.worker.parts
        await bench.client.set_worker("w1", concurrency=0)
        await until(lambda: parts.scope.vitals.concurrency == 0, message="the order is heard")
        await bench.client.publish("task", key=keys_of_rank(1)[0])
        await until(lambda: parts.queue.ready_count(monotonic()) == 1, message="the task is ready")
        assert parts.overflow.look(monotonic()) is None
        assert parts.scope.vitals.appeal_cnt == 0
