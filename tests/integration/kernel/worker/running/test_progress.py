"""What a handler tells of its progress: in its run while it goes on, with what ends it, and there when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest

from mtask import App, Context, Retry
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import claim as claims
from tests.integration.worker_harness import Bench, Working
from tests.mongo import until

HALF = {"fraction": 0.5, "message": "half"}


def told(bench: Bench, task_id: str, place: int = -1) -> dict[str, Any]:
    """Return what is stored of a run's progress, but for its time; nothing where there is no run."""
    runs = bench.state(task_id)["worker_states"]
    progress: dict[str, Any] = runs[place].get("progress", {}) if runs else {}
    assert not progress or isinstance(progress["time"], datetime)
    return {field: value for field, value in progress.items() if field != "time"}


async def test_it_is_written_while_the_handler_runs_and_stays(working: Working) -> None:
    app, gate = App(), asyncio.Event()

    @app.task
    async def work(context: Context) -> None:
        context.progress(0.25, "begun")
        await gate.wait()

    async with working(app) as bench:
        await bench.client.publish("work", key="1")  # it is pinged every 30 s
        await until(lambda: told(bench, "work:1") == {"fraction": 0.25, "message": "begun"}, 10.0, "written")
        (run,) = bench.state("work:1")["worker_states"]
        assert run["status"] == "RUNNING"
        assert run["claim_time"] <= run["progress"]["time"] < run["ping_expire_time"]
        gate.set()
        await bench.status("work:1", "SUCCESS")
        assert bench.state("work:1")["worker_states"][0]["progress"] == run["progress"]


async def test_however_often_it_is_told_it_is_sent_once_a_second_and_the_last_stands(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, is_enough = App(), asyncio.Event()
    sent: list[float] = []
    ping = claims.ping

    def noted(
        runs: Mapping[str, str], lease_ms: Any, progress: Mapping[str, Any] | None = None, *more: Any
    ) -> Operation[Any]:
        if progress:
            sent.append(monotonic())
        return ping(runs, lease_ms, progress, *more)

    monkeypatch.setattr(claims, "ping", noted)

    @app.task
    async def work(context: Context) -> int:
        count = 0
        while not is_enough.is_set():
            count += 1
            context.progress(message=f"{count} done")
            await asyncio.sleep(0.001)
        return count

    async with working(app) as bench:
        await bench.client.publish("work", key="1")
        await until(lambda: len(sent) >= 3, message="sent three times")
        is_enough.set()
        state = await bench.status("work:1", "SUCCESS")
        assert told(bench, "work:1") == {"message": f"{state['worker_states'][0]['returns']} done"}
    assert all(later - earlier > 0.9 for earlier, later in pairwise(sent))


async def test_whatever_ends_the_run_takes_the_last_along(working: Working) -> None:
    app = App()

    @app.task
    async def succeeds(context: Context, number: int) -> None:
        context.progress(0.1)
        context.progress(number / 10, f"task {number}")

    @app.task
    def plain(context: Context) -> None:
        context.progress(0.5, "half")

    @app.task(max_retries=0)
    async def fails(context: Context) -> None:
        context.progress(0.5, "half")
        raise ValueError("broken")

    @app.task
    async def goes_back(context: Context) -> None:
        context.progress(0.5, "half")
        raise Retry(delay=3600)

    @app.task
    async def commits(context: Context) -> None:
        context.progress(0.5, "half")
        async with context.transaction():
            pass

    async with working(app) as bench:
        with bench.backed_up():  # what is plain goes in groups
            for number in range(5):
                await bench.client.publish("succeeds", {"number": number}, key=str(number))
        others: list[Any] = [plain, fails, goes_back, commits]
        for task in others:
            await bench.client.publish(task, key="1")
        ends = {"plain:1": "SUCCESS", "fails:1": "FAIL", "commits:1": "SUCCESS"}
        for task_id, status in [*ends.items(), *((f"succeeds:{number}", "SUCCESS") for number in range(5))]:
            await bench.status(task_id, status)
        await until(lambda: bench.state("goes_back:1")["worker_states"][0]["status"] == "CANCELED")
        assert {task_id: told(bench, task_id) for task_id in [*ends, "goes_back:1"]} == dict.fromkeys(
            [*ends, "goes_back:1"], HALF
        )
        for number in range(5):
            assert told(bench, f"succeeds:{number}") == {"fraction": number / 10, "message": f"task {number}"}


async def test_each_run_has_its_own(working: Working) -> None:
    app = App()

    @app.task(retry_delay=0)
    async def work(context: Context) -> None:
        if context.attempt == 1:
            context.progress(0.5, "half")
            raise ValueError("once")

    async with working(app) as bench:
        await bench.client.publish("work", key="1", retry_delay=0)
        await bench.status("work:1", "SUCCESS")
        assert [told(bench, "work:1", place) for place in (0, 1)] == [HALF, {}]


async def test_a_ping_that_fails_loses_nothing(working: Working) -> None:
    app, tells, gate = App(), asyncio.Event(), asyncio.Event()

    @app.task
    async def work(context: Context) -> None:
        await tells.wait()
        context.progress(0.5, "half")
        await gate.wait()

    async with working(app) as bench:
        await bench.client.publish("work", key="1")
        await bench.status("work:1", "RUNNING")
        with bench.failing("findAndModify", times=2, closeConnection=True):
            tells.set()
            await until(lambda: told(bench, "work:1") == HALF, message="written in the end")
        gate.set()
        await bench.status("work:1", "SUCCESS")


async def test_what_is_told_while_a_ping_is_under_way_is_written_too(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, gate = App(), asyncio.Event()
    contexts: list[Context] = []

    @app.task
    async def work(context: Context) -> None:
        contexts.append(context)
        context.progress(0.25, "begun")
        await gate.wait()

    async with working(app) as bench:
        store = bench.pings
        run = store.run

        def run_and_tell(operation: Any) -> Any:
            result = run(operation)
            if operation.__name__ == "ping" and contexts:
                contexts.pop().progress(0.5, "half")  # the reply has not been read yet
            return result

        monkeypatch.setattr(store, "run", run_and_tell)
        await bench.client.publish("work", key="1")  # it is pinged every 30 s
        await until(lambda: told(bench, "work:1") == HALF, 10.0, "written")
        assert bench.state("work:1")["status"] == "RUNNING"
        gate.set()
        await bench.status("work:1", "SUCCESS")


async def test_what_is_no_progress_is_refused_and_nothing_stored(working: Working) -> None:
    app = App()
    nonsense: list[tuple[Any, Any]] = [
        (None, None), (-0.1, None), (1.1, None), (float("nan"), None), (True, None), (0.5, 5), (0.5, "\ud800"),
    ]  # fmt: skip

    @app.task
    async def work(context: Context) -> int:
        refused = 0
        for fraction, message in nonsense:
            try:
                context.progress(fraction, message)
            except ValueError:
                refused += 1
        return refused

    @app.task
    async def talks(context: Context) -> None:
        context.progress(message="x" * 100_000)

    async with working(app) as bench:
        await bench.client.publish("work", key="1")
        await bench.client.publish("talks", key="1")
        state = await bench.status("work:1", "SUCCESS")
        assert state["worker_states"][0]["returns"] == len(nonsense)
        assert told(bench, "work:1") == {}
        await bench.status("talks:1", "SUCCESS")
        assert 100 <= len(told(bench, "talks:1")["message"]) < 100_000
