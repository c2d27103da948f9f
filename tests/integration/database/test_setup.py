"""Making sure of the database: what is missing is made, what is ours is mended, what is foreign is left alone."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from mtask.database import setup
from mtask.database.schema import schema_title, task_validator, worker_validator
from mtask.errors import AccessDenied, NotReplicaSet, SchemaMismatch
from mtask.kernel.document.task import SCHEMA_REVISION
from mtask.kernel.driver import connect
from mtask.kernel.driver.indexes import (
    CALLBACKS_INDEX,
    CHILDREN_INDEX,
    DISCOVERY_INDEX,
    EXPIRY_INDEX,
    FINISHED_INDEX,
    FLOW_INDEX,
    HEAD_INDEX,
    HELD_INDEX,
    LOOKUP_INDEX,
    OWED_INDEX,
    RECENT_INDEX,
    STATUS_INDEX,
    TENANT_INDEX,
    TURNS_INDEX,
    UNENDED_INDEX,
    worker_indexes,
)
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations.publish import Policy
from mtask.local import find_mongod
from mtask.local.ownership import free_ports
from tests.integration import stores
from tests.mongo import Client, eventually

pytestmark = pytest.mark.fresh_database
Document = dict[str, Any]
_FLOWS = [FLOW_INDEX, HELD_INDEX, OWED_INDEX, CHILDREN_INDEX, UNENDED_INDEX, HEAD_INDEX, CALLBACKS_INDEX]
_LISTS = [RECENT_INDEX, FINISHED_INDEX, TENANT_INDEX, TURNS_INDEX]
_OF_TASKS = sorted(["_id_", DISCOVERY_INDEX, STATUS_INDEX, EXPIRY_INDEX, LOOKUP_INDEX, *_LISTS, *_FLOWS])


@pytest.fixture
def store(mongo: Client, database_name: str) -> SyncStore:
    """A store on a database that nobody has made yet."""
    return SyncStore(mongo, database_name)


def state(store: SyncStore) -> dict[str, tuple[Document, list[str]]]:
    """Return each collection's options and the names of its indexes."""
    return {
        found["name"]: (
            found["options"],
            sorted(index["name"] for index in store.database[found["name"]].list_indexes()),
        )
        for found in store.database.list_collections()
    }


def assert_complete(store: SyncStore) -> None:
    found = state(store)
    assert found.keys() == {"tasks", "workers"}
    tasks, workers = found["tasks"], found["workers"]
    assert tasks[0]["validator"] == task_validator()
    assert workers[0]["validator"] == worker_validator()
    assert all(each[0].get("validationAction", "error") == "error" for each in (tasks, workers))
    assert tasks[1] == _OF_TASKS
    assert workers[1] == sorted(["_id_", EXPIRY_INDEX])


def test_an_empty_database_gets_collections_validators_and_indexes(store: SyncStore) -> None:
    server_time = store.run(setup.ensure())
    assert abs(server_time - datetime.now(UTC)) < timedelta(minutes=1)
    assert_complete(store)


def test_database_of_an_earlier_revision_gets_the_index_of_lookups_and_keeps_its_tasks(store: SyncStore) -> None:
    store.run(setup.ensure())
    stores.publish(store, "k")
    store.tasks.drop_index(LOOKUP_INDEX)
    earlier = task_validator()
    earlier["$jsonSchema"]["title"] = schema_title("tasks").replace(f"revision {SCHEMA_REVISION}", "revision 4")
    del earlier["$or"]
    store.database.command("collMod", "tasks", validator=earlier)
    store.run(setup.ensure())
    assert_complete(store)
    assert stores.parsed(store, "k").lookup is None


def test_making_sure_again_changes_nothing(store: SyncStore) -> None:
    store.run(setup.ensure())
    before = state(store)
    store.run(setup.ensure())
    store.run(setup.ensure(repair=True))
    assert state(store) == before


def test_eight_threads_at_once_make_it_once_and_none_of_them_fails(mongo_uri: str, store: SyncStore) -> None:
    barrier = Barrier(8)

    def ensure_and_publish(number: int) -> list[str]:
        with connect.sync_store(mongo_uri, store.database.name).client as client:
            mine = SyncStore(client, store.database.name)
            barrier.wait(30)
            mine.run(setup.ensure())
            # Whoever comes back finds all that the engine needs, whether or not it made it itself.
            return sorted(index["name"] for index in mine.tasks.list_indexes())

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(ensure_and_publish, range(8)))
    assert seen == [_OF_TASKS] * 8
    assert_complete(store)


def ensure_with_others(uri: str, database: str, start: Barrier) -> None:
    made = connect.sync_store(uri, database)
    start.wait(60)
    made.run(setup.ensure())
    made.close()


