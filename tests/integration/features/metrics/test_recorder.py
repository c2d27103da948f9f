"""What a worker counts of a known load, exactly; when it stores its counts; and what becomes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Context, Fail, Retry
from mtask.errors import DatabaseUnavailable
from mtask.features.metrics import operations as tallies
from mtask.features.metrics import worker as recorder
from mtask.features.metrics.rules import TOTALS_ID
from mtask.kernel.document.options import TaskOptions
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.process.counts import Histogram, Pair, Tally, tally_of
from tests.integration import stores
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import Client, until

AT_ONCE: TaskOptions = {"retry_delay": 0}
app = App()


@app.task
async def quick() -> None:
    """Return at once."""


@app.task
async def flaky(context: Context) -> int:
    """Fail twice."""
    if context.attempt < 3:
        raise ValueError("no luck")
    return context.attempt


@app.task
async def hopeless() -> None:
    """Fail for good."""
    raise Fail("never")


@app.task
async def again(context: Context) -> None:
    """Go back once."""
    if context.attempt == 1:
        raise Retry(timedelta(0), "not yet")


@app.task
async def endless() -> None:
    """Wait for its end."""
    await asyncio.Event().wait()


@app.task
async def booked(context: Context) -> None:
    """End in a transaction."""
    async with context.transaction():
        pass


def outcomes(tally: Tally) -> dict[str, dict[str, int]]:
    return {pair.name: counts.runs for pair, counts in tally.pairs.items()}


def stored(bench: Bench, tally_id: str | None = None) -> Tally:
    found = bench.mongo[bench.database]["metrics"].find_one(
        {"_id": tally_id or bench.worker.parts.features.recorder.tally_id}
    )
    assert found is not None
    return tally_of(found)


async def settled(bench: Bench, count: int) -> Tally:
    """Wait until the worker has counted so many ended runs; return its tally."""
    await until(lambda: bench.worker.tally.run_cnt >= count, message=f"{count} runs")
    assert bench.worker.tally.run_cnt == count
    return bench.worker.tally


async def test_each_run_of_a_known_load_counts_once_with_its_outcome(working: Working) -> None:
    async with working(app) as bench:
        publish = bench.client.publish
        for number in range(7):
            await publish("quick", key=str(number))
        await publish("flaky", key="k", **AT_ONCE)
        await publish("hopeless", key="k")
        await publish("again", key="k")
        await publish("booked", key="k")
        await publish("endless", key="late", run_timeout=0.05, max_retries=0)
        await publish("endless", key="canceled")
        await until(lambda: len(bench.worker.parts.scope.ledger.running) >= 1)
        await bench.status("endless:canceled", "RUNNING")
        await bench.client.cancel("endless", "canceled")
        tally = await settled(bench, 7 + 3 + 1 + 2 + 1 + 1 + 1)
        assert outcomes(tally) == {
            "quick": {"SUCCESS": 7},
            "flaky": {"FAIL": 2, "SUCCESS": 1},
            "hopeless": {"FAIL": 1},
            "again": {"CANCELED": 1, "SUCCESS": 1},
            "booked": {"SUCCESS": 1},
            "endless": {"FAIL": 1, "CANCELED": 1},
        }
        for counts in tally.pairs.values():
            assert counts.wait.count == counts.run.count == sum(counts.runs.values())
        late = tally.pairs[Pair("default", "endless")].run
        assert late.seconds >= 0.05
        ran = Counter(run["status"] for found in bench.tasks.find() for run in found["task_state"]["worker_states"])
        assert ran == {"SUCCESS": 10, "FAIL": 4, "CANCELED": 2}, "the documents say the same"
        await bench.worker.parts.features.recorder.write()
        assert stored(bench).document() == tally.document()
        assert (tally.leases_lapsed, tally.lateness.count) == (0, 0)


async def test_a_wait_begins_when_the_task_is_due(working: Working) -> None:
    async with working(app) as bench:
        with bench.backed_up():
            await bench.client.publish("quick", key="waits")
            delayed = await bench.client.publish("quick", key="due later", delay=timedelta(seconds=0.5))
            assert delayed.created
            begin = await bench.client.server_time()
            await until_server(bench, begin, 0.7)
        bench.worker.parts.claimer.wake()
        waits = (await settled(bench, 2)).pairs[Pair("default", "quick")].wait
        runs = [bench.state(f"quick:{key}")["worker_states"][0]["claim_time"] for key in ("waits", "due later")]
        states = [bench.state(f"quick:{key}") for key in ("waits", "due later")]
        due = [states[0]["create_time"], states[1]["start_time"]]
        expected = sum((claimed - since).total_seconds() for claimed, since in zip(runs, due, strict=True))
        assert waits.seconds == pytest.approx(expected, abs=0.002)
        assert waits.seconds >= 0.7


async def until_server(bench: Bench, begin: Any, seconds: float) -> None:
    async def has_passed() -> bool:
        passed: timedelta = await bench.client.server_time() - begin
        return passed.total_seconds() >= seconds

    await until(has_passed, message=f"{seconds:g} s")


@pytest.mark.parametrize("retries", [0, 3], ids=["the janitor closes it", "a rescue closes it"])
async def test_a_lapsed_run_counts_once_at_the_worker_that_closes_it(
    working: Working, database_name: str, mongo: Client, retries: int
) -> None:
    store = SyncStore(mongo, database_name)
    async with working(lapsing, worker_id="w1") as bench, working(lapsing, worker_id="w2") as other:
        with bench.backed_up(), other.backed_up():
            for number in range(5):
                stores.publish(store, str(number), max_retries=retries, retry_delay=0)
            assert len(stores.claim(store, "dead", *map(str, range(5)))) == 5
            for number in range(5):
                stores.lapse(store, str(number))
        for each in (bench, other):
            each.worker.parts.claimer.wake()
            each.worker.parts.scans.ask_full()
        tallies_of = [bench.worker.tally, other.worker.tally]
        final = "SUCCESS" if retries else "FAIL"
        for number in range(5):
            await bench.status(f"task:{number}", final)
        expected = 5 + (5 if retries else 0)
        await until(lambda: sum(tally.run_cnt for tally in tallies_of) >= expected, message="counted")
        for each in (bench, other):
            await each.at_rest()
        both = Tally()
        for tally in tallies_of:
            both.add(tally)
        assert both.leases_lapsed == 5
        assert outcomes(both) == {"task": {"TIMEOUT": 5, **({"SUCCESS": 5} if retries else {})}}


lapsing = App()


@lapsing.task(name="task")
async def task() -> None:
    """Return at once."""


async def test_nothing_is_written_for_a_task_and_nothing_when_nothing_has_changed(
    working: Working, database_name: str, mongo: Client
) -> None:
    async with working(app) as bench:
        parts = bench.worker.parts
        collection = mongo[database_name]["metrics"]
        await parts.features.recorder.write()
        assert (parts.features.recorder.write_cnt, collection.count_documents({})) == (0, 0)
        for number in range(30):
            await bench.client.publish("quick", key=str(number))
        await settled(bench, 30)
        assert parts.features.recorder.write_cnt == 0
        await parts.features.recorder.write()
        await parts.features.recorder.write()
        assert parts.features.recorder.write_cnt == 1
        found = collection.find_one()
        assert found is not None
        assert (found["recent_runs"], found["worker_id"], found["recent_seconds"] > 0) == (30, "w1", True)
        await bench.client.publish("quick", key="one more")
        await settled(bench, 31)
    # The stop has written what was left.
    found = collection.find_one()
    assert found is not None
    assert (tally_of(found).run_cnt, found["recent_runs"], parts.features.recorder.write_cnt) == (31, 1, 2)


async def test_a_loop_writes_at_its_interval(working: Working, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.Recorder.__init__, "__defaults__", (timedelta(seconds=0.05),))
    async with working(app) as bench:
        await bench.client.publish("quick", key="k")
        await until(lambda: bench.worker.parts.features.recorder.write_cnt == 1, message="written")


async def test_a_worker_that_was_folded_alive_goes_on_in_another_tally(
    working: Working, database_name: str, mongo: Client
) -> None:
    """It was frozen for longer than its heartbeat lasts; the reply to its last write before that was lost."""
    store = SyncStore(mongo, database_name)
    async with working(app) as bench:
        parts = bench.worker.parts
        for number in range(40):
            await bench.client.publish("quick", key=str(number))
        await settled(bench, 40)
        await parts.features.recorder.write()
        former = parts.features.recorder.tally_id
        # This one is stored, though the worker does not know it.
        await bench.client.publish("quick", key="unknown")
        await settled(bench, 41)

        async def lose() -> None:
            raise DatabaseUnavailable("the reply is lost")

        writing = between(bench.store, "record", after=lose)
        await parts.features.recorder.write()
        writing.end()
        assert writing.seen_cnt == 1
        bench.registry.update_one({"_id": "w1"}, {"$set": {"status": "stopped"}})
        assert store.run(tallies.fold()) == 1
        bench.registry.update_one({"_id": "w1"}, {"$set": {"status": "running"}})
        await bench.client.publish("quick", key="after")
        await settled(bench, 42)
        await parts.features.recorder.write()
        assert parts.features.recorder.tally_id == f"{former}-2"
        assert outcomes(stored(bench)) == {"quick": {"SUCCESS": 1}}
        assert (stored(bench, former).run_cnt, stored(bench, TOTALS_ID).run_cnt) == (41, 41)
        metrics = await bench.client.metrics()
        assert metrics.tally.run_cnt == 42
        waits: Histogram = metrics.tally.pairs[Pair("default", "quick")].wait
        assert waits.count == 42


async def test_a_database_that_refuses_metrics_hinders_no_task(
    working: Working, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(app) as bench:
        parts = bench.worker.parts
        refused = between(bench.store, "record", before=_refuse)
        await bench.client.publish("quick", key="k")
        await settled(bench, 1)
        for _ in range(3):
            await parts.features.recorder.write()
        assert refused.seen_cnt == 3
        assert caplog.text.count("metrics not stored") == 1, "one line, not one in ten seconds"
        refused.end()
        await parts.features.recorder.write()
        assert stored(bench).run_cnt == 1


async def _refuse() -> None:
    from mtask.errors import AccessDenied

    raise AccessDenied("not authorized", is_unauthorized=True)


async def test_late_firings_and_lost_claims_count(working: Working) -> None:
    async with working(app) as bench:
        now = await bench.client.server_time()
        await bench.client.add_schedule("once", "quick", now + timedelta(seconds=1))
        lateness = bench.worker.tally.lateness
        await until(lambda: lateness.count == 1, message="fired")
        assert 0 <= lateness.seconds < 60
        parts = bench.worker.parts
        await bench.client.publish("quick", key="gone", delay=timedelta(days=1))
        await parts.sender.claim_free(["quick:gone"], lookup_first=False, is_rescue=False, is_simple=False)
        assert bench.worker.tally.claims_lost == parts.sender.lost_cnt >= 1
