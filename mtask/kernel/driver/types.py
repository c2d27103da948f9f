"""The driver's types, under names that the rest of mtask may import."""

from __future__ import annotations

from typing import Any, TypeAlias

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection as _AsyncCollection
from pymongo.asynchronous.mongo_client import AsyncMongoClient as _AsyncMongoClient
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.mongo_client import MongoClient

SyncMongoClient: TypeAlias = MongoClient[dict[str, Any]]
SyncCollection: TypeAlias = Collection[dict[str, Any]]
SyncSession: TypeAlias = ClientSession
AsyncMongoClient: TypeAlias = _AsyncMongoClient[dict[str, Any]]
AsyncCollection: TypeAlias = _AsyncCollection[dict[str, Any]]
AsyncSession: TypeAlias = AsyncClientSession
#: Where the code of the driver is.
DRIVER_FOLDERS: tuple[str, ...] = tuple(pymongo.__path__)
