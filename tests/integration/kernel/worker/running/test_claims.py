"""Claims that meet others, lost replies and late news: what was taken is run, what was heard is not forgotten."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import App, RunStatus, TaskSpec
from mtask.errors import DatabaseUnavailable
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery.fleet import Peers
from tests import build
from tests.integration.stores import register
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import Client, Document, until


def foreign(key: str, **changes: Any) -> Document:
    """Return a task named "work" as some other service writes it, with parts of its state or options changed."""
    return build.changed(build.task(f"work:{key}", time=datetime.now(UTC), params={}), changes)


def insert(bench: Bench, document: Document) -> None:
    """Insert a document past the validator."""
    bench.mongo[bench.database].command("insert", "tasks", documents=[document], bypassDocumentValidation=True)


def runs_of(bench: Bench, task_id: str) -> list[tuple[str, str]]:
    return [(run["worker_id"], run["status"]) for run in bench.state(task_id)["worker_states"]]


@pytest.fixture
def long_app() -> App:
    made = App()

    @made.task
    async def work() -> None:
        await asyncio.sleep(60)

    return made


@pytest.mark.parametrize(
    "fault",
    [{"writeConcernError": {"code": 100, "errmsg": "not replicated"}}, {"errorCode": 11601}],
    ids=["not yet replicated", "interrupted"],
)
@pytest.mark.parametrize(("command", "task_cnt"), [("findAndModify", 1), ("update", 3)])
async def test_claim_that_was_not_answered_as_it_should_be_is_read_back_and_run(
    working: Working, app: App, command: str, task_cnt: int, fault: dict[str, Any]
) -> None:
    """What is written and not yet replicated is not to be read at once: it is looked for again."""
    async with working(app) as bench:
        with bench.failing(command, times=1, **fault):
            with bench.backed_up():
                await bench.client.publish_many([TaskSpec("work", {}, key=str(key)) for key in range(task_cnt)])
                await until(lambda: len(bench.worker.parts.queue) == task_cnt)
            bench.worker.parts.claimer.wake()
            for key in range(task_cnt):
                await bench.status(f"work:{key}", "SUCCESS")
                assert runs_of(bench, f"work:{key}") == [("w1", "SUCCESS")]
        await bench.at_rest()


async def test_group_that_fails_half_way_is_read_back_as_soon_as_it_can_be_and_run(working: Working, app: App) -> None:
    async with working(app) as bench:
        refusals = iter(range(3))

        async def be_unavailable() -> None:
            if next(refusals, None) is not None:
                raise DatabaseUnavailable("not now")

        between(bench.store, "claimed", before=be_unavailable)
        with bench.backed_up():
            for key in ("1", "2", "4", "5"):
                await bench.client.publish("work", {}, key=key)
            insert(bench, foreign("3", task_option__worker_timeout_ms="1m"))
            await until(lambda: len(bench.worker.parts.queue) == 5)
        bench.worker.parts.claimer.wake()
        for key in ("1", "2", "4", "5"):
            await bench.status(f"work:{key}", "SUCCESS")
            assert runs_of(bench, f"work:{key}") == [("w1", "SUCCESS")]
        await bench.status("work:3", "FAIL")
        assert next(refusals, None) is None
        await bench.at_rest()


async def test_document_that_cannot_be_started_does_not_keep_the_others_of_its_group_from_starting(
    working: Working, app: App
) -> None:
    async with working(app) as bench:

        async def be_unavailable() -> None:
            raise DatabaseUnavailable("not now")

        with bench.backed_up():
            insert(bench, foreign("1", task_state__create_time="yesterday"))
            for key in ("2", "3"):
                await bench.client.publish("work", {}, key=key)
            await until(lambda: len(bench.worker.parts.queue) == 3)
            # The end of the run that cannot be started is not written at first: nor need it be.
            is_its = {"only": lambda given: given["outcomes"][0].task_id == "work:1"}
            stepped = between(bench.store, "finish", before=be_unavailable, **is_its)
        bench.worker.parts.claimer.wake()
        for key in ("2", "3"):
            await bench.status(f"work:{key}", "SUCCESS")
        await until(lambda: stepped.seen_cnt)
        await bench.at_rest()


async def test_document_marked_as_malformed_between_its_claim_and_the_reading_of_it_is_not_started(
    working: Working, app: App, store: SyncStore
) -> None:
    async with working(app) as bench:

        async def mark() -> None:
            if not bench.tasks.count_documents({"_id": "work:1", "task_state.status": "RUNNING"}):
                stepped.act_amid(mark)  # this claim was that of the other task alone
                return
            assert store.run(claims.quarantine("work:1", "w1", "by whoever looked at it"))

        with bench.backed_up():
            insert(bench, foreign("1", task_state__failed_cnt=-1))
            await bench.client.publish("work", {}, key="2")
            await until(lambda: len(bench.worker.parts.queue) == 2)
            bench.worker.parts.adoption.are_simple = False  # the long statement takes no offence at it
            stepped = between(bench.store, "claim", amid=mark)
        bench.worker.parts.claimer.wake()
        await bench.status("work:2", "SUCCESS")
        await until(lambda: bench.tasks.count_documents({"_id": "work:1", "task_state.status": "FAIL"}))
        await bench.at_rest()
        runs = runs_in(bench.tasks.find_one({"_id": "work:1"}) or {})
        assert [run["status"] for run in runs] == ["CANCELED", "FAIL"]


async def test_lease_is_trusted_as_the_claim_wrote_it_though_options_changed_before_it_was_read_back(
    working: Working, long_app: App
) -> None:
    async with working(long_app) as bench:

        async def change_options() -> None:
            for key in ("1", "2"):
                await bench.client.update_option(
                    "work", key, worker_timeout=600, ping_interval=300
                )  # fmt: skip

        between(bench.store, "claim", amid=change_options)
        with bench.backed_up():
            for key in ("1", "2"):
                await bench.client.publish("work", {}, key=key, worker_timeout=4, ping_interval=0.5)
            await until(lambda: len(bench.worker.parts.queue) == 2)
        bench.worker.parts.claimer.wake()
        run = await until(lambda: bench.worker.parts.scope.ledger.held_run("work:1"))
        assert run is not None
        assert run.trusted_until <= time.monotonic() + 4.0
        assert run.next_ping <= time.monotonic() + 2.0
        (first,) = bench.state("work:1")["worker_states"]
        await until(
            lambda: bench.state("work:1")["worker_states"][0]["ping_expire_time"] > first["ping_expire_time"],
            message="a ping in time",
        )
        assert bench.count("RUNNING") == 2


async def test_claimer_goes_on_when_the_finisher_has_drained(working: Working, app: App) -> None:
    async with working(app) as bench:
        bench.stop_scans()
        with bench.backed_up():
            await bench.client.publish("work", {}, key="1")
            await until(lambda: "work:1" in bench.worker.parts.queue)
        # Nobody wakes it: what drains the finisher knows nothing of the claimer.
        await bench.status("work:1", "SUCCESS")


async def test_each_slot_that_becomes_free_is_filled_though_no_hint_comes(working: Working) -> None:
    app, ends = App(), asyncio.Queue[None]()

    @app.task
    async def work() -> None:
        await ends.get()

    async with working(app, concurrency=1) as bench:
        bench.stop_scans()
        parts, cnt = bench.worker.parts, 4
        await bench.client.publish_many([TaskSpec("work", {}, key=str(number)) for number in range(cnt)])
        for left in reversed(range(cnt)):
            # The claim has landed, so only the end of the run tells that there is room again.
            await until(lambda: len(parts.scope.ledger.running) == 1 and parts.claimer.is_at_rest, message="a run")
            await until(lambda left=left: len(parts.queue) == left)  # type: ignore[misc]
            ends.put_nowait(None)
            await until(lambda left=left: bench.count("SUCCESS") == cnt - left)  # type: ignore[misc]


async def test_task_lost_to_a_worker_that_died_is_preempted_when_its_lease_lapses(
    working: Working, store: SyncStore, app: App
) -> None:
    """The event of the other's claim comes while the own claim is under way, and must not be forgotten."""
    async with working(app) as bench:
        bench.stop_scans()
        steps = iter(("lose", "hear"))
        heard = 0

        async def lose() -> None:
            nonlocal heard
            if next(steps, None) == "lose":
                heard = bench.worker.parts.stream.event_cnt
                assert store.run(claims.claim(["work:1"], "dead", "of-dead"))

        async def hear() -> None:
            if next(steps, None) == "hear":
                await bench.heard(heard)

        between(bench.store, "claim", before=lose, after=hear)
        await bench.client.publish("work", {}, key="1", worker_timeout=3, ping_interval=0.5, retry_delay=0)
        state = await bench.status("work:1", "SUCCESS")
        assert runs_of(bench, "work:1") == [("dead", "TIMEOUT"), ("w1", "SUCCESS")]
        lost, won = state["worker_states"]
        assert won["claim_time"] >= lost["ping_expire_time"]
        await bench.at_rest()


