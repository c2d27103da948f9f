"""Limits in real workers: never more than they allow over all of them, and no permit kept for what is over."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import pytest

from mtask import App, Client, Context, Fail, Retry, TaskSpec
from mtask.database import setup
from mtask.features.controls.rules import Limit
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.limits import operations as permits
from mtask.features.limits import worker as limits_module
from mtask.features.limits.operations import PermitPool, PermitRequest, Wanted
from mtask.features.limits.statements import WAIT_MS
from mtask.features.limits.worker import Admitted, Limits
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.worker.running.run import EndReason
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import Client as Mongo
from tests.mongo import fail_command, until

QUEUE = PermitPool("default")
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def client(client: Client) -> Client:
    client.init()
    return client


def quick() -> None:
    """The handler of a task that runs in an executor."""


class Gauge:
    """An app whose one task says how many of it run at once, of all and of each key."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.app = App()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.starts: list[float] = []
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.app.task(name="work")(self._work)

    async def _work(self, context: Context) -> None:
        self.starts.append(monotonic())
        key = context.task.task_option.limit_key or "none"
        for counted in ("all", key):
            self.running[counted] += 1
            self.most[counted] = max(self.most[counted], self.running[counted])
        await asyncio.sleep(0.005)
        await self.gate.wait()
        for counted in ("all", key):
            self.running[counted] -= 1


@asynccontextmanager
async def two_workers(working: Working, app: App) -> AsyncIterator[Bench]:
    """Run two workers; return the first one's bench."""
    async with working(app, worker_id="w1") as bench, working(app, worker_id="w2"):
        yield bench


@asynccontextmanager
async def one_of_two_runs(working: Working, gauge: Gauge) -> AsyncIterator[Bench]:
    """Run two workers that know each other, and a task that waits at the gate; return the first one's bench."""
    async with working(gauge.app, worker_id="w1") as bench, working(gauge.app, worker_id="w2") as other:
        ledgers = [each.worker.parts.scope.ledger for each in (bench, other)]
        await until(lambda: all(ledger.has_peers for ledger in ledgers), message="they know each other")
        await publish(bench, 1)
        await until(lambda: gauge.running["all"] == 1, message="one runs")
        yield bench


async def publish(bench: Bench, count: int, *, prefix: str = "", **given: Any) -> None:
    for number in range(count):
        await bench.client.publish("work", key=f"{prefix}{number}", **given)


def is_free(bench: Bench, pool: PermitPool = QUEUE) -> bool:
    """Whether nothing takes up a permit."""
    found = bench.mongo[bench.database]["places"].find_one({"_id": pool.id})
    return found is not None and found["running"] == []


def claim_times(bench: Bench, **criteria: Any) -> list[datetime]:
    return sorted(run["claim_time"] for d in bench.tasks.find(criteria) for run in d["task_state"]["worker_states"])


def most_in_a_window(times: list[float], window: timedelta) -> int:
    """Return the most starts of handlers in any window. The times are monotonic seconds, in their order."""
    return max(bisect_left(times, time + window.total_seconds()) - index for index, time in enumerate(times))


async def test_task_that_others_have_run_meanwhile_loses_its_place(working: Working, client: Client) -> None:
    app, gate, starts = App(), asyncio.Event(), list[str]()

    @app.task
    async def work(context: Context) -> None:
        starts.append(context.task.key)
        await gate.wait()

    client.limit("default", concurrency=1)
    async with working(app) as bench:
        for key in ("holds", "moved", "next"):
            await publish(bench, 1, prefix=key)
            await until(lambda: starts == ["holds0"], message="the first one runs")
        await until(lambda: {"work:moved0", "work:next0"} <= set(dict(bench.worker.parts.queue.names())))
        bench.stop_stream()
        bench.stop_scans()
        # So it stands after a run in another worker that failed.
        bench.tasks.update_one({"_id": "work:moved0"}, [{"$set": {"task_state.next_preempt_time": "$$NOW"}}])
        gate.set()
        await bench.status("work:moved0", "SUCCESS")
        assert starts == ["holds0", "next0", "moved0"]


