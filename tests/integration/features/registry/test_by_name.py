"""A publish by name makes the same task as one by handler, and asks the registry seldom."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import monitoring

from mtask import App, AsyncClient, Client, Flow, TaskSpec
from mtask.errors import InvalidParams, UnknownTask, UnknownTaskName
from mtask.features.registry import client as registry
from mtask.kernel.driver.stores import SyncStore
from tests.clients import KINDS, Kind, open_client
from tests.integration.cli.commands import Commands
from tests.integration.features.registry.apps import first_version, params_of, registered, second_version, thirty
from tests.integration.web.serving import Serve
from tests.mongo import Client as Mongo

Document = dict[str, Any]


class Heard(monitoring.CommandListener):
    """The commands that a driver's client has sent, by collection."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, bool]] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        collection = str(event.command.get(event.command_name))
        self.events.append(
            (event.command_name, collection, "txnNumber" in event.command and "autocommit" in event.command)
        )

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        pass

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass

    def of(self, collection: str) -> list[tuple[str, str, bool]]:
        """Return the commands about a collection."""
        return [event for event in self.events if event[1] == collection]


def comparable(document: Document, *, flow: bool = False) -> Document:
    """Return a task's document without its id, its key and its times."""
    state = {name: value for name, value in document["task_state"].items() if not name.endswith("_time")}
    left_out = ("_id", "key", "task_state", *(("flow",) if flow else ()))
    return {**{name: value for name, value in document.items() if name not in left_out}, "task_state": state}


@pytest.fixture
def known(store: SyncStore) -> App:
    """Register thirty handlers with all options."""
    app = thirty()
    registered(store, app)
    return app


@pytest.fixture
def stored(mongo: Mongo, database_name: str) -> Any:
    """Return what reads a task's document."""
    return lambda name, key: mongo[database_name]["tasks"].find_one({"_id": f"{name}:{key}"})


def same(app: App, stored: Any, client: Client, key: str) -> None:
    """Check that the tasks under this key are as those by handler, but for ids and times."""
    for index, (name, handler) in enumerate(app.handlers.items()):
        own = f"by-handler/{key}"
        client.publish(handler.function, params_of(index), key=own)
        made, expected = stored(name, key), stored(name, own)
        assert made is not None, name
        assert comparable(made) == comparable(expected), name
        assert list(made) == list(expected), "the fields have the same order"
        assert made["declared"], name


def test_thirty_handlers_published_by_name_and_by_handler_make_equal_documents(
    known: App, stored: Any, client: Client
) -> None:
    for index, name in enumerate(known.handlers):
        client.publish(name, params_of(index), key="a")
    client.publish_many([TaskSpec(name, params_of(index), key="b") for index, name in enumerate(known.handlers)])
    same(known, stored, client, "a")
    same(known, stored, client, "b")


def test_steps_of_flows_by_name_equal_those_by_handler(known: App, stored: Any, client: Client) -> None:
    by_name, by_handler = Flow("n", priority=3), Flow("h", priority=3)
    for index, (name, handler) in enumerate(known.handlers.items()):
        by_name.add(name, name, params_of(index))
        by_handler.add(name, handler.function, params_of(index))
    client.publish_flow(by_name)
    client.publish_flow(by_handler)
    for name in known.handlers:
        made, expected = stored(name, f"n/{name}"), stored(name, f"h/{name}")
        assert comparable(made, flow=True) == comparable(expected, flow=True)
        assert made["task_option"]["priority"] == 3, "the options of the flow go before the declared ones"


def test_schedules_by_name_equal_those_by_handler(known: App, mongo: Mongo, database_name: str, client: Client) -> None:
    for index, (name, handler) in enumerate(known.handlers.items()):
        client.add_schedule(f"n-{name}", name, "* * * * *", params_of(index))
        client.add_schedule(f"h-{name}", handler.function, "* * * * *", params_of(index))
        made, expected = (mongo[database_name]["schedules"].find_one({"_id": f"{kind}-{name}"}) for kind in "nh")
        assert made is not None
        assert expected is not None
        for field in ("name", "queue", "params", "task_option", "lookup"):
            assert made.get(field) == expected.get(field), (name, field)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_client_knows_the_registry(
    kind: Kind, known: App, stored: Any, mongo_uri: str, database_name: str, client: Client
) -> None:
    with open_client(kind, mongo_uri, database_name) as own:
        for index, name in enumerate(known.handlers):
            own.publish(name, params_of(index), key="k")
    same(known, stored, client, "k")


