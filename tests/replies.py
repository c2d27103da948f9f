"""The bytes of the server's replies, counted in the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bson
from pymongo import MongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent


class Replies(CommandListener):
    """Counts the bytes of all replies to reads. A reply is encoded again: its documents have the same size then."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, call: Callable[[], Any]) -> int:
        """Return the bytes of the replies to this call."""
        before = self.count
        call()
        return self.count - before

    def started(self, event: CommandStartedEvent) -> None: ...

    def succeeded(self, event: CommandSucceededEvent) -> None:
        if event.command_name in ("find", "aggregate", "getMore"):
            batch = event.reply["cursor"].get("firstBatch") or event.reply["cursor"].get("nextBatch") or []
            self.count += sum(len(bson.encode(document)) for document in batch)

    def failed(self, event: CommandFailedEvent) -> None: ...


@contextmanager
def counting(uri: str) -> Iterator[tuple[MongoClient[dict[str, Any]], Replies]]:
    """Connect with a client whose replies are counted."""
    replies = Replies()
    client: MongoClient[dict[str, Any]] = MongoClient(uri, event_listeners=[replies])
    with client:
        yield client, replies
