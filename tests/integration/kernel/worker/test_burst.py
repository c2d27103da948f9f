"""A burst: a worker runs what is due, and stops by itself once nothing is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest

from mtask import App, Client, Context, Fail, Flow, Next, Retry, TaskSpec
from mtask.features.isolation.options import ExecutorOptions
from mtask.kernel.document.status import WorkerStatus
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from tests.integration.features.isolation import isolated
from tests.mongo import PATIENCE, fail_command, until
from tests.mongo import Client as Mongo

HOUR = 3600
ISOLATED = "tests.integration.features.isolation.isolated:app"


@pytest.fixture
def client(client: Client) -> Client:
    client.init()
    return client


def made() -> App:
    app = App()

    @app.task
    async def work(context: Context, value: int = 0) -> int:
        return value

    @app.task
    async def first() -> Next:
        return Next("work", {"value": 7})

    @app.task
    async def fails() -> None:
        raise ValueError("no luck")

    @app.task
    def later(context: Context) -> None:
        raise Fail("tried twice") if context.attempt > 1 else Retry(delay=0)

    @app.task
    async def much_later() -> None:
        raise Retry(delay=3600)

    return app


def bursting(client: Client, uri: str, app: App, worker_id: str = "w", **options: Any) -> Worker:
    given = WorkerOptions(uri, client.database_name, worker_id=worker_id, burst=True, scheduler=False, **options)
    return Worker(app, given)


async def ended(worker: Worker) -> Worker:
    """Run a worker; return it when it has stopped by itself."""
    async with asyncio.timeout(PATIENCE):
        await worker.run()
    return worker


async def burst(client: Client, uri: str, app: App, worker_id: str = "w", **options: Any) -> Worker:
    return await ended(bursting(client, uri, app, worker_id, **options))


def states(client: Client) -> dict[str, str]:
    return {task.key: str(task.status) for task in client.find(limit=0)}


async def test_burst_runs_what_is_due_and_leaves_what_is_later_or_paused_or_of_others(
    client: Client, mongo_uri: str
) -> None:
    client.publish_many([TaskSpec("work", key=f"due/{n}") for n in range(30)])
    client.publish("work", key="from next", delay=3600)
    client.publish("first", key="first")
    flow = Flow("flow")
    flow.add("two", "work", after=[flow.add("one", "work")])
    client.publish_flow(flow)
    client.publish("fails", key="final", max_retries=2, retry_delay=0)
    client.publish("fails", key="tried again", retry_delay=HOUR)
    client.publish("later", key="retried")
    client.publish("much_later", key="much later")
    client.publish("work", key="of another worker", specific_worker_ids=["x"])
    client.publish("nobody", key="of no handler")
    client.publish("work", key="in a paused queue", queue="mail")
    client.publish("work", key="of a paused tenant", tenant="acme")
    client.pause(queue="mail")
    client.pause(tenant="acme")
    await burst(client, mongo_uri, made(), queues=["default", "mail"])
    found = states(client)
    waiting = {key for key, status in found.items() if status == "INIT"}
    assert waiting == {
        *("from next", "tried again", "much later", "of another worker", "of no handler"),
        *("in a paused queue", "acme:of a paused tenant"),
    }
    assert {key for key, status in found.items() if status == "FAIL"} == {"final", "retried"}
    assert sum(status == "SUCCESS" for status in found.values()) == 30 + 2 + 2, found
    assert client.get("fails", "final").task_state.failed_cnt == 3
    assert len(client.get("later", "retried").runs) == 2


async def test_burst_that_finds_nothing_ends(client: Client, mongo_uri: str) -> None:
    worker = await burst(client, mongo_uri, made())
    assert worker.tally.run_cnt == 0
    assert [(each.worker_id, each.status) for each in client.workers(live_only=False)] == [("w", "stopped")]


async def test_burst_waits_for_its_limits(client: Client, mongo_uri: str) -> None:
    client.publish_many([TaskSpec("work", key=str(n)) for n in range(6)])
    client.limit("default", concurrency=1, rate=(3, 0.3))
    app, begun = App(), list[float]()

    @app.task
    async def work() -> None:
        begun.append(monotonic())

    await burst(client, mongo_uri, app)
    assert set(states(client).values()) == {"SUCCESS"}
    assert begun[3] - begun[0] >= 0.25, "the second three wait for the next window"


async def test_burst_waits_for_isolated_handlers(client: Client, mongo_uri: str) -> None:
    client.publish_many([TaskSpec("echo", {"value": n}, key=str(n)) for n in range(4)])
    await burst(client, mongo_uri, isolated.app, executors=ExecutorOptions(ISOLATED, count=1))
    assert [client.get("echo", str(n)).returns["value"] for n in range(4)] == [0, 1, 2, 3]


async def test_bursts_share_a_backlog_and_all_end(client: Client, mongo_uri: str) -> None:
    client.publish_many([TaskSpec("work", key=str(n)) for n in range(200)])
    both = (burst(client, mongo_uri, made(), worker_id, concurrency=5) for worker_id in ("a", "b"))
    workers = await asyncio.gather(*both)
    assert client.count(status="SUCCESS") == 200
    assert sum(worker.tally.run_cnt for worker in workers) == 200


async def test_burst_does_not_end_while_a_task_runs_or_its_end_is_unwritten(
    client: Client, mongo_uri: str, mongo: Mongo, caplog: pytest.LogCaptureFixture
) -> None:
    app, started, gate = made(), asyncio.Event(), asyncio.Event()

    @app.task
    async def held() -> None:
        started.set()
        await gate.wait()

    client.publish("held", key="held")
    worker = bursting(client, mongo_uri, app)
    life = asyncio.create_task(ended(worker))
    await started.wait()
    await until(lambda: worker.status is WorkerStatus.RUNNING, message="it looks whether it is done")
    await asyncio.wait((life,), timeout=1)  # it looks several times, and the task that it runs is not due
    assert worker.status is WorkerStatus.RUNNING
    with caplog.at_level(logging.WARNING, "mtask.worker"), refused_writes(mongo, client.database_name):
        gate.set()
        await until(lambda: caplog.text.count("finish failed, will be sent again") >= 5)
        assert worker.status is WorkerStatus.RUNNING
    await life
    assert client.get("held", "held").status == "SUCCESS"


@contextmanager
def refused_writes(mongo: Mongo, database: str) -> Iterator[None]:
    """Let the server refuse the ends of runs of the worker `w` during the block."""
    where = {"app_name": "mtask-worker:w", "namespace": f"{database}.tasks"}
    with fail_command(mongo, ["update", "findAndModify"], error_code=91, **where):  # type: ignore[arg-type]
        yield


async def test_burst_looks_again_after_a_look_that_fails(
    client: Client, mongo_uri: str, mongo: Mongo, caplog: pytest.LogCaptureFixture
) -> None:
    app = made()
    gate, started = asyncio.Event(), asyncio.Event()

    @app.task
    async def held() -> None:
        started.set()
        await gate.wait()

    client.publish("held", key="held")
    worker = bursting(client, mongo_uri, app)
    life = asyncio.create_task(ended(worker))
    await started.wait()
    await until(lambda: worker.status is WorkerStatus.RUNNING, message="it looks whether it is done")
    where = f"{client.database_name}.tasks"
    with caplog.at_level(logging.WARNING, "mtask.worker"):
        with fail_command(mongo, "find", error_code=96, app_name="mtask-worker:w", namespace=where):
            gate.set()
            await until(lambda: "cannot look for due tasks" in caplog.text or life.done())
        client.publish("work", key="meanwhile")
        await life
    assert "cannot look for due tasks" in caplog.text
    assert states(client) == {"held": "SUCCESS", "meanwhile": "SUCCESS"}
