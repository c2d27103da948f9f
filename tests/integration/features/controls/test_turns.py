"""Fair turns in real workers: who has many waiting tasks keeps nobody else waiting. The documents tell the order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import App, Client, Context
from mtask.features.controls import fair_scans as turns
from mtask.kernel.document.identity import between
from mtask.kernel.driver.indexes import TURNS_INDEX
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.process.part import ScanTarget
from tests.integration.stores import ready_store
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client as Mongo
from tests.mongo import until

FLOOD = 300


@pytest.fixture
def client(client: Client) -> Client:
    client.init()
    return client


class Recorder:
    """An app whose one task records the tenants of its runs."""

    def __init__(self) -> None:
        self.app = App()
        self.gate = asyncio.Event()
        self.app.task(name="work")(self._work)

    async def _work(self, context: Context) -> None:
        assert context.tenant is None or context.task.key.startswith(f"{context.tenant}:")
        await self.gate.wait()


def publish(client: Client, tenant: str | None, count: int, *, queue: str = "default", **options: Any) -> None:
    """Publish due tasks of a tenant, as another service does: with one insert."""
    from mtask import TaskSpec

    specs = [TaskSpec("work", key=f"{tenant}-{n}", tenant=tenant, queue=queue, **options) for n in range(count)]
    client.publish_many(specs)


def in_order(bench: Bench) -> list[str]:
    """Return the tenants of the runs, in the order in which they were claimed."""
    found = bench.tasks.find({}, {"tenant": 1, "task_state.worker_states.claim_time": 1})
    runs = [(run["claim_time"], d.get("tenant", "none")) for d in found for run in d["task_state"]["worker_states"]]
    return [tenant for _, tenant in sorted(runs)]


async def test_the_few_tasks_of_some_tenants_start_before_the_many_of_another(working: Working, client: Client) -> None:
    """Both workers begin with scans, which find the flood first by age and by priority."""
    recorder = Recorder()
    recorder.gate.set()
    client.set_fair("default")
    publish(client, "flood", FLOOD, priority=9)
    publish(client, "beta", 5)
    publish(client, "coro", 5)
    publish(client, None, 5)
    async with (
        working(recorder.app, worker_id="w1", concurrency=2) as bench,
        working(recorder.app, worker_id="w2", concurrency=2),
    ):
        await until(lambda: bench.count("SUCCESS") == FLOOD + 15, message="all done")
        order = in_order(bench)
        last_of_few = max(index for index, tenant in enumerate(order) if tenant != "flood")
        # Groups of up to 22 are claimed at once, and each of the two workers meets others at its own pace.
        assert order[:last_of_few].count("flood") < FLOOD / 2


async def test_task_of_another_tenant_is_next_though_a_flood_was_there_first(working: Working, client: Client) -> None:
    """It comes by the change stream, while a worker knows of nothing but the flood."""
    recorder = Recorder()
    client.set_fair("default")
    publish(client, "flood", FLOOD)
    async with working(recorder.app, concurrency=1) as bench:
        await until(lambda: bench.count("RUNNING") >= 1, message="one runs")
        bench.stop_scans()
        bench.worker.parts.queue.capacity = 20
        heard = bench.worker.parts.stream.event_cnt
        publish(client, "more", 100)
        publish(client, "beta", 3)
        await bench.heard(heard + 102)
        recorder.gate.set()
        await until(lambda: bench.tasks.count_documents({"tenant": "beta", "task_state.status": "SUCCESS"}) == 3)
        order = in_order(bench)
        assert len(order) < FLOOD / 2, "of the tasks in the worker's memory, a part was claimed"


async def test_queue_without_fair_turns_goes_by_age(working: Working, client: Client) -> None:
    recorder = Recorder()
    recorder.gate.set()
    publish(client, "flood", 100)
    publish(client, "beta", 3)
    async with working(recorder.app, concurrency=1) as bench:
        await until(lambda: bench.count("SUCCESS") == 103, message="all done")
        # The tasks of one group have one claim_time, and a worker with one slot claims few at once.
        assert in_order(bench).index("beta") > 60


class Ring:
    """The scans of one worker, without the worker."""

    def __init__(self, store: SyncStore) -> None:
        self.store = store
        self.batches: list[list[Any]] = []
        self.turns = turns.TurnScans("w1", self._run)

    async def _take(self, operation: Any, *, note: object) -> finding.Scan:
        found: finding.Scan = self.store.run(operation)
        self.batches.append([document.get("tenant") for document in found.documents])
        return found

    async def _run(self, operation: Any) -> Any:
        return self.store.run(operation)

    def scan(self, capacity: int, excluded: Sequence[str] = (), also: Sequence[Filter] = ()) -> list[str]:
        """Make one scan; return the tenants of the tasks that it found."""
        self.batches.clear()
        target = ScanTarget(["default"])
        found = asyncio.run(self.turns.scan(self._take, target, ["work"], 0, capacity, list(also), excluded))
        self.is_complete = found.is_complete
        return [tenant for batch in self.batches for tenant in batch]


def test_scans_go_round_all_tenants_and_take_equal_parts(mongo: Mongo, database_name: str, client: Client) -> None:
    store = ready_store(mongo, database_name)
    for number in range(40):
        publish(client, f"tenant-{number:02}", 30 if number == 7 else 4)
    ring = Ring(store)
    rounds = [set(ring.scan(64)) for _ in range(6)]
    assert set().union(*rounds) == {f"tenant-{number:02}" for number in range(40)}
    # One tenant after the other has its turn: none comes again before all others have come.
    assert all(len(found) < 40 for found in rounds)
    assert not ring.is_complete


def test_scan_of_few_tenants_brings_as_much_as_there_is_room_for(
    mongo: Mongo, database_name: str, client: Client
) -> None:
    ring = Ring(ready_store(mongo, database_name))
    publish(client, "acme", 100)
    assert len(ring.scan(64)) == 4  # the sixteenth part, as there might be as many tenants
    assert len(ring.scan(64)) == 64
    publish(client, "beta", 2)
    assert ring.scan(64).count("beta") >= 2
    assert ring.scan(64).count("acme") == 32


def test_scan_brings_whole_parts_though_a_batch_ends_within_one(
    mongo: Mongo, database_name: str, client: Client
) -> None:
    ring = Ring(ready_store(mongo, database_name))
    for tenant in ("acme", "beta", "coro"):
        publish(client, tenant, 4)
    found = ring.scan(5 * turns.TENANTS)
    assert all(found.count(tenant) >= 4 for tenant in ("acme", "beta", "coro"))
    assert ring.is_complete


def test_scan_leaves_out_excluded_tenants(mongo: Mongo, database_name: str, client: Client) -> None:
    ring = Ring(ready_store(mongo, database_name))
    publish(client, "acme", 3)
    publish(client, "beta", 3)
    publish(client, None, 2)
    assert sorted(map(str, ring.scan(100, ["acme"]))) == ["None", "None", "beta", "beta", "beta"]
    assert ring.is_complete


def test_scan_of_tenants_examines_only_what_it_brings(mongo: Mongo, database_name: str, client: Client) -> None:
    store = ready_store(mongo, database_name)
    publish(client, "acme", 500)
    publish(client, "acme", 200, queue="other")
    publish(client, "beta", 5)
    publish(client, None, 300)
    late = datetime.now(UTC) + timedelta(hours=1)
    publish(client, "coro", 300, start_time=late)
    ends = store.run(finding.tenants_at_ends("default"))
    assert ends == ("acme", "coro")
    for bounds, most in (({"$gt": ""}, 20), ({"$gt": "acme"}, 20), ({"$gt": "", "$nin": ["acme"]}, 20)):
        operation = finding.scan_tenants("default", ["work"], "w1", 0, most, bounds)
        call = next(operation)
        explained = mongo[database_name].command(
            "explain",
            {
                "find": "tasks",
                "filter": call.args[0],
                "projection": dict(call.args[1]),
                "sort": dict(call.kwargs["sort"]),
                "limit": most,
                "hint": TURNS_INDEX,
            },
            verbosity="executionStats",
        )
        stats = explained["executionStats"]
        assert stats["totalDocsExamined"] <= stats["nReturned"] + 1
        assert stats["totalKeysExamined"] <= stats["nReturned"] + 15
        assert "SORT" not in _stages(explained["queryPlanner"]["winningPlan"])


def _stages(plan: dict[str, Any]) -> list[str]:
    inner = [plan[name] for name in ("inputStage", "queryPlan") if name in plan] + plan.get("inputStages", [])
    return [str(plan.get("stage")), *(stage for one in inner for stage in _stages(one))]


def test_tasks_of_no_tenant_are_in_none_of_the_indexes_of_tenants(
    mongo: Mongo, database_name: str, client: Client
) -> None:
    publish(client, None, 20)
    publish(client, "acme", 2)
    tasks = mongo[database_name]["tasks"]
    tasks.aggregate([{"$indexStats": {}}])
    counted = tasks.count_documents({"tenant": {"$exists": True}}, hint="mtask_tenant")
    assert counted == 2
    keys = mongo[database_name].command("validate", "tasks")["keysPerIndex"]
    assert (keys["mtask_tenant"], keys[TURNS_INDEX]) == (2, 2)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
@pytest.mark.parametrize(("first", "last"), [("acme", "zeta"), ("tenant-1", "tenant-999"), ("a", "a"), ("a", "ab")])
def test_random_place_lies_between_the_first_and_the_last_tenant(first: str, last: str, part: float) -> None:
    assert first <= between(first, last, part) <= last or between(first, last, part) <= first
