"""The stores: a database's collections with the engine's guarantees, and the loops that run operations on them.

Write concern is majority with journaling, read concern is majority, and reads go to the primary. The options of the
user's URI do not change these settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, timedelta
from typing import Any, TypeVar

import bson
import pymongo
from bson import CodecOptions
from bson.binary import UuidRepresentation
from bson.codec_options import DatetimeConversion, TypeDecoder, TypeRegistry
from bson.dbref import DBRef
from bson.errors import InvalidBSON
from bson.raw_bson import RawBSONDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from pymongo.errors import BulkWriteError, PyMongoError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.synchronous.client_session import ClientSession
from pymongo.synchronous.collection import Collection
from pymongo.synchronous.database import Database
from pymongo.synchronous.mongo_client import MongoClient
from pymongo.write_concern import WriteConcern

from mtask.kernel.driver import roles as rights
from mtask.kernel.driver.codec import Codec
from mtask.kernel.driver.errors import DUPLICATE_KEY, NOT_STORABLE, translated
from mtask.kernel.driver.failover import WhilePrimary, mend_checks, mend_waits
from mtask.kernel.driver.operation import COLLECTIONS, Call, Operation

T = TypeVar("T")
Document = dict[str, Any]

TASKS = "tasks"
WORKERS = "workers"
SCHEDULES = "schedules"
CONTROLS = "controls"
PLACES = "places"

#: The usual time limit of each call of an operation. It includes server selection and retries.
OPERATION_TIMEOUT = timedelta(seconds=10)


class _ReferenceAsWritten(TypeDecoder):
    """Decodes an object with `$ref` and `$id` as a plain dict, as it was written, and not as the driver's DBRef."""

    bson_type = DBRef

    def transform_bson(self, value: DBRef) -> Document:
        return dict(value.as_doc())


CODEC: CodecOptions[Document] = CodecOptions(
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    # A reply may contain a date that Python cannot hold, or broken text. Then one task is malformed, but the read of
    # the whole batch must not fail.
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
    type_registry=TypeRegistry([_ReferenceAsWritten()]),
)
#: The codec of replies to `find_one_and_update`. With a type registry, the driver decodes such a reply in two parts. If
#: the reply has a write concern error and labels, as in a failover, the driver then fails on it. Hence `_as_written`.
_PLAIN: CodecOptions[Document] = CODEC.with_options(type_registry=TypeRegistry())
#: A codec that decodes any BSON, but cannot encode every value. It leaves UUIDs as bytes, because a value with the BSON
#: subtype of UUIDs may be no UUID. With `CODEC`, one such value makes the whole reply unreadable.
READING: CodecOptions[Document] = CODEC.with_options(uuid_representation=UuidRepresentation.UNSPECIFIED)
#: The codec of `find_naive`. Its dates are in UTC, but do not say so, and it decodes references as the driver's DBRef.
#: With a type registry, the driver decodes each document of a reply twice.
NAIVE: CodecOptions[Document] = _PLAIN.with_options(tz_aware=False, tzinfo=None)
_READING_NAIVE = NAIVE.with_options(uuid_representation=UuidRepresentation.UNSPECIFIED)
_FAILURES = (PyMongoError, *NOT_STORABLE)
_FINDS = frozenset({"find", "find_naive"})
#: The methods that the driver lacks. See `Call`.
_OURS = _FINDS | {"rows", "insert_new", "upserted"}
_READS = _FINDS | {"find_one", "rows", "find_one_and_update"}
#: The methods whose reply holds no document, or is passed to `_as_written`. `_PLAIN` decodes it once, `CODEC` twice.
_ANSWERS = frozenset(
    {
        "find_one_and_update",
        "update_one",
        "update_many",
        "replace_one",
        "insert_one",
        "insert_many",
        "insert_new",
        "upserted",
        "delete_one",
        "delete_many",
    }
)
_GUARANTEES: dict[str, Any] = {
    "codec_options": CODEC,
    "read_preference": ReadPreference.PRIMARY,
    "write_concern": WriteConcern(w="majority", j=True),
    "read_concern": ReadConcern("majority"),
}


