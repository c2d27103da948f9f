"""Promises of the worker that a wrong line could break unseen: each of these caught one of `tests.faults.mutants`."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar, cast

import pytest

from mtask import App, Context, RunStatus
from mtask.errors import DatabaseUnavailable, LeaseLost
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions
from mtask.kernel.operations.change_stream import Stream
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery import fetch as batches
from mtask.kernel.worker.discovery import fetch_loop as scans
from mtask.kernel.worker.discovery import stream
from mtask.kernel.worker.running import claim
from mtask.kernel.worker.running import leases as pinger
from mtask.kernel.worker.running.run import HeldRun, trusted_until
from tests.integration import stores
from tests.integration.stores import register
from tests.integration.worker_harness import Bench, Working, between, set_horizon
from tests.mongo import PATIENCE, Client, eventually, fail_command, until

T = TypeVar("T")
#: Longer than any test: nothing is found by a regular scan.
_FAR = timedelta(minutes=10)


def _name(operation: object) -> str:
    return getattr(operation, "__name__", "")


@pytest.fixture
def app() -> App:
    made = App()

    @made.task
    async def work() -> None:
        """Nothing to do."""

    return made


# --- the change stream ------------------------------------------------------------------------------------


def _between_streams(monkeypatch: pytest.MonkeyPatch, act: Callable[[Bench], Awaitable[None]]) -> list[Bench]:
    """Have `act` done once, when a stream has broken and the scan after it is over; return where to put the bench."""
    benches: list[Bench] = []
    acted: list[Bench] = []
    real_open = Stream.open

    async def open_late(*arguments: Any) -> Stream:
        if benches and not acted:
            of_worker = benches[0].worker.parts.scans
            await until(lambda: not (of_worker._wake.is_set() or of_worker._is_full_due), message="scanned")
            acted.append(benches[0])
            await act(benches[0])
        return await real_open(*arguments)

    monkeypatch.setattr(Stream, "open", open_late)
    return benches


async def test_task_that_comes_between_a_broken_stream_and_the_next_is_found_by_the_scan_after_its_opening(
    working: Working, mongo: Client, app: App, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (scans, batches, stream):
        monkeypatch.setattr(module, "HORIZON", _FAR)

    async def publish(bench: Bench) -> None:
        await bench.client.publish("work", {}, key="between")

    benches = _between_streams(monkeypatch, publish)
    async with working(app) as bench:
        benches.append(bench)
        with fail_command(mongo, "getMore", times=1, error_code=286, app_name=bench.app_name):
            register(store, "wakes-the-stream", ["other"])
            await until(lambda: bench.count("SUCCESS"), message="the task between is done")


async def test_stream_is_opened_anew_and_not_where_the_old_one_ended(
    working: Working, database_name: str, mongo: Client, app: App, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped database ends the stream for good: nothing can be resumed after that."""
    for module in (scans, batches, stream):
        monkeypatch.setattr(module, "HORIZON", _FAR)
    async with working(app) as bench:
        indexes = set(bench.tasks.index_information())
        mongo.drop_database(database_name)
        await until(lambda: set(bench.tasks.index_information()) == indexes, message="set up again")
        await bench.scanned()
        bench.stop_scans()
        new_stream = bench.worker.parts.stream
        heard = new_stream.event_cnt
        numbers = itertools.count()

        def is_heard() -> bool:
            register(store, f"another-{next(numbers)}", ["other"])
            return new_stream.event_cnt > heard + 3

        await until(is_heard, 20, "events of the new stream")
        await bench.client.publish("work", {}, key="1")
        await bench.status("work:1", "SUCCESS")


