"""Pausing a queue or a task name: nothing is claimed once the call has returned, by any worker, and at once again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from pymongo.errors import WriteError

from mtask import App, Client, RateLimited
from mtask.database import setup
from mtask.errors import ControlUnconfirmed, DatabaseUnavailable, InvalidInput, SchemaMismatch
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import filters
from mtask.kernel.worker.running import claim as recovery
from tests.integration.stores import publish, register, stored
from tests.integration.worker_harness import Bench, Working, between
from tests.mongo import Client as Mongo
from tests.mongo import until


@pytest.fixture
def app() -> App:
    made = App()

    @made.task(queue="mail")
    async def send() -> None: ...

    @made.task(queue="mail")
    async def receive() -> None: ...

    @made.task
    async def other() -> None: ...

    return made


async def test_nothing_is_claimed_by_any_worker_once_the_call_has_returned(
    working: Working, app: App, client: Client
) -> None:
    async with AsyncExitStack() as stack:
        benches = [await stack.enter_async_context(working(app, worker_id=f"w{n}", concurrency=20)) for n in range(3)]
        is_over = False

        async def flood() -> None:
            number = 0
            while not is_over:
                number += 1
                await benches[0].client.publish("send", key=f"flood-{number}", queue="mail")

        flooding = asyncio.create_task(flood())
        tasks = benches[0].tasks
        await until(lambda: tasks.count_documents({"task_state.status": "SUCCESS"}) > 50, message="under way")

        async def pause_and_resume() -> None:
            await asyncio.to_thread(client.pause, queue="mail")
            late = {"task_state.worker_states.claim_time": {"$gt": client.server_time()}}
            waiting = tasks.count_documents({"task_state.status": "INIT"})
            await until(lambda: tasks.count_documents({"task_state.status": "INIT"}) > waiting + 20)
            assert tasks.count_documents(late) == 0
            await asyncio.to_thread(client.resume, queue="mail")
            await until(lambda: tasks.count_documents(late) > 0, 5.0, "claimed again")

        for _ in range(3):
            await pause_and_resume()
        is_over = True
        await flooding


async def told(bench: Bench) -> list[dict[str, Any]]:
    """Return what the worker says that it goes by, in a heartbeat that it begins now."""
    document = bench.registry.find_one()
    for _ in range(2):  # one may be under way
        assert document is not None
        newer = {"heartbeat_time": {"$gt": document["heartbeat_time"]}}
        bench.worker.parts.pinger.beat_now()
        document = await until(partial(bench.registry.find_one, newer), message="a heartbeat")
    assert document is not None
    seen: list[dict[str, Any]] = document["controls_seen"]
    return seen


@pytest.mark.parametrize("is_lost", [False, True], ids=["claim", "lost claim"])
async def test_a_pause_returns_when_what_was_under_way_has_landed(
    working: Working, app: App, client: Client, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(recovery, "SETTLED", 0.0)
    async with working(app) as bench:
        worker, lands = bench.worker, asyncio.Event()

        async def hold() -> None:
            await lands.wait()

        async def lose() -> None:
            if claiming.seen_cnt == 1:
                raise DatabaseUnavailable("no answer")

        claiming = between(bench.store, "claim", before=lose if is_lost else hold)
        between(bench.store, "run_statuses", before=hold)  # the last look at what a lost claim took
        await bench.client.publish("other", key="1")
        under_way = worker.parts.recovery.jobs if is_lost else worker.parts.claimer._in_flight
        await until(lambda: under_way, message="under way")
        pausing = asyncio.create_task(asyncio.to_thread(client.pause, name="other"))
        try:
            await until(lambda: worker.parts.scope.served.paused_names, message="heard of it")
            assert await told(bench) == []
        finally:
            lands.set()
        await pausing
        assert not under_way
        assert [seen["_id"] for seen in await told(bench)] == ["name:other"]


async def test_what_was_queued_here_before_a_pause_is_not_claimed_after_it(
    working: Working, app: App, client: Client
) -> None:
    async with working(app) as bench:
        parts = bench.worker.parts
        with bench.backed_up():
            await bench.client.publish("other", key="1")
            await until(lambda: "other:1" in parts.queue, message="queued")
            await asyncio.to_thread(client.pause, name="other")
            assert "other:1" in parts.queue
        await until(lambda: parts.adoption.won_cnt or parts.sender.lost_cnt, message="tried")
        assert (parts.adoption.won_cnt, bench.state("other:1")["status"]) == (0, "INIT")
        await asyncio.to_thread(client.resume, name="other")
        await bench.status("other:1", "SUCCESS")


async def test_other_queues_and_names_go_on(working: Working, app: App, client: Client) -> None:
    async with working(app) as bench:
        await asyncio.to_thread(client.pause, name="send")
        for name, queue in (("send", "mail"), ("receive", "mail"), ("other", "default")):
            await bench.client.publish(name, key="1", queue=queue)
        await bench.status("receive:1", "SUCCESS")
        await bench.status("other:1", "SUCCESS")
        await asyncio.to_thread(client.pause, queue="mail")
        await bench.client.publish("receive", key="2", queue="mail")
        await bench.client.publish("other", key="2")
        await bench.status("other:2", "SUCCESS")
        assert (bench.state("send:1")["status"], bench.state("receive:2")["status"]) == ("INIT", "INIT")
        await asyncio.to_thread(client.resume, queue="mail")
        await bench.status("receive:2", "SUCCESS", 5.0)
        assert bench.state("send:1")["status"] == "INIT"
        await asyncio.to_thread(client.resume, name="send")
        await bench.status("send:1", "SUCCESS", 5.0)


@pytest.mark.parametrize("what", [{"queue": "default"}, {"name": "other"}])
async def test_what_is_resumed_is_claimed_within_100_ms(
    working: Working, app: App, client: Client, what: dict[str, str]
) -> None:
    delays = []
    async with working(app) as bench:
        for turn in range(30):  # a busy machine needs some tries
            await asyncio.to_thread(client.pause, **what)  # type: ignore[arg-type]
            heard = bench.worker.parts.stream.event_cnt
            await bench.client.publish("other", key=str(turn))
            await bench.heard(heard)
            resumed = await asyncio.to_thread(client.resume, **what)  # type: ignore[arg-type]
            await bench.status(f"other:{turn}", "SUCCESS")
            claimed = bench.state(f"other:{turn}")["worker_states"][0]["claim_time"]
            delays.append(claimed - resumed.update_time)  # both by the server's clock
            if turn >= 4 and min(delays) <= timedelta(milliseconds=100):
                break
    assert all(timedelta(0) <= delay < timedelta(seconds=2.5) for delay in delays), delays  # no scan brought it
    assert min(delays) <= timedelta(milliseconds=100), delays


async def test_what_runs_goes_on_and_its_retry_waits(working: Working, client: Client) -> None:
    app, gate = App(), asyncio.Event()

    @app.task(retry_delay=0)
    async def work(fails: bool) -> None:
        await gate.wait()
        if fails and client.get("work", "b").task_state.failed_cnt == 0:
            raise ValueError("once")

    async with working(app) as bench:
        await bench.client.publish("work", {"fails": False}, key="a")
        await bench.client.publish("work", {"fails": True}, key="b", retry_delay=0)
        await until(lambda: bench.count("RUNNING") == 2, message="both run")
        await asyncio.to_thread(client.pause, name="work")
        gate.set()
        await bench.status("work:a", "SUCCESS")
        await until(lambda: bench.state("work:b")["failed_cnt"] == 1, message="it failed")
        heard = bench.worker.parts.stream.event_cnt
        await bench.client.publish("work", {"fails": False}, key="c")
        await bench.heard(heard)
        assert (bench.state("work:b")["status"], bench.state("work:c")["status"]) == ("INIT", "INIT")
        await asyncio.to_thread(client.resume, name="work")
        await bench.status("work:b", "SUCCESS", 5.0)
        await bench.status("work:c", "SUCCESS", 5.0)


async def test_a_worker_that_starts_later_goes_by_it_from_the_first_claim_on(
    working: Working, app: App, client: Client
) -> None:
    client.pause(queue="mail")
    client.publish("send", key="1", queue="mail")
    client.publish("other", key="1")
    async with working(app) as bench:
        await bench.status("other:1", "SUCCESS")
        assert bench.state("send:1")["status"] == "INIT"
        await asyncio.to_thread(client.resume, queue="mail")
        await bench.status("send:1", "SUCCESS", 5.0)


def claimed_in_every_way(store: SyncStore, keys: Sequence[str], also: Sequence[filters.Filter]) -> list[int]:
    """Return how many of these due tasks each way of claiming takes; they are put back in between."""
    task_ids = [f"task:{key}" for key in keys]
    documents = [stored(store, key) for key in keys]
    found = []
    for claim in (
        claims.claim(task_ids, "w", "1", also=also),
        claims.claim(task_ids, "w", "2", also=also, are_simple=True),
        claims.claim(task_ids[:1], "w", "3", also=also),
        claims.claim(task_ids[:1], "w", "4", also=also, are_simple=True),
    ):
        found.append(len(store.run(claim)))
        for document in documents:
            store.tasks.replace_one({"_id": document["_id"]}, document)
    return found


async def test_a_claim_that_comes_when_the_heartbeat_has_run_out_is_not_valid(
    working: Working, app: App, client: Client
) -> None:
    beats: dict[str, Any] = {"heartbeat_interval": timedelta(hours=1), "heartbeat_timeout": timedelta(seconds=4)}
    async with working(app, **beats) as bench:
        parts = bench.worker.parts

        async def wait() -> None:
            if claiming.seen_cnt == 1:
                until_when = (bench.registry.find_one() or {})["heartbeat_expire_time"]
                await until(lambda: client.server_time() > until_when, message="run out")

        claiming = between(bench.store, "claim", before=wait)
        bench.worker.parts.pinger.beat_now()
        await bench.client.publish("other", key="1")
        await until(lambda: parts.adoption.won_cnt or parts.sender.lost_cnt, message="landed")
        assert parts.sender.lost_cnt == 1
        bench.worker.parts.pinger.beat_now()
        await bench.status("other:1", "SUCCESS")


def test_a_worker_whose_heartbeat_has_expired_claims_nothing(store: SyncStore) -> None:
    store.run(setup.ensure())
    publish(store, "k")
    publish(store, "l")
    now = stored(store, "k")["task_state"]["create_time"]
    assert claimed_in_every_way(store, ["k", "l"], [filters.in_time(now)]) == [0, 0, 0, 0]
    assert claimed_in_every_way(store, ["k", "l"], [filters.in_time(now + timedelta(minutes=1))]) == [2, 2, 1, 1]
    assert claimed_in_every_way(store, ["k", "l"], []) == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("also", "is_taken"),
    [
        (filters.claimable_now(["default"], [], None), False),
        (filters.claimable_now([], ["task"], None), False),
        (filters.claimable_now(["other"], ["other"], None), True),
        (filters.of_others(["default"]), False),
        (filters.of_others(["other"]), True),
        (filters.of_queues_and_keys([("default", "another key", None)]), False),
        (filters.of_queues_and_keys([("other", None, None), ("default", None, None)]), True),
        (filters.of_queues_and_keys([("default", None, "acme")]), False),
        (filters.of_others([], ["acme"]), True),
        (filters.claimable_now([], [], None, ["acme"]), True),
    ],
)
def test_every_way_of_claiming_keeps_to_pauses_and_limits(
    store: SyncStore, also: filters.Filter, is_taken: bool
) -> None:
    store.run(setup.ensure())
    publish(store, "k")
    publish(store, "l")
    assert claimed_in_every_way(store, ["k", "l"], [also]) == ([2, 2, 1, 1] if is_taken else [0, 0, 0, 0])


def test_a_live_worker_that_does_not_answer_is_named(store: SyncStore, client: Client) -> None:
    store.run(setup.ensure())
    register(store, "silent", ["send"])
    with pytest.raises(ControlUnconfirmed, match="silent") as caught:
        client.pause(name="send", timeout=0.2)
    assert caught.value.worker_ids == ["silent"]
    assert [(control.id, control.paused) for control in client.controls()] == [("name:send", True)]
    client.pause(name="unserved", timeout=timedelta(0))  # nobody whom it concerns


def test_a_live_worker_that_goes_by_what_was_said_before_is_named(store: SyncStore, client: Client) -> None:
    store.run(setup.ensure())
    before = client.pause(name="send")
    register(store, "behind", ["send"])
    seen = [{"_id": before.id, "revision": before.revision}]
    store.database["workers"].update_one({"_id": "behind"}, {"$set": {"controls_seen": seen}})
    assert client.pause(name="send") == before
    with pytest.raises(ControlUnconfirmed, match="behind"):
        client.resume(name="send", timeout=0.2)


def test_pausing_twice_changes_nothing(client: Client) -> None:
    first = client.pause(queue="mail")
    assert client.pause(queue="mail") == first
    assert client.resume(queue="mail").revision == first.revision + 1


@pytest.mark.parametrize(
    "given", [{}, {"queue": "a", "name": "b"}, {"queue": ""}, {"name": "no name"}, {"queue": "a", "timeout": "soon"}]
)
def test_nonsense_is_refused(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        client.pause(**given)
    assert client.controls() == []


def write(mongo: Mongo, database: str, change: dict[str, Any]) -> None:
    """Change the control of the queue "mail" by hand, past the validator."""
    mongo[database].command("collMod", "controls", validator={})
    assert mongo[database]["controls"].update_one({"_id": "queue:mail"}, change).modified_count == 1


async def test_where_no_good_one_is_known_what_a_malformed_control_is_for_is_paused(
    working: Working, database_name: str, mongo: Mongo, app: App, client: Client
) -> None:
    client.resume(queue="mail")
    write(mongo, database_name, {"$set": {"paused": "no"}})
    with pytest.raises(SchemaMismatch, match="queue:mail"):
        client.controls()
    async with working(app) as bench:
        await bench.client.publish("send", key="1", queue="mail")
        await bench.client.publish("other", key="1")
        await bench.status("other:1", "SUCCESS")
        assert bench.state("send:1")["status"] == "INIT"
        await asyncio.to_thread(client.resume, queue="mail")  # mends it
        await bench.status("send:1", "SUCCESS", 5.0)


async def test_what_a_malformed_control_last_said_holds_but_nothing_is_removed_by_it(
    working: Working, database_name: str, mongo: Mongo, app: App, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.pause(queue="mail")
    client.limit("mail", concurrency=1)
    client.keep("mail", fail=0)
    async with working(app) as bench:
        controls = bench.worker.parts.features.controls
        assert (list(controls.limits), list(controls.keeps)) == (["mail"], ["mail"])
        write(mongo, database_name, {"$set": {"limit.starts": 5}})
        await until(lambda: "its last readable version stays in force" in caplog.text, message="it was read")
        await until(lambda: not controls.keeps, message="taken up")
        assert (list(controls.served.paused_queues), list(controls.limits)) == (["mail"], ["mail"])
        await bench.client.publish("send", key="1", queue="mail")
        await bench.client.publish("other", key="1")
        await bench.status("other:1", "SUCCESS")
        assert bench.state("send:1")["status"] == "INIT"
        with pytest.raises(SchemaMismatch, match=r"mtask .*limit"):
            await asyncio.to_thread(client.resume, queue="mail")
        await asyncio.to_thread(client.limit, "mail")  # mends it, and now it is resumed
        await bench.status("send:1", "SUCCESS", 5.0)
        assert (controls.limits, list(controls.keeps)) == ({}, ["mail"])


@pytest.mark.parametrize(
    "change",
    [{"revision": "x"}, {"revision": 0}, {"update_time": 5}, {"kind": "name"}, {"target": "other"}, {"paused": 1}],
    ids=str,
)
def test_what_a_client_sets_anew_mends_a_malformed_control(
    mongo: Mongo, database_name: str, client: Client, change: dict[str, Any]
) -> None:
    former = client.pause(queue="mail")
    write(mongo, database_name, {"$set": change})
    mended = client.pause(queue="mail")
    assert (mended.kind, mended.target, mended.paused) == ("queue", "mail", True)
    assert mended.revision > former.revision


@pytest.mark.parametrize(
    ("limit", "is_taken"),
    [
        ({"starts": 5}, False),
        ({"window_ms": 500}, False),
        ({"starts": 5, "window_ms": None}, False),
        ({"concurrency": 1, "starts": 5}, False),
        ({"concurrency": None}, False),
        ({}, False),
        ({"starts": 5, "window_ms": 500}, True),
        ({"concurrency": 1}, True),
        ({"concurrency": 1, "starts": 5, "window_ms": 500}, True),
        (None, True),
    ],
)
@pytest.mark.parametrize("field", ["limit", "key_limit"])
def test_validator_takes_a_limit_that_bounds_something_and_no_other(
    mongo: Mongo, database_name: str, client: Client, field: str, limit: dict[str, Any] | None, is_taken: bool
) -> None:
    client.resume(queue="mail")
    controls = mongo[database_name]["controls"]
    if is_taken:
        controls.update_one({"_id": "queue:mail"}, {"$set": {field: limit}})
        assert len(client.controls()) == 1
    else:
        with pytest.raises(WriteError, match="failed validation"):
            controls.update_one({"_id": "queue:mail"}, {"$set": {field: limit}})


async def test_pause_that_ends_by_itself_ends_without_a_write_and_not_before(working: Working, app: App) -> None:
    async with working(app) as bench:
        await bench.scanned()
        paused = await bench.client.pause(queue="mail", until=timedelta(seconds=1), timeout=30)
        await bench.client.publish("send", key="1", queue="mail")
        assert paused.paused
        assert paused.until is not None
        state = await bench.status("send:1", "SUCCESS")  # the controls are read by themselves once a minute only
        assert state["worker_states"][0]["claim_time"].replace(tzinfo=UTC) >= paused.until
        assert (await bench.client.controls()) == [paused]  # nobody has written
        again = await bench.client.pause(queue="mail", timeout=30)
        assert (again.until, again.revision > paused.revision) == (None, True)
        with pytest.raises(InvalidInput, match="until"):
            await bench.client.pause(queue="mail", until=-1)


#: The scope, and the other tasks that wait, too.
HELD = {
    "task": set(),
    "name": {"send:other key", "send:same key"},
    "limit_key": {"send:same key", "receive:same key"},
    "queue": {"send:other key", "send:same key", "receive:same key"},
}


@pytest.mark.parametrize("scope", list(HELD))
async def test_rate_limited_run_goes_back_uncounted_and_holds_back_its_scope(working: Working, scope: Any) -> None:
    made, opened = App(), asyncio.Event()

    @made.task(queue="mail")
    async def send(first: bool = False) -> None:
        if first and not opened.is_set():
            raise RateLimited(3600, scope)

    @made.task(queue="mail")
    async def receive() -> None: ...

    @made.task
    async def other() -> None: ...

    async with working(made) as bench, working(made, worker_id="w2") as second:
        await bench.client.publish("send", {"first": True}, key="1", queue="mail", limit_key="a")
        await until(lambda: bench.state("send:1")["status"] == "INIT" and bench.state("send:1")["worker_states"])
        if scope != "task":
            [control] = await until(bench.client.controls)
            workers = [each.worker.parts.features.controls for each in (bench, second)]
            await until(lambda: all(each.beat()["controls_seen"] for each in workers))
            assert control.at(datetime.now(UTC) + timedelta(days=1)).holds is False
        for name, key in (("send", "b"), ("send", "a"), ("receive", "a")):
            keyed = "same key" if key == "a" else "other key"
            await bench.client.publish(name, key=keyed, queue="mail", limit_key=key)
        await bench.client.publish("other", key="1")
        everything = {"send:other key", "send:same key", "receive:same key", "other:1"}
        for task_id in everything - HELD[scope]:
            await bench.status(task_id, "SUCCESS")
        for task_id in HELD[scope]:
            assert bench.state(task_id)["status"] == "INIT"
            reasons = [reason.code for reason in (await bench.client.inspect(task_id)).reasons]
            assert reasons[0] in ("paused", "rate_limited"), reasons
        (run,) = bench.state("send:1")["worker_states"]
        assert (run["status"], run["fail_reason"], bench.state("send:1")["failed_cnt"]) == (
            "CANCELED",
            "rate limited",
            0,
        )
        if HELD[scope]:
            target = {"name": "send"} if scope == "name" else {"queue": "mail"}
            await bench.client.resume(**target, timeout=30)
            for task_id in HELD[scope]:
                await bench.status(task_id, "SUCCESS")
