"""Transactions of handlers: apart from the engine's own calls, whatever they take, and each session for one run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Context, Fail
from mtask.app.middleware import RunCall
from mtask.errors import LeaseLost
from mtask.kernel.driver import connect
from tests.clients import with_options
from tests.integration.worker_harness import Bench, Working, working_on
from tests.mongo import Client, Document, until

both_kinds = pytest.mark.parametrize("kind", ["async", "plain"])


def depositing(database: str, ended: list[str] | None = None) -> App:
    """Return an app whose handlers write into `effects`, in their transactions."""
    app = App()

    @app.task
    async def deposit_async(context: Context, fails: bool = False) -> None:
        async with context.transaction() as session:
            await session.client[database]["effects"].insert_one({"of": context.task.id}, session=session)
            if fails:
                raise Fail("changed its mind")

    @app.task
    def deposit_plain(context: Context, fails: bool = False) -> None:
        try:
            with context.transaction() as session:
                session.client[database]["effects"].insert_one({"of": context.task.id}, session=session)
                if fails:
                    raise Fail("changed its mind")
        except BaseException as error:
            if ended is not None:
                ended.append(type(error).__name__)
            raise

    @app.task
    async def hold() -> None:
        await asyncio.sleep(600)

    @app.task
    async def work() -> None:
        pass

    return app


@contextmanager
def slow(bench: Bench, command: str, seconds: float) -> Iterator[None]:
    """Have the server take that long for each of these commands of the worker, inside of handlers' transactions."""
    where = {"failCommands": [command], "appName": bench.app_name, "blockConnection": True}
    if command == "insert":
        where["namespace"] = f"{bench.database}.effects"
    what = {**where, "blockTimeMS": int(seconds * 1000)}
    bench.mongo.admin.command("configureFailPoint", "failCommand", mode="alwaysOn", data=what)
    try:
        yield
    finally:
        bench.mongo.admin.command("configureFailPoint", "failCommand", mode="off")


def under_way(bench: Bench, command: str) -> int:
    """Return how many of these commands of the worker's handlers the server is busy with."""
    wanted: Document = {"appName": bench.app_name, f"command.{command}": {"$exists": True}}
    if command == "insert":
        wanted["command.insert"] = "effects"
    return len(list(bench.mongo.admin.aggregate([{"$currentOp": {"allUsers": True}}, {"$match": wanted}])))


@pytest.fixture
def effects(mongo: Client, database_name: str) -> Any:
    return mongo[database_name].create_collection("effects")


@both_kinds
async def test_slow_statements_that_fill_a_pool_keep_no_ping_no_heartbeat_and_no_claim_waiting(
    mongo_uri: str, database_name: str, mongo: Client, effects: Any, kind: str
) -> None:
    small = with_options(mongo_uri, "maxPoolSize=4")
    interval = timedelta(milliseconds=200)
    app = depositing(database_name)
    async with working_on(small, database_name, mongo, app, heartbeat_interval=interval) as bench:
        await bench.client.publish("hold", key="held", ping_interval=0.2, worker_timeout=4)
        await bench.status("hold:held", "RUNNING")
        with slow(bench, "insert", 8.0):
            for number in range(4):
                await bench.client.publish(f"deposit_{kind}", {}, key=f"{number}")
            await until(lambda: under_way(bench, "insert") == 4, message="the pool is full")

            def seen() -> tuple[Any, Any]:
                (run,) = bench.state("hold:held")["worker_states"]
                beaten = bench.registry.find_one({"_id": "w1"})
                assert beaten is not None
                return run["ping_expire_time"], beaten["heartbeat_time"]

            for _ in range(2):
                lease, beat = seen()
                await until(lambda lease=lease, beat=beat: seen()[0] > lease and seen()[1] > beat)  # type: ignore[misc]
            await bench.client.publish("work", key="beside")
            await bench.status("work:beside", "SUCCESS")
            assert under_way(bench, "insert") == 4, "all of it came while the pool was full"
        for number in range(4):
            await bench.status(f"deposit_{kind}:{number}", "SUCCESS")
        assert effects.count_documents({}) == 4
        assert [run["status"] for run in bench.state("hold:held")["worker_states"]] == ["RUNNING"]


