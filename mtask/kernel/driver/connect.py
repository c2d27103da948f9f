"""Builds stores on MongoDB clients.

The client is either made here from a URI, with the options that mtask needs, or passed by the caller.
"""

from __future__ import annotations

from typing import Any

from pymongo.asynchronous.mongo_client import AsyncMongoClient
from pymongo.synchronous.mongo_client import MongoClient
from pymongo.uri_parser import parse_uri

from mtask.errors import InvalidInput, InvalidURI, MtaskError, shown
from mtask.kernel.driver.errors import scrubbed, translated
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.driver.types import SyncCollection

Document = dict[str, Any]
_SELECTION_MS = 8_000
_CONNECT_MS = 5_000
#: The longest application name that the server accepts, in bytes. A worker_id may be longer.
_APP_NAME_BYTES = 128


def _bounded(app_name: str) -> str:
    """Return the name, cut to the greatest length that the server accepts. No character is cut in two."""
    return app_name.encode()[:_APP_NAME_BYTES].decode(errors="ignore")


def client_options(app_name: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the options of each client that is made here."""
    return {
        "appname": _bounded(app_name),
        "serverSelectionTimeoutMS": _SELECTION_MS,
        "connectTimeoutMS": _CONNECT_MS,
        "tz_aware": True,
        "retryWrites": True,
        "retryReads": True,
        **extra,
    }


#: Options of a client whose connection is always in use. Such a client notices a lost server even with rare heartbeats.
#: Its monitors stream, so they report elections. A frozen primary would report nothing.
QUIET: dict[str, Any] = {"serverMonitoringMode": "stream", "heartbeatFrequencyMS": 120_000, "socketTimeoutMS": 25_000}


def database_of(uri: str, database: str | None, default: str) -> str:
    """Return the first name that is set: `database`, the database in the URI, or `default`.

    Raises InvalidURI or InvalidInput.
    """
    if not isinstance(uri, str) or not uri.strip():
        raise InvalidURI("it is empty")
    if database is not None:
        check_database(default if database == "" else database)
    try:
        # To parse an SRV URI, the driver sends a DNS query. So such a URI is only parsed if `database` is not given.
        in_uri = None if database and uri.startswith("mongodb+srv://") else parse_uri(uri)["database"]
        named = database or in_uri or default
    except MtaskError:
        raise
    except Exception as error:
        raise InvalidURI(scrubbed(str(error))) from None
    return check_database(named)


def check_database(name: str) -> str:
    """Return the database's name; raise InvalidInput if it is not valid."""
    is_usable = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= 63
    if not is_usable or any(letter in ' "$*./\\:<>?|' for letter in name):
        raise InvalidInput(
            f"{shown(name)} is not a database name: use 1 to 63 letters, digits, '_' or '-'.", field="database"
        )
    return name


def sync_store(uri: str, database: str, app_name: str = "mtask", **extra: Any) -> SyncStore:
    """Return a store on a new client for this URI; raise InvalidURI."""
    try:
        client: MongoClient[Document] = MongoClient(uri, **client_options(app_name, extra))
    except Exception as error:
        raise _unusable(error) from None
    return SyncStore(client, database)


def async_store(uri: str, database: str, app_name: str = "mtask", **extra: Any) -> AsyncStore:
    """Return a store on a new client for this URI; raise InvalidURI."""
    try:
        client: AsyncMongoClient[Document] = AsyncMongoClient(uri, **client_options(app_name, extra))
    except Exception as error:
        raise _unusable(error) from None
    return AsyncStore(client, database)


def _unusable(error: Exception) -> Exception:
    known = translated(error)
    return known if isinstance(known, MtaskError) else InvalidURI(scrubbed(str(error)))


def store_for(client: Any, database: str | None, default: str) -> SyncStore | AsyncStore:
    """Return a store on the caller's client: a MongoClient, an AsyncMongoClient or a Motor client.

    A Motor client runs a MongoClient in threads. The store uses that MongoClient, and the caller must run the store's
    operations in threads. Raises InvalidInput if `client` is any other object.
    """
    inner = client.delegate if is_motor(client) else client  # on a PyMongo client, `delegate` would be a database
    if isinstance(inner, AsyncMongoClient):
        return AsyncStore(inner, check_database(database or inner.get_default_database(default).name))
    if isinstance(inner, MongoClient):
        return SyncStore(inner, check_database(database or inner.get_default_database(default).name))
    raise InvalidInput(
        f"{type(client).__name__} is no MongoDB client: give a URI, a pymongo MongoClient or AsyncMongoClient, "
        "or a Motor client.",
        field="client",
    )


def is_motor(client: object) -> bool:
    """Whether this is a Motor client or session."""
    return type(client).__module__.startswith("motor.")


def inner_session(session: Any) -> Any:
    """Return the driver's session inside a Motor session. Return any other session unchanged."""
    return session.delegate if is_motor(session) else session


def motor_collection(client: Any, own: SyncCollection) -> Any:
    """Return one of mtask's collections as a collection of the Motor client, with the same options."""
    return client[own.database.name].get_collection(
        own.name,
        codec_options=own.codec_options,
        read_preference=own.read_preference,
        write_concern=own.write_concern,
        read_concern=own.read_concern,
    )