async def test_database_dropped_while_no_stream_is_open_is_set_up_again(
    working: Working, database_name: str, mongo: Client, app: App, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes: set[str] = set()

    async def drop(bench: Bench) -> None:
        indexes.update(bench.tasks.index_information())
        mongo.drop_database(database_name)

    benches = _between_streams(monkeypatch, drop)
    async with working(app) as bench:
        benches.append(bench)
        with fail_command(mongo, "getMore", times=1, error_code=286, app_name=bench.app_name):
            register(store, "wakes-the-stream", ["other"])
            await until(lambda: indexes, message="dropped")
            await until(lambda: set(bench.tasks.index_information()) == indexes, message="set up again")


async def test_task_that_moves_into_the_horizon_is_met_by_a_regular_scan(
    working: Working, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_horizon(monkeypatch, timedelta(seconds=0.5))
    async with working(app) as bench:
        await bench.client.publish("work", {}, key="1", delay=timedelta(seconds=1.5))
        await bench.status("work:1", "SUCCESS")


# --- leases -----------------------------------------------------------------------------------------------


async def test_lease_is_trusted_from_when_it_was_asked_for_however_late_the_answer_comes(working: Working) -> None:
    app, runs, go_on = App(), [], asyncio.Event()
    asked: list[float] = []
    pinged: list[float] = []

    @app.task
    async def work(context: Context) -> None:
        runs.append(cast(HeldRun, context._run))
        await go_on.wait()

    async def note() -> None:
        asked.append(monotonic())

    async def linger() -> None:
        await asyncio.sleep(0.5)

    async with working(app) as bench:
        between(bench.store, "claim", before=note, after=linger)
        await bench.client.publish("work", {}, key="1", ping_interval=1)
        (run,) = await until(lambda: runs)
        assert run.trusted_until <= trusted_until(asked[0], run.lease_ms)

        real = bench.pings.run

        def answer_late(operation: Generator[Any, Any, T]) -> T:
            sent = monotonic()
            answer = real(operation)
            if _name(operation) == "ping":
                time.sleep(0.5)
                pinged.append(sent)
            return answer

        bench.pings.run = answer_late  # type: ignore[method-assign, assignment]
        before = run.trusted_until
        trusted = await until(lambda: run.trusted_until > before and run.trusted_until)
        assert any(trusted <= trusted_until(sent, run.lease_ms) for sent in pinged)
        go_on.set()
        await bench.status("work:1", "SUCCESS")


async def test_handler_is_told_when_its_lease_can_no_longer_be_trusted_though_the_server_is_not_heard(
    working: Working,
) -> None:
    app, started, ended = App(), asyncio.Event(), asyncio.Event()

    @app.task
    async def work(context: Context) -> None:
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            assert not context.is_lease_valid
            ended.set()

    async with working(app) as bench:

        def be_unavailable(_: object) -> None:
            raise DatabaseUnavailable("cut off")

        bench.pings.run = be_unavailable  # type: ignore[method-assign, assignment]
        bench.stop_scans()  # they look at what is held, through a connection that this test leaves open
        await bench.client.publish("work", {}, key="1", ping_interval=0.3, worker_timeout=1.5)
        await until(started.is_set)
        await until(ended.is_set, 20, "the handler is ended")


async def test_run_out_of_time_that_blocks_the_loop_keeps_its_lease_no_longer_and_counts(
    working: Working, database_name: str, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinger, "OVERTIME", 0.2)
    app, lapses = App(), []
    tasks = mongo[database_name]["tasks"]
    lapsed = {"$expr": {"$lt": [{"$first": "$task_state.worker_states.ping_expire_time"}, "$$NOW"]}}

    @app.task
    async def block() -> None:
        lapses.append(eventually(lambda: tasks.count_documents(lapsed), 20, "the lease lapses"))

    async with working(app) as bench:
        limits: dict[str, Any] = {"run_timeout": 0.2, "worker_timeout": 1.5, "ping_interval": 0.3}
        await bench.client.publish("block", {}, key="1", max_retries=0, **limits)
        state = await bench.status("block:1", "FAIL")
        assert lapses
        assert (state["failed_cnt"], state["worker_states"][0]["status"]) == (1, "TIMEOUT")


# --- claims -----------------------------------------------------------------------------------------------


class _LateClaim:
    """The `run` of a store whose first claim is not answered, and is carried out only after the last read-back."""

    def __init__(self, store: AsyncStore) -> None:
        self._run = store.run
        self._late: Generator[Any, Any, Any] | None = None
        self.reads = 0
        self.is_carried_out = False

    async def run(self, operation: Generator[Any, Any, T]) -> T:
        if _name(operation) == "claim" and self._late is None:
            self._late = operation
            raise DatabaseUnavailable("no answer")
        result = await self._run(operation)
        if _name(operation) == "claimed":
            self.reads += 1
            if self.reads == len(claim._READ_AGAIN_AFTER) + 1 and self._late is not None:
                self.is_carried_out = bool(await self._run(self._late))
        return result


async def test_claim_that_comes_true_after_it_was_given_up_is_handed_back(
    working: Working, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for as long as it can come true; here until the worker stops."""
    monkeypatch.setattr(claim, "SETTLED", _FAR.total_seconds())
    async with working(app) as bench:
        late = _LateClaim(bench.store)
        vars(bench.store)["run"] = late.run
        await bench.client.publish("work", {}, key="1", worker_timeout=600)
        await until(lambda: late.is_carried_out, message="the claim has come true")
        bench.worker.stop()
        await asyncio.wait((bench.life,), timeout=PATIENCE)
        assert bench.life.done()
        state = bench.state("work:1")
        assert [run["status"] for run in state["worker_states"]] == ["CANCELED"]
        assert (state["status"], state["failed_cnt"]) == ("INIT", 0)


async def test_plain_handler_that_goes_on_after_its_run_keeps_its_slot(working: Working, app: App) -> None:
    go_on = threading.Event()

    @app.task
    def hold() -> None:
        go_on.wait()

    async with working(app, concurrency=1) as bench:
        try:
            await bench.client.publish("hold", {}, key="1", run_timeout=0.2, max_retries=0)
            await bench.status("hold:1", "FAIL")
            await until(lambda: not bench.worker.parts.scope.ledger.runs, message="the run has ended")
            assert bench.worker.parts.slots.running_cnt == 1
            await bench.client.publish("work", {}, key="1")
            await until(lambda: "work:1" in bench.worker.parts.queue, message="the second task is at hand")
            assert bench.state("work:1")["status"] == "INIT"
        finally:
            go_on.set()
        await bench.status("work:1", "SUCCESS")
        await bench.at_rest()


# --- transactions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_transaction_that_the_server_ended_leaves_neither_effect_nor_success_and_the_next_leaves_both(
    working: Working, database_name: str, mongo: Client, kind: str
) -> None:
    app, attempts = App(), []
    effects = mongo[database_name]["effects"]
    effects.insert_one({"_id": "before"})
    refused = threading.Event()

    def end_first(session: Any) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            mongo.admin.command("killSessions", [{"id": session.session_id["id"]}])
            refused.set()

    @app.task
    async def write_async(context: Context) -> None:
        async with context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({"_id": len(attempts)}, session=session)
            end_first(session)

    @app.task
    def write_plain(context: Context) -> None:
        with context.transaction() as session:
            session.client[database_name]["effects"].insert_one({"_id": len(attempts)}, session=session)
            end_first(session)

    async with working(app) as bench:
        name = f"write_{kind}"
        await bench.client.publish(name, {}, key="1", max_retries=0)
        state = await bench.status(f"{name}:1", "SUCCESS")
        assert refused.is_set()
        assert [run["status"] for run in state["worker_states"]] == ["CANCELED", "SUCCESS"]
        assert [document["_id"] for document in effects.find()] == ["before", 1]


def test_commit_of_a_run_whose_lease_lapsed_is_refused_and_its_write_is_not_there(store: SyncStore) -> None:
    stores.publish(store, "k")
    stores.claim(store, "w", "k")
    run_id = stores.parsed(store, "k").runs[0].run_id
    stores.lapse(store, "k")
    with store.client.start_session() as session:
        transactions.start(session)
        store.database["effects"].insert_one({"_id": 1}, session=session)
        outcome = Outcome("task:k", run_id, RunStatus.SUCCESS)
        with pytest.raises(LeaseLost):
            store.run(transactions.commit(outcome, lambda: True), session)
    assert store.database["effects"].count_documents({}) == 0
    assert store.run(claims.run_statuses(["task:k"], [run_id])) == {run_id: "RUNNING"}