async def test_task_that_others_run_while_it_gets_its_permit_is_not_claimed(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, admit = Gauge(), Limits.admit
    client.limit("default", concurrency=1)

    async def slow(limits: Limits, tasks: Sequence[StoredTask], *rest: Any) -> Admitted:
        admitted = await admit(limits, tasks, *rest)
        if tasks[0].task_state.next_preempt_time == LONG_AGO:
            # So it stands after a run in another worker that failed.
            client.tasks.update_one({}, [{"$set": {"task_state.next_preempt_time": "$$NOW"}}])
        return admitted

    monkeypatch.setattr(Limits, "admit", slow)
    async with working(gauge.app) as bench:
        await bench.client.publish("work", key="moved", start_time=LONG_AGO)
        await bench.status("work:moved", "SUCCESS")
        assert bench.worker.parts.sender.lost_cnt == 1, "the first claim, with the permit for its former place"


async def test_requests_for_permits_are_made_in_the_order_of_their_tasks(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, admit, asked = Gauge(), Limits.admit, list[str]()
    client.limit("default", concurrency=1)

    async def noted(limits: Limits, tasks: Sequence[StoredTask], *rest: Any) -> Admitted:
        asked.extend(task.key for task in tasks)
        return await admit(limits, tasks, *rest)

    async with working(gauge.app) as bench:
        with bench.backed_up():
            for key in ("first", "second"):
                await bench.client.publish("work", key=key)
            sender = bench.worker.parts.sender
            reads, has_read = count(), asyncio.Event()

            async def first_comes_after_the_second() -> None:
                if not next(reads):
                    await has_read.wait()
                has_read.set()

            between(bench.store, "still_due_at", after=first_comes_after_the_second)
            monkeypatch.setattr(Limits, "admit", noted)
            claims_of = (sender.claim_gated([f"work:{key}"], is_rescue=False) for key in ("first", "second"))
            await asyncio.gather(*claims_of)
            assert asked == ["first", "second"]


async def test_scan_for_tasks_of_executors_does_not_tell_what_else_waits_behind_a_limit(
    working: Working, client: Client
) -> None:
    gauge = Gauge(is_open=False)
    gauge.app.task(name="apart", isolation="process")(quick)
    client.limit("default", concurrency=1)
    client.publish_many([TaskSpec("work", key=f"{n}") for n in range(600)])  # more than one scan brings

    executors = ExecutorOptions("no.such:app", count=1)  # none is started
    async with working(gauge.app, executors=executors) as bench:
        await until(lambda: gauge.running["all"] == 1, message="one runs")
        await bench.worker.parts.scans._batches.scan_isolated()
        heard = bench.worker.parts.stream.event_cnt
        await bench.client.publish("work", key="late")
        await bench.heard(heard)
        queue = bench.worker.parts.queue
        await until(lambda: "work:late" not in queue, message="others, which are not known here, go before it")
        bench.worker.stop()
        bench.worker.stop()


async def test_never_more_at_once_than_the_limit_over_two_workers(working: Working, client: Client) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=3)
    async with two_workers(working, gauge.app) as bench:
        await publish(bench, 25)
        await until(lambda: gauge.running["all"] == 3, message="three run")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 25, message="all done")
        await until(lambda: is_free(bench), message="every permit given back")
    assert gauge.most["all"] == 3


async def test_each_key_has_a_limit_of_its_own_and_what_has_none_is_not_bound_by_it(
    working: Working, client: Client
) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", key_concurrency=1)
    async with two_workers(working, gauge.app) as bench:
        for key in ("a", "b"):
            await publish(bench, 4, prefix=key, limit_key=key)
        await publish(bench, 4)
        await until(lambda: gauge.running["all"] == 6, message="one of each key, and all without")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 12, message="all done")
        await until(lambda: all(is_free(bench, PermitPool("default", key)) for key in "ab"), message="given back")
    assert [gauge.most[key] for key in ("a", "b", "none")] == [1, 1, 4]


async def test_request_for_permits_that_fails_is_made_again(
    working: Working, database_name: str, mongo: Mongo, client: Client
) -> None:
    gauge = Gauge()
    client.limit("default", concurrency=1)
    async with working(gauge.app) as bench:
        places = f"{database_name}.places"
        with fail_command(mongo, "findAndModify", times=2, error_code=50, app_name=bench.app_name, namespace=places):
            await publish(bench, 3)
            await until(lambda: bench.count("SUCCESS") == 3, message="all done")


async def test_no_window_has_more_starts_than_the_limit(working: Working, client: Client) -> None:
    gauge, window = Gauge(), timedelta(seconds=1)
    client.limit("default", rate=(4, window))
    async with two_workers(working, gauge.app) as bench:
        await publish(bench, 12)
        await until(lambda: bench.count("SUCCESS") == 12, message="all done")
        assert len(gauge.starts) == 12
        assert most_in_a_window(gauge.starts, window) == 4


