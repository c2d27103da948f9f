"""Handlers that die or do not end: their executor is gone with all it has started, and other runs go on."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtask.kernel.worker.running.run import EndReason
from tests.integration.features.isolation.bench import Isolated, Isolating, is_alive
from tests.mongo import PATIENCE, until

ONCE = {"max_retries": 0}
_PR_SET_CHILD_SUBREAPER = 36
STUCK = ["never looks", "ignores SIGTERM", "forks", "spins in C"]


@pytest.fixture
def adopting() -> Iterator[None]:
    """Orphans become children of this process, as they become those of the first process of a container."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


async def children_of(it: Isolated, task_id: str) -> list[int]:
    return [int(pid) for pid in (await it.noted(f"children-{task_id.partition(':')[2]}")).split()]


DEATHS = [
    ("die", "SIGSEGV", "executor killed by SIGSEGV"),
    ("die", "SIGKILL", "executor killed by SIGKILL, perhaps for want of memory"),
    ("die", "memory", "executor ended above its 150 MiB of memory"),
    ("die_async", "exit", "executor exited with code 3"),
]


async def test_a_handler_that_dies_fails_at_once_with_the_cause_and_others_go_on(
    isolating: Isolating, tmp_path: Path
) -> None:
    async with isolating(max_memory_mib=150) as it:
        folder = {"folder": str(tmp_path)}
        other = await it.publish("hold", "other", folder)
        pid = await it.started(other)
        here = await it.publish("hold_here", "here", folder)
        for name, how, cause in DEATHS:
            # Its lease is an hour long: nobody waits it out.
            task_id = await it.publish(name, how, {**folder, "how": how}, **ONCE, worker_timeout=3600)
            dead = await it.started(task_id)
            run = await it.ended(task_id, "FAIL")
            assert run["fail_reason"] == cause
            assert it.bench.state(task_id)["failed_cnt"] == 1
            await it.gone(dead, *(await children_of(it, task_id) if name == "die" else []))

            def is_replaced(dead: int = dead) -> bool:
                return len(it.executors.pids) == 2 and dead not in it.executors.pids

            await until(is_replaced, message="replaced")

        it.open_gate()
        assert (await it.ended(other, "SUCCESS"))["returns"] == pid
        await it.ended(here, "SUCCESS")
        await it.bench.at_rest()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets another process than the first one adopt orphans")
async def test_a_worker_that_is_the_first_process_of_a_container_reaps_what_its_executors_leave(
    isolating: Isolating, tmp_path: Path, adopting: None
) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("die", "1", {"folder": str(tmp_path), "how": "exit"}, **ONCE)
        await it.ended(task_id, "FAIL")
        [child] = await children_of(it, task_id)
        await until(lambda: not Path(f"/proc/{child}").exists(), message="not even a zombie is left")


async def test_deaths_count_as_the_failures_of_a_handler_do(isolating: Isolating, tmp_path: Path) -> None:
    async with isolating(count=1) as it:
        folder = {"folder": str(tmp_path), "how": "exit"}
        again = {"max_retries": 1, "retry_delay": 0}
        await it.ended(await it.publish("die", "1", folder, **again), "FAIL")
        assert [run["status"] for run in it.bench.state("die:1")["worker_states"]] == ["FAIL", "FAIL"]
        task_id = await it.publish("die_for_good", "1", **again)
        assert (await it.ended(task_id, "FAIL"))["final"]
        assert len(it.bench.state(task_id)["worker_states"]) == 1


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "spins in C" else pytest.mark.long) for how in STUCK]
)
async def test_a_run_timeout_ends_a_handler_that_cannot_be_asked(
    isolating: Isolating, tmp_path: Path, how: str
) -> None:
    async with isolating(count=1) as it:
        params = {"folder": str(tmp_path), "how": how}
        task_id = await it.publish("stuck", "1", params, run_timeout=0.5, **ONCE)
        pid = await it.started(task_id)
        children = await children_of(it, task_id) if how == "forks" else []
        run = await it.ended(task_id, "FAIL")
        assert run["fail_reason"] == "the run took longer than run_timeout_ms (500 ms)"
        await it.gone(pid, *children)
        await it.ended(await it.publish("echo", "1"), "SUCCESS")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "never looks" else pytest.mark.long) for how in STUCK]
)
async def test_a_cancelation_ends_a_handler_that_never_looks(isolating: Isolating, tmp_path: Path, how: str) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("stuck", "1", {"folder": str(tmp_path), "how": how})
        pid = await it.started(task_id)
        children = await children_of(it, task_id) if how == "forks" else []
        await it.bench.client.cancel(*task_id.split(":"))
        run = await it.ended(task_id, "CANCELED")
        assert (run["status"], run["fail_reason"]) == ("CANCELED", "canceled on request")
        await it.gone(pid, *children)