@contextmanager
def bounded(timeout: timedelta | None) -> Iterator[None]:
    """Limit the time of the block and translate the driver's errors. Without `timeout`, the client's limits apply."""
    try:
        with pymongo.timeout(timeout.total_seconds()) if timeout is not None else nullcontext():
            yield
    except _FAILURES as error:
        raise translated(error) from error


def unbound() -> None:
    """Remove any time limit that is in force.

    A signal handler must call this before it raises an exception, because it may have interrupted a block with a time
    limit. The driver keeps the limit in several variables. The exception can leave only some of them set, and then
    every later operation fails, even closing the client.
    """
    pymongo.timeout(None).__enter__()


def _duplicates(error: BulkWriteError) -> set[int]:
    failed = error.details.get("writeErrors", [])
    if error.details.get("writeConcernErrors") or any(item["code"] != DUPLICATE_KEY for item in failed):
        raise error
    return {item["index"] for item in failed}


def _as_written(value: Any) -> Any:
    """Return a decoded value in which each DBRef is an object again, as `CODEC` decodes it. This changes `value`."""
    if isinstance(value, DBRef):
        return _as_written(dict(value.as_doc()))
    if isinstance(value, dict):
        value.update({name: _as_written(part) for name, part in value.items() if isinstance(part, dict | list | DBRef)})
    elif isinstance(value, list):
        value[:] = map(_as_written, value)
    return value


def _as_documents(found: list[Any]) -> list[Document]:
    """Return documents. Without a type registry, the driver takes a document with `$ref` and `$id` for a DBRef."""
    return [document if type(document) is dict else _as_written(document) for document in found]


def _target(store: SyncStore | AsyncStore, call: Call, session: Any) -> Any:
    if call.target == "session":
        return session
    if call.method in _ANSWERS and call.target in store.answering:
        return store.answering[call.target]
    if call.method == "find_naive":
        return store.naive[call.target]
    if call.target == "admin":
        return store.client["admin"]
    return store.database if call.target == "database" else store.collections[call.target]


def _arguments(call: Call, session: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"codec_options": CODEC} if call.method == "command" else {}
    if session is not None and call.target != "session":
        own["session"] = session
    return {**call.kwargs, **own}


def _read_anew(call: Call) -> Call:
    """Return a call that reads undecodable data again, in a readable form; raise InvalidBSON if no call can do this.

    If the failed call changed a document, the change is not repeated. The new call only reads the document as it is
    now.
    """
    if call.method not in _READS or call.target in ("database", "session"):
        raise InvalidBSON("the reply cannot be decoded")
    if call.method == "rows":
        return replace(
            call, args=([RawBSONDocument(bson.encode(stage, codec_options=CODEC)) for stage in call.args[0]],)
        )
    if call.method != "find_one_and_update":
        return replace(call, args=tuple(_encoded(part) for part in call.args))
    wanted = {"_id": {"$eq": call.args[0]["_id"]}}
    return Call(call.target, "find_one", (_encoded(wanted), call.kwargs.get("projection")), timeout=call.timeout)


def _reading(call: Call) -> CodecOptions[Document]:
    return _READING_NAIVE if call.method == "find_naive" else READING


def _encoded(part: Any) -> Any:
    # The part is encoded here with `CODEC`, because `READING` cannot write every value.
    return RawBSONDocument(bson.encode(part, codec_options=CODEC)) if isinstance(part, Mapping) else part


def _told(error: Exception, call: Call, database: str, *, in_session: bool) -> Exception:
    """Return mtask's error for an error of the driver in this call, and any other error unchanged.

    A caller must not keep the result in a variable: a frame that holds the error it raises is part of a cycle.
    """
    if isinstance(error, _FAILURES):
        if in_session and isinstance(error, PyMongoError) and error.has_error_label("TransientTransactionError"):
            return error  # the caller sees the label and repeats the transaction
        made = translated(error)
        made.__cause__ = error
        error = made
    return rights.explained(error, rights.need_of(call), database)