async def test_however_a_run_ends_its_permit_is_given_back(working: Working, client: Client) -> None:
    app, stays = App(), asyncio.Event()
    client.limit("default", concurrency=1)

    @app.task(max_retries=0)
    async def work(context: Context, how: str) -> None:
        if how == "raise":
            raise ValueError("broken")
        if how == "fail":
            raise Fail("for good")
        if how == "retry" and context.attempt == 1:
            raise Retry(delay=0)
        if how == "commit":
            async with context.transaction():
                pass
        if how == "cancel":
            await stays.wait()

    async with two_workers(working, app) as bench:
        hows = ("cancel", "raise", "fail", "retry", "commit", "return")
        for how in hows:
            await bench.client.publish(work, {"how": how}, key=how)
        await bench.status("work:cancel", "RUNNING")
        await bench.client.cancel("work", "cancel")
        ends = dict(zip(hows, ("CANCELED", "FAIL", "FAIL", "SUCCESS", "SUCCESS", "SUCCESS"), strict=True))
        for how, status in ends.items():
            await bench.status(f"work:{how}", status)
        await until(lambda: is_free(bench), message="given back")


async def test_params_that_do_not_fit_keep_no_permit(working: Working, client: Client) -> None:
    app = App()
    client.limit("default", concurrency=1)

    @app.task
    async def work(number: int) -> None: ...

    async with working(app) as bench:
        await bench.client.publish("work", {"number": "many"}, key="bad")
        await bench.client.publish("work", {"number": 1}, key="good")
        await bench.status("work:bad", "FAIL")
        await bench.status("work:good", "SUCCESS")
        await until(lambda: is_free(bench), message="given back")


async def test_a_permit_of_a_worker_that_has_died_is_free_when_its_lease_has_lapsed(
    working: Working, client: Client, store: SyncStore
) -> None:
    gauge = Gauge()
    client.limit("default", concurrency=1)
    lease = {"ping_interval": 0.5, "worker_timeout": 1.5}
    client.publish("work", key="of the dead", **lease)  # type: ignore[call-overload]
    store.run(setup.ensure(setup.EVERY))
    store.run(permits.take([PermitRequest(QUEUE, Limit(concurrency=1), [Wanted("work:of the dead")])], "w", "token"))
    (document,) = store.run(claims.claim(["work:of the dead"], "dead", "token"))
    lapses = document["task_state"]["worker_states"][0]["ping_expire_time"]
    async with two_workers(working, gauge.app) as bench:
        await publish(bench, 3)
        await until(lambda: bench.count("SUCCESS") == 4, message="all done, that of the dead among them")
        await until(lambda: is_free(bench), message="given back")
        of_the_living = {"task_state.worker_states.worker_id": {"$ne": "dead"}}
        assert min(claim_times(bench, **of_the_living)) >= lapses
        assert [run["status"] for run in bench.state("work:of the dead")["worker_states"]] == ["TIMEOUT", "SUCCESS"]
    assert gauge.most["all"] == 1