def test_command_line_publishes_by_name_what_the_handlers_declare(
    known: App, stored: Any, client: Client, mtask: Commands
) -> None:
    for index, name in enumerate(known.handlers):
        mtask.ok("publish", name, json.dumps(params_of(index)), "--key", "c")
    same(known, stored, client, "c")


async def test_rest_publishes_by_name_what_the_handlers_declare(
    known: App, stored: Any, client: Client, serving: Serve
) -> None:
    async with serving() as server:
        for index, name in enumerate(known.handlers):
            made = await server.ask("POST", "/v1/tasks", json={"name": name, "key": "r", "params": params_of(index)})
            assert made.status_code == 201, made.text
            assert "warnings" not in made.json()
        batch = [{"name": name, "key": "s", "params": params_of(index)} for index, name in enumerate(known.handlers)]
        answer = await server.ask("POST", "/v1/tasks:batch", json={"tasks": batch})
        assert all(entry["created"] for entry in answer.json()["tasks"])
    same(known, stored, client, "r")
    same(known, stored, client, "s")


def test_explicit_arguments_go_before_declared_ones(known: App, stored: Any, client: Client) -> None:
    client.publish("handler-0", {"to": "x"}, key="k", queue="own", priority=1, concurrent_worker_cnt=1)
    made = stored("handler-0", "k")
    assert (made["queue"], made["task_option"]["priority"]) == ("own", 1)
    assert made["task_option"]["max_unexpected_retries"] == 9


def test_an_update_replaces_the_declared_version(store: SyncStore, stored: Any, client: Client) -> None:
    registered(store, first_version())
    client.publish("send", {"to": "a"}, key="k")
    former = stored("send", "k")["declared"]
    registered(store, second_version())
    with Client(store.client, database=store.database.name) as other:
        other.publish("send", {"to": "a", "subject": "s"}, key="k", if_exists="update")
        assert stored("send", "k")["declared"] not in (None, former)
    with Client(store.client, database=store.database.name, registry=False) as without:
        without.publish("send", {"to": "a"}, key="k", if_exists="update")
        assert "declared" not in stored("send", "k")
        assert stored("send", "k")["queue"] == "default", "registry=False is as it was before there was a registry"


def test_wrong_params_are_refused_by_name_and_types_are_not_checked(store: SyncStore, client: Client) -> None:
    registered(store, second_version())
    with pytest.raises(InvalidParams, match="subject: Field required"):
        client.publish("send", {"to": "a"})
    with pytest.raises(InvalidParams, match="cc: Extra inputs are not permitted"):
        client.publish("send", {"to": "a", "subject": "s", "cc": 1})
    with pytest.raises(InvalidParams, match="give a mapping of to, subject, not str"):
        client.publish("send", "a")
    assert client.count() == 0
    assert client.publish("send", {"to": 1, "subject": []}).created


async def test_wrong_params_of_one_task_of_a_batch_are_its_problem(store: SyncStore, serving: Serve) -> None:
    registered(store, second_version())
    async with serving() as server:
        tasks = [{"name": "send", "params": {"to": "a"}}, {"name": "send", "params": {"to": "a", "subject": "s"}}]
        answer = await server.ask("POST", "/v1/tasks:batch", json={"tasks": tasks})
        wrong, right = answer.json()["tasks"]
        assert wrong["problem"]["status"] == 422
        assert "subject" in wrong["problem"]["detail"]
        assert right["created"] is True


# --- the cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def heard(mongo_uri: str, database_name: str) -> Iterator[tuple[Client, Heard]]:
    """Return a client, and the commands that it sends."""
    commands = Heard()
    source: Any = Mongo(mongo_uri, event_listeners=[commands])
    with source, Client(source, database=database_name) as made:
        made.init()
        commands.events.clear()
        yield made, commands