def _collections(database: Any, codec: CodecOptions[Any] | None = None) -> dict[str, Any]:
    """Return all collections of a database by name, with the codec of their replies."""
    return {name: database.get_collection(name, codec_options=codec) for name in COLLECTIONS}


class SyncStore:
    """Runs operations through a `pymongo.MongoClient`."""

    def __init__(self, client: MongoClient[Document], database: str, timeout: timedelta = OPERATION_TIMEOUT) -> None:
        mend_checks()
        self.client = client
        self.timeout = timeout
        self.codec = Codec()
        #: The names of tasks that searches have found, for `mtask.search.walks`.
        self.names: set[str] = set()
        self.database = client.get_database(database, **_GUARANTEES)
        self.collections: dict[str, Collection[Document]] = _collections(self.database)
        self.answering: dict[str, Collection[Document]] = _collections(self.database, _PLAIN)
        self.naive: dict[str, Collection[Document]] = _collections(self.database, NAIVE)

    @property
    def tasks(self) -> Collection[Document]:
        """The collection of tasks."""
        return self.collections[TASKS]

    @property
    def readable(self) -> Database[Document]:
        """The database, with a codec for any BSON. Use it for reads that cannot be repeated, such as change streams."""
        return self.database.with_options(codec_options=READING)

    def run(self, operation: Operation[T], session: ClientSession | None = None) -> T:
        """Run an operation to its end and return its result. Raises subclasses of MtaskError."""
        try:
            call = next(operation)
            while True:
                try:
                    if call.target == "codec":
                        answer = self.codec if call.method == "get" else self.codec.ask(call.method, *call.args)
                    elif call.target == "names":
                        answer = self.names
                    else:
                        with pymongo.timeout((call.timeout or self.timeout).total_seconds()):
                            answer = self._answer(call, None if call.is_apart else session)
                except Exception as error:
                    in_session = session is not None and not call.is_apart
                    call = operation.throw(_told(error, call, self.database.name, in_session=in_session))
                else:
                    call = operation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _answer(self, call: Call, session: ClientSession | None) -> Any:
        try:
            return self._ask(call, session, _target(self, call, session))
        except InvalidBSON:
            again = _read_anew(call)
            return self._ask(again, session, self.collections[again.target].with_options(codec_options=_reading(again)))

    def _ask(self, call: Call, session: ClientSession | None, target: Any) -> Any:
        kwargs = _arguments(call, session)
        if call.method not in _OURS:
            answer = getattr(target, call.method)(*call.args, **kwargs)
            return _as_written(answer) if call.method == "find_one_and_update" else answer
        if call.method in _FINDS:
            with target.find(*call.args, **kwargs) as cursor:
                found = cursor.to_list()
            return _as_documents(found) if call.method == "find_naive" else found
        if call.method == "rows":
            with target.aggregate(*call.args, **kwargs) as cursor:
                return cursor.to_list()
        if call.method == "insert_new":
            try:
                target.insert_many(*call.args, ordered=False, **kwargs)
            except BulkWriteError as error:
                return _duplicates(error)
            return set()
        return set(target.bulk_write(*call.args, ordered=False, **kwargs).upserted_ids or {})

    def close(self) -> None:
        """Close the client."""
        self.client.close()


