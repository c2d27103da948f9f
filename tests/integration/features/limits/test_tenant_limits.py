"""Limits of tenants in real workers: counted over all of them, and in nobody else's way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from mtask import App, Client, Context
from mtask.errors import InvalidInput
from mtask.features.limits.operations import PermitPool
from tests.integration.features.limits.test_limits import is_free, most_in_a_window, two_workers
from tests.integration.worker_harness import Bench, Working
from tests.mongo import until


@pytest.fixture
def client(client: Client) -> Client:
    client.init()
    return client


class Gauge:
    """An app whose one task says how many of it run at once, of each tenant."""

    def __init__(self) -> None:
        self.app = App()
        self.running: Counter[str] = Counter()
        self.starts: list[float] = []
        self.gate = asyncio.Event()
        self.app.task(name="work")(self._work)
        self.app.task(name="other", queue="other")(self._work)

    async def _work(self, context: Context) -> None:
        self.starts.append(monotonic())
        tenant = context.tenant or "none"
        self.running[tenant] += 1
        await self.gate.wait()
        self.running[tenant] -= 1


def most_at_once(runs: Iterable[dict[str, Any]]) -> int:
    """Return the most runs at once, by the instants in the documents. A run that ends as another begins is over."""
    steps = [step for run in runs for step in ((run["claim_time"], 1), (run["success_time"], -1))]
    now = most = 0
    for _, change in sorted(steps):
        now += change
        most = max(most, now)
    return most


def runs_of(bench: Bench, **criteria: Any) -> list[dict[str, Any]]:
    return [run for found in bench.tasks.find(criteria) for run in found["task_state"]["worker_states"]]


async def test_each_tenant_of_a_queue_has_a_limit_that_holds_over_two_workers(working: Working, client: Client) -> None:
    gauge = Gauge()
    client.limit("default", tenant_concurrency=2)
    async with two_workers(working, gauge.app) as bench:
        for tenant, count in (("acme", 12), ("beta", 3), (None, 4)):
            for number in range(count):
                await bench.client.publish("work", key=str(number), tenant=tenant)
        expected = {"acme": 2, "beta": 2, "none": 4}
        await until(lambda: dict(gauge.running) == expected, message="two of each tenant, and all of none")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 19, message="all done")
        pools = [PermitPool("default", tenant=tenant) for tenant in ("acme", "beta")]
        await until(lambda: all(is_free(bench, pool) for pool in pools), message="every permit given back")
        assert most_at_once(runs_of(bench, tenant="acme")) == 2
        assert most_at_once(runs_of(bench, tenant="beta")) == 2


async def test_the_limit_of_one_tenant_holds_over_its_queues_and_binds_no_other(
    working: Working, client: Client
) -> None:
    gauge = Gauge()
    client.limit(tenant="acme", concurrency=3)
    async with (
        working(gauge.app, worker_id="w1", queues=["default", "other"]) as bench,
        working(gauge.app, worker_id="w2", queues=["default", "other"]),
    ):
        acme, beta = bench.client.for_tenant("acme"), bench.client.for_tenant("beta")
        for number in range(6):
            await acme.publish("work", key=str(number))
            await acme.publish("other", key=str(number), queue="other")
            await beta.publish("work", key=str(number))
        await until(lambda: dict(gauge.running) == {"acme": 3, "beta": 6}, message="three of acme, all of beta")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 18, message="all done")
        await until(lambda: is_free(bench, PermitPool(None, tenant="acme")), message="every permit given back")
        assert most_at_once(runs_of(bench, tenant="acme")) == 3


async def test_no_window_has_more_starts_of_a_tenant_than_its_rate(working: Working, client: Client) -> None:
    gauge, window = Gauge(), timedelta(seconds=1)
    gauge.gate.set()
    client.limit(tenant="acme", rate=(4, window))
    async with two_workers(working, gauge.app) as bench:
        for number in range(10):
            await bench.client.publish("work", key=str(number), tenant="acme")
        await until(lambda: bench.count("SUCCESS") == 10, message="all done")
        assert most_in_a_window(gauge.starts, window) == 4


async def test_tasks_of_a_tenant_at_its_limit_hide_no_tasks_of_others_from_scans(
    working: Working, client: Client
) -> None:
    gauge = Gauge()
    client.limit(tenant="acme", concurrency=1)
    for number in range(15):
        client.publish("work", key=str(number), tenant="acme", priority=9)
    async with working(gauge.app) as bench:
        bench.worker.parts.queue.capacity = 10
        bench.stop_stream()
        await until(lambda: gauge.running["acme"] == 1, message="one runs")
        for number in range(5):
            await bench.client.publish("work", key=str(number), tenant="beta")
        await until(lambda: gauge.running["beta"] == 5, message="the others run")
        assert gauge.running["acme"] == 1
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 20, message="all done")
        assert most_at_once(runs_of(bench, tenant="acme")) == 1


async def test_paused_tenant_waits_and_the_others_go_on(working: Working, client: Client) -> None:
    gauge = Gauge()
    gauge.gate.set()
    async with working(gauge.app) as bench:
        await bench.client.pause(tenant="acme")
        await bench.client.publish("work", key="1", tenant="acme")
        await bench.client.publish("work", key="1", tenant="beta")
        await bench.status("work:beta:1", "SUCCESS")
        assert bench.state("work:acme:1")["status"] == "INIT"
        await bench.client.resume(tenant="acme")
        await bench.status("work:acme:1", "SUCCESS")


def test_limits_of_queues_are_refused_for_a_tenant(client: Client) -> None:
    with pytest.raises(InvalidInput, match="the other limits are of queues"):
        client.limit(tenant="acme", key_concurrency=1)
    with pytest.raises(InvalidInput, match="give one of the two"):
        client.limit("default", tenant="acme", concurrency=1)
    with pytest.raises(InvalidInput, match="use 1 to 64 letters"):
        client.limit(tenant="a:b", concurrency=1)
