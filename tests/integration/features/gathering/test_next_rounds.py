"""A run's end begins the next round: the worker hears of it and takes it, short leases and dead workers or not."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from mtask import App, Client, Context, Retry, TaskSpec
from mtask.arguments.publish import PublishMiddleware
from tests.integration.worker_harness import Working
from tests.mongo import Client as Mongo
from tests.mongo import until


async def test_the_next_round_is_heard_of_without_a_scan(working: Working) -> None:
    app, seen = App(), list[int]()
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(number: int) -> None:
        seen.append(number)
        started.set()
        await go_on.wait()

    async with working(app) as bench:
        bench.stop_scans()
        await bench.client.publish(work, {"number": 1}, key="k", if_running="again")
        await started.wait()
        for number in (2, 3):
            await bench.client.publish(work, {"number": number}, key="k", if_running="again")
        go_on.set()
        await until(lambda: seen == [1, 3])
        await bench.status("work:k", "SUCCESS")
        await bench.client.publish(work, {"number": 4}, key="k", debounce=0.2)
        await until(lambda: seen == [1, 3, 4])
        await bench.status("work:k", "SUCCESS")
        await bench.at_rest()


async def test_a_retry_takes_the_newest_params_and_a_transaction_begins_the_next_round(
    working: Working, database_name: str, mongo: Mongo
) -> None:
    app, seen = App(), list[int]()
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(context: Context, number: int) -> str:
        seen.append(number)
        started.set()
        await go_on.wait()
        if number == 1:
            raise Retry(delay=timedelta(hours=1))
        if number == 2:
            await made[0].publish(work, {"number": 3}, key="k", if_running="again")
        async with context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({"number": number}, session=session)
        return str(number)

    made: list[Any] = []
    async with working(app) as bench:
        made.append(bench.client)
        await bench.client.publish(work, {"number": 1}, key="k", if_running="again")
        await started.wait()
        await bench.client.publish(work, {"number": 2}, key="k", if_running="again")
        go_on.set()
        await until(lambda: seen[:2] == [1, 2], message="the retry's delay is that of the former round")
        await until(lambda: seen[-1] == 3)
        await bench.status("work:k", "SUCCESS")
        effects = mongo[database_name]["effects"]
        assert sorted(effect["number"] for effect in effects.find()) == [2, 3]


async def test_a_stopped_worker_hands_back_and_the_next_round_begins(working: Working) -> None:
    app, started = App(), asyncio.Event()

    @app.task
    async def work(number: int) -> None:
        started.set()
        await asyncio.Event().wait()

    async with working(app, shutdown_timeout=timedelta(0)) as bench:
        await bench.client.publish(work, {"number": 1}, key="k", if_running="again")
        await started.wait()
        await bench.client.publish(work, {"number": 2}, key="k", if_running="again")
        bench.worker.stop()
        await asyncio.wait((bench.life,))
        found = bench.document("work:k")
        assert (found["task_state"]["status"], found["params"]) == ("INIT", {"number": 2})
        assert "again" not in found


def test_middleware_runs_around_calls_that_gather(mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    app, seen = App(), list[Any]()

    @app.middleware("publish")
    def tag(spec: Any) -> Any:
        spec.params = {"number": spec.params["number"] + 10}
        seen.append((yield).updated)

    @app.task
    async def work(number: int) -> None: ...

    around: PublishMiddleware = app.around.publish
    with Client(mongo_uri, database=database_name, middleware=around) as client:
        for number in (1, 2):
            client.publish(work, {"number": number}, key="k", debounce=60)
        client.publish_many([TaskSpec(work, {"number": 3}, key="k")], collect=False, debounce=60)
        assert client.get(work, "k").params == {"number": 13}
    assert seen == [False, True, True]
