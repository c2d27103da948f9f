"""Handlers that spoil their process, and bad moments: the worker goes on, and loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.integration.features.isolation import isolated
from tests.integration.features.isolation.bench import Isolated, Isolating, is_alive
from tests.mongo import PATIENCE, until

ONCE = {"max_retries": 0}


async def ended(it: Isolated, task_id: str) -> str:
    """Wait until the task has ended; return its status."""

    def status() -> str:
        found: str = it.bench.state(task_id)["status"]
        return found if found in ("SUCCESS", "FAIL", "CANCELED") else ""

    await until(status, message=f"{task_id} ended")
    return status()


@pytest.mark.parametrize("how", ["closes all files", pytest.param("writes to the socket", marks=pytest.mark.long)])
async def test_a_handler_that_spoils_its_connection_fails_and_the_next_one_runs(
    isolating: Isolating, tmp_path: Path, how: str
) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("breaks", "1", {"folder": str(tmp_path), "how": how}, **ONCE)
        pid = await it.started(task_id)
        run = await it.ended(task_id, "FAIL")
        assert run["fail_reason"] == "executor killed because it closed its connection"
        await it.gone(pid)
        await it.ended(await it.publish("echo", "1"), "SUCCESS")


async def test_a_process_that_walks_is_gone_with_its_run(isolating: Isolating, tmp_path: Path) -> None:
    def group(pid: int) -> list[str]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if of == str(pid) and state != "Z":
                found.append(stat.parent.name)
        return found

    async with isolating(count=1) as it:
        task_id = await it.publish("walks", "1", {"folder": str(tmp_path)})
        pid = await it.started(task_id)
        await it.bench.client.cancel(*task_id.split(":"))
        await it.ended(task_id, "CANCELED")
        await until(lambda: not group(pid), message="no process is left of the group")


async def test_what_a_handler_starts_does_not_get_the_connection(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        assert (await it.ended(await it.publish("inherited", "1"), "SUCCESS"))["returns"] == []


async def test_a_stop_while_an_executor_starts_does_not_wait_for_it(
    isolating: Isolating, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with isolating(count=1) as it:
        # The hooks of the worker's own process have run by now.
        await it.ended(await it.publish("here", "1"), "SUCCESS")
        monkeypatch.setenv(isolated.SLOW_VARIABLE, str(tmp_path / "starting"))
        task_id = await it.publish("echo", "1")
        pid = int(await it.noted("starting"))
        it.bench.worker.stop()
        await asyncio.wait((it.bench.life,), timeout=PATIENCE)
        state = it.bench.state(task_id)
        assert [run["status"] for run in state["worker_states"]] == ["CANCELED"]
        assert (state["status"], state["failed_cnt"]) == ("INIT", 0)
    assert not is_alive(pid)


@pytest.mark.long
async def test_a_second_stop_ends_a_handler_that_never_looks_at_once(isolating: Isolating, tmp_path: Path) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("stuck", "1", {"folder": str(tmp_path), "how": "ignores SIGTERM"})
        pid = await it.started(task_id)
        it.bench.worker.stop()
        it.bench.worker.stop()
        await asyncio.wait((it.bench.life,), timeout=PATIENCE)
        assert not is_alive(pid)
        (run,) = it.bench.state(task_id)["worker_states"]
        assert (run["status"], run["fail_reason"]) == ("CANCELED", "handed back: the worker stopped")


async def test_a_cancelation_at_the_moment_of_the_result_leaves_the_executor_in_order(isolating: Isolating) -> None:
    random = Random(7)
    async with isolating(count=1) as it:
        first = await it.ended(await it.publish("echo", "first"), "SUCCESS")
        ends: set[str] = set()
        for number in range(30):
            task_id = await it.publish("echo", f"{number}")
            await asyncio.sleep(random.uniform(0.0, 0.02))
            await it.bench.client.cancel(*task_id.split(":"))
            ends.add(await ended(it, task_id))
        await it.bench.at_rest()
        assert ends <= {"SUCCESS", "CANCELED"}
        last = await it.ended(await it.publish("echo", "last"), "SUCCESS")
        assert last["returns"]["pid"] == first["returns"]["pid"]


@pytest.mark.parametrize(("count", "size"), [(50, 10), pytest.param(20, 1_000_000, marks=pytest.mark.long)])
async def test_many_runs_wait_for_one_executor_and_each_is_run_once(
    isolating: Isolating, count: int, size: int
) -> None:
    async with isolating(count=1, concurrency=100) as it:
        value = "x" * size
        task_ids = [await it.publish("echo", f"{number}", {"value": value}) for number in range(count)]
        pids = set()
        for task_id in task_ids:
            run = await it.ended(task_id, "SUCCESS")
            assert run["returns"]["value"] == value
            pids.add(run["returns"]["pid"])
        handed_back = it.bench.tasks.count_documents({"task_state.worker_states.1": {"$exists": True}})
        assert (len(pids), handed_back) == (1, 0)
        await it.bench.at_rest()
        assert set(it.executors.pids) == pids


async def test_an_executor_that_cannot_be_started_for_want_of_threads_is_tried_again(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        submit = it.executors._spawner.submit

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        it.executors._spawner.submit = refuse  # type: ignore[method-assign, assignment]
        task_id = await it.publish("echo", "1", max_retries=50, retry_delay=0.1)
        failed = {"task_state.failed_cnt": {"$gt": 0}}
        await until(lambda: it.bench.tasks.count_documents(failed), message="a failure")
        reason = it.bench.state(task_id)["worker_states"][0]["fail_reason"]
        assert reason == "executor could not start: can't start new thread"
        it.executors._spawner.submit = submit  # type: ignore[method-assign]
        await it.ended(task_id, "SUCCESS")
