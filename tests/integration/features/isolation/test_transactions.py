"""Transactions of isolated handlers: the writes and the SUCCESS commit together, wherever the executor dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtask.errors import ResultLost
from tests.integration.features.isolation.bench import Isolated, Isolating
from tests.mongo import until

NAMES = ("commit", "commit_async")
ONCE = {"max_retries": 0}


def effects(it: Isolated, task_id: str) -> int:
    return it.bench.mongo[it.bench.database]["effects"].count_documents({"_id": task_id})


def params(it: Isolated, then: str) -> dict[str, Any]:
    it.bench.mongo[it.bench.database]["effects"].create_index("there")
    return {"folder": str(it.folder), "effects": it.bench.database, "then": then}


async def test_writes_and_success_commit_together(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        for name in NAMES:
            for key in ("1", "2"):  # the second one uses the session of the first
                task_id = await it.publish(name, key, params(it, "return"))
                await it.ended(task_id, "SUCCESS")
                assert await it.bench.client.result(name, key) == "committed"
                assert effects(it, task_id) == 1
        await it.bench.at_rest()
        assert not it.executors._reports._suspensions


def _last(it: Isolated, task_id: str) -> dict[str, Any]:
    run: dict[str, Any] = it.bench.state(task_id)["worker_states"][-1]
    return run


async def test_a_death_inside_rolls_back_at_once_and_counts(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        for name in NAMES:
            task_id = await it.publish(name, "1", params(it, "die inside"), **ONCE, worker_timeout=3600)
            run = await it.ended(task_id, "FAIL")
            assert run["fail_reason"].startswith("executor killed by SIGKILL")
            assert effects(it, task_id) == 0
            # The transaction is over: nobody waits for its locks.
            it.bench.mongo[it.bench.database]["effects"].insert_one({"_id": task_id})
            assert not it.executors._reports._suspensions
            await it.bench.at_rest()


async def test_a_death_after_the_commit_leaves_the_success(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        for name in NAMES:
            task_id = await it.publish(name, "1", params(it, "die after"))
            await it.ended(task_id, "SUCCESS")
            await it.bench.at_rest()
            assert effects(it, task_id) == 1
            (run,) = it.bench.state(task_id)["worker_states"]
            assert run["status"] == "SUCCESS"
            assert run["returns_lost"].startswith("executor killed by SIGKILL")
            assert "returns_owed_by" not in run


async def test_what_a_handler_raises_in_or_after_a_transaction_means_the_same(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        cases = [("fail inside", "FAIL", 0), ("fail after", "SUCCESS", 1), ("go on", "SUCCESS", 1)]
        for key, (then, status, written) in enumerate(cases):
            task_id = await it.publish("commit", f"{key}", params(it, then))
            await it.ended(task_id, status)
            assert effects(it, task_id) == written, then
        with pytest.raises(ResultLost, match="the handler raised ValueError"):
            await it.bench.client.result("commit", "1")
        await it.exists("echo:@commit:2/next-1")
        await it.bench.status("echo:@commit:2/next-1", "SUCCESS")


async def test_a_handler_that_stays_inside_fails_and_holds_up_nobody(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("commit", "1", params(it, "stay inside"), **ONCE)
        run = await it.ended(task_id, "FAIL")
        assert "returned without leaving the block of context.transaction()" in run["fail_reason"]
        it.bench.mongo[it.bench.database]["effects"].insert_one({"_id": task_id})
        assert not it.executors._reports._suspensions
        await it.bench.at_rest()


async def test_pings_pause_while_the_transaction_is_open_and_go_on_with_the_next_run(
    isolating: Isolating, tmp_path: Path
) -> None:
    async with isolating(count=1) as it:
        lease = {"ping_interval": 0.2, "worker_timeout": 60}
        task_id = await it.publish("commit", "1", params(it, "wait inside"), **lease)
        await it.started(task_id)
        held = it.bench.worker.parts.scope.ledger.held_run(task_id)
        assert held is not None
        assert held.suspended == 1
        before = _last(it, task_id)["ping_expire_time"]
        # Other runs are pinged meanwhile; this one is not.
        other = await it.publish("hold_here", "1", {"folder": str(tmp_path)}, **lease)
        await until(lambda: it.bench.state(other)["worker_states"], message="claimed")
        first = _last(it, other)["ping_expire_time"]
        await until(lambda: _last(it, other)["ping_expire_time"] > first, message="pinged")
        assert _last(it, task_id)["ping_expire_time"] == before
        it.open_gate()
        await it.ended(task_id, "SUCCESS")
        assert effects(it, task_id) == 1


async def test_a_cancelation_amid_a_transaction_rolls_back(isolating: Isolating) -> None:
    async with isolating(count=1) as it:
        task_id = await it.publish("commit", "1", params(it, "wait inside"))
        pid = await it.started(task_id)
        await it.bench.client.cancel(*task_id.split(":"))
        await it.ended(task_id, "CANCELED")
        await it.gone(pid)
        assert effects(it, task_id) == 0
