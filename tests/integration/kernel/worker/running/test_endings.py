"""How runs end: written whatever the server says once, ended when they must end, and their slots freed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from pymongo.errors import OperationFailure

from mtask import App, Context, Retry, TaskSpec
from mtask.errors import DatabaseTimeout
from mtask.kernel.worker.running import outcomes
from mtask.kernel.worker.running.run import EndReason, HeldRun
from tests.integration.kernel.worker.hostile import ENDS, exit_before_finishes
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import Client, until

FAULTS: dict[str, dict[str, Any]] = {
    "interrupted at shutdown": {"errorCode": 11600},
    "interrupted": {"errorCode": 11601},
    "unknown error": {"errorCode": 8},
    "full cache": {"errorCode": 388},
    "stepped down before it was replicated": {"writeConcernError": {"code": 189, "errmsg": "stepped down"}},
    "shutting down before it was replicated": {"writeConcernError": {"code": 91, "errmsg": "shutting down"}},
    "not replicated": {"writeConcernError": {"code": 100, "errmsg": "not enough data-bearing nodes"}},
}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("task_cnt", [1, 3])
async def test_one_error_of_the_server_on_a_finish_costs_no_success(
    working: Working, fault: str, task_cnt: int
) -> None:
    app, go_on = App(), asyncio.Event()
    started = []

    @app.task
    async def work(context: Context) -> int:
        started.append(context.task.key)
        await go_on.wait()
        return 7

    async with working(app) as bench:
        await bench.client.publish_many([TaskSpec("work", {}, key=str(key)) for key in range(task_cnt)])
        await until(lambda: len(started) == task_cnt)
        with bench.failing("update", times=1, **FAULTS[fault]):
            go_on.set()
            await until(lambda: not bench.count("RUNNING"))
        for key in range(task_cnt):
            (run,) = bench.state(f"work:{key}")["worker_states"]
            assert (run["status"], run.get("returns")) == ("SUCCESS", 7), run
        await bench.at_rest()
        assert bench.worker.parts.finisher.lost_cnt == 0


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("task_cnt", [1, 3])
async def test_answer_that_is_lost_until_the_lease_has_ended_is_read_back(
    working: Working, caplog: pytest.LogCaptureFixture, task_cnt: int, is_stored: bool
) -> None:
    app, go_on, kept = App(), asyncio.Event(), []

    @app.task
    async def work(context: Context) -> int:
        kept.append(cast(HeldRun, context._run))
        await go_on.wait()
        return 7

    async with working(app) as bench:

        async def lose_answer() -> None:
            for run in kept:
                run.trusted_until = time.monotonic()  # as after a standstill of the whole process
            raise DatabaseTimeout("no answer")

        await bench.client.publish_many([TaskSpec("work", {}, key=str(key)) for key in range(task_cnt)])
        await until(lambda: len(kept) == task_cnt)
        finisher = bench.worker.parts.finisher
        between(bench.store, "finish", **{"after" if is_stored else "before": lose_answer})
        go_on.set()
        await until(lambda: finisher.finished_cnt + finisher.lost_cnt == task_cnt)
        assert (finisher.finished_cnt, finisher.lost_cnt) == ((task_cnt, 0) if is_stored else (0, task_cnt))
        assert bench.count("SUCCESS" if is_stored else "RUNNING") == task_cnt
        assert ("result not confirmed" in caplog.text) is not is_stored
        assert "result refused" not in caplog.text, "the database refused nothing"


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_handler_that_goes_on_after_its_transaction_is_not_ended_and_what_it_returns_is_stored(
    working: Working, database_name: str, mongo: Client, kind: str
) -> None:
    app = App()
    seen: list[object] = []
    mongo[database_name].create_collection("effects")

    @app.task(name="async")
    async def go_on(context: Context) -> str:
        async with context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({"x": 1}, session=session)
        seen.append((context.is_lease_valid, context.is_cancelled))
        await asyncio.sleep(2.3)  # longer than the lease
        seen.append(context.is_cancelled)
        return "value"

    @app.task(name="plain")
    def go_on_plain(context: Context) -> str:
        with context.transaction() as session:
            session.client[database_name]["effects"].insert_one({"x": 1}, session=session)
        seen.append((context.is_lease_valid, context.is_cancelled))
        time.sleep(2.3)
        seen.append(context.is_cancelled)
        return "value"

    async with working(app) as bench:
        await bench.client.publish(kind, {}, key="1", worker_timeout=2, ping_interval=0.1)
        await bench.status(f"{kind}:1", "SUCCESS")
        await bench.at_rest()
        (run,) = bench.state(f"{kind}:1")["worker_states"]
        assert run.get("returns") == "value"
        assert seen == [(True, False), False]
        assert bench.mongo[database_name]["effects"].count_documents({}) == 1


@pytest.mark.parametrize("task_cnt", [1, 2])
async def test_run_of_a_removed_task_whose_cleanup_outlasts_its_lease_keeps_no_thread_busy_and_the_log_short(
    working: Working, caplog: pytest.LogCaptureFixture, task_cnt: int
) -> None:
    app, go_on = App(), asyncio.Event()

    @app.task
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await go_on.wait()

    async with working(app) as bench:
        for key in range(task_cnt):
            await bench.client.publish("work", {}, key=str(key), worker_timeout=0.6, ping_interval=0.15)
        runs = await until(
            lambda: (
                bench.worker.parts.scope.ledger.runs if len(bench.worker.parts.scope.ledger.runs) == task_cnt else []
            )
        )
        bench.tasks.delete_many({})
        await until(lambda: all(run.end_reason is not None for run in runs))
        end = max(run.trusted_until for run in runs)
        turns = _counted(bench.worker.parts.pinger, "work")
        await until(lambda: time.monotonic() > end + 0.7)
        go_on.set()
        assert len(turns) < 50
        assert sum(record.getMessage() == "lease lost" for record in caplog.records) <= task_cnt
        assert {run.end_reason for run in runs} <= {EndReason.REMOVED, EndReason.LEASE_LOST}
        await bench.at_rest()


def _counted(owner: Any, method: str) -> list[None]:
    turns: list[None] = []
    call = getattr(owner, method)

    def counted(*args: Any) -> Any:
        turns.append(None)
        return call(*args)

    setattr(owner, method, counted)
    return turns


async def test_handler_that_swallows_its_cancellation_fails_at_its_limit_and_keeps_its_slot_until_it_ends(
    working: Working,
) -> None:
    app, go_on = App(), asyncio.Event()

    @app.task
    async def swallow() -> str:
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    @app.task
    async def work() -> None:
        """Do nothing."""

    async with working(app, concurrency=1) as bench:
        try:
            await bench.client.publish("swallow", {}, key="1", run_timeout=0.2, max_retries=0)
            state = await bench.status("swallow:1", "FAIL")
            assert "longer than run_timeout_ms (200 ms)" in state["worker_states"][0]["fail_reason"]
            await bench.client.publish("work", {}, key="1")
            await until(lambda: "work:1" in bench.worker.parts.queue, message="the second task is at hand")
            assert bench.state("work:1")["status"] == "INIT"
            assert len(bench.worker.parts.scope.ledger.runs) == 1
        finally:
            go_on.set()
        await bench.status("work:1", "SUCCESS")
        await bench.at_rest()
        assert bench.state("swallow:1") == state


async def test_handler_that_blocks_the_loop_beyond_its_limit_and_returns_fails(working: Working) -> None:
    app = App()

    @app.task
    async def block() -> str:
        time.sleep(0.6)  # noqa: ASYNC251 it is meant to
        return "too late"

    async with working(app) as bench:
        await bench.client.publish("block", {}, key="1", run_timeout=0.2, max_retries=0)
        state = await bench.status("block:1", "FAIL")
        assert "longer than run_timeout_ms (200 ms)" in state["worker_states"][0]["fail_reason"]
        await bench.at_rest()


async def test_conflicts_go_back_uncounted_fifteen_times_and_then_count(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "CONFLICT_DELAY_MS", 1)
    app, tries = App(), []

    @app.task
    async def conflict(context: Context) -> None:
        tries.append(context.attempt)
        labels = {"errorLabels": ["TransientTransactionError"]}
        raise OperationFailure("Transaction 1 has been aborted.", 251, labels)

    async with working(app) as bench:
        await bench.client.publish("conflict", {}, key="1", max_retries=0)
        state = await bench.status("conflict:1", "FAIL")
        assert tries == list(range(1, 17))
        assert [run["status"] for run in state["worker_states"]] == ["CANCELED"] * 15 + ["FAIL"]
        assert state["failed_cnt"] == 1


async def test_run_that_ends_before_its_first_step_frees_its_slot(working: Working) -> None:
    app, started = App(), []

    @app.task
    async def work(context: Context) -> None:
        started.append(context.task.key)

    async with working(app, concurrency=1) as bench:
        pinger = bench.worker.parts.pinger
        hold_all = pinger.hold_all
        ended: list[HeldRun] = []

        def hold_and_end(runs: Sequence[HeldRun]) -> None:
            hold_all(runs)
            if runs and not ended:
                ended.append(runs[0])
                runs[0].end(EndReason.LEASE_LOST)

        pinger.hold_all = hold_and_end  # type: ignore[method-assign]
        await bench.client.publish("work", {}, key="1")
        await until(lambda: ended)
        await bench.client.publish("work", {}, key="2")
        await bench.status("work:2", "SUCCESS")
        await bench.at_rest()
        await until(lambda: not pinger.held(), message="no lease is kept")


@pytest.mark.parametrize("task_cnt", [1, 3])
async def test_cancel_between_the_claim_and_the_start_of_the_run_is_noticed_at_once(
    working: Working, task_cnt: int
) -> None:
    app, ends = App(), []
    asked: list[str] = []

    @app.task
    async def work(context: Context) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append(context.task.key)

    async with working(app) as bench:
        bench.stop_scans()  # which look at what is held, too

        async def cancel() -> None:
            # The worker may claim the tasks in several groups.
            if asked or bench.state("work:0")["status"] != "RUNNING":
                return
            asked.append("0")
            count = bench.worker.parts.stream.event_cnt
            await bench.client.cancel("work", "0")
            await bench.heard(count)

        between(bench.store, "claim", after=cancel)
        with bench.backed_up():
            for key in range(task_cnt):  # no ping tells of it in the time that this test has
                await bench.client.publish("work", {}, key=str(key), ping_interval=300, worker_timeout=600)
            await until(lambda: len(bench.worker.parts.queue) == task_cnt)
        bench.worker.parts.claimer.wake()
        await bench.status("work:0", "CANCELED")
        assert ends == ["0"]
        assert bench.count("RUNNING") == task_cnt - 1


async def test_cancel_while_a_handler_waits_for_its_transaction_leaves_no_pings_suspended(working: Working) -> None:
    app, waiting, raised = App(), [], []
    may_begin = asyncio.Event()

    @app.task
    async def work(context: Context) -> None:
        waiting.append(cast(HeldRun, context._run))
        await may_begin.wait()
        try:
            async with context.transaction():
                """Nothing comes so far."""
        except BaseException as error:
            raised.append(type(error))
            raise

    async with working(app) as bench:
        pinger = bench.worker.parts.pinger
        await bench.client.publish("work", {}, key="1")
        await until(lambda: waiting, message="the handler runs")
        with pinger._sending(waiting):  # a ping is under way
            may_begin.set()
            await until(lambda: waiting[0].suspended)
            await bench.client.cancel("work", "1")
            await bench.status("work:1", "CANCELED")
        assert raised == [asyncio.CancelledError]
        context: Any = bench.worker.parts.runner._caller._around.context
        suspensions = context.keywords["transactions"]._suspensions
        await until(lambda: not suspensions and not waiting[0].suspended, message="pings go on")
        await bench.at_rest()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
@pytest.mark.parametrize("kind", [*ENDS])
async def test_what_raises_when_the_worker_reads_it_ends_the_run_all_the_same(
    working: Working, kind: str, is_async: bool
) -> None:
    app = App()
    end, status, reason = ENDS[kind]
    exit_before_finishes(app)

    async def work() -> Any:
        return end()

    app.task(name="work")(work if is_async else end)

    def run_of(bench: Bench, task_id: str) -> dict[str, Any]:
        runs = bench.state(task_id)["worker_states"]
        return dict(runs[0]) if runs else {}

    async with working(app) as bench:
        task_id = (await bench.client.publish("work", key="1", max_retries=0)).task_id
        await until(lambda: run_of(bench, task_id).get("status") == status, message=f"the run is {status}")
        assert run_of(bench, task_id)["fail_reason"].startswith(reason)
        await bench.at_rest()


async def test_counted_retry_is_a_failure_with_a_delay_of_its_own(working: Working) -> None:
    app, delays = App(), [3600.0, 0.0]

    @app.task(retry_delay=0, max_retries=1)
    async def work(context: Context) -> None:
        raise Retry(delays[int(context.task.key)], "busy", counted=True)

    async with working(app) as bench:
        await bench.client.publish("work", key="0")
        await until(lambda: bench.state("work:0")["failed_cnt"] == 1)
        await bench.client.publish("work", key="1")
        ended = await bench.status("work:1", "FAIL")
        assert (ended["failed_cnt"], len(ended["worker_states"])) == (2, 2)  # the limit of the task holds
        waiting = bench.state("work:0")
        (run,) = waiting["worker_states"]
        assert (waiting["status"], run["status"], run["fail_reason"]) == ("INIT", "FAIL", "busy")
        assert (run["retry_time"] - run["fail_time"]).total_seconds() == 3600
