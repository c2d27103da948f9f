"""Clients of mtask for the backends, and the transactions of Django's connections to MongoDB."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from mtask.arguments.publish import TaskSpec
from mtask.client.sync import Client
from mtask.contrib.django.targets import Target

_lock = threading.Lock()
#: By target, database and process: the client, and the driver's client on which it was made.
_clients: dict[tuple[Target, str | None, int], tuple[Any, Client]] = {}
#: The databases that are known to have mtask's collections, each with the driver's client that found them.
_known: dict[str, Any] = {}
#: The aliases of databases about whose `atomic()` was warned already.
_warned: set[str] = set()
_IS_NO_TRANSACTION = (
    "django.db.transaction.atomic() is no transaction on MongoDB: the task is enqueued at once. "
    "Use django_mongodb_backend.transaction.atomic()."
)


def connection_of(target: Target) -> Any:
    """Return this thread's connection of Django to the database; raise ImproperlyConfigured if it is no MongoDB."""
    connection: Any = connections[target.alias or ""]
    if connection.vendor != "mongodb":
        raise ImproperlyConfigured(
            f"DATABASES[{target.alias!r}] is {connection.display_name}, and mtask stores tasks in MongoDB: "
            'name a database of django_mongodb_backend as OPTIONS["DATABASE"], or give OPTIONS["URI"].'
        )
    return connection


def client_of(target: Target) -> Client:
    """Return the client of a target. The threads of a process share it, and also Django's connections to MongoDB."""
    if target.alias is None:
        key = (target, target.name, os.getpid())
        with _lock:
            if key not in _clients:
                made = Client(target.uri, database=target.name, middleware=[ask_for_time])
                _clients[key] = (None, made)
            return _clients[key][1]
    connection = connection_of(target)
    connection.ensure_connection()
    driver, name = connection.connection, connection.settings_dict["NAME"]
    key = (target, name, 0)
    with _lock:
        if key not in _clients or _clients[key][0] is not driver:
            _clients[key] = (driver, Client(driver, database=name, middleware=[ask_for_time]))
        return _clients[key][1]


def close_clients() -> None:
    """Close the clients of the targets that have a URI. Django itself closes its connections."""
    with _lock:
        while _clients:
            _clients.popitem()[1][1].close()


def ask_for_time(spec: TaskSpec) -> Generator[None, Any, None]:
    """Ask for the create_time of the task, as a middleware around the publish."""
    spec.tells_time = True
    yield


def session_of(target: Target) -> Any:
    """Return the session of the open transaction in this thread. None: there is none, or the target has a URI.

    Raises ImproperlyConfigured if mtask's collections are missing: a transaction cannot see what is made after its
    first read.
    """
    if target.alias is None:
        return None
    connection = connection_of(target)
    session = connection.session if getattr(connection, "in_atomic_block_mongo", False) else None
    if session is None:
        if connection.in_atomic_block and target.alias not in _warned:
            _warned.add(target.alias)
            warnings.warn(_IS_NO_TRANSACTION, RuntimeWarning, stacklevel=4)
        return None
    name = connection.settings_dict["NAME"]
    if _known.get(name) is not connection.connection:
        if "tasks" not in connection.introspection.table_names():
            raise ImproperlyConfigured(
                f"the database {name!r} lacks mtask's collections, and a transaction cannot make them: "
                "run `manage.py migrate` first."
            )
        _known[name] = connection.connection
    return session


def uri_of(target: Target) -> str:
    """Return the URI for a worker; raise ImproperlyConfigured if no URI can say the same as `DATABASES`."""
    if target.uri is not None:
        return target.uri
    connection = connection_of(target)
    given: dict[str, Any] = dict(connection.get_connection_params())
    host = given.pop("host", None) or "localhost"
    user, password = given.pop("username", None), given.pop("password", None)
    port = given.pop("port", None)
    if not str(host).startswith(("mongodb://", "mongodb+srv://")):
        host = f"mongodb://{host}{f':{port}' if port else ''}/"
    if user:
        scheme, _, rest = host.partition("://")
        secret = f":{quote(password, safe='')}" if password else ""
        host = f"{scheme}://{quote(user, safe='')}{secret}@{rest.rpartition('@')[2]}"
    return _with_options(host, given, target)


def _with_options(uri: str, options: Mapping[str, Any], target: Target) -> str:
    if not options:
        return uri
    texts = {}
    for name, value in options.items():
        if not isinstance(value, str | int | float | bool):
            raise ImproperlyConfigured(
                f'DATABASES[{target.alias!r}]["OPTIONS"][{name!r}] does not fit into a URI: '
                f'give the backend OPTIONS["URI"] for its workers.'
            )
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    base, has_query, query = uri.partition("?")
    if not has_query and "/" not in base.partition("://")[2]:
        base += "/"
    return f"{base}?{query}{'&' if query else ''}{urlencode(texts)}"
