"""Documents changed at random, read by whoever is no worker: clients, events, the doctor and the command line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymongo import WriteConcern
from pymongo.errors import WriteError

from mtask import Client
from mtask.errors import MtaskError
from mtask.kernel.document.task import Task
from mtask.kernel.driver.errors import NOT_STORABLE
from mtask.kernel.driver.stores import READING, SyncStore
from mtask.kernel.worker.discovery.quarantine import malformation
from mtask.settings import Settings
from tests.faults import changing
from tests.faults.changing import Chance
from tests.faults.fuzzing import LIMIT, fuzz
from tests.faults.malformed import good
from tests.faults.test_fuzz_cli import check
from tests.integration.cli.commands import Commands
from tests.mongo import Client as Mongo
from tests.mongo import Document

pytestmark = pytest.mark.timeout(LIMIT)
#: Of an event's own document everything may be anything; more than these a small server says no to.
_COUNT = 25


@pytest.fixture
def commands(
    mongo_uri: str, database_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Commands:
    for name in (*(f"MTASK_{field.upper()}" for field in Settings.model_fields), "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MTASK_URI", mongo_uri)
    monkeypatch.setenv("MTASK_DATABASE", database_name)
    return Commands(mongo_uri, database_name, capsys)


@pytest.fixture
def client(client: Client) -> Client:
    client.init()
    return client


class Written:
    """Changed documents in a collection, past every validation."""

    def __init__(self, mongo: Mongo, database: str, seed: int) -> None:
        self._tasks = SyncStore(mongo, database).tasks.with_options(write_concern=WriteConcern(w=1))
        self._tasks.delete_many({})
        self.choice = Chance(seed)
        self.ids: list[Any] = []

    def insert(self) -> None:
        """Write so many that the server takes."""
        number = 0
        while len(self.ids) < _COUNT:
            number += 1
            document = self._changed(f"bad-{number}")
            with suppress(WriteError, *NOT_STORABLE):
                self._tasks.insert_one(document, bypass_document_validation=True)
                self.ids.append(document["_id"])

    def stored(self) -> list[Document]:
        """Return them as the engine reads them."""
        return list(self._tasks.with_options(codec_options=READING).find({"_id": {"$in": self.ids}}))

    def change(self) -> None:
        """Change some of each, one field by its path and the whole: the stream tells of both."""
        for document_id in self.ids:
            changed = self._changed("again") | {"_id": document_id}
            paths = [".".join(map(str, path)) for path in changing.places(changed) if path[0] != "_id"]
            change: Document = {"$set": {self.choice.of(paths): self.choice.value()}}
            with suppress(WriteError, *NOT_STORABLE):
                self._tasks.update_one({"_id": {"$eq": document_id}}, change, bypass_document_validation=True)
            with suppress(WriteError, *NOT_STORABLE):
                fields = {name: value for name, value in changed.items() if name != "_id"}
                self._tasks.update_one({"_id": {"$eq": document_id}}, {"$set": fields}, bypass_document_validation=True)

    def _changed(self, key: str) -> Document:
        if self.choice.of([True, False, False, False]):
            return changing.anything(self.choice, key)
        document = changing.in_state(key, *self.choice.of(changing.STATES))
        for _ in range(self.choice.of([1, 1, 2, 3])):
            changing.change(self.choice, document)
        return document


@fuzz(4, shrink=False)
@given(seed=st.integers(0, 2**32))
def test_events_go_on_beside_documents_changed_at_random(
    mongo: Mongo, database_name: str, client: Client, seed: int
) -> None:
    written = Written(mongo, database_name, seed)
    with client.events() as events:
        written.insert()
        written.change()
        client.publish("right", key=str(seed))
        for event in events:  # it ends by the one that is right, however many came before
            if event.name == "right":
                break
            assert isinstance(event.task_id, str)


@fuzz(4, shrink=False)
@given(seed=st.integers(0, 2**32))
def test_clients_get_over_documents_changed_at_random(
    mongo: Mongo, database_name: str, client: Client, seed: int
) -> None:
    written = Written(mongo, database_name, seed)
    written.insert()
    right = client.publish("right", key=str(seed))
    assert right.task_id in {task.id for task in client.find(limit=0)}
    assert client.count() >= 1
    assert client.stats()
    findings = client.diagnose()
    assert "documents" in {finding.check for finding in findings}
    keys = [task_id.split(":", 1) for task_id in written.ids if isinstance(task_id, str) and task_id[:5] == "noop:"]
    calls: list[Callable[[str, str], Any]] = [
        client.get,
        lambda name, key: client.inspect(f"{name}:{key}"),
        lambda name, key: client.update_option(name, key, priority=3),
        client.cancel,
        client.retry,
        client.rerun,
        client.remove,
    ]
    for name, key in keys:
        for call in calls:
            # Whatever it says, it says it as one of ours.
            with suppress(MtaskError):
                found = call(name, key)
                assert not isinstance(found, Task) or found.id == f"{name}:{key}"


@fuzz(4, shrink=False)
@given(seed=st.integers(0, 2**32))
def test_the_doctor_names_each_document_that_is_malformed(
    mongo: Mongo, database_name: str, client: Client, seed: int
) -> None:
    written = Written(mongo, database_name, seed)
    written.insert()
    named = [finding.fields.get(ids, ()) for finding in client.diagnose() for ids in ("task_ids", "marked_ids")]
    assert {str(document["_id"]) for document in written.stored() if malformation(document)} <= {*chain(*named)}


@fuzz(2, shrink=False)
@given(seed=st.integers(0, 2**32))
def test_command_line_gets_over_documents_changed_at_random(
    mongo: Mongo, database_name: str, client: Client, commands: Commands, seed: int
) -> None:
    written = Written(mongo, database_name, seed)
    written.insert()
    mongo[database_name]["tasks"].insert_one(good("right"))
    for line in (["list", "--limit", "0"], ["stats"], ["doctor"], ["list", "--status", "INIT"], ["workers"]):
        for flags in ([], ["--json"]):
            check(commands(*line, *flags), is_json=bool(flags))
    assert "noop:right" in commands("list", "--limit", "0").out
    for task_id in [task_id for task_id in written.ids if isinstance(task_id, str)][:8]:
        for flags in ([], ["--json"]):
            check(commands("show", *flags, "--", task_id), is_json=bool(flags))
        check(commands("cancel", "--", task_id))
        check(commands("retry", "--", task_id))