class AsyncStore:
    """Runs operations through a `pymongo.AsyncMongoClient`.

    A primary that is frozen or cut off keeps its connections open, but does not answer. As soon as the driver knows
    another primary, a call that still waits for the former primary ends with DatabaseUnavailable. The caller can then
    read back the result of the call.
    """

    def __init__(
        self, client: AsyncMongoClient[Document], database: str, timeout: timedelta = OPERATION_TIMEOUT
    ) -> None:
        mend_waits()
        mend_checks()
        self.client = client
        self.timeout = timeout
        self.codec = Codec()
        #: The names of tasks that searches have found, for `mtask.search.walks`.
        self.names: set[str] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        self.database = client.get_database(database, **_GUARANTEES)
        self.collections: dict[str, AsyncCollection[Document]] = _collections(self.database)
        self.answering: dict[str, AsyncCollection[Document]] = _collections(self.database, _PLAIN)
        self.naive: dict[str, AsyncCollection[Document]] = _collections(self.database, NAIVE)

    @property
    def tasks(self) -> AsyncCollection[Document]:
        """The collection of tasks."""
        return self.collections[TASKS]

    @property
    def readable(self) -> AsyncDatabase[Document]:
        """The database, with a codec for any BSON. Use it for reads that cannot be repeated, such as change streams."""
        return self.database.with_options(codec_options=READING)

    async def run(self, operation: Operation[T], session: AsyncClientSession | None = None) -> T:
        """Run an operation to its end and return its result. Raises subclasses of MtaskError."""
        try:
            call = next(operation)
            while True:
                try:
                    if call.target == "names":
                        call = operation.send(self.names)
                        continue
                    if call.target == "codec":
                        # It may ask another server, so it does so in a thread.
                        answer = (
                            self.codec
                            if call.method == "get"
                            else await asyncio.to_thread(self.codec.ask, call.method, *call.args)
                        )
                        call = operation.send(answer)
                        continue
                    with pymongo.timeout((call.timeout or self.timeout).total_seconds()):
                        if session is None or call.is_apart:
                            answer = await WhilePrimary(self._answer(call, None), self.client, self._keep)
                        else:  # a call in a transaction goes on: only its owner may give it up
                            answer = await self._answer(call, session)
                except Exception as error:
                    in_session = session is not None and not call.is_apart
                    call = operation.throw(_told(error, call, self.database.name, in_session=in_session))
                else:
                    call = operation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def while_primary(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for the server's answer, but only until the driver knows a new primary.

        Raises DatabaseUnavailable if another primary has been elected since the request was sent.
        """
        # The rest of a call that is given up ends in another asyncio task. That task cannot take back the time limits
        # that the call has set here.
        with pymongo.timeout(None):
            return await WhilePrimary(waiting, self.client, self._keep)

    def _keep(self, rest: asyncio.Task[Any]) -> None:
        """Keep a reference to the rest of a call that was given up, until it ends. It may take long."""
        self._abandoned.add(rest)
        rest.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # without this line, asyncio logs that nobody retrieved the exception

    async def _answer(self, call: Call, session: AsyncClientSession | None) -> Any:
        try:
            return await self._ask(call, session, _target(self, call, session))
        except InvalidBSON:
            again = _read_anew(call)
            target = self.collections[again.target].with_options(codec_options=_reading(again))
            return await self._ask(again, session, target)

    async def _ask(self, call: Call, session: AsyncClientSession | None, target: Any) -> Any:
        kwargs = _arguments(call, session)
        if call.method not in _OURS:
            answer = await getattr(target, call.method)(*call.args, **kwargs)
            return _as_written(answer) if call.method == "find_one_and_update" else answer
        if call.method in _FINDS:
            async with target.find(*call.args, **kwargs) as cursor:
                found = await cursor.to_list()
            return _as_documents(found) if call.method == "find_naive" else found
        if call.method == "rows":
            async with await target.aggregate(*call.args, **kwargs) as cursor:
                return await cursor.to_list()
        if call.method == "insert_new":
            try:
                await target.insert_many(*call.args, ordered=False, **kwargs)
            except BulkWriteError as error:
                return _duplicates(error)
            return set()
        return set((await target.bulk_write(*call.args, ordered=False, **kwargs)).upserted_ids or {})

    async def close(self) -> None:
        """Close the client."""
        await self.client.close()
