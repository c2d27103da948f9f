"""Workers register what their handlers declare: which version is current while two of them are live."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Child, Client, Context, Flow, Next
from mtask.database.schema import LAYOUTS, Layout
from mtask.doctor import checks as doctor
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.registry import operations
from mtask.features.registry import worker as registering
from mtask.features.registry.rules import MAX_VERSIONS, declared_by, label
from mtask.kernel.driver.stores import SyncStore
from tests.integration.cli.commands import Commands
from tests.integration.features.registry import isolated
from tests.integration.features.registry.apps import first_version, registered, second_version
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client as Mongo
from tests.mongo import until

Document = dict[str, Any]
FIRST, SECOND = (declared_by(app().handlers["send"])["hash"] for app in (first_version, second_version))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers look at the registry often."""
    monkeypatch.setattr(registering, "INTERVAL", 0.1)


@pytest.fixture
def current(mongo: Mongo, database_name: str) -> Any:
    """Return what reads the hash of the current version of `send`."""
    return lambda: (mongo[database_name]["handlers"].find_one({"_id": "send"}) or {}).get("current")


async def registered_by(bench: Bench) -> None:
    """Wait until a worker has registered its handlers."""
    await until(lambda: bench.worker.parts.features.handlers.look_cnt > 0, message="the handlers are registered")


async def looked(bench: Bench, times: int = 3) -> None:
    """Wait until a worker has looked at the registry several times more."""
    handlers = bench.worker.parts.features.handlers
    former = handlers.look_cnt
    await until(lambda: handlers.look_cnt >= former + times, message="the worker looks at the registry")


async def test_worker_registers_its_handlers_and_names_their_versions(
    working: Working, mongo: Mongo, database_name: str, client: Client
) -> None:
    async with working(first_version()) as bench:
        await registered_by(bench)
        stored = mongo[database_name]["handlers"].find_one({"_id": "send"})
        assert stored is not None
        (version,) = stored["versions"]
        assert (stored["current"], version["hash"], version["app_version"]) == (FIRST, FIRST, "1.0")
        assert (version["queue"], version["options"]) == ("mail", {"max_unexpected_retries": 1})
        worker = bench.registry.find_one({"_id": "w1"})
        assert worker is not None
        assert worker["handlers"] == [label("send", FIRST)]
        (found,) = await asyncio.to_thread(client.handlers)
        assert (found.workers, found.versions[0].workers) == (["w1"], ["w1"])


async def test_task_published_by_name_runs_with_what_the_handler_declares(working: Working, client: Client) -> None:
    async with working(second_version()) as bench:
        await registered_by(bench)
        made = await asyncio.to_thread(client.publish, "send", {"to": "a", "subject": "s"}, key="k")
        await bench.status(made.task_id, "SUCCESS")
        document = bench.document(made.task_id)
        assert (document["queue"], document["declared"]) == ("post", SECOND)
        assert document["task_option"]["max_unexpected_retries"] == 2


async def test_rolling_deploy_and_rollback_end_at_the_version_that_is_live(
    working: Working, client: Client, current: Any
) -> None:
    async with working(first_version(), "old-1") as old_1, working(first_version(), "old-2") as old_2:
        await registered_by(old_1)
        await registered_by(old_2)
        assert current() == FIRST
        async with working(second_version(), "new-1") as new_1:
            await registered_by(new_1)
            assert current() == SECOND, "the newest deploy wins while the old workers are live"
            # A worker of the former version restarts during the deploy: the other one still has that version.
            async with working(first_version(), "old-3") as old_3:
                await registered_by(old_3)
                await looked(old_3)
                assert current() == SECOND
            # A worker of the new version restarts.
            async with working(second_version(), "new-2") as new_2:
                await registered_by(new_2)
                assert current() == SECOND
        # The rollback by ending the new workers: a worker that is there notices.
        await until(lambda: current() == FIRST, message="the version of the live workers is current again")
        assert {version.hash for version in (await asyncio.to_thread(client.handlers))[0].versions} == {FIRST, SECOND}


async def test_rollback_by_starting_old_workers_wins_over_live_new_ones(working: Working, current: Any) -> None:
    async with working(first_version(), "old") as old:
        await registered_by(old)
    async with working(second_version(), "new") as new:
        await registered_by(new)
        assert current() == SECOND
        async with working(first_version(), "again") as again:
            await registered_by(again)
            assert current() == FIRST, "no live worker had the former version, so it was deployed anew"
            await looked(new)
            assert current() == FIRST, "workers of the other version do not claim it back"


