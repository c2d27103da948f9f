"""Values that handlers return after their transactions have committed: all who need one wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Context, Flow, Next
from mtask.errors import DatabaseUnavailable, FlowWaitTimeout, ResultLost, TaskRunning, WaitTimeout
from mtask.features.callbacks import operations as callbacks
from mtask.features.flows import settle as settling
from mtask.kernel.document.options import TaskOptions
from mtask.kernel.document.status import RunStatus, WorkerStatus
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions, workers
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery import reaper
from mtask.kernel.worker.running.transactions import RunTransactions
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client, Document, until

both_kinds = pytest.mark.parametrize("kind", ["async", "plain"])


class Gate:
    """What handlers wait for, between their commits and their ends. Each has passed `committed` before."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.value: Any = "the value"
        self.error: BaseException | None = None

    def pass_through(self) -> Any:
        """Wait for the gate in a thread; return the value, or raise the error."""
        self.open.wait()
        if self.error is not None:
            raise self.error
        return self.value


class Unreadable:
    """Stands for another object, as those of frameworks do, and cannot tell for which."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("outside of its application")


def gated(gate: Gate) -> App:
    """Return an app whose handlers go on after the commit, until the gate opens."""
    app = App()

    @app.task
    async def go_on_async(context: Context) -> Any:
        async with context.transaction():
            pass
        return await asyncio.to_thread(gate.pass_through)

    @app.task
    def go_on_plain(context: Context) -> Any:
        with context.transaction():
            pass
        return gate.pass_through()

    @app.task(next="read")
    async def go_on_as_read(context: Context) -> Any:
        async with context.transaction():
            pass
        return await asyncio.to_thread(gate.pass_through)

    @app.task
    async def set_before(context: Context) -> Any:
        async with context.transaction():
            context.set_result("set before")
        return await asyncio.to_thread(gate.pass_through)

    @app.task
    async def say_none(context: Context) -> None:
        async with context.transaction():
            pass
        await asyncio.to_thread(gate.pass_through)

    @app.task
    async def read(context: Context) -> dict[str, Any]:
        return await context.results()

    return app


@asynccontextmanager
async def bench_of(working: Working, gate: Gate, **options: Any) -> AsyncIterator[Bench]:
    async with working(gated(gate), **options) as bench:
        try:
            yield bench
        finally:
            gate.open.set()


def run_in(bench: Bench, task_id: str) -> Document:
    """Return the last run of a task."""
    run: Document = bench.state(task_id)["worker_states"][-1]
    return run


async def is_final(bench: Bench, task_id: str) -> None:
    await bench.status(task_id, "SUCCESS")
    assert run_in(bench, task_id)["returns_owed_by"]


@both_kinds
async def test_readers_wait_for_a_value_that_comes_after_the_commit(working: Working, kind: str) -> None:
    gate, name = Gate(), f"go_on_{kind}"
    async with bench_of(working, gate) as bench:
        client = bench.client
        await client.publish(name, key="1", retain_success=3600)
        await is_final(bench, f"{name}:1")
        for reading in (client.wait(name, "1", timeout=0.2), client.wait_all([(name, "1")], timeout=0.2)):
            with pytest.raises(WaitTimeout):
                await reading
        assert not (await client.get(name, "1")).is_complete
        owing = await client.get(name, "1")
        assert "expire_time" not in bench.document(f"{name}:1"), "its retention waits, too"
        with pytest.raises(TaskRunning):
            await client.remove(name, "1")
        result = asyncio.create_task(client.result(name, "1"))
        several = asyncio.create_task(client.wait_all([(name, "1")]))
        gate.open.set()
        assert await result == "the value"
        assert [task.returns for task in await several] == ["the value"]
        assert client.etag(owing) != client.etag(await client.get(name, "1"))
        document = bench.document(f"{name}:1")
        assert "owed_since" not in document
        assert "returns_owed_by" not in run_in(bench, f"{name}:1")
        assert document["expire_time"] - document["task_state"]["finish_time"] == timedelta(hours=1)


async def test_dependents_callbacks_and_the_next_task_wait_for_the_value(working: Working) -> None:
    gate = Gate()
    async with bench_of(working, gate) as bench:
        flow = Flow("f")
        first = flow.add("first", "go_on_async")
        flow.add("second", "read", after=[first])
        await bench.client.publish_flow(flow)
        hook = {"url": "https://hooks.example.com/"}
        await bench.client.publish("go_on_as_read", key="1", callback=hook)
        ids = ["go_on_async:f/first", "go_on_as_read:1"]
        for task_id in ids:
            await is_final(bench, task_id)
        await bench.store.run(settling.settle_all(ids))
        await bench.store.run(callbacks.settle_all(ids))
        assert bench.state("read:f/second")["status"] == "WAITING"
        assert bench.tasks.count_documents({"name": "mtask/callback"}) == 0
        assert bench.tasks.count_documents({"name": "read", "chain": {"$exists": True}}) == 0
        with pytest.raises(FlowWaitTimeout):
            await bench.client.wait_flow("f", timeout=0.1)
        gate.open.set()
        assert await bench.client.result("read", "f/second") == {"first": "the value"}
        (continued,) = await until(lambda: list(bench.tasks.find({"name": "read", "chain": {"$exists": True}})))
        assert await bench.client.result("read", continued["key"]) == {"go_on_as_read": "the value"}
        await until(lambda: bench.tasks.count_documents({"name": "mtask/callback"}) == 1)
        await until(lambda: bench.tasks.count_documents({"owed_since": {"$exists": True}}) == 0)


@pytest.mark.parametrize(
    ("value", "error", "reason"),
    [
        (None, ValueError("secret"), "the handler raised ValueError after its transaction had committed"),
        (object(), None, "cannot be stored as BSON"),
        (Next("read"), None, "Next came after the transaction had committed"),
        ("x" * 17_000_000, None, "too large"),
        (Unreadable(), None, "cannot be read: RuntimeError: outside of its application"),
    ],
    ids=["raises", "unstorable", "next", "too-large", "unreadable"],
)
async def test_what_comes_after_the_commit_and_cannot_be_stored_is_told_to_be_lost(
    working: Working, value: Any, error: BaseException | None, reason: str
) -> None:
    gate = Gate()
    gate.value, gate.error = value, error
    gate.open.set()
    async with bench_of(working, gate) as bench:
        flow = Flow("f")
        first = flow.add("first", "go_on_async")
        flow.add("second", "read", after=[first], max_retries=0)
        await bench.client.publish_flow(flow)
        with pytest.raises(ResultLost, match=reason):
            await bench.client.result("go_on_async", "f/first")
        run = run_in(bench, "go_on_async:f/first")
        assert (run["status"], run["returns"]) == ("SUCCESS", None)
        assert "returns_owed_by" not in run
        assert "secret" not in run["returns_lost"]
        await bench.status("read:f/second", "FAIL")
        assert "ResultLost" in run_in(bench, "read:f/second")["fail_reason"]


async def test_value_that_is_set_before_the_commit_and_a_handler_that_says_none_owe_nothing(working: Working) -> None:
    gate = Gate()
    async with bench_of(working, gate) as bench:
        for name in ("set_before", "say_none"):
            await bench.client.publish(name, key="1")
        assert await bench.client.result("set_before", "1") == "set before"
        assert await bench.client.result("say_none", "1") is None
        assert bench.tasks.count_documents({"owed_since": {"$exists": True}}) == 0


async def test_value_of_a_round_before_a_rerun_is_stored_in_its_own_run(working: Working) -> None:
    gate, later = Gate(), Gate()
    app, gates = App(), [later, gate]

    @app.task
    async def go_on(context: Context) -> Any:
        mine = gates.pop()
        async with context.transaction():
            pass
        return await asyncio.to_thread(mine.pass_through)

    later.value = "the later value"
    async with working(app) as bench, working(app, "w2"):
        try:
            await bench.client.publish("go_on", key="1")
            await is_final(bench, "go_on:1")
            await bench.client.rerun("go_on", "1")
            await until(lambda: len(bench.state("go_on:1")["worker_states"]) == 2)
            await is_final(bench, "go_on:1")
            later.open.set()
            assert await bench.client.result("go_on", "1") == "the later value"
            assert bench.state("go_on:1")["worker_states"][0]["returns_owed_by"], "that one is still owed"
            gate.open.set()
            await until(lambda: "owed_since" not in bench.document("go_on:1"))
            runs = bench.state("go_on:1")["worker_states"]
            assert [run["returns"] for run in runs] == ["the value", "the later value"]
        finally:
            gate.open.set()
            later.open.set()


async def test_value_of_one_seat_is_waited_for_when_the_other_seat_has_ended_the_task(
    working: Working, database_name: str, mongo: Client
) -> None:
    gate, committed = Gate(), asyncio.Event()
    app, two = gated(gate), TaskOptions(concurrent_worker_cnt=2)
    kept = TaskOptions(concurrent_worker_cnt=2, retain_success=3600)

    @app.task
    async def seat(context: Context, adds: bool) -> Any:
        if context.worker_id == "w2":
            await committed.wait()
            if adds:
                await context.add_child("child", "say_none")
                marked = mongo[database_name]["tasks"].find_one({"_id": context.task.id, "owed_since": {"$ne": None}})
                assert marked is not None, "the child took the mark of the value along"
            return "of the other seat"
        async with context.transaction():
            pass
        committed.set()
        return await asyncio.to_thread(gate.pass_through)

    async with working(app) as bench, working(app, "w2"):
        try:
            for key in ("f/first", "alone"):
                committed.clear()
                gate.open.clear()
                task_id = f"seat:{key}"
                if key == "alone":
                    await bench.client.publish("seat", {"adds": False}, key=key, **kept)
                else:
                    flow = Flow("f")
                    first = flow.add("first", "seat", {"adds": True}, **two)
                    flow.add("second", "read", after=[first])
                    await bench.client.publish_flow(flow)
                await bench.status(task_id, "SUCCESS")
                await bench.store.run(settling.settle_all([task_id]))
                with pytest.raises(WaitTimeout):
                    await bench.client.wait("seat", key, timeout=0.1)
                assert "expire_time" not in bench.document(task_id)
                if key != "alone":
                    assert bench.state("read:f/second")["status"] == "WAITING"
                gate.open.set()
                await bench.client.wait("seat", key)
                values = {run["returns"] for run in bench.state(task_id)["worker_states"]}
                assert values == {"the value", "of the other seat"}
                await until(lambda: "owed_since" not in bench.document(task_id))  # noqa: B023
            results = await bench.client.result("read", "f/second")
            assert set(results) == {"first", "child"}
            assert "expire_time" in bench.document("seat:alone")
        finally:
            gate.open.set()


async def commit_elsewhere(bench: Bench, worker: workers.Registration, task_id: str) -> str:
    """Let another worker commit the SUCCESS of a task; return the run_id. Its handler is still to return."""
    await bench.store.run(workers.register(worker))
    await bench.store.run(claims.claim([task_id], worker.worker_id, worker.incarnation))
    run_id = f"{worker.incarnation}-0"
    outcome = Outcome(task_id, run_id, RunStatus.SUCCESS, returns_owed_by=worker.incarnation)
    assert await bench.store.run(claims.finish_in_transaction(outcome))
    return run_id


async def test_value_of_a_handler_that_did_not_learn_of_its_commit_is_told_to_be_lost(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App()
    commit = transactions.commit

    def unanswered(outcome: Outcome, is_lease_valid: Any) -> Operation[None]:
        yield from commit(outcome, is_lease_valid)
        raise DatabaseUnavailable("the answer is lost")

    @app.task
    async def go(context: Context) -> str:
        async with context.transaction():
            pass
        return "the value"

    monkeypatch.setattr(transactions, "commit", unanswered)
    async with working(app) as bench:
        await bench.client.publish("go", key="k")
        with pytest.raises(ResultLost, match="the answer was lost"):
            await bench.client.result("go", "k", timeout=60)
        await until(lambda: "owed_since" not in bench.document("go:k"))


async def test_handler_that_is_cancelled_while_it_commits_goes_on_when_that_is_over(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, goes_on = App(), asyncio.Event()
    end = RunTransactions.end

    async def slow(*given: Any) -> None:
        await goes_on.wait()
        await end(*given)

    @app.task
    async def go(context: Context) -> str:
        own = asyncio.current_task()
        assert own is not None
        async with context.transaction():
            asyncio.get_running_loop().call_soon(own.cancel)
        return "the value"

    monkeypatch.setattr(RunTransactions, "end", slow)
    async with working(app) as bench:
        await bench.client.publish("go", key="k", max_retries=0)
        await until(lambda: any(task.cancelling() for task in asyncio.all_tasks()))
        goes_on.set()
        with pytest.raises(ResultLost, match="CancelledError after its transaction had committed"):
            await bench.client.result("go", "k", timeout=10)


async def test_result_that_is_set_after_the_commit_is_stored_and_a_second_one_is_refused(working: Working) -> None:
    app, refused = App(), list[str]()

    @app.task
    async def late(context: Context) -> str:
        async with context.transaction():
            pass
        context.set_result("set")
        return "returned"

    @app.task
    async def twice(context: Context) -> None:
        async with context.transaction():
            context.set_result("in the block")
        try:
            context.set_result("too late")
        except RuntimeError as error:
            refused.append(str(error))

    async with working(app) as bench:
        for name, value in (("late", "set"), ("twice", "in the block")):
            await bench.client.publish(name, key="k")
            assert await bench.client.result(name, "k", timeout=20) == value
    assert len(refused) == 1
    assert "call set_result in its block" in refused[0]


def registered(worker_id: str, timeout: timedelta) -> workers.Registration:
    incarnation = f"incarnation-{worker_id}"
    return workers.Registration(worker_id, incarnation, "host", 1, None, ["default"], [], 1, "0", timeout)


async def test_value_of_a_dead_worker_is_told_to_be_lost_and_that_of_a_live_one_is_not(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "SILENCE", 6.0)
    app = App()

    @app.task
    async def read(context: Context) -> dict[str, Any]:
        return await context.results()

    async with working(app) as bench:
        runs = {}
        for name, lives in (("live", timedelta(hours=1)), ("dead", timedelta(milliseconds=1))):
            flow = Flow(name)
            first = flow.add("first", "elsewhere", retain_success=0)
            flow.add("second", "read", after=[first], max_retries=0)
            await bench.client.publish_flow(flow)
            await bench.client.publish("elsewhere", key=name, callback={"url": "https://hooks.example.com/"})
            runs[name] = await commit_elsewhere(bench, registered(name, lives), f"elsewhere:{name}/first")
            await commit_elsewhere(bench, registered(name, lives), f"elsewhere:{name}")
        with pytest.raises(ResultLost, match="died or stopped"):
            await bench.client.result("elsewhere", "dead")
        await bench.status("read:dead/second", "FAIL")
        await until(lambda: bench.tasks.count_documents({"name": "mtask/callback"}) == 1)
        assert not await bench.store.run(transactions.store_return("elsewhere:dead/first", runs["dead"], "too late"))
        for task_id in ("elsewhere:live", "elsewhere:live/first"):
            assert run_in(bench, task_id)["returns_owed_by"] == "incarnation-live"
        assert bench.state("read:live/second")["status"] == "WAITING"
        last = workers.Heartbeat(WorkerStatus.STOPPED, 0, 0, [])
        await bench.store.run(workers.heartbeat(registered("live", timedelta(hours=1)), last))
        with pytest.raises(ResultLost, match="died or stopped"):
            await bench.client.result("elsewhere", "live")