async def test_run_that_cannot_begin_before_the_end_of_its_permit_is_handed_back(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is counted for the end of its permit at the latest, so a later one would be one too many."""
    gauge = Gauge()
    client.limit("default", rate=(5, timedelta(seconds=1)))
    monkeypatch.setattr(limits_module, "BEGIN", 60.0)  # a worker that is as slow
    async with working(gauge.app) as bench:
        await publish(bench, 1)
        runs = "worker_states"
        await until(lambda: bench.state("work:0")[runs][:1] != [], message="claimed")
        await until(lambda: bench.state("work:0")[runs][0]["status"] == "CANCELED", message="handed back")
        assert "could not begin it in time" in bench.state("work:0")[runs][0]["fail_reason"]
        assert gauge.starts == []
        monkeypatch.setattr(limits_module, "BEGIN", 0.2)
        await bench.status("work:0", "SUCCESS")
        assert bench.state("work:0")["failed_cnt"] == 0
    assert len(gauge.starts) == 1


async def test_permit_of_a_run_that_a_ping_revives_amid_its_rescue_is_not_returned(
    working: Working, database_name: str, mongo: Mongo, client: Client, store: SyncStore
) -> None:
    """A first read may be older than the ping, right after an election for example. The close then finds a live run."""
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=2)
    lease = {"ping_interval": 0.5, "worker_timeout": 1.5}
    ids = ["work:lives on", "work:of the dead"]
    for task_id in ids:
        client.publish("work", key=task_id.partition(":")[2], **lease)  # type: ignore[call-overload]
    store.run(setup.ensure(setup.EVERY))
    store.run(permits.take([PermitRequest(QUEUE, Limit(concurrency=2), [*map(Wanted, ids)])], "w", "token"))
    assert len(store.run(claims.claim(ids, "dead", "token"))) == 2
    later = datetime.now(UTC) + timedelta(minutes=5)

    async def revive() -> None:
        moved = {"task_state.worker_states.0.ping_expire_time": later, "task_state.next_preempt_time": later}
        has_lapsed = {"task_state.worker_states.0.ping_expire_time": {"$lte": datetime.now(UTC)}}
        mongo[database_name]["tasks"].update_one(
            {"_id": ids[0], "task_state.status": "RUNNING", **has_lapsed}, {"$set": moved}
        )

    async with working(gauge.app) as bench:
        between(bench.store, "settle", before=revive)
        await until(lambda: gauge.running["all"] > 0, message="the other one is rescued")
        pool = mongo[database_name]["places"].find_one({"_id": QUEUE.id}) or {}
        assert sorted(entry["task_id"] for entry in pool["running"]) == ids
        await publish(bench, 3)
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 4, message="all but the one that lives on are done")
    assert gauge.most["all"] == 1


@pytest.mark.parametrize("bound", [5, None])
async def test_a_limit_that_is_raised_or_removed_lets_what_waits_start_at_once(
    working: Working, client: Client, bound: int | None
) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=2)
    async with working(gauge.app) as bench:
        await publish(bench, 8)
        await until(lambda: gauge.running["all"] == 2, message="two run")
        await asyncio.to_thread(client.limit, "default", concurrency=bound)
        await until(lambda: gauge.running["all"] == (bound or 8), 4.0, "more run")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 8, message="all done")
    assert gauge.most["all"] == (bound or 8)


async def test_an_unlimited_queue_beside_a_crowded_one_is_served(
    working: Working, database_name: str, client: Client
) -> None:
    gauge = Gauge(is_open=False)
    client.limit("narrow", concurrency=1)
    async with working(gauge.app, queues=["narrow", "default"]) as bench:
        await publish(bench, 5, prefix="narrow", queue="narrow", priority=9)
        await publish(bench, 5)
        await until(lambda: gauge.running["all"] == 6, message="one of the narrow queue, and all of the other")
        assert bench.tasks.count_documents({"queue": "narrow", "task_state.status": "RUNNING"}) == 1
        assert client.count(queue="default", status="RUNNING") == 5
        pools = {d["_id"] for d in bench.mongo[database_name]["places"].find()}
        assert pools == {PermitPool("narrow").id}  # the other is never asked about
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 10, message="all done")


def asked(bench: Bench) -> list[list[str]]:
    """Record the tasks for which the worker asks for permits from now on."""
    limits, groups = bench.worker.parts.features.limits, list[list[str]]()
    admit = limits.admit

    async def recorded(tasks: Sequence[StoredTask], *given: Any) -> Admitted:
        groups.append([task.id for task in tasks])
        return await admit(tasks, *given)

    limits.admit = recorded  # type: ignore[assignment,method-assign]
    return groups


async def test_of_many_that_wait_for_one_permit_a_few_ask_at_a_time_the_most_urgent_first(
    working: Working, client: Client
) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=1)
    async with working(gauge.app) as bench:
        await publish(bench, 1)
        await until(lambda: gauge.running["all"] == 1, message="one runs")
        specs = [TaskSpec("work", key=f"many {n}", priority=n % 3) for n in range(120)]
        await bench.client.publish_many(specs)
        limits = bench.worker.parts.features.limits
        await until(lambda: len(list(limits.windows.entries())) >= 118, message="all wait")
        groups = asked(bench)
        await until(lambda: len(groups) >= 2, message="some have asked")
        assert max(map(len, groups)) <= 2
        urgent = {f"work:many {n}" for n in range(120) if n % 3 == 2}
        assert {task_id for group in groups for task_id in group} <= urgent
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 121, message="all done")
    assert gauge.most["all"] == 1


def _was_refused(limits: Limits, pool: PermitPool, least: int) -> bool:
    return limits.pools.state(pool).refusals >= least


async def test_tasks_that_their_key_refuses_use_up_no_permit_of_the_queue(working: Working, client: Client) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=3, key_concurrency=1)
    key = PermitPool("default", "k")
    async with working(gauge.app) as bench:
        await publish(bench, 6, limit_key="k")
        limits = bench.worker.parts.features.limits
        asked_in_vain = [partial(_was_refused, limits, key, count) for count in range(1, 5)]
        for condition in asked_in_vain:
            await until(condition, message="asked in vain")
            limits.called(key.id, 1)
        await publish(bench, 2, prefix="free ")
        await until(lambda: gauge.running["all"] == 3, message="two without a key run beside the one with it")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 8, message="all done")


async def test_what_its_key_admits_and_its_queue_does_not_keeps_no_permit_and_does_not_ask_at_once(
    working: Working, client: Client
) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=1, key_concurrency=1)
    async with working(gauge.app) as bench:
        await publish(bench, 1, limit_key="first")
        await until(lambda: gauge.running["all"] == 1, message="one runs")
        with bench.backed_up():
            await publish(bench, 1, prefix="next ", limit_key="second")
            waiting = StoredTask.model_validate(bench.tasks.find_one({"key": "next 0"}))
            limits = bench.worker.parts.features.limits
            refused: list[StoredTask] = []
            now = bench.worker.parts.scope.clock.now()
            admitted = await limits.admit([waiting], "token", now, lambda tasks, _: refused.extend(tasks))
            assert (admitted.task_ids, [task.id for task in refused]) == ([], ["work:next 0"])
            assert is_free(bench, PermitPool("default", "second"))
            assert not limits.pools.has_room(QUEUE)


async def test_call_that_comes_before_the_answer_to_an_older_request_is_not_forgotten(
    working: Working, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=1)
    async with working(gauge.app) as bench:
        await publish(bench, 1)
        await until(lambda: gauge.running["all"] == 1, message="one runs")
        with bench.backed_up():
            await publish(bench, 1, prefix="next ")
            waiting = StoredTask.model_validate(bench.tasks.find_one({"key": "next 0"}))
            limits, clock = bench.worker.parts.features.limits, bench.worker.parts.scope.clock
            store = bench.worker.parts.scope.store
            run = store.run

            async def answered_late(operation: Any) -> Any:
                answer = await run(operation)
                limits.called(QUEUE.id, 1)
                return answer

            with monkeypatch.context() as patch:
                patch.setattr(type(store), "run", lambda _, operation: answered_late(operation))
                await limits.admit([waiting], "token", clock.now(), lambda *_: None)
            assert limits.pools.retry_at(QUEUE) <= monotonic()


async def no_polls(monkeypatch: pytest.MonkeyPatch, *benches: Bench) -> None:
    """Have the workers ask the full pool only when they hear of a permit."""
    monkeypatch.setattr(limits_module, "POLL", 3_600.0)
    pools = [bench.worker.parts.features.limits.pools for bench in benches]
    await until(lambda: all(each.retry_at(QUEUE) > monotonic() + 60 for each in pools), message="polled once more")


async def test_permits_that_an_answer_leaves_free_are_asked_for_at_once(
    working: Working, database_name: str, mongo: Mongo, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, peer, limit, places = Gauge(), App(), Limit(concurrency=4), mongo[database_name]["places"]
    peer.task(name="other")(lambda: None)
    gauge.gate.clear()
    client.limit("default", concurrency=4)
    async with working(peer, worker_id="peer"), working(gauge.app, worker_id="w1") as bench:
        ghosts = [Wanted(f"ghost:{number}") for number in range(4)]
        await bench.worker.parts.scope.store.run(permits.take([PermitRequest(QUEUE, limit, ghosts)], "g", "g"))
        await publish(bench, 6)
        await until(lambda: len(listed_in(mongo, database_name).get("w1", ())) == 6, message="all listed")
        await no_polls(monkeypatch, bench)
        call = {"running": [], "call": f"{datetime.now(UTC).isoformat()} 1\nw1\n"}  # three more came free since
        places.update_one({"_id": QUEUE.id}, {"$set": call})
        await until(lambda: gauge.running["all"] == 4, message="all permits used")
        gauge.gate.set()


async def test_worker_that_does_not_ask_for_what_it_returned_withdraws_and_the_other_is_called(
    working: Working, database_name: str, mongo: Mongo, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to see to its tasks itself, so nobody was called for them."""
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=1)
    async with working(gauge.app, worker_id="w1") as one, working(gauge.app, worker_id="w2") as two:
        benches = {"w1": one, "w2": two}
        await publish(one, 1)
        await until(lambda: gauge.running["all"] == 1, message="one runs")
        holder = one.state("work:0")["worker_states"][0]["worker_id"]
        await publish(one, 1, prefix="next ")
        await until(lambda: set(listed_in(mongo, database_name)) == {"w1", "w2"}, message="listed")
        await no_polls(monkeypatch, one, two)
        monkeypatch.setattr(benches[holder].worker.parts.features.limits, "let_ask", lambda counts: None)
        gauge.gate.set()
        await one.status("work:next 0", "SUCCESS")
        assert one.state("work:next 0")["worker_states"][0]["worker_id"] != holder