async def test_task_that_only_looks_simple_is_claimed_as_any_other(working: Working, app: App) -> None:
    """Its event shows no failure; the guard of the short claim does, and a look says what to do."""
    async with working(app) as bench:
        bench.stop_scans()
        bench.tasks.insert_one(foreign("1", task_state__failed_cnt=1))
        state = await bench.status("work:1", "SUCCESS")
        assert (state["failed_cnt"], len(state["worker_states"])) == (1, 1)
        await bench.at_rest()


async def test_hint_heard_while_a_look_is_under_way_is_kept(working: Working, store: SyncStore, app: App) -> None:
    """The task is held when the look is answered, and handed back before the answer has come."""
    peers = Peers("w1")
    peers.update([{"_id": "peer", "concurrency": 10, "names": ["work"]}])
    key = next(str(number) for number in range(100) if peers.rank(f"work:{number}", "work") == 1)
    task_id = f"work:{key}"
    register(store, "peer", ["work"])
    async with working(app) as bench:
        bench.stop_scans()
        is_first = True

        async def be_held() -> None:
            if is_first:
                assert store.run(claims.claim([task_id], "peer", "of-peer"))

        async def be_handed_back() -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                heard = bench.worker.parts.stream.event_cnt
                outcome = Outcome(task_id, "of-peer-0", RunStatus.CANCELED, reason="handed back")
                assert store.run(claims.finish([outcome]))
                await bench.heard(heard)
                await until(lambda: not bench.worker.parts.questions.suspects, message="the hint is looked at")
                await bench.store.run(finding.look([task_id]))  # later than its own look

        looks = between(bench.store, "still_due", before=be_held, after=be_handed_back)
        await bench.client.publish("work", {}, key=key)
        await bench.status(task_id, "SUCCESS")
        assert looks.seen_cnt >= 1
        assert runs_of(bench, task_id) == [("peer", "CANCELED"), ("w1", "SUCCESS")]
        await bench.at_rest()


