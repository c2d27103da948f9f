"""How clients come by their connection: URIs, databases, the caller's own driver client, a database that is away."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest
from bson.binary import UuidRepresentation
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.read_concern import ReadConcern

from mtask import App, AsyncClient, Client, Published, TaskSpec
from mtask.errors import DatabaseUnavailable, InvalidInput, InvalidURI, OperationFailed, SchemaMismatch
from mtask.kernel.driver.stores import OPERATION_TIMEOUT
from tests.clients import KINDS, AnyClient, Kind, claim, open_client, open_store, succeed, with_options
from tests.integration.worker_harness import Working
from tests.mongo import Client as Mongo
from tests.mongo import fail_command

WEAK = "w=0&readPreference=secondaryPreferred&readConcernLevel=local&journal=false&retryWrites=false"
GUARANTEES = {
    "write_concern": WriteConcern(w="majority", j=True),
    "read_concern": ReadConcern("majority"),
    "read_preference": ReadPreference.PRIMARY,
}


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Hold a port at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


# --- which database ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "database", "expected"),
    [("", None, "mtask"), ("/shop", None, "shop"), ("/shop", "other", "other"), ("", "other", "other")],
)
def test_database_is_the_given_one_else_the_uris_else_mtask(path: str, database: str | None, expected: str) -> None:
    uri = f"mongodb://127.0.0.1:1{path}"

    async def asynchronous() -> list[str]:
        source: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri)
        motor: Any = AsyncIOMotorClient(uri)
        async with AsyncClient(uri, database=database) as client:
            names = [
                client.database_name,
                AsyncClient(source, database=database).database_name,
                AsyncClient(motor, database=database).database_name,
            ]
        await source.close()
        motor.close()
        return names

    with Client(uri, database=database) as client, MongoClient[dict[str, Any]](uri) as source:
        assert client.database_name == expected
        assert Client(source, database=database).database_name == expected
        assert client.tasks.full_name == f"{expected}.tasks"
    assert asyncio.run(asynchronous()) == [expected] * 3


@pytest.mark.parametrize("name", ["a b", "a.b", "$a", "x" * 64, "ü" * 40, "a/b", "\0"])
def test_name_that_is_no_database_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a database name: use 1 to 63 letters"):
        Client("mongodb://127.0.0.1:1", database=name)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "  ",
        "http://u:secret@h/",
        "mongodb://",
        "mongodb://u:secret@",
        "mongodb://u:sec%ret@h/",
        "mongodb://u:pass:secret@h/",
        "mongodb://u:secret@h:port/",
        "mongodb://u:p@h/secret@h/",
        "mongodb://u:p@secret@h/",
        "mongodb://u:secret@h/?nonsense=1",
        "mongodb://u:secret@h/?readPreference=often",
    ],
)
def test_uri_that_cannot_be_used_is_refused_without_its_password(uri: str) -> None:
    async def asynchronous() -> None:
        AsyncClient(uri)

    for connect in (lambda: Client(uri), lambda: asyncio.run(asynchronous())):
        with pytest.raises(InvalidURI, match="the MongoDB URI cannot be used") as raised:
            connect()
        assert "secret" not in str(raised.value)


async def test_what_is_no_client_is_refused_with_what_to_give(mongo: Mongo) -> None:
    with pytest.raises(InvalidInput, match="int is no MongoDB client: give a URI"):
        Client(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"this client is for sync code: use mtask\.Client"):
        AsyncClient(mongo)
    source: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient("mongodb://127.0.0.1:1")
    motor: Any = AsyncIOMotorClient("mongodb://127.0.0.1:1")
    sources: list[Any] = [source, motor]
    for asynchronous in sources:
        with pytest.raises(InvalidInput, match=r"this client belongs to asyncio: use mtask\.AsyncClient"):
            Client(asynchronous)
    await source.close()
    motor.close()


# --- a client made from a URI, and the caller's own -------------------------------------------------------


def test_client_of_a_uri_closes_its_connections(mongo_uri: str, database_name: str) -> None:
    client = Client(mongo_uri, database=database_name)
    client.publish("a", key="k")
    client.close()
    with pytest.raises(OperationFailed, match="after close"):
        client.get("a", "k")

    async def scenario() -> None:
        async with AsyncClient(mongo_uri, database=database_name) as client:
            assert (await client.get("a", "k")).key == "k"
        with pytest.raises(OperationFailed, match="after close"):
            await client.get("a", "k")

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_callers_own_client_stays_open(kind: Kind, mongo_uri: str, database_name: str) -> None:
    with open_client(kind, mongo_uri, database_name) as client:
        client.publish("a", key="k")
        client.close()
        assert client.get("a", "k").key == "k"


@pytest.mark.parametrize("kind", KINDS)
def test_weak_concerns_of_the_callers_uri_do_not_weaken_the_engine(
    kind: Kind, mongo_uri: str, database_name: str
) -> None:
    with open_client(kind, with_options(mongo_uri, WEAK), database_name) as client:
        assert client.source.write_concern.document["w"] == 0
        for collection in (client.client.tasks, client.client._store.tasks):
            assert {name: getattr(collection, name) for name in GUARANTEES} == GUARANTEES
            assert collection.codec_options.tz_aware
            assert collection.codec_options.uuid_representation == UuidRepresentation.STANDARD
        # With w=0 nothing of this could be told.
        assert client.publish("a", {"n": 1}, key="k").created
        assert client.publish("a", {"n": 2}, key="k", if_exists="update").updated
        assert [one.created for one in client.publish_many([TaskSpec("a", key="k"), TaskSpec("a", key="l")])] == [
            False,
            True,
        ]
        assert client.get("a", "k").params == {"n": 2}
        assert client.remove("a", "k") is True
        # The caller's own use of it is as it was.
        assert client.source.write_concern.document["w"] == 0


def test_weak_concerns_in_the_uri_of_mtasks_own_client_do_not_weaken_it(mongo_uri: str, database_name: str) -> None:
    with Client(with_options(mongo_uri, WEAK), database=database_name) as client:
        assert {name: getattr(client.tasks, name) for name in GUARANTEES} == GUARANTEES
        assert client.publish("a", key="k").created


@pytest.mark.parametrize("kind", KINDS)
def test_naive_callers_client_gets_aware_instants_all_the_same(kind: Kind, mongo_uri: str, database_name: str) -> None:
    with open_client(kind, mongo_uri, database_name, tz_aware=False, uuidRepresentation="javaLegacy") as client:
        client.publish("a", key="k")
        assert client.get("a", "k").task_state.create_time.tzinfo is UTC
        assert client.client.tasks.codec_options.tz_aware


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_is_the_collection_itself(kind: Kind, mongo_uri: str, database_name: str) -> None:
    with open_client(kind, mongo_uri, database_name) as client:
        client.publish("a", key="k")

        async def find_one() -> Any:
            found = client.client.tasks.find_one({"name": "a"})
            return await found if inspect.isawaitable(found) else found

        assert client.runner.run(find_one())["_id"] == "a:k"


@pytest.mark.fresh_database
@pytest.mark.parametrize("kind", KINDS)
def test_first_call_makes_sure_of_the_collections(kind: Kind, mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    with open_client(kind, mongo_uri, database_name) as client:
        client.find()
    assert sorted(mongo[database_name].list_collection_names()) == ["tasks", "workers"]
    assert "mtask_discovery" in mongo[database_name]["tasks"].index_information()


@pytest.mark.fresh_database
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_collection_is_told_and_left_alone(
    kind: Kind, mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    mongo[database_name]["tasks"].insert_one({"title": "buy milk"})
    with (
        open_client(kind, mongo_uri, database_name) as client,
        pytest.raises(SchemaMismatch, match="is not a task of mtask"),
    ):
        client.publish("a", key="k")
    assert mongo[database_name]["tasks"].count_documents({}) == 1
    assert list(mongo[database_name]["tasks"].index_information()) == ["_id_"]


# --- the database is away ---------------------------------------------------------------------------------


def assert_told(error: DatabaseUnavailable) -> None:
    assert "cannot be reached" in str(error)
    assert "nothing is done twice" in str(error)
    assert "secret" not in str(error)
    assert "secret" not in "".join(traceback.format_exception(error))


def test_absent_database_is_told_in_bounded_time_and_without_the_password(closed_port: int) -> None:
    uri = f"mongodb://user:secret@127.0.0.1:{closed_port}/?directConnection=true"
    began = time.monotonic()
    with Client(uri) as client, pytest.raises(DatabaseUnavailable) as raised:
        client.publish("a", key="k")
    assert time.monotonic() - began < 20
    assert_told(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_absent_database_is_told_through_the_callers_own_client(kind: Kind, closed_port: int) -> None:
    uri = f"mongodb://user:secret@127.0.0.1:{closed_port}/?directConnection=true"
    with open_client(kind, uri, None) as client:
        client.client._store.timeout = timedelta(milliseconds=500)
        for ask in (client.publish, client.get):
            with pytest.raises(DatabaseUnavailable) as raised:
                ask("a", key="k")
            assert_told(raised.value)


@pytest.fixture(params=KINDS)
def named(request: pytest.FixtureRequest, mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    """Connect under an app name of its own, so that the server can fail it and nobody else."""
    with open_client(request.param, mongo_uri, database_name, appname=database_name) as opened:
        opened.init()
        yield opened


def test_server_that_does_not_answer_is_given_up_in_bounded_time(named: AnyClient, mongo: Mongo) -> None:
    named.client._store.timeout = timedelta(milliseconds=300)
    began = time.monotonic()
    with (
        fail_command(mongo, "update", block_ms=1_200, app_name=named.client.database_name),
        pytest.raises(DatabaseUnavailable) as raised,
    ):
        named.publish("a", key="k")
    assert time.monotonic() - began < 10
    assert_told(raised.value)


def test_lost_connection_costs_nothing(named: AnyClient, mongo: Mongo) -> None:
    app_name = named.client.database_name
    with fail_command(mongo, "update", close_connection=True, times=1, app_name=app_name):
        assert named.publish("a", key="k") == Published("a:k", created=True, updated=False)
    with fail_command(mongo, "insert", close_connection=True, times=1, app_name=app_name):
        told = named.publish_many([TaskSpec("a", key=key) for key in "klm"])
    assert [one.created for one in told] == [False, True, True]
    with fail_command(mongo, "find", close_connection=True, times=1, app_name=app_name):
        assert len(named.find()) == 3


def test_connection_that_is_lost_again_and_again_is_told_and_the_same_call_works_later(
    named: AnyClient, mongo: Mongo
) -> None:
    named.client._store.timeout = timedelta(milliseconds=500)
    with fail_command(mongo, ["update", "insert"], close_connection=True, app_name=named.client.database_name):
        with pytest.raises(DatabaseUnavailable) as raised:
            named.publish("a", key="k")
        assert_told(raised.value)
        with pytest.raises(DatabaseUnavailable) as raised:
            named.publish_many([TaskSpec("a", key="k")])
        assert_told(raised.value)
    named.client._store.timeout = OPERATION_TIMEOUT
    assert named.publish("a", key="k").created


@pytest.mark.fresh_database
def test_client_that_could_not_connect_at_first_works_once_the_database_is_there(
    mongo_uri: str, database_name: str, mongo: Mongo
) -> None:
    with MongoClient[dict[str, Any]](mongo_uri, appname=database_name) as source:
        client = Client(source, database=database_name)
        client._store.timeout = timedelta(milliseconds=500)
        with (
            fail_command(mongo, "listCollections", close_connection=True, app_name=database_name),
            pytest.raises(DatabaseUnavailable),
        ):
            client.publish("a", key="k")
        client._store.timeout = OPERATION_TIMEOUT
        assert client.publish("a", key="k").created


def test_client_is_shared_by_threads(mongo_uri: str, database_name: str) -> None:
    async def publish_from_threads(client: Client) -> list[Published]:
        found: list[Published] = await asyncio.gather(
            *(asyncio.to_thread(client.publish, "a", key=str(n % 20)) for n in range(100))
        )
        return found

    with Client(mongo_uri, database=database_name) as client:
        told = asyncio.run(publish_from_threads(client))
        assert sum(one.created for one in told) == 20
        assert client.count() == 20


@pytest.mark.parametrize("kind", ["asyncio", "motor"])
def test_client_is_shared_by_asyncio_tasks(kind: Kind, mongo_uri: str, database_name: str) -> None:
    with open_client(kind, mongo_uri, database_name) as client:

        async def publish_at_once() -> list[Published]:
            publish = client.client.publish
            return list(await asyncio.gather(*(publish("a", key=str(n % 20)) for n in range(100))))

        assert sum(one.created for one in client.runner.run(publish_at_once())) == 20
        assert client.count() == 20


@pytest.mark.parametrize("kind", KINDS)
def test_published_task_can_be_claimed_run_and_waited_for(kind: Kind, mongo_uri: str, database_name: str) -> None:
    with open_client(kind, mongo_uri, database_name) as client, open_store(mongo_uri, database_name) as store:
        client.publish("a", key="k")
        succeed(store, "a:k", claim(store, "a:k"), 42)
        assert client.wait("a", "k", timeout=40).returns == 42


@pytest.mark.parametrize("worker_id", ["w" * 117, "é" * 128, "𝄞" * 64])
async def test_worker_with_the_longest_id_can_connect(worker_id: str, working: Working) -> None:
    """The server takes 128 bytes as an application's name; what is beyond them is left out, and no part of a letter."""
    app = App()

    @app.task
    def seven() -> int:
        return 7

    async with working(app, worker_id) as bench:
        published = await bench.client.publish("seven", key="k")
        await bench.status(published.task_id, "SUCCESS")
        assert str(bench.document(published.task_id)["task_state"]["worker_states"][0]["worker_id"]) == worker_id


def test_change_whose_reply_tells_of_a_failover_is_repeated(named: AnyClient, mongo: Mongo) -> None:
    params = {"ref": {"$ref": "orders", "$id": 7}, "refs": [{"$ref": "orders", "$id": 8, "more": [1]}]}
    named.publish("a", params, key="k")
    named.cancel("a", "k")
    failing = {
        "failCommands": ["findAndModify"],
        "writeConcernError": {"code": 262, "errmsg": "time is up"},
        "errorLabels": ["RetryableWriteError"],
        "appName": named.client.database_name,
    }
    mongo.admin.command("configureFailPoint", "failCommand", mode={"times": 1}, data=failing)
    task = named.retry("a", "k")
    assert (task.status, task.params) == ("INIT", params)
