"""What runs in an executor behaves as what runs in the worker's process."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import Decimal128, Int64, ObjectId, Regex

from mtask.errors import InvalidInput
from mtask.features.isolation.options import ExecutorOptions
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from tests.integration.features.isolation import isolated
from tests.integration.features.isolation.bench import Isolating
from tests.integration.kernel.worker.hostile import ENDS
from tests.integration.kernel.worker.leaks import Before
from tests.mongo import Client as Mongo
from tests.mongo import until


async def test_handlers_run_in_processes_that_are_made_when_needed_and_used_again(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        assert it.executors.pids == {}
        here = await it.ended(await it.publish("here", "1"), "SUCCESS")
        assert (here["returns"], it.executors.pids) == (os.getpid(), {})

        task_id = await it.publish("echo", "1", {"value": 1})
        first = (await it.ended(task_id, "SUCCESS"))["returns"]
        task_id = await it.publish("echo_async", "1", {"value": 2})
        second = (await it.ended(task_id, "SUCCESS"))["returns"]

        assert first["pid"] == second["pid"] == first["hook"] != os.getpid()
        assert (first["value"], second["value"]) == (1, 2)
        assert (first["attempt"], first["worker"], first["runs"]) == (1, "w1", 1)
        assert first["run"] in isolated.around_finishes  # in this process: the outcome is written here
        assert first["run"] not in isolated.around_runs


async def test_values_arrive_as_they_are_stored(isolating: Isolating) -> None:
    value: dict[str, Any] = {
        "id": ObjectId(),
        "when": datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        "long": Int64(2**40),
        "short long": Int64(7),
        "exact": Decimal128("1.50"),
        "bytes": b"\x00\xff",
        "pattern": Regex("^a", "i"),
        "text": "ä\u2028\x00",
        "large": "x" * 3_000_000,
        "deep": {"list": [1, 2.5, None, True, {"$odd.name": []}]},
    }
    async with isolating(count=1) as it:
        task_id = await it.publish("echo", "1", {"value": value})
        await it.ended(task_id, "SUCCESS")
        returned = {"$getField": {"field": "value", "input": {"$last": "$task_state.worker_states.returns"}}}
        is_same = {"same": {"$eq": ["$params.value", returned]}}
        same: list[dict[str, Any]] = [{"$match": {"_id": task_id}}, {"$project": is_same}]
        assert list(it.bench.tasks.aggregate(same)) == [{"_id": task_id, "same": True}]


RAISED: dict[str, tuple[str, dict[str, Any]]] = {
    "retry": ("SCHEDULED", {"status": "CANCELED", "fail_reason": "later"}),
    "fail": ("FAIL", {"status": "FAIL", "fail_reason": "never", "final": True}),
    "exit": ("FAIL", {"status": "FAIL", "fail_reason": "SystemExit: 7"}),
    "error": ("FAIL", {"status": "FAIL", "fail_reason": "ValueError: a bad value (isolated.py:"}),
    "unstorable": ("FAIL", {"status": "FAIL", "fail_reason": "the handler's return value cannot be stored"}),
    "goes on": ("SUCCESS", {"status": "SUCCESS", "returns": "went on"}),
}


async def test_what_a_handler_raises_means_the_same_and_its_executor_goes_on(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        before = (await it.ended(await it.publish("echo", "before"), "SUCCESS"))["returns"]["pid"]
        for kind, (status, run) in RAISED.items():
            task_id = await it.publish("raises", kind, {"kind": kind}, max_retries=0)
            if kind == "retry":
                await until(lambda: it.bench.state("raises:retry")["worker_states"], message="claimed")
                await until(
                    lambda: it.bench.state("raises:retry")["worker_states"][0]["status"] == "CANCELED",
                    message="given back",
                )
                found = it.bench.state(task_id)["worker_states"][0]
                assert it.bench.state(task_id)["failed_cnt"] == 0
            else:
                found = await it.ended(task_id, status)
            for field, expected in run.items():
                text = isinstance(expected, str)
                assert found[field].startswith(expected) if text else found[field] == expected, kind
        await it.exists("echo:@raises:goes on/next-1")
        await it.bench.status("echo:@raises:goes on/next-1", "SUCCESS")
        for kind, (_, status, reason) in ENDS.items():  # what raises when its executor reads it
            task_id = await it.publish("raises", kind, {"kind": kind}, max_retries=0)

            def closed(task_id: str = task_id, status: str = status) -> list[dict[str, Any]]:
                return [one for one in it.bench.state(task_id)["worker_states"] if one["status"] == status]

            ended, *_ = await until(closed, message=f"the run of {kind} is {status}")
            assert ended["fail_reason"].startswith(reason), kind
        after = await it.ended(await it.publish("echo", "after"), "SUCCESS")
        assert after["returns"]["pid"] == before


async def test_progress_is_told_while_the_handler_goes_on(isolating: Isolating, tmp_path: Path) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("tell", "1", {"folder": str(tmp_path)})

        def told() -> bool:
            runs = it.bench.state(task_id)["worker_states"]
            return bool(runs) and runs[0].get("progress", {}).get("message") == "half"

        await until(told, message="progress")
        assert it.bench.state(task_id)["status"] == "RUNNING"
        it.open_gate()
        run = await it.ended(task_id, "SUCCESS")
        assert run["progress"]["fraction"] == 0.5


async def test_an_executor_knows_that_its_lease_was_extended(isolating: Isolating, tmp_path: Path) -> None:
    async with isolating(count=1) as it:
        lease: dict[str, Any] = {"ping_interval": 0.3, "worker_timeout": 5}
        task_id = await it.publish("sees", "1", {"folder": str(tmp_path)}, **lease)
        await it.started(task_id)
        begun = await it.bench.client.server_time()

        async def is_older() -> bool:  # than the lease that it was begun with
            return bool((await it.bench.client.server_time() - begun).total_seconds() > 5.5)

        await until(is_older, message="extended")
        it.open_gate()
        run = await it.ended(task_id, "SUCCESS")
        assert run["returns"] == [True, False]


def test_nothing_is_left_after_a_stop(isolating: Isolating, mongo: Mongo) -> None:
    async def scenario() -> tuple[Before, str]:
        before = Before.note(mongo)
        async with isolating() as it:
            task_ids = [await it.publish("echo", f"{number}") for number in range(5)]
            task_ids.append(await it.publish("raises", "1", {"kind": "fail"}))
            for task_id in task_ids:
                await it.ended(task_id, "FAIL" if task_id.startswith("raises") else "SUCCESS")
            await it.bench.at_rest()
            kept = (it.executors._by_run, it.executors._waiting, it.executors._reports._suspensions)
            assert not any(kept)
            return before, it.bench.app_name

    before, app_name = asyncio.run(scenario())
    before.check_nothing_left(app_name)


async def test_children_and_results_work_there(isolating: Isolating) -> None:
    from mtask import Flow

    async with isolating() as it:
        flow = Flow("f")
        flow.add("one", "step")
        flow.add("two", "results", after=["one"])
        await it.bench.client.publish_flow(flow)
        run = await it.ended("step:f/one", "SUCCESS")
        assert run["returns"] == [True, {}]
        run = await it.ended("results:f/two", "SUCCESS")
        assert run["returns"] == ["child", "one"]


@pytest.mark.parametrize(("isolation", "is_isolated"), [("thread", False), ("process", True)])
async def test_sync_handlers_that_do_not_say_where_they_run_follow_the_option(
    isolating: Isolating, isolation: str, is_isolated: bool
) -> None:
    async with isolating(isolation=isolation) as it:
        for name, expected in (("thread_or_not", is_isolated), ("thread", False), ("here", False)):
            run = await it.ended(await it.publish(name, "1"), "SUCCESS")
            assert (run["returns"] != os.getpid()) is expected, name


async def test_no_more_isolated_tasks_are_claimed_than_executors_take_soon(
    isolating: Isolating, tmp_path: Path
) -> None:
    async with isolating(concurrency=10) as it:
        folder = {"folder": str(tmp_path)}
        held = [await it.publish("hold", f"{number}", folder, priority=5) for number in range(12)]
        await until(lambda: len(list(tmp_path.glob("started-*"))) == 2, message="two go on")
        # Tasks of other handlers do not wait behind them, and none of the others was claimed.
        for number in range(3):
            await it.ended(await it.publish("here", f"{number}"), "SUCCESS")
        assert it.bench.count("RUNNING") == 2
        assert sum(len(it.bench.state(task_id)["worker_states"]) for task_id in held) == 2
        it.open_gate()
        for task_id in held:
            await it.ended(task_id, "SUCCESS")
            # Now runs may wait for an executor. On a slow machine one may wait too long, and is handed back.
            *others, last = it.bench.state(task_id)["worker_states"]
            assert last["status"] == "SUCCESS"
            assert all("no slot free" in one["fail_reason"] for one in others)
        await it.bench.at_rest()


async def test_an_executor_is_replaced_after_its_runs(
    isolating: Isolating, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = tmp_path / "stopped"
    monkeypatch.setenv(isolated.STOPPED_VARIABLE, str(stopped))
    async with isolating(count=1, max_runs=2) as it:
        pids = []
        for number in range(4):
            task_id = await it.publish("echo", f"{number}")
            pids.append((await it.ended(task_id, "SUCCESS"))["returns"]["pid"])
        assert pids[0] == pids[1] != pids[2] == pids[3]
        assert await it.noted("stopped") in map(str, pids)  # its stop hooks were called
        await it.gone(*pids)


async def test_runs_fail_with_the_cause_if_no_executor_can_start(
    isolating: Isolating, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with isolating(count=1) as it:
        # The hooks of the worker's own process have run by now.
        await it.ended(await it.publish("here", "1"), "SUCCESS")
        monkeypatch.setenv(isolated.BROKEN_VARIABLE, "yes")
        task_id = await it.publish("echo", "1", max_retries=0)
        run = await it.ended(task_id, "FAIL")
        assert "executor could not start" in run["fail_reason"]
        assert "no pool today" in run["fail_reason"]

        monkeypatch.delenv(isolated.BROKEN_VARIABLE)
        await it.ended(await it.publish("echo", "2"), "SUCCESS")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ExecutorOptions(), "say which app"),
        (ExecutorOptions("a:b", count=0), "executors 0"),
        (ExecutorOptions("a:b", isolation="fork"), '"thread" or "process"'),  # type: ignore[arg-type]
        (ExecutorOptions("a:b", max_runs=0), "max runs per executor 0"),
        (ExecutorOptions("a:b", max_memory_mib=10), "use 64 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: ExecutorOptions, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Worker(isolated.app, WorkerOptions("mongodb://127.0.0.1", "x", executors=options))
