"""Documents of any kind in `controls`, `schedules`, `places` and `workers`: the worker goes on, and beats."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymongo import WriteConcern
from pymongo.errors import WriteError

from mtask import App, Client
from mtask.kernel.driver.errors import NOT_STORABLE
from mtask.kernel.driver.stores import SyncStore
from tests.faults import changing
from tests.faults.changing import Chance
from tests.faults.fuzzing import LIMIT, PATIENCE, Lab, fuzz
from tests.faults.malformed import good
from tests.mongo import Client as Mongo
from tests.mongo import Document, until

pytestmark = pytest.mark.timeout(LIMIT)
app = App()
_numbers = itertools.count()
_COLLECTIONS = ("controls", "schedules", "places", "workers")


@app.task
async def noop() -> None:
    """Do nothing."""


@pytest.fixture
def lab(mongo_uri: str, database_name: str, mongo: Mongo) -> Iterator[Lab]:
    # What cannot be read of a control pauses its queue: the worker serves another beside it.
    with Lab(mongo_uri, database_name, mongo, app, queues=["default", "free"]) as made:
        yield made


def _sound(mongo_uri: str, database: str) -> None:
    """Leave one sound document of each kind."""
    with Client(mongo_uri, database=database) as client:
        client.limit("default", concurrency=2, rate=(50, 1.0), key_concurrency=1, timeout=30)
        client.add_schedule("often", "noop", timedelta(hours=1))


async def _spoil(lab: Lab, stored: dict[str, Any], choice: Chance) -> None:
    for name, collection in stored.items():
        unchecked = collection.with_options(write_concern=WriteConcern(w=1))
        found: list[Document] = list(unchecked.find({"_id": {"$ne": "w1"}}))
        for document in found:
            changing.change(choice, document, "_id")
            with suppress(WriteError, *NOT_STORABLE):
                unchecked.replace_one({"_id": document["_id"]}, document, bypass_document_validation=True)
        strange: Document = {"_id": f"strange-{name}-{next(_numbers)}"}
        for _ in range(5):
            strange[choice.name() or "x"] = choice.value()
        strange["_id"] = f"strange-{next(_numbers)}"
        with suppress(WriteError, *NOT_STORABLE):
            unchecked.insert_one(strange, bypass_document_validation=True)
    beats = lab.registry.find_one({"_id": "w1"})
    assert beats is not None
    number = next(_numbers)
    lab.insert([good(f"beside-{number}", queue="default"), good(f"right-{number}", queue="free")])
    lab.scan()
    right = {"_id": f"noop:right-{number}", "task_state.status": "SUCCESS"}

    def is_done() -> bool:
        lab.assert_well()
        return lab.tasks.count_documents(right) == 1

    await until(is_done, PATIENCE, "a good task in another queue")

    def has_beaten() -> bool:
        lab.assert_well()
        now = lab.registry.find_one({"_id": "w1"})
        return now is not None and now["heartbeat_time"] > beats["heartbeat_time"]

    lab.bench.worker.parts.pinger.beat_now()
    await until(has_beaten, PATIENCE, "a heartbeat")


@fuzz(8, shrink=False)
@given(seed=st.integers(0, 2**32))
def test_worker_gets_over_documents_of_any_kind_beside_the_tasks(
    lab: Lab, mongo_uri: str, database_name: str, mongo: Mongo, seed: int
) -> None:
    store = SyncStore(mongo, database_name)
    stored: dict[str, Any] = {name: store.collections[name] for name in _COLLECTIONS}
    lab.run(_made(mongo_uri, database_name, lab))
    lab.run(_spoil(lab, stored, Chance(seed)))
    with Client(mongo_uri, database=database_name) as client:
        assert client.diagnose()
    for collection in stored.values():
        collection.delete_many({"_id": {"$ne": "w1"}})


async def _made(mongo_uri: str, database: str, lab: Lab) -> None:
    """Make the sound documents while the worker lives, and see that it works by them."""
    await asyncio.to_thread(_sound, mongo_uri, database)
    number = next(_numbers)
    lab.insert([good(f"before-{number}")])
    lab.scan()
    done = {"_id": f"noop:before-{number}", "task_state.status": "SUCCESS"}
    await until(lambda: lab.tasks.count_documents(done), PATIENCE, "a task of the limited queue")