async def test_tasks_that_were_looked_at_and_left_to_others_keep_nothing_busy(
    working: Working, store: SyncStore, app: App
) -> None:
    peers = Peers("w1")
    peers.update([{"_id": "peer", "concurrency": 10, "names": ["work"]}])
    keys = [str(number) for number in range(40) if peers.rank(f"work:{number}", "work") == 1][:8]
    taken, left = keys[:4], keys[4:]
    register(store, "peer", ["work"])
    async with working(app, concurrency=5) as bench:
        is_first = True

        async def be_taken() -> None:
            nonlocal is_first
            if not is_first:
                return
            is_first = False
            store.run(claims.claim([f"work:{key}" for key in taken], "peer", "of-peer"))

        between(bench.store, "still_due", before=be_taken)
        await bench.client.publish_many([TaskSpec("work", {}, key=key) for key in keys])
        for key in left:
            await bench.status(f"work:{key}", "SUCCESS")
        await bench.at_rest()
        outcomes = [Outcome(f"work:{key}", f"of-peer-{n}", RunStatus.CANCELED, reason="handed back")
                    for n, key in enumerate(taken)]  # fmt: skip
        store.run(claims.finish(outcomes))
        for key in taken:
            await bench.status(f"work:{key}", "SUCCESS")
        await bench.at_rest()


async def test_preemption_time_ahead_that_another_service_wrote_is_waited_for(working: Working, app: App) -> None:
    async with working(app) as bench:
        bench.stop_scans()
        due = await bench.client.server_time() + timedelta(seconds=1.5)
        insert(bench, foreign("1", task_state__next_preempt_time=due))
        bench.tasks.update_one({"_id": "work:1"}, {"$set": {"task_option.priority": 5}})  # a hint
        state = await bench.status("work:1", "SUCCESS")
        # A date is written to the millisecond below.
        assert state["worker_states"][0]["claim_time"] - due >= timedelta(milliseconds=-1)
        assert bench.worker.parts.sender.lost_cnt <= 3


async def test_task_that_a_dead_workers_transaction_holds_up_holds_up_no_other(
    working: Working, mongo: Client, store: SyncStore, app: App
) -> None:
    """A worker that died between its last write and its commit leaves its transaction open for a minute or more."""
    task_ids = [f"work:{number}" for number in range(12)]
    held, others = task_ids[5], [*task_ids[:5], *task_ids[6:]]
    async with working(app, concurrency=20) as bench:
        with bench.backed_up(), mongo.start_session() as session:
            # A lease so short that it would lapse while the group waits for the one that is held up.
            lease: dict[str, Any] = {"ping_interval": 0.5, "worker_timeout": 4}
            specs = [TaskSpec("work", {}, key=task_id.partition(":")[2], **lease) for task_id in task_ids]
            await bench.client.publish_many(specs)
            assert len(store.run(claims.claim(task_ids, "dead", "of-dead"))) == len(task_ids)
            session.start_transaction()
            bench.tasks.update_one({"_id": held}, {"$set": {"task_option.priority": 5}}, session=session)
            queue = bench.worker.parts.queue
            await until(lambda: len(queue) == len(task_ids), message="all have lapsed")
            bench.worker.parts.claimer.is_backed_up = lambda: False  # type: ignore[method-assign]
            bench.worker.parts.claimer.wake()
            for task_id in others:
                await bench.status(task_id, "SUCCESS")
            assert bench.state(held)["worker_states"][0]["worker_id"] == "dead"
            assert len(bench.state(held)["worker_states"]) == 1
            session.abort_transaction()
        await bench.status(held, "SUCCESS")
        for task_id in (held, *others):
            assert runs_of(bench, task_id) == [("dead", "TIMEOUT"), ("w1", "SUCCESS")], task_id
        await bench.at_rest()