async def test_what_waits_is_listed_when_a_permit_is_taken_though_it_waits_for_its_queue_too(
    working: Working, database_name: str, mongo: Mongo, client: Client
) -> None:
    app, peer = App(), App()
    listed: list[int] = []
    pool = PermitPool(None, tenant="acme")
    client.limit("default", concurrency=1)
    client.limit(tenant="acme", concurrency=1)
    places = mongo[database_name]["places"]

    @app.task
    def work() -> None:
        waiting = (places.find_one({"_id": pool.id}) or {}).get("waiting", ())
        listed.append(sum(len(worker["tasks"]) for worker in waiting))

    peer.task(name="other")(work)
    async with working(peer, worker_id="peer") as bench:
        for number in range(3):
            await bench.client.publish("work", key=f"{number}", tenant="acme")
        async with working(app, worker_id="w1"):
            await until(lambda: bench.count("SUCCESS") == 3, message="all done")
    assert listed == [2, 1, 0]


def listed_in(mongo: Mongo, database: str) -> dict[str, list[str]]:
    """Return the keys of the tasks that the pool of the queue lists, by worker."""
    waiting = (mongo[database]["places"].find_one({"_id": QUEUE.id}) or {}).get("waiting", ())
    return {each["worker_id"]: [task["task_id"].partition(":")[2] for task in each["tasks"]] for each in waiting}