@both_kinds
async def test_statement_that_takes_longer_than_the_engines_socket_timeout_succeeds(
    working: Working, database_name: str, effects: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for maker in ("sync_store", "async_store"):
        made = getattr(connect, maker)

        def impatient(*args: Any, made: Any = made, **options: Any) -> Any:
            is_quiet = options.pop("socketTimeoutMS", None) is not None and made.__name__ == "sync_store"
            return made(*args, **options, **({"socketTimeoutMS": 500} if is_quiet else {}))

        monkeypatch.setattr(connect, maker, impatient)
    async with working(depositing(database_name)) as bench:
        with slow(bench, "insert", 1.5):
            await bench.client.publish(f"deposit_{kind}", {}, key="1", max_retries=0)
            state = await bench.status(f"deposit_{kind}:1", "SUCCESS")
        assert [run["status"] for run in state["worker_states"]] == ["SUCCESS"], "no conflict"


async def test_commit_that_is_not_answered_is_waited_for_no_longer_than_the_lease(
    working: Working, database_name: str, effects: Any
) -> None:
    ended: list[str] = []
    async with working(depositing(database_name, ended)) as bench:
        with slow(bench, "commitTransaction", 5.0):
            await bench.client.publish("deposit_plain", {}, key="1", ping_interval=0.5, worker_timeout=1.5)
            await until(lambda: under_way(bench, "commitTransaction"), message="the commit is under way")
            await until(lambda: ended, message="the handler hears of it")
            assert under_way(bench, "commitTransaction"), "long before the server answers"
        await bench.status("deposit_plain:1", "SUCCESS")
        assert effects.count_documents({}) == 1


@both_kinds
async def test_session_of_an_aborted_transaction_serves_no_other_run(
    working: Working, database_name: str, effects: Any, kind: str
) -> None:
    name = f"deposit_{kind}"
    async with working(depositing(database_name)) as bench:
        named = []
        for number in range(6):
            is_last = number > 3
            await bench.client.publish(name, {"fails": not is_last}, key=f"{number}")
            state = await bench.status(f"{name}:{number}", "SUCCESS" if is_last else "FAIL")
            await bench.at_rest()  # the worker has its session back a moment after the commit
            named.append(state["worker_states"][0]["session_id"])
        assert len(set(named[:5])) == 5, "each aborted one was for its run alone"
        assert named[5] == named[4], "one whose run has committed in time is used again"


async def test_worker_makes_the_clients_for_transactions_when_the_first_one_begins(
    working: Working, database_name: str, effects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for maker in ("sync_store", "async_store"):
        make = getattr(connect, maker)

        def counted(*args: Any, make: Any = make, **options: Any) -> Any:
            made.append(make.__name__)
            return make(*args, **options)

        monkeypatch.setattr(connect, maker, counted)
    async with working(depositing(database_name)) as bench:
        await bench.client.publish("work", key="1")
        await bench.status("work:1", "SUCCESS")
        made.clear()
        for kind, factory in (("async", "async_store"), ("plain", "sync_store")):
            for number in range(2):
                await bench.client.publish(f"deposit_{kind}", {}, key=f"{number}")
                await bench.status(f"deposit_{kind}:{number}", "SUCCESS")
            assert made.count(factory) == 1
        assert len(made) == 2


def test_plain_handler_that_outlives_its_worker_begins_no_transaction(working: Working, effects: Any) -> None:
    app, raised, has_begun = App(), [], []
    gate = asyncio.Event()

    @app.task
    def late(context: Context) -> None:
        transaction = context.transaction()
        has_begun.append(1)
        while not gate.is_set():
            asyncio.run(asyncio.sleep(0.02))
        try:
            with transaction:
                pass
        except LeaseLost:
            raised.append(1)

    async def scenario() -> None:
        async with working(app) as bench:
            await bench.client.publish("late", key="1")
            await until(lambda: has_begun)
            bench.worker.stop()
            bench.worker.stop()
            await asyncio.wait((bench.life,))
            gate.set()
            await until(lambda: raised, message="it is refused")
        assert effects.count_documents({}) == 0

    asyncio.run(scenario())


@both_kinds
async def test_callback_of_a_run_that_a_transaction_has_ended_waits_for_no_scan(
    working: Working, database_name: str, effects: Any, kind: str
) -> None:
    async with working(depositing(database_name)) as bench:
        bench.stop_scans()
        name = f"deposit_{kind}"
        await bench.client.publish(name, {}, key="1", callback={"url": "https://hooks.example.com/"})
        await bench.status(f"{name}:1", "SUCCESS")
        deliveries = {"name": "mtask/callback"}
        await until(lambda: bench.tasks.count_documents(deliveries) == 1, 30.0, "its delivery is published")


@both_kinds
@pytest.mark.parametrize("how", ["abort_transaction", "commit_transaction", "end_session"])
async def test_handler_that_ends_its_transaction_itself_fails(
    working: Working, database_name: str, effects: Any, kind: str, how: str
) -> None:
    app = App()

    @app.task
    async def end_async(context: Context) -> None:
        async with context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({}, session=session)
            await getattr(session, how)()

    @app.task
    def end_plain(context: Context) -> None:
        with context.transaction() as session:
            session.client[database_name]["effects"].insert_one({}, session=session)
            getattr(session, how)()

    async with working(app) as bench:
        await bench.client.publish(f"end_{kind}", key="1", max_retries=1, retry_delay=0)
        state = await bench.status(f"end_{kind}:1", "FAIL")
        assert [run["status"] for run in state["worker_states"]] == ["FAIL", "FAIL"]
        assert "has ended its transaction itself" in state["worker_states"][0]["fail_reason"]
        assert effects.count_documents({}) == (2 if how == "commit_transaction" else 0)
        await bench.at_rest()


@both_kinds
@pytest.mark.parametrize("how", ["abort_transaction", "commit_transaction"])
async def test_handler_that_begins_another_transaction_on_its_session_fails(
    working: Working, database_name: str, effects: Any, kind: str, how: str
) -> None:
    app = App()

    @app.task
    async def begin_async(context: Context) -> None:
        async with context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({"of": "first"}, session=session)
            await getattr(session, how)()
            await session.start_transaction()
            await session.client[database_name]["effects"].insert_one({"of": "second"}, session=session)

    @app.task
    def begin_plain(context: Context) -> None:
        with context.transaction() as session:
            session.client[database_name]["effects"].insert_one({"of": "first"}, session=session)
            getattr(session, how)()
            session.start_transaction()
            session.client[database_name]["effects"].insert_one({"of": "second"}, session=session)

    async with working(app) as bench:
        await bench.client.publish(f"begin_{kind}", key="1", max_retries=0)
        (run,) = (await bench.status(f"begin_{kind}:1", "FAIL"))["worker_states"]
        assert "has ended its transaction itself" in run["fail_reason"]
        written = [effect["of"] for effect in effects.find()]
        assert written == (["first"] if how == "commit_transaction" else []), "nothing of the second"
        await bench.at_rest()


@both_kinds
async def test_handler_that_does_not_leave_its_transaction_fails_and_holds_up_nobody(
    working: Working, database_name: str, effects: Any, kind: str
) -> None:
    app = App()
    sessions: list[Any] = []  # else the collection of garbage would abort the transactions

    @app.task
    async def enter_async(context: Context) -> str:
        transaction = context.transaction()
        sessions.append(session := await transaction.__aenter__())
        await session.client[database_name]["effects"].insert_one({"_id": 1}, session=session)
        if context.attempt == 2:
            await transaction.__aexit__(None, None, None)
        return "done"

    @app.task
    def enter_plain(context: Context) -> str:
        transaction = context.transaction()
        sessions.append(session := transaction.__enter__())
        session.client[database_name]["effects"].insert_one({"_id": 1}, session=session)
        if context.attempt == 2:
            transaction.__exit__(None, None, None)
        return "done"

    async with working(app) as bench:
        await bench.client.publish(f"enter_{kind}", key="1", max_retries=1, retry_delay=0)
        failed, succeeded = (await bench.status(f"enter_{kind}:1", "SUCCESS"))["worker_states"]
        # The second run would meet the first one's write.
        assert (failed["status"], succeeded["status"]) == ("FAIL", "SUCCESS")
        assert "returned without leaving the block of context.transaction()" in failed["fail_reason"]
        assert "returns" not in failed
        assert effects.count_documents({}) == 1
        assert await bench.client.result(f"enter_{kind}", "1") == "done"
        await bench.at_rest()


@both_kinds
async def test_handler_that_raises_inside_an_open_transaction_fails_by_its_own_reason(
    working: Working, database_name: str, effects: Any, kind: str
) -> None:
    app = App()
    sessions: list[Any] = []

    @app.task
    async def raise_async(context: Context) -> None:
        sessions.append(session := await context.transaction().__aenter__())
        await session.client[database_name]["effects"].insert_one({"_id": 1}, session=session)
        raise Fail("changed its mind")

    @app.task
    def raise_plain(context: Context) -> None:
        sessions.append(session := context.transaction().__enter__())
        session.client[database_name]["effects"].insert_one({"_id": 1}, session=session)
        raise Fail("changed its mind")

    async with working(app) as bench:
        await bench.client.publish(f"raise_{kind}", key="1")
        (run,) = (await bench.status(f"raise_{kind}:1", "FAIL"))["worker_states"]
        assert run["fail_reason"] == "changed its mind"
        effects.insert_one({"_id": 1})  # nobody holds it
        await bench.at_rest()


async def test_middleware_may_hold_the_transaction_around_its_handler(
    working: Working, database_name: str, effects: Any
) -> None:
    app = App()

    @app.middleware
    async def transact(run: RunCall) -> AsyncIterator[None]:
        async with run.context.transaction() as session:
            await session.client[database_name]["effects"].insert_one({"_id": 1}, session=session)
            yield

    @app.task
    async def work() -> None:
        pass

    async with working(app) as bench:
        await bench.client.publish("work", key="1")
        (run,) = (await bench.status("work:1", "SUCCESS"))["worker_states"]
        assert run["status"] == "SUCCESS"
        assert effects.count_documents({}) == 1
        await bench.at_rest()