async def test_an_async_handler_that_goes_on_when_it_is_cancelled_is_killed(
    isolating: Isolating, tmp_path: Path
) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("stubborn", "1", {"folder": str(tmp_path)})
        pid = await it.started(task_id)
        await it.bench.client.cancel(*task_id.split(":"))
        await it.noted("cancelled-1")
        await it.ended(task_id, "CANCELED")
        await it.gone(pid)


async def test_a_handler_that_ends_when_asked_keeps_its_executor(isolating: Isolating, tmp_path: Path) -> None:
    async with isolating(count=1) as it:
        for name in ("looks", "hold_async"):
            task_id = await it.publish(name, name, {"folder": str(tmp_path)})
            pid = await it.started(task_id)
            await it.bench.client.cancel(*task_id.split(":"))
            await it.ended(task_id, "CANCELED")
            assert await it.noted(f"cancelled-{name}") == str(pid)
            run = await it.ended(await it.publish("echo", name), "SUCCESS")
            assert run["returns"]["pid"] == pid


async def test_a_removed_task_and_a_lost_lease_end_the_handler_and_nothing_is_written(
    isolating: Isolating, tmp_path: Path
) -> None:
    async with isolating() as it:
        removed = await it.publish("hold", "removed", {"folder": str(tmp_path)})
        lost = await it.publish("hold", "lost", {"folder": str(tmp_path)})
        pids = [await it.started(removed), await it.started(lost)]
        it.bench.tasks.delete_one({"_id": removed})
        held = it.bench.worker.parts.scope.ledger.held_run(lost)
        assert held is not None
        held.end(EndReason.LEASE_LOST)
        await it.gone(*pids)
        assert it.bench.tasks.find_one({"_id": removed}) is None
        assert it.bench.state(lost)["worker_states"][0]["status"] == "RUNNING"  # it is another's to end
        await it.bench.at_rest()


async def test_a_run_that_waits_for_an_executor_can_be_canceled(isolating: Isolating, tmp_path: Path) -> None:
    async with isolating(count=1) as it:
        first = await it.publish("hold", "1", {"folder": str(tmp_path)})
        await it.started(first)
        pool = it.executors
        room = it.bench.worker.parts.queue._isolated
        assert room is not None
        setattr(room, "count", lambda: 1)  # noqa: B010 as if handlers had been quick until now
        second = await it.publish("hold", "2", {"folder": str(tmp_path)})
        await until(lambda: len(pool._waiting) == 1, message="it waits")
        setattr(room, "count", lambda: 0)  # noqa: B010
        # Nobody is canceled: the run is handed back after a while, as the executor stays busy.
        await until(lambda: it.bench.state(second)["worker_states"][-1]["status"] == "CANCELED", message="handed back")
        (run,) = it.bench.state(second)["worker_states"]
        assert "no slot free" in run["fail_reason"]
        assert it.bench.state(second)["failed_cnt"] == 0


async def test_an_idle_executor_that_is_killed_is_replaced(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        run = await it.ended(await it.publish("echo", "1"), "SUCCESS")
        pid = run["returns"]["pid"]
        os.kill(pid, 9)
        await until(lambda: it.executors.pids and pid not in it.executors.pids, message="replaced")
        run = await it.ended(await it.publish("echo", "2"), "SUCCESS")
        assert run["returns"]["pid"] != pid


async def test_a_graceful_stop_waits_for_handlers_and_hands_the_others_back(
    isolating: Isolating, tmp_path: Path
) -> None:
    async with isolating() as it:
        ready, stuck = tmp_path / "ready", tmp_path / "stuck"
        ready.mkdir()
        stuck.mkdir()
        held = await it.publish("hold", "ready", {"folder": str(ready)})
        late = await it.publish("hold", "stuck", {"folder": str(stuck)})
        pids = []
        for path in (ready / "started-ready", stuck / "started-stuck"):
            await until(path.exists, message=path.name)
            pids.append(int(path.read_text()))
        it.bench.worker.stop()
        await until(lambda: it.bench.worker.status.value == "stopping", message="stopping")
        (ready / "gate").touch()
        await asyncio.wait((it.bench.life,), timeout=PATIENCE)
        assert it.bench.state(held)["status"] == "SUCCESS"
        (run,) = it.bench.state(late)["worker_states"]
        assert (run["status"], run["fail_reason"]) == ("CANCELED", "handed back: the worker stopped")
        assert it.bench.state(late)["failed_cnt"] == 0
        assert not any(map(is_alive, pids))