async def test_workers_of_a_new_version_that_start_at_once_make_it_current(
    working: Working, current: Any, mongo: Mongo, database_name: str
) -> None:
    async with working(first_version(), "old") as old:
        await registered_by(old)
        async with working(second_version(), "a") as a, working(second_version(), "b") as b:
            await registered_by(a)
            await registered_by(b)
            assert current() == SECOND
    stored = mongo[database_name]["handlers"].find_one({"_id": "send"})
    assert stored is not None
    assert [version["hash"] for version in stored["versions"]] == [FIRST, SECOND]


async def test_without_any_live_worker_the_last_version_stays_current(working: Working, current: Any) -> None:
    async with working(first_version()) as bench:
        await registered_by(bench)
    async with working(other_app(), "other") as other:
        await registered_by(other)
        await looked(other)
        assert current() == FIRST


def other_app() -> App:
    """Return an app with another handler."""
    app = App()

    @app.task
    async def other() -> None: ...

    return app


async def test_worker_registers_again_what_was_removed(
    working: Working, current: Any, mongo: Mongo, database_name: str
) -> None:
    async with working(first_version()) as bench:
        await registered_by(bench)
        mongo[database_name]["handlers"].delete_many({})
        bench.registry.update_one({"_id": "w1"}, {"$unset": {"handlers": 1}})
        await until(lambda: current() == FIRST, message="registered again")
        await until(lambda: (bench.registry.find_one({"_id": "w1"}) or {}).get("handlers"), message="named again")


def test_a_document_keeps_the_last_versions_only(store: SyncStore, mongo: Mongo, database_name: str) -> None:
    hashes = []
    for number in range(MAX_VERSIONS + 3):
        app = App()

        @app.task(priority=number)
        async def send(to: str) -> None: ...

        registered(store, app)
        hashes.append(declared_by(app.handlers["send"])["hash"])
    stored = mongo[database_name]["handlers"].find_one({"_id": "send"})
    assert stored is not None
    assert [version["hash"] for version in stored["versions"]] == hashes[-MAX_VERSIONS:]
    assert stored["current"] == hashes[-1]


