"""A client asks a server at once that is no primary any more, as an answer says, and does not wait for its monitor."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
from pymongo.errors import PyMongoError
from pymongo.monitoring import (
    ServerHeartbeatFailedEvent,
    ServerHeartbeatListener,
    ServerHeartbeatStartedEvent,
    ServerHeartbeatSucceededEvent,
)

from mtask.kernel.driver import connect
from tests.mongo import PATIENCE, fail_command
from tests.mongo import Client as Mongo

_APP = "quiet"


class Waiting(ServerHeartbeatListener):
    """Tells when a monitor waits for the server to report a change."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def started(self, event: ServerHeartbeatStartedEvent) -> None:
        if event.awaited:
            self.begun.set()

    def succeeded(self, event: ServerHeartbeatSucceededEvent) -> None: ...

    def failed(self, event: ServerHeartbeatFailedEvent) -> None: ...


#: The answers that do not say to which state of the topology they belong, and say that the server is no primary.
_ANSWERS: list[dict[str, Any]] = [
    {"error_code": 91},
    {"write_concern_error": {"code": 189, "errmsg": "stepped down"}},
]


@pytest.fixture(params=_ANSWERS, ids=["error", "unconfirmed write"])
def failing(request: pytest.FixtureRequest, mongo: Mongo) -> AbstractContextManager[None]:
    """Let the next two writes fail during the block: the driver repeats one itself."""
    return fail_command(mongo, "update", times=2, app_name=_APP, **request.param)


def test_sync_client_that_was_told_of_no_change_writes_again(
    mongo_uri: str, database_name: str, failing: AbstractContextManager[None]
) -> None:
    waiting = Waiting()
    store = connect.sync_store(mongo_uri, database_name, _APP, event_listeners=[waiting], **connect.QUIET)
    writes = store.database["writes"]
    try:
        writes.update_one({"_id": 1}, {"$set": {"a": 1}}, upsert=True)
        assert waiting.begun.wait(PATIENCE)
        with failing, pytest.raises(PyMongoError):
            writes.update_one({"_id": 1}, {"$set": {"a": 2}})
        writes.update_one({"_id": 1}, {"$set": {"a": 3}})
    finally:
        store.close()


async def test_async_client_that_was_told_of_no_change_writes_again(
    mongo_uri: str, database_name: str, failing: AbstractContextManager[None]
) -> None:
    waiting = Waiting()
    store = connect.async_store(mongo_uri, database_name, _APP, event_listeners=[waiting], **connect.QUIET)
    writes = store.database["writes"]
    try:
        await writes.update_one({"_id": 1}, {"$set": {"a": 1}}, upsert=True)
        assert await asyncio.to_thread(waiting.begun.wait, PATIENCE)
        with failing, pytest.raises(PyMongoError):
            await writes.update_one({"_id": 1}, {"$set": {"a": 2}})
        await writes.update_one({"_id": 1}, {"$set": {"a": 3}})
    finally:
        await store.close()
