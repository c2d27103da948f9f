"""A task that someone's open transaction has locked waits, and no other does: claims, pings, finishes, settling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Context, TaskSpec
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.worker.discovery import reaper as task_janitor
from tests.clients import server_now
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client, until

Document = dict[str, Any]
_OTHERS = [f"work:{number}" for number in range(1, 20)]


class _Gated:
    """An app whose handlers wait at a gate."""

    def __init__(self) -> None:
        self.app = App()
        self.gate = asyncio.Event()
        self.started: set[str] = set()

        @self.app.task
        async def work(context: Context) -> None:
            self.started.add(context.task.id)
            await self.gate.wait()


@contextmanager
def locked(bench: Bench, task_id: str) -> Iterator[None]:
    """Keep a transaction open that has written this task; nothing of it stays."""
    with bench.mongo.start_session() as session:
        session.start_transaction()
        written = bench.tasks.update_one({"_id": task_id}, {"$set": {"params": "locked"}}, session=session)
        assert written.modified_count == 1
        try:
            yield
        finally:
            session.abort_transaction()


def unfinished(bench: Bench, task_ids: list[str]) -> list[str]:
    """Return those of these tasks that have not succeeded."""
    wanted = {"_id": {"$in": task_ids}, "task_state.status": {"$ne": "SUCCESS"}}
    return [document["_id"] for document in bench.tasks.find(wanted)]


async def publish_all(bench: Bench, **options: Any) -> None:
    keys = [task_id.partition(":")[2] for task_id in ["work:0", *_OTHERS]]
    await bench.client.publish_many([TaskSpec("work", key=key, **options) for key in keys])


async def test_claims_of_a_backlog_do_not_wait_for_a_locked_task(working: Working) -> None:
    gated = _Gated()
    gated.gate.set()
    async with working(gated.app, concurrency=15) as bench:
        with ExitStack() as lock:
            with bench.backed_up():
                await publish_all(bench)
                lock.enter_context(locked(bench, "work:0"))
            await until(lambda: not unfinished(bench, _OTHERS), message="the others succeed")
            assert bench.state("work:0")["status"] == "INIT"
        await bench.status("work:0", "SUCCESS")
        assert [run["attempt"] for run in bench.state("work:0")["worker_states"]] == [1]
        await bench.at_rest()


async def test_results_do_not_wait_for_a_locked_task(working: Working) -> None:
    gated = _Gated()
    async with working(gated.app, concurrency=20) as bench:
        await publish_all(bench)
        await until(lambda: len(gated.started) == 20, message="all run")
        with locked(bench, "work:0"):
            gated.gate.set()
            await until(lambda: not unfinished(bench, _OTHERS), message="the others' results are written")
            assert bench.state("work:0")["status"] == "RUNNING"
        await bench.status("work:0", "SUCCESS")
        assert [run["attempt"] for run in bench.state("work:0")["worker_states"]] == [1]
        await bench.at_rest()


async def test_single_results_do_not_wait_behind_a_locked_one(working: Working) -> None:
    """The locked one is under way alone, and the next ones, fewer than make a group of their own, follow it."""
    gates: dict[str, asyncio.Event] = {key: asyncio.Event() for key in ("0", "1")}
    app = App()

    @app.task
    async def work(context: Context) -> None:
        await gates[context.task.key].wait()

    async with working(app) as bench:
        for key in gates:
            await bench.client.publish("work", key=key)
            await bench.status(f"work:{key}", "RUNNING")
        with locked(bench, "work:0"):
            gates["0"].set()
            await until(lambda: bench.worker.parts.finisher.pending, message="the locked one is being written")
            gates["1"].set()
            await bench.status("work:1", "SUCCESS")
        await bench.status("work:0", "SUCCESS")


async def test_leases_are_kept_beside_a_locked_task(working: Working, mongo: Client) -> None:
    gated = _Gated()
    async with working(gated.app, concurrency=20) as bench:
        await publish_all(bench, worker_timeout=8, ping_interval=1)
        await until(lambda: len(gated.started) == 20, message="all run")
        with locked(bench, "work:0"):
            leases = [bench.state(task_id)["worker_states"][-1]["ping_expire_time"] for task_id in _OTHERS]
            past = max(leases) + timedelta(seconds=4)
            await until(lambda: server_now(mongo) > past, message="all would have lapsed")
        states = {task_id: bench.state(task_id)["worker_states"] for task_id in _OTHERS}
        assert {task_id: [run["status"] for run in runs] for task_id, runs in states.items()} == {
            task_id: ["RUNNING"] for task_id in _OTHERS
        }
        gated.gate.set()
        await until(lambda: not unfinished(bench, ["work:0", *_OTHERS]), message="all succeed")
        assert {len(bench.state(task_id)["worker_states"]) for task_id in _OTHERS} == {1}
        await bench.at_rest()


async def test_leases_of_different_lengths_are_pinged_together(working: Working) -> None:
    gated = _Gated()
    async with working(gated.app, concurrency=20) as bench:
        sent: list[int] = []
        pinger = bench.worker.parts.pinger
        store = pinger._store
        run = store.run

        def counted(operation: Any, session: Any = None) -> Any:
            if operation.__name__ == "ping":
                sent.append(1)
            return run(operation, session)

        for number in range(20):
            await bench.client.publish("work", key=str(number), worker_timeout=(60_000 + number) / 1000)
        await until(lambda: len(gated.started) == 20, message="all run")
        before = {run.task_id: run.trusted_until for run in pinger.held()}
        store.run = counted  # type: ignore[method-assign]
        with pinger._condition:
            for held in pinger._runs.values():
                held.next_ping = 0.0
            pinger._condition.notify_all()
        await until(lambda: all(run.trusted_until > before[run.task_id] for run in pinger.held()))
        assert len(sent) == 1
        for number in range(20):
            (one,) = bench.state(f"work:{number}")["worker_states"]
            assert one["ping_expire_time"] - one["claim_time"] > timedelta(milliseconds=60_000 + number)
        gated.gate.set()
        await until(lambda: not unfinished(bench, _OTHERS), message="all succeed")


async def test_lapsed_tasks_are_settled_beside_a_locked_one(
    working: Working, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may take them any more: whoever scans marks them FAIL."""
    monkeypatch.setattr(task_janitor, "SETTLE_GRACE_MS", 0)
    gated = _Gated()
    async with working(gated.app) as bench:
        with bench.backed_up():
            last = {"max_retries": 0, "specific_worker_ids": ["dead"]}
            await publish_all(bench, worker_timeout=1, ping_interval=0.5, **last)
            await asyncio.to_thread(store.run, claims.claim(["work:0", *_OTHERS], "dead", "token"))
            with locked(bench, "work:0"):
                failed = {"_id": {"$in": _OTHERS}, "task_state.status": "FAIL"}
                await until(lambda: bench.tasks.count_documents(failed) == len(_OTHERS), message="all others FAIL")
                assert bench.state("work:0")["status"] == "RUNNING"
            await bench.status("work:0", "FAIL")