def test_a_name_is_looked_up_once_and_again_when_its_time_is_over(
    store: SyncStore, stored: Any, heard: tuple[Client, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(store, first_version())
    client, commands = heard
    now = 1000.0
    for module in ("mtask.arguments.publish", "mtask.features.registry.client"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: now)
    for key in "abc":
        client.publish("send", {"to": "a"}, key=key)
    assert len(commands.of("handlers")) == 1
    registered(store, second_version())
    now += registry.LASTS - 0.1
    client.publish("send", {"to": "a"}, key="d")
    assert len(commands.of("handlers")) == 1
    assert stored("send", "d")["queue"] == "mail"
    now += 0.2
    client.publish("send", {"to": "a", "subject": "s"}, key="e")
    assert len(commands.of("handlers")) == 2
    assert stored("send", "e")["queue"] == "post"


def test_others_go_on_with_what_was_known_while_one_asks_anew(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(store, first_version())
    now = 1000.0
    monkeypatch.setattr("mtask.features.registry.client.monotonic", lambda: now)
    cache = registry.Registry()
    store.run(cache.learn(["send"]))
    former = cache.entries["send"]
    now = former.until + 1
    asking = cache.learn(["send"])
    next(asking)  # the read is under way
    assert cache.entries["send"] == former._replace(until=now + registry.READING)
    asking.close()


def test_a_publish_by_name_sends_what_one_by_handler_sends(store: SyncStore, heard: tuple[Client, Heard]) -> None:
    app = first_version()
    registered(store, app)
    client, commands = heard
    client.publish("send", {"to": "a"}, key="first")
    sent = []
    for task in ("send", app.handlers["send"].function):
        commands.events.clear()
        client.publish(task, {"to": "a"})
        client.publish_many([TaskSpec(task, {"to": "a"}) for _ in range(3)])
        sent.append([*commands.events])
    assert sent[0] == sent[1]


def test_params_that_do_not_fit_what_is_remembered_are_looked_up_anew(
    store: SyncStore, stored: Any, heard: tuple[Client, Heard]
) -> None:
    registered(store, first_version())
    client, commands = heard
    client.publish("send", {"to": "a"}, key="a")
    registered(store, second_version())
    client.publish("send", {"to": "a", "subject": "s"}, key="b")
    assert stored("send", "b")["queue"] == "post"
    assert len(commands.of("handlers")) == 2


def test_an_empty_registry_costs_one_look_for_all_names_and_warns_of_nothing(heard: tuple[Client, Heard]) -> None:
    client, commands = heard
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(20):
            client.publish(f"task-{number}")
    assert len(commands.of("handlers")) == 2, "the first name, and that there are no others"
    assert commands.of("workers") == []


def test_an_unknown_name_is_believed_for_a_shorter_time(
    store: SyncStore, heard: tuple[Client, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(store, first_version())
    client, commands = heard
    now = 1000.0
    for module in ("mtask.arguments.publish", "mtask.features.registry.client"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: now)
    with pytest.warns(UnknownTaskName):
        client.publish("sent")
    looks = len(commands.of("handlers"))
    now += registry.UNKNOWN_LASTS - 0.1
    client.publish("sent")
    assert len(commands.of("handlers")) == looks
    now += 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was told before
        client.publish("sent")
    assert len(commands.of("handlers")) > looks


def test_a_publish_in_a_transaction_reads_the_registry_outside_of_it(
    store: SyncStore, stored: Any, heard: tuple[Client, Heard]
) -> None:
    registered(store, first_version())
    client, commands = heard
    source: Any = client.tasks.database.client
    with source.start_session() as session, session.start_transaction():
        client.publish("send", {"to": "a"}, key="a", session=session)
        registered(store, second_version())  # it would conflict with, or be unseen by, a read of the transaction
        client.publish("send", {"to": "a", "subject": "s"}, key="b", session=session)
    assert [is_inside for _, _, is_inside in commands.of("handlers")] == [False, False]
    assert any(is_inside for _, _, is_inside in commands.of("tasks"))
    assert (stored("send", "a")["queue"], stored("send", "b")["queue"]) == ("mail", "post")


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_transaction_leaves_no_task_by_name(
    kind: Kind, store: SyncStore, stored: Any, mongo_uri: str, database_name: str
) -> None:
    registered(store, first_version())
    with open_client(kind, mongo_uri, database_name) as client:
        client.init()
        with pytest.raises(ZeroDivisionError):
            client.in_transaction(
                lambda session: client.client.publish("send", {"to": "a"}, key="a", session=session),
                lambda session: 1 / 0,
            )
    assert stored("send", "a") is None


def test_threads_share_what_a_client_knows(store: SyncStore, mongo: Mongo, database_name: str, client: Client) -> None:
    app = thirty()
    registered(store, app)
    names, failures = list(app.handlers), []

    def publish(number: int) -> None:
        try:
            for index, name in enumerate(names):
                client.publish(name, params_of(index), key=f"{number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert mongo[database_name]["tasks"].count_documents({"declared": {"$exists": True}}) == 8 * len(names)


def test_the_cache_is_bounded(store: SyncStore, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(store, first_version())
    monkeypatch.setattr(registry, "MAX_ENTRIES", 10)
    for number in range(25):
        client.publish(f"name-{number}")
    assert client._known is not None
    assert len(client._known.entries) <= 10


# --- unknown names ------------------------------------------------------------------------------------------


def test_an_unknown_name_warns_once_and_is_published(store: SyncStore, client: Client) -> None:
    registered(store, first_version())
    with pytest.warns(UnknownTaskName, match="no handler is registered under 'sennd'; did you mean 'send'"):
        assert client.publish("sennd").created
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.publish("sennd")
        client.publish("send", {"to": "a"})
    with pytest.warns(UnknownTaskName, match="the task waits for a worker that has one"):
        client.publish("quite/another")


def test_a_client_that_rejects_unknown_names_publishes_nothing(
    store: SyncStore, mongo_uri: str, database_name: str
) -> None:
    with Client(mongo_uri, database=database_name, unknown_names="reject") as client:
        with pytest.raises(UnknownTask, match="nothing was published"):
            client.publish("send", {"to": "a"})
        registered(store, first_version())
        for _ in range(2):  # the second one meets what is remembered
            with pytest.raises(UnknownTask, match="did you mean 'send'"):
                client.publish("sennd")
        with pytest.raises(UnknownTask):
            client.publish_many([TaskSpec("send", {"to": "a"}), TaskSpec("sennd")])
        assert client.count() == 0


def test_a_wrong_value_of_unknown_names_is_refused(mongo_uri: str) -> None:
    with pytest.raises(ValueError, match="unknown_names"):
        Client(mongo_uri, unknown_names="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="registry=False"):
        Client(mongo_uri, unknown_names="reject", registry=False)


async def test_rest_warns_of_an_unknown_name_and_tells_a_tenant_no_names(store: SyncStore, serving: Serve) -> None:
    registered(store, first_version())
    async with serving() as server:
        made = (await server.ask("POST", "/v1/tasks", json={"name": "sennd"})).json()
        assert made["created"] is True
        assert made["warnings"] == ["no handler is registered under 'sennd'; did you mean 'send'?"]
        batch = await server.ask("POST", "/v1/tasks:batch", json={"tasks": [{"name": "sennd"}]})
        assert "did you mean" in batch.json()["tasks"][0]["warnings"][0]
        told = (await server.ask("POST", "/v1/tasks", token="acme", json={"name": "sennd"})).json()["warnings"]
        assert len(told) == 1
        assert "did you mean" not in told[0]


def test_command_line_warns_of_an_unknown_name_on_stderr(store: SyncStore, mtask: Commands) -> None:
    registered(store, first_version())
    ended = mtask.ok("publish", "sennd")
    assert "did you mean 'send'?" in ended.err
    assert "sennd" in ended.out
    assert "did you mean" not in ended.out
    assert "did you mean" not in mtask.ok("publish", "send", '{"to": "a"}').err
    assert "did you mean 'send'?" in mtask.ok("schedule", "add", "s", "sennd", "--every", "1h").err


def test_a_name_that_a_worker_of_an_older_mtask_serves_is_no_unknown_one(
    store: SyncStore, mongo: Mongo, database_name: str, client: Client
) -> None:
    registered(store, first_version())
    now = client.server_time()
    mongo[database_name]["workers"].insert_one(
        {
            "_id": "old",
            "incarnation": "i",
            "host": "h",
            "pid": 1,
            "status": "running",
            "heartbeat_expire_time": now.replace(year=now.year + 1),
            "queues": ["default"],
            "names": ["older"],
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.publish("older")


def test_a_malformed_document_is_told_in_the_log_and_published_around(
    store: SyncStore, mongo: Mongo, database_name: str, stored: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    registered(store, first_version())
    mongo[database_name].command("collMod", "handlers", validator={})
    mongo[database_name]["handlers"].update_one({"_id": "send"}, {"$set": {"versions": "none"}})
    client.publish("send", {"to": "a"}, key="a")
    assert "malformed" in caplog.text
    assert stored("send", "a")["queue"] == "default"
    assert client.handlers() == []


async def test_asyncio_client_lists_handlers(store: SyncStore, mongo_uri: str, database_name: str) -> None:
    registered(store, first_version())
    registered(store, second_version())
    async with AsyncClient(mongo_uri, database=database_name) as client:
        (found,) = await client.handlers()
        assert found.name == "send"
        assert [version.queue for version in found.versions] == ["post", "mail"]
        assert found.current == found.versions[0]
        assert await client.get_handler("other") is None