def test_eight_processes_at_once_make_it_once_and_none_of_them_fails(mongo_uri: str, store: SyncStore) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start = context.Barrier(8)
    arguments = (mongo_uri, store.database.name, start)
    processes = [context.Process(target=ensure_with_others, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert_complete(store)


@pytest.mark.parametrize("repair", [False, True])
def test_a_dropped_index_is_made_again(store: SyncStore, repair: bool) -> None:
    store.run(setup.ensure())
    store.tasks.drop_index(DISCOVERY_INDEX)
    store.database.workers.drop_index(EXPIRY_INDEX)
    store.run(setup.ensure(repair=repair))
    assert_complete(store)


def test_process_that_died_amid_the_indexes_is_made_up_for(store: SyncStore) -> None:
    operation = setup.ensure(["tasks"])
    call, before = next(operation), ""
    while before != "create_indexes":
        before, call = call.method, operation.send(store._answer(call, None))
    operation.close()
    store.run(setup.ensure())
    assert sorted(index["name"] for index in store.tasks.list_indexes()) == _OF_TASKS


def test_a_process_that_died_between_validator_and_indexes_is_made_up_for(store: SyncStore) -> None:
    store.database.create_collection("tasks", validator=task_validator())
    store.run(setup.ensure())
    assert_complete(store)


@pytest.mark.parametrize("title", [schema_title("tasks").replace(f"revision {SCHEMA_REVISION}", "revision 0"), None])
def test_an_outdated_validator_is_replaced_and_the_tasks_stay(store: SyncStore, title: str | None) -> None:
    store.run(setup.ensure())
    stores.publish(store, "k")
    outdated = {"$jsonSchema": {"title": title, "required": ["_id"]}} if title else {}
    store.database.command("collMod", "tasks", validator=outdated)
    store.run(setup.ensure())
    assert_complete(store)
    assert stores.parsed(store, "k").status == "INIT"


def test_a_newer_revision_of_the_same_schema_version_is_left_as_it_is(store: SyncStore) -> None:
    store.run(setup.ensure())
    newer = {"$jsonSchema": {"title": schema_title("tasks").replace(f"revision {SCHEMA_REVISION}", "revision 999")}}
    store.database.command("collMod", "tasks", validator=newer)
    store.run(setup.ensure())
    assert state(store)["tasks"][0]["validator"] == newer


def test_a_validator_of_a_newer_schema_version_is_refused(store: SyncStore) -> None:
    title = schema_title("tasks").replace("schema_version 1", "schema_version 2")
    store.database.create_collection("tasks", validator={"$jsonSchema": {"title": title}})
    with pytest.raises(SchemaMismatch, match=r"schema_version 2.*Upgrade mtask") as caught:
        store.run(setup.ensure())
    assert caught.value.collection == "tasks"


def test_a_document_of_a_newer_schema_version_is_refused(store: SyncStore) -> None:
    store.tasks.insert_one({"_id": "task:k", "schema_version": 2})
    with pytest.raises(SchemaMismatch, match=r"'task:k' has schema_version 2.*Upgrade mtask"):
        store.run(setup.ensure())


def test_foreign_tasks_are_refused_and_left_alone(store: SyncStore) -> None:
    store.tasks.insert_one({"_id": 7, "title": "water the plants"})
    with pytest.raises(SchemaMismatch, match=r"document 7 is not a task of mtask.*another --database"):
        store.run(setup.ensure())
    assert state(store) == {"tasks": ({}, ["_id_"])}


def test_foreign_workers_are_refused_and_left_alone(store: SyncStore) -> None:
    store.database.workers.insert_one({"_id": 7, "name": "Anna"})
    with pytest.raises(SchemaMismatch, match=r"document 7 is not a worker of mtask.*another --database") as caught:
        store.run(setup.ensure())
    assert caught.value.collection == "workers"
    assert state(store)["workers"] == ({}, ["_id_"])


def test_an_empty_collection_that_somebody_made_is_taken_over(store: SyncStore) -> None:
    store.database.create_collection("tasks")
    store.run(setup.ensure())
    assert_complete(store)


def test_a_view_in_the_place_of_a_collection_is_refused(store: SyncStore) -> None:
    store.database.create_collection("tasks", viewOn="elsewhere", pipeline=[])
    with pytest.raises(SchemaMismatch, match="it is a view"):
        store.run(setup.ensure())


def test_a_foreign_index_under_our_name_is_refused_with_what_to_do(store: SyncStore) -> None:
    store.run(setup.ensure())
    store.tasks.drop_index(STATUS_INDEX)
    store.tasks.create_index("params.number", name=STATUS_INDEX)
    with pytest.raises(SchemaMismatch, match=r"index.*Drop that index"):
        store.run(setup.ensure(repair=True))


def test_dead_workers_leave_by_their_index() -> None:
    assert worker_indexes()[0].document["expireAfterSeconds"] == 86_400


@contextmanager
def mongod(folder: Path, *options: str) -> Iterator[str]:
    """Run a mongod of its own and give its address."""
    data = folder / "data"
    data.mkdir()
    port = free_ports(1)[0]
    command = [
        str(find_mongod()),
        f"--dbpath={data}",
        f"--port={port}",
        "--bind_ip=127.0.0.1",
        "--nounixsocket",
        "--wiredTigerCacheSizeGB=0.25",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: is_answering(port), 30, "mongod answers")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def is_answering(port: int) -> bool:
    client: Client = MongoClient("127.0.0.1", port, serverSelectionTimeoutMS=500, directConnection=True)
    with client:
        try:
            return bool(client.admin.command("hello")["ok"])
        except PyMongoError:
            return False


def test_a_standalone_server_is_refused_with_the_two_commands_that_make_it_a_replica_set(tmp_path: Path) -> None:
    with mongod(tmp_path) as address:
        store = connect.sync_store(f"mongodb://{address}/", "mtask")
        with store.client, pytest.raises(NotReplicaSet) as caught:
            store.run(setup.ensure())
    assert "mongod --replSet rs0" in str(caught.value)
    assert "mongosh --eval 'rs.initiate()'" in str(caught.value)


PASSWORD = "hunter2"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica set that asks for passwords: users admin, writer (readWrite), reader (read), nobody."""
    folder = tmp_path_factory.mktemp("guarded")
    key = folder / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o400)
    with mongod(folder, "--replSet=rs0", "--auth", f"--keyFile={key}") as address:
        client: Client = MongoClient(address, directConnection=True)
        with client:
            member = {"_id": 0, "host": address}
            client.admin.command("replSetInitiate", {"_id": "rs0", "members": [member]})
            eventually(lambda: client.admin.command("hello")["isWritablePrimary"], 30, "a primary")
            client.admin.command("createUser", "admin", pwd=PASSWORD, roles=["root"])
        with connect.sync_store(uri_of(address, "admin"), "shop").client as admin:
            for user, roles in (
                ("writer", [{"role": "readWrite", "db": name} for name in ("shop", "fresh")]),
                ("reader", [{"role": "read", "db": "shop"}]),
                ("nobody", []),
            ):
                admin.admin.command("createUser", user, pwd=PASSWORD, roles=roles)
        yield address


def uri_of(address: str, user: str, password: str = PASSWORD) -> str:
    return f"mongodb://{user}:{password}@{address}/?replicaSet=rs0&authSource=admin"


@contextmanager
def store_of(address: str, user: str, database: str, password: str = PASSWORD) -> Iterator[SyncStore]:
    store = connect.sync_store(uri_of(address, user, password), database)
    with store.client:
        yield store


def test_a_user_who_may_read_and_write_makes_a_fresh_database_and_publishes(guarded: str) -> None:
    with store_of(guarded, "writer", "fresh") as store:
        store.run(setup.ensure())
        store.run(setup.ensure())
        store.run(publishing.publish(stores.new_task("k"), Policy()))
        assert_complete(store)


def test_a_user_who_may_read_and_write_passes_where_an_administrator_was_before(guarded: str) -> None:
    with store_of(guarded, "admin", "shop") as store:
        store.run(setup.ensure())
        outdated = {
            "$jsonSchema": {"title": schema_title("tasks").replace(f"revision {SCHEMA_REVISION}", "revision 0")}
        }
        store.database.command("collMod", "tasks", validator=outdated)
    with store_of(guarded, "writer", "shop") as store:
        store.run(setup.ensure())
        assert stores.publish(store, "k").created


@pytest.mark.parametrize("user", ["reader", "nobody"])
def test_a_user_without_rights_is_refused_with_the_roles_that_are_needed(guarded: str, user: str) -> None:
    with store_of(guarded, user, "elsewhere") as store, pytest.raises(AccessDenied) as caught:
        store.run(setup.ensure())
    needed = "mtask_elsewhere_deployer"
    assert needed in caught.value.roles
    assert needed in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_a_wrong_password_is_refused_without_being_shown(guarded: str) -> None:
    with store_of(guarded, "writer", "shop", "wrong-hunter3") as store, pytest.raises(AccessDenied) as caught:
        store.run(setup.ensure())
    assert "hunter3" not in str(caught.value)
