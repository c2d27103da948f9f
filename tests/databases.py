"""A pool of databases that are set up: to make one costs more than what most tests do in it."""

from __future__ import annotations

import uuid
from collections import deque
from typing import Any

from pymongo.errors import PyMongoError

from mtask.database import setup
from mtask.kernel.driver.stores import SyncStore
from tests.mongo import Client as Mongo
from tests.mongo import streams

#: With more documents than this in a collection, dropping the database is faster than emptying it.
_MANY = 2_000
#: A database is emptied and lent again after this many others: by then nothing of its former test writes into it.
_RESTING = 4


class Databases:
    """Lends databases to tests, one after the other: with the collections that every use needs, and no document.

    A database that a test has changed in another way than by its documents is not lent again.
    """

    def __init__(self, client: Mongo) -> None:
        self._client = client
        self._resting: deque[str] = deque()
        self._layout: dict[str, Any] | None = None

    def take(self) -> str:
        """Return the name of a database that is set up and empty."""
        while len(self._resting) > _RESTING:
            name = self._resting.popleft()
            if self._is_clean(name):
                return name
            self._client.drop_database(name)
        name = f"test_{uuid.uuid4().hex}"
        SyncStore(self._client, name).run(setup.ensure())
        self._layout = self._layout or self._read_layout(name)
        return name

    def give_back(self, name: str) -> None:
        """Take a database back from a test."""
        self._resting.append(name)

    def _is_clean(self, name: str) -> bool:
        """Make the database as it was before a test had it; return False if it cannot be lent again."""
        try:
            return self._clean_up(name)
        except PyMongoError:  # a document is locked by a transaction that the test left open, for example
            return False

    def _clean_up(self, name: str) -> bool:
        found = self._read_layout(name)
        if self._layout is None or any(found.get(each) != layout for each, layout in self._layout.items()):
            return False
        others = found.keys() - self._layout.keys()
        # Killed workers leave their streams to the server, and there are tests that count those of their database.
        if any(each.startswith("system.") for each in others) or streams(self._client, name):
            return False
        database = self._client[name]
        for each in others:
            database.drop_collection(each)
        for each in self._layout:
            if database[each].estimated_document_count() > _MANY:
                return False
            database.command("delete", each, deletes=[{"q": {}, "limit": 0}], maxTimeMS=1_000)
            database.command("planCacheClear", each)
        return True

    def _read_layout(self, name: str) -> dict[str, Any]:
        """Return the options and the indexes of each collection, by its name."""
        database = self._client[name]
        return {
            each["name"]: (each["type"], each["options"], self._indexes(name, each["name"]))
            for each in database.list_collections()
        }

    def _indexes(self, name: str, collection: str) -> list[Any]:
        if collection.startswith("system."):
            return []
        return [dict(index) for index in self._client[name][collection].list_indexes()]
