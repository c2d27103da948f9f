"""Middleware around publishing, running and finishing, and hooks of the worker, on a real worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any

import pytest

from mtask import App, AsyncClient, Client, Context, Fail, TaskSpec
from mtask.app.middleware import FinishCall, RunCall
from mtask.errors import InvalidInput
from mtask.kernel.document.status import RunStatus
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from tests.integration.worker_harness import Working
from tests.mongo import Client as Mongo
from tests.mongo import until

Middle = Generator[None, Any, None]


# --- publishing -----------------------------------------------------------------------------------------------


def test_publish_within_middleware_may_change_the_spec_and_sees_what_came_of_it(
    mongo_uri: str, database_name: str
) -> None:
    app, seen = App(), list[Any]()

    @app.middleware("publish")
    def urgent(spec: TaskSpec) -> Middle:
        spec.options["priority"] = 7
        seen.append(spec.key)
        published = yield
        seen.append(published.created)

    def check(client: Client) -> None:
        first = client.publish("mail", {}, key="1")
        assert client.get("mail", "1").task_option.priority == 7
        spec = TaskSpec("mail", {}, key="2")
        client.publish_many([spec, TaskSpec("mail", {}, key="1")])
        assert (first.created, spec.options) == (True, {}), "the caller's own spec stays as it was"
        assert client.get("mail", "2").task_option.priority == 7

    with Client(mongo_uri, database=database_name, middleware=app.around.publish) as client:
        check(client)
    assert seen == ["1", True, "2", "1", True, False]

    async def alike() -> None:
        async with AsyncClient(mongo_uri, database=database_name, middleware=app.around.publish) as client:
            await client.publish("mail", {}, key="3")
            assert (await client.get("mail", "3")).task_option.priority == 7

    asyncio.run(alike())


def test_publish_that_a_middleware_refuses_publishes_nothing(mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    seen: list[BaseException] = []

    def watching(spec: TaskSpec) -> Middle:
        try:
            yield
        except Exception as error:
            seen.append(error)
            raise

    def refusing(spec: TaskSpec) -> Middle:
        if spec.params is None:
            raise InvalidInput("give params.", field="params")
        yield

    with Client(mongo_uri, database=database_name, middleware=[watching, refusing]) as client:
        with pytest.raises(InvalidInput, match="give params"):
            client.publish("mail", key="1")
        with pytest.raises(InvalidInput, match="give params"):
            client.publish_many([TaskSpec("mail", {}, key="2"), TaskSpec("mail", key="3")])
        with pytest.raises(InvalidInput):
            client.publish("mail", {}, key="")
        with pytest.raises(InvalidInput, match="not a TaskSpec"):
            client.publish_many(["mail"])  # type: ignore[list-item]
    assert len(seen) == 4
    assert mongo[database_name]["tasks"].count_documents({}) == 0


# --- running and finishing -----------------------------------------------------------------------------------------


async def test_run_and_finish_are_composed_around_sync_and_async_handlers(working: Working) -> None:
    app, seen = App(), list[tuple[Any, ...]]()

    @app.middleware
    def around(run: RunCall) -> Middle:
        seen.append(("run", run.task.id, run.attempt, run.context.worker_id))
        try:
            seen.append(("returned", (yield)))
        except Exception as error:
            seen.append(("raised", str(error)))
            raise

    @app.middleware
    async def patient(run: RunCall) -> AsyncGenerator[None, Any]:
        await asyncio.sleep(0)
        seen.append(("inner", run.run_id == run.context.run_id))
        yield
        await asyncio.sleep(0)

    @app.middleware("finish")
    def outcome(finish: FinishCall) -> Middle:
        is_written = yield
        seen.append(("finish", finish.task.id, finish.status, finish.reason, finish.returns, is_written))

    @app.task(max_retries=0)
    async def coming(value: int) -> int:
        return value + 1

    @app.task(max_retries=0)
    def going(context: Context) -> None:
        raise ValueError(f"on {threading.current_thread().name[:13]}")

    async with working(app) as bench:
        await bench.client.publish(coming, {"value": 1}, key="1")
        await bench.status("coming:1", "SUCCESS")
        await until(lambda: len(seen) == 4, message="its finish is told")
        await bench.client.publish(going, key="1")
        await bench.status("going:1", "FAIL")
        await until(lambda: len(seen) == 8, message="its finish is told")
    assert seen[:4] == [
        ("run", "coming:1", 1, "w1"),
        ("inner", True),
        ("returned", 2),
        ("finish", "coming:1", RunStatus.SUCCESS, None, 2, True),
    ]
    assert seen[4:7] == [("run", "going:1", 1, "w1"), ("inner", True), ("raised", "on mtask-handler")]
    assert seen[7][:3] == ("finish", "going:1", RunStatus.FAIL)
    assert "on mtask-handler" in seen[7][3]


async def test_middleware_may_refuse_a_run_and_changes_nothing_after_it(working: Working) -> None:
    app, called = App(), list[str]()

    @app.middleware
    def swallowing(run: RunCall) -> Middle:
        try:
            yield
        except ValueError:
            return  # seen, and not undone

    @app.middleware
    def breaking(run: RunCall) -> Middle:
        if run.task.key == "refused":
            raise Fail("not on this worker")
        yield
        raise RuntimeError("too late to matter")

    @app.middleware("finish")
    def broken(finish: FinishCall) -> Middle:
        if finish:
            raise RuntimeError("the outcome is written all the same")
        yield

    @app.task(max_retries=0)
    async def work(context: Context) -> str:
        called.append(context.task.key)
        if context.task.key == "failing":
            raise ValueError("its own")
        return "done"

    async with working(app) as bench:
        for key in ("refused", "failing", "fine"):
            await bench.client.publish(work, key=key)
        refused = await bench.status("work:refused", "FAIL")
        failing = await bench.status("work:failing", "FAIL")
        fine = await bench.status("work:fine", "SUCCESS")
        assert refused["worker_states"][0]["fail_reason"] == "not on this worker"
        assert "its own" in failing["worker_states"][0]["fail_reason"]
        assert fine["worker_states"][0]["returns"] == "done"
        await bench.at_rest()
    assert sorted(called) == ["failing", "fine"]


# --- hooks ------------------------------------------------------------------------------------------------------


async def test_handlers_get_the_values_of_hooks_which_end_after_the_last_run(working: Working) -> None:
    app, said = App(), list[str]()

    @app.on_start
    async def pool() -> AsyncIterator[list[str]]:
        opened = ["open"]
        yield opened
        opened[0] = "closed"
        said.append("pool closed")

    @app.on_start
    def greeting() -> str:
        return "hello"

    @app.on_start
    def sync_pool() -> Iterator[int]:
        yield 5

    @app.on_stop
    def goodbye() -> None:
        said.append("goodbye")

    @app.task
    async def work(context: Context) -> str:
        await asyncio.sleep(0)
        said.append("ran")
        return f"{context.value(greeting)} {context.value(pool)[0]} {context.value(sync_pool)}"

    @app.task(max_retries=0)
    def lost(context: Context) -> None:
        context.value(test_handlers_get_the_values_of_hooks_which_end_after_the_last_run)  # type: ignore[arg-type]

    async with working(app) as bench:
        await bench.client.publish(work, key="1")
        state = await bench.status("work:1", "SUCCESS")
        assert state["worker_states"][0]["returns"] == "hello open 5"
        await bench.client.publish(lost, key="1")
        state = await bench.status("lost:1", "FAIL")
        assert "register it with @app.on_start" in state["worker_states"][0]["fail_reason"]
    assert said == ["ran", "pool closed", "goodbye"]


def test_worker_whose_hook_fails_says_so_and_is_not_left_on_record_as_live(
    mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    app = App()

    @app.task
    async def work() -> None: ...

    @app.on_start
    async def pool() -> None:
        raise OSError("no such host")

    worker = Worker(app, WorkerOptions(mongo_uri, database_name, worker_id="w1"))
    with pytest.raises(Exception, match="on_start failed: OSError: no such host"):
        asyncio.run(worker.run())
    found = mongo[database_name]["workers"].find_one({"_id": "w1"})
    assert found is not None
    assert found["status"] == "stopped"
