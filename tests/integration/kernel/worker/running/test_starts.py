"""The runs that a worker holds start in their order, whatever was claimed together and in whichever order it came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mtask import App, Client, Context, Retry, TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.running.run import Order
from tests.integration.kernel.worker.running.starts import Watch, release
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import until

COUNT = 60
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def overtaken(starts: Sequence[int]) -> int:
    """Return the most tasks of higher priority that had not started when one started."""
    return max(sum(later > priority for later in starts[index:]) for index, priority in enumerate(starts))


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02])
async def test_tasks_start_by_priority_and_at_most_those_of_the_other_slots_at_once(
    working: Working, client: Client, seconds: float
) -> None:
    app, starts = App(), list[int]()

    @app.task
    async def slow(number: int) -> None:
        starts.append(number)
        await asyncio.sleep(seconds)

    def backlog(label: str) -> list[TaskSpec]:
        return [TaskSpec("slow", {"number": n}, key=f"{label}/{n:03}", priority=n) for n in range(COUNT)]

    client.publish_many(backlog("slow"))
    async with working(app, concurrency=1) as bench:
        await until(lambda: len(starts) == COUNT, message="all started")
        assert starts == sorted(starts, reverse=True)
        for concurrency in (1, 3, 10):
            starts.clear()
            await release(bench, backlog(f"{concurrency}"), concurrency)
            await until(lambda: len(starts) == COUNT, message="all started")
            assert overtaken(starts) < concurrency, starts


KINDS = ["quick", "quick", "blocking", "twice", "again"]


@dataclass(frozen=True)
class Task:
    """A task of a kind: "blocking" is sync, "twice" wants two workers, and "again" raises Retry in its first run."""

    key: str
    kind: str
    priority: int
    minutes: int
    was_handed_back: bool

    @property
    def name(self) -> str:
        return "blocking" if self.kind == "blocking" else "quick"

    @property
    def id(self) -> str:
        return f"{self.name}:{self.key}"

    @property
    def due(self) -> datetime:
        return LONG_AGO + timedelta(minutes=self.minutes)

    @property
    def order(self) -> Order:
        return (not self.was_handed_back, -self.priority, self.due)

    @property
    def spec(self) -> TaskSpec:
        seats = 1 + (self.kind == "twice")
        given: dict[str, Any] = {"key": self.key, "priority": self.priority, "start_time": self.due}
        return TaskSpec(self.name, {"is_again": self.kind == "again"}, concurrent_worker_cnt=seats, **given)


def some_tasks(chance: Random) -> list[Task]:
    return [
        Task(
            key=uuid4().hex,
            kind=chance.choice(KINDS),
            priority=chance.randint(-1, 2),
            minutes=chance.randint(0, 2),
            was_handed_back=chance.random() < 0.1,
        )
        for _ in range(30)
    ]


@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_the_first_in_order_of_the_runs_that_a_worker_holds_starts_next_whatever_their_kinds(
    working: Working, store: SyncStore, seed: int
) -> None:
    app, runs, watch, chance = App(), list[str](), Watch(), Random(seed)
    store.tasks.delete_many({})  # those of the example before

    @app.task
    async def quick(context: Context, is_again: bool) -> None:
        runs.append(context.task.key)
        if is_again and runs.count(context.task.key) == 1:
            raise Retry(delay=0)

    @app.task
    def blocking(context: Context, is_again: bool) -> None:
        runs.append(context.task.key)

    def hand_back(tasks: Sequence[Task]) -> None:
        task_ids, token = [task.id for task in tasks if task.was_handed_back], str(chance.random())
        if not task_ids:
            return
        store.run(claims.claim(task_ids, "another", token))
        run_ids = claims.run_ids_of(task_ids, token)
        store.run(claims.finish([Outcome(each, run_ids[each], RunStatus.CANCELED, reason="r") for each in task_ids]))

    async def lose_some_replies() -> None:
        if chance.random() < 0.2:
            raise DatabaseUnavailable("cut off")

    async def drained_by(bench: Bench, concurrency: int) -> None:
        tasks = some_tasks(chance)
        watch.orders |= {task.id: task.order for task in tasks}
        runs.clear()
        await release(bench, [task.spec for task in tasks], concurrency, lambda: hand_back(tasks))
        expected = len(tasks) + sum(task.kind == "again" for task in tasks)
        await until(lambda: len(runs) == expected, message="all ran")

    async def scenario() -> None:
        async with working(app) as bench:
            watch.over(bench)
            between(bench.store, "claim", after=lose_some_replies)
            for concurrency in (1, 1, 3):
                await drained_by(bench, concurrency)

    asyncio.run(scenario())
    assert watch.overtaken == []
    assert watch.most_waiting > 1


async def test_tenants_take_turns_among_the_runs_that_wait_too_whatever_the_priorities(
    working: Working, client: Client
) -> None:
    app, starts = App(), list[str | None]()

    @app.task
    async def work(context: Context) -> None:
        starts.append(context.tenant)

    def backlog(round_: int) -> list[TaskSpec]:
        many = [("alfa", 0), ("flood", 9)]
        return [TaskSpec("work", key=f"{round_}/{n}", tenant=t, priority=p) for n in range(COUNT) for t, p in many]

    client.set_fair("default")
    async with working(app, concurrency=1) as bench:
        for round_ in range(2):  # in the second round, more is claimed ahead
            starts.clear()
            await release(bench, backlog(round_), 1)
            await until(lambda: len(starts) == 2 * COUNT, message="all started")
            assert all(first != second for first, second in pairwise(starts)), starts