async def test_task_that_goes_before_those_that_are_listed_is_listed_at_once(
    working: Working, database_name: str, mongo: Mongo, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "POLL", 600.0)
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=1)

    def is_first(key: str) -> bool:
        return any(tasks[:1] == [key] for tasks in listed_in(mongo, database_name).values())

    async with one_of_two_runs(working, gauge) as bench:
        for name, priority in (("low", 0), ("high", 5), ("higher", 9)):
            await publish(bench, 1, prefix=name, priority=priority)
            await until(partial(is_first, f"{name}0"), message=f"{name} is listed first")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 4, message="all done")


async def test_task_that_comes_later_and_goes_behind_those_that_are_listed_is_listed_soon(
    working: Working, database_name: str, mongo: Mongo, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may take all that go before it, and then nobody would be called for it."""
    monkeypatch.setattr(limits_module, "POLL", 600.0)
    gauge = Gauge(is_open=False)
    client.limit("default", concurrency=1)

    def are_listed(*keys: str) -> bool:
        return any(tasks == [*keys] for tasks in listed_in(mongo, database_name).values())

    async with one_of_two_runs(working, gauge) as bench:
        await publish(bench, 1, prefix="high", priority=5)
        await until(partial(are_listed, "high0"), message="one is listed")
        for worker in ("w1", "w2"):
            await publish(bench, 1, prefix=worker, specific_worker_ids=[worker])
            await until(partial(are_listed, "high0", f"{worker}0"), message=f"the task of {worker} is listed, too")
        gauge.gate.set()
        await until(lambda: bench.count("SUCCESS") == 4, message="all done")


async def test_what_waits_for_a_start_stays_listed_until_the_next_one_is_free(
    working: Working, database_name: str, mongo: Mongo, client: Client
) -> None:
    client.limit("default", rate=(1, 9))

    def ends() -> dict[str, datetime]:
        document = mongo[database_name]["places"].find_one({"_id": QUEUE.id}) or {}
        return {each["worker_id"]: each["until"] for each in document.get("waiting", ())}

    def longer(first: Mapping[str, datetime]) -> list[timedelta]:
        return [end - first[each] for each, end in ends().items() if each in first and end > first[each]]

    async with two_workers(working, Gauge().app) as bench:
        await publish(bench, 2)
        first = await until(ends, message="a worker is listed")
        by = await until(partial(longer, first), message="it is listed for longer")
        assert min(by) < timedelta(milliseconds=WAIT_MS), "it was not listed for a while"
        assert bench.count("SUCCESS") == 1


async def test_blocked_keys_keep_neither_another_queue_nor_another_key_from_being_served(
    working: Working, client: Client
) -> None:
    gauge = Gauge()
    client.limit("narrow", key_rate=(1, timedelta(days=1)))
    keys, each = 800, 7  # more wait for long than a batch brings, and more keys than are easily counted up
    specs = [
        TaskSpec("work", key=f"{key} {n}", queue="narrow", limit_key=f"k{key}")
        for key in range(keys)
        for n in range(each)
    ]
    client.publish_many(specs)
    queues = ["narrow", "default"]
    async with working(gauge.app, queues=queues, concurrency=200) as bench:
        await until(lambda: bench.count("SUCCESS") == keys, message="one of each key")
        bench.stop_stream()
        await publish(bench, 10)
        await publish(bench, 1, prefix="late ", queue="narrow", limit_key="late")
        await until(lambda: bench.count("SUCCESS") == keys + 11, message="what nothing keeps from it")


async def test_a_claim_that_comes_too_late_for_its_permit_is_not_valid(
    working: Working, database_name: str, client: Client
) -> None:
    gauge = Gauge()
    client.limit("default", concurrency=1)
    async with working(gauge.app) as bench:
        parts = bench.worker.parts

        async def wait() -> None:
            if claiming.seen_cnt == 1:
                (entry,) = (bench.mongo[database_name]["places"].find_one({"_id": QUEUE.id}) or {})["running"]
                await until(lambda: client.server_time() > entry["claim_by"], message="too late")

        claiming = between(bench.store, "claim", before=wait)
        await publish(bench, 1)
        await until(lambda: parts.adoption.won_cnt or parts.sender.lost_cnt, message="landed")
        assert parts.sender.lost_cnt == 1
        await bench.status("work:0", "SUCCESS")
        assert len(claim_times(bench)) == 1


@pytest.mark.parametrize(
    ("limits", "change", "pool"),
    [
        ({"queue": "narrow", "concurrency": 1}, {"queue": "narrow"}, PermitPool("narrow")),
        ({"queue": "default", "key_concurrency": 1}, {"task_option.limit_key": "b"}, PermitPool("default", "b")),
    ],
    ids=["queue", "key"],
)
async def test_a_task_that_comes_under_another_limit_amid_its_claim_needs_its_permit_there(
    working: Working, client: Client, limits: Any, change: Any, pool: PermitPool
) -> None:
    gauge = Gauge()
    client.limit(**limits)
    async with working(gauge.app, queues=["default", "narrow"]) as bench:

        async def move() -> None:
            if claiming.seen_cnt == 1:
                bench.tasks.update_one({"_id": "work:0"}, {"$set": change})

        claiming = between(bench.store, "claim", before=move)
        await publish(bench, 1, limit_key="a")
        await bench.status("work:0", "SUCCESS")
        await until(lambda: is_free(bench, pool), 5.0, "it was taken, and given back")


async def test_a_run_that_its_worker_lets_go_of_keeps_its_permit_until_it_is_closed(
    working: Working, client: Client
) -> None:
    """A lease is trusted no longer some time before it lapses: until then the run is live for all others."""
    gauge = Gauge(is_open=False)
    for queue in ("default", "other"):
        client.limit(queue, concurrency=1)
    async with working(gauge.app, queues=["default", "other"]) as bench:
        await publish(bench, 1)
        await until(lambda: gauge.running["all"] == 1, message="it runs")
        (run,) = bench.worker.parts.scope.ledger.runs
        run.end(EndReason.LEASE_LOST)
        await until(lambda: not bench.worker.parts.scope.ledger.runs, message="let go")
        gauge.gate.set()
        await publish(bench, 1, prefix="later ", queue="other")
        await bench.status("work:later 0", "SUCCESS")
        await until(lambda: is_free(bench, PermitPool("other")), message="what comes after it is given back")
        assert not is_free(bench)