def test_a_version_that_live_workers_have_is_neither_moved_nor_made_current_again(
    store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    registered(store, first_version())
    registered(store, second_version())
    before = mongo[database_name]["handlers"].find_one({"_id": "send"})
    now = store.database.command("hello")["localTime"]
    mongo[database_name]["workers"].insert_one(
        {
            "_id": "peer",
            "incarnation": "i",
            "host": "h",
            "pid": 1,
            "status": "running",
            "heartbeat_expire_time": now + timedelta(hours=1),
            "queues": ["default"],
            "names": ["send"],
            "handlers": [label("send", FIRST)],
        }
    )
    registered(store, first_version())
    assert mongo[database_name]["handlers"].find_one({"_id": "send"}) == before
    assert store.run(operations.succeed(store.run(operations.hashes()))) == ["send"], "no live worker has the second"
    assert store.run(operations.succeed(store.run(operations.hashes()))) == []


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_validators_take_fields_that_they_do_not_know(layout: Layout) -> None:
    # So those of revision 9 take `declared` in tasks and `handlers` in workers, and clients of it read both.
    assert "additionalProperties" not in str(layout.validator())
    assert layout.model.model_config.get("extra") == "ignore"


def test_task_of_this_revision_is_read_and_updated_beside_the_former_one(
    store: SyncStore, mongo: Mongo, database_name: str, client: Client
) -> None:
    validator = LAYOUTS["tasks"].unabridged
    assert validator is not None
    former = validator()
    del former["$jsonSchema"]["properties"]["declared"]
    registered(store, first_version())
    mongo[database_name].command("collMod", "tasks", validator=former)
    client.publish("send", {"to": "a"}, key="k")
    assert client.get("send", "k").declared == FIRST
    client.publish("send", {"to": "b"}, key="k", if_exists="update")
    assert client.cancel("send", "k").declared == FIRST


def test_a_version_that_is_started_anew_meanwhile_is_not_followed(
    store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    registered(store, first_version())
    registered(store, second_version())
    now = store.database.command("hello")["localTime"]
    worker = {"incarnation": "i", "host": "h", "pid": 1, "status": "running", "queues": ["default"], "names": ["send"]}
    live = {"heartbeat_expire_time": now + timedelta(hours=1), "handlers": [label("send", FIRST)]}
    mongo[database_name]["workers"].insert_one({"_id": "peer", **worker, **live})
    read = store.run(operations.hashes())
    registered(store, second_version())  # a worker of the current version, which had none, starts
    assert store.run(operations.succeed(read)) == []
    stored = mongo[database_name]["handlers"].find_one({"_id": "send"})
    assert stored is not None
    assert stored["current"] == SECOND


# --- tasks that handlers publish ----------------------------------------------------------------------------


def parents() -> App:
    """Return an app whose handlers publish tasks of a handler that it lacks."""
    app = App()

    @app.task
    async def parent(context: Context) -> None:
        await context.add_children([Child("child", "send", {"to": "a"})])

    @app.task
    async def goes_on() -> Next:
        return Next("send", {"to": "a"})

    @app.task(next="send")
    async def goes_on_by_name(to: str) -> None: ...

    return app


async def test_children_and_next_tasks_by_name_get_what_other_apps_declare(
    working: Working, store: SyncStore, client: Client
) -> None:
    registered(store, first_version())
    async with working(parents()) as bench:
        await registered_by(bench)
        flow = Flow("f")
        flow.add("parent", "parent")
        await asyncio.to_thread(client.publish_flow, flow)
        one = await asyncio.to_thread(client.publish, "goes_on", key="n")
        other = await asyncio.to_thread(client.publish, "goes_on_by_name", {"to": "a"}, key="n")
        for task_id in ("parent:f/parent", one.task_id, other.task_id):
            await bench.status(task_id, "SUCCESS")
        await until(lambda: bench.tasks.count_documents({"name": "send"}) == 3, message="all are published")
        for document in bench.tasks.find({"name": "send"}):
            assert (document["queue"], document["declared"]) == ("mail", FIRST), document["_id"]
            assert document["task_option"]["max_unexpected_retries"] == 1


async def test_isolated_handlers_publish_by_name_what_other_apps_declare(
    working: Working, store: SyncStore, client: Client
) -> None:
    registered(store, first_version())
    path = "tests.integration.features.registry.isolated:app"
    executors = ExecutorOptions(app=path, count=1)
    async with working(isolated.app, executors=executors) as bench:
        flow = Flow("f")
        flow.add("parent", "parent")
        await asyncio.to_thread(client.publish_flow, flow)
        one = await asyncio.to_thread(client.publish, "goes_on", key="n")
        for task_id in ("parent:f/parent", one.task_id):
            await bench.status(task_id, "SUCCESS")
        await until(lambda: bench.tasks.count_documents({"name": "send"}) == 2, message="both are published")
        made = [(document["queue"], document["declared"]) for document in bench.tasks.find({"name": "send"})]
        assert made == [("mail", FIRST)] * 2


# --- what is shown ------------------------------------------------------------------------------------------


async def test_mtask_handlers_lists_versions_queues_and_workers(working: Working, mtask: Commands) -> None:
    assert "no handlers" in mtask.ok("handlers").err
    async with working(first_version(), "old") as old, working(second_version(), "new") as new:
        await registered_by(old)
        await registered_by(new)
        table = (await asyncio.to_thread(mtask.ok, "handlers")).out
        assert all(word in table for word in ("send", "HANDLER", "WORKERS", "old", "new"))
        (entry,) = (await asyncio.to_thread(mtask.ok, "handlers", "--json")).json
        assert entry["name"] == "send"
        assert {version["app_version"]: version["workers"] for version in entry["versions"]} == {
            "1.0": ["old"],
            "2.0": ["new"],
        }
        one = (await asyncio.to_thread(mtask.ok, "handlers", "send")).out
        assert "(current)" in one
        assert "subject" in one or "to" in one
    assert mtask("handlers", "nobody").code == 2


async def test_doctor_tells_of_several_versions_and_of_malformed_documents(
    working: Working, store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    def said() -> str:
        found = store.run(doctor.examine(database_name, timedelta(minutes=1)))
        return " ".join(f"{one.level.value} {one.message}" for one in found if one.check == "handlers")

    async with working(first_version(), "old") as old:
        await registered_by(old)
        assert await asyncio.to_thread(said) == "OK 1 registered"
        async with working(second_version(), "new") as new:
            await registered_by(new)
            assert "WARN live workers have several versions of send" in await asyncio.to_thread(said)
    mongo[database_name].command("collMod", "handlers", validator={})
    mongo[database_name]["handlers"].update_one({"_id": "send"}, {"$set": {"current": "gone"}})
    assert "FAIL handler 'send' is malformed" in said()


# --- kinds of handlers --------------------------------------------------------------------------------------


@pytest.fixture
def odd(store: SyncStore) -> App:
    """Register a handler whose parameters have default values that are secrets."""
    app = App()

    @app.task
    async def send(to: str, password: str = "hunter2") -> None: ...

    registered(store, app)
    return app


def test_default_values_are_not_stored(odd: App, mongo: Mongo, database_name: str) -> None:
    assert "hunter2" not in str(mongo[database_name]["handlers"].find_one({"_id": "send"}))
