"""The connection of the sync client. It runs operations, and prepares the database before the first operation.

This module is written by hand, like `connection_aio.py`. The client's calls are in `sync.py`, which is generated from
`aio.py`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from mtask.arguments.publish import Preparation, PublishMiddleware
from mtask.client import views
from mtask.database import setup
from mtask.defaults import DEFAULT_DATABASE
from mtask.doctor import operations as diagnosis
from mtask.errors import InvalidInput
from mtask.features.audit_log.client import ActionLog
from mtask.features.encryption.settings import Encryption
from mtask.features.registry.client import UnknownNames, registry_of
from mtask.kernel.document.identity import check_tenant
from mtask.kernel.driver import connect
from mtask.kernel.driver.operation import Operation, T, owned
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import transactions
from mtask.parts.codec import codec_of

if TYPE_CHECKING:
    from mtask.kernel.driver.types import SyncCollection, SyncMongoClient, SyncSession


class SyncConnection:
    """A connection through a MongoClient. See `Client`.

    The caller gives the driver's client, or the connection makes one from a URI.
    """

    _sleep = staticmethod(time.sleep)

    def __init__(
        self,
        source: str | SyncMongoClient | None = None,
        *,
        database: str | None = None,
        check: bool = True,
        timeout: timedelta | None = None,
        server_timeout: timedelta | None = None,
        middleware: PublishMiddleware = (),
        actor: str | None = None,
        log_actions: bool = True,
        tenant: str | None = None,
        encryption: Encryption | None = None,
        registry: bool = True,
        unknown_names: UnknownNames = "warn",
    ) -> None:
        self._known = registry_of(unknown_names, is_on=registry)
        self._tenant = self._owner = None if tenant is None else check_tenant(tenant)
        self._actions = ActionLog(actor, is_on=log_actions)
        if source is None:
            from mtask.settings import read_settings  # a client that is given its URI needs no settings

            settings = read_settings()
            source, database = settings.uri, database or settings.database
        # Before the client is made: an error leaves nothing to close.
        self._codec = codec_of(encryption, source)
        self._owns_client = isinstance(source, str)
        store = (
            connect.sync_store(source, connect.database_of(source, database, DEFAULT_DATABASE))
            if isinstance(source, str)
            else connect.store_for(source, database, DEFAULT_DATABASE)
        )
        if not isinstance(store, SyncStore) or connect.is_motor(source):
            raise InvalidInput("this client belongs to asyncio: use mtask.AsyncClient.", field="client")
        self._store = store
        store.codec = self._codec
        if timeout is not None:
            store.timeout = timeout
        self._check = check
        self._middleware = tuple(middleware)
        self._server_timeout = server_timeout
        #: Shared by the clients of `for_tenant`.
        self._ready = threading.Event()
        self._setup = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tenant(self) -> str | None:
        """The tenant whose tasks this client publishes and finds. None: it publishes for nobody, and finds all."""
        return self._tenant

    def for_tenant(self, tenant: str) -> Self:
        """Return a client of this tenant. It shares the connection of this client, and need not be closed.

        Its calls mean the tenant's tasks: `publish` publishes for the tenant, and names and keys are those that the
        tenant gave. Searches, counts, events, flows and schedules hold nothing of other tenants. The calls about
        queues, workers and controls mean those of all. Raises InvalidInput.
        """
        own = self.bound_to(tenant)
        own._tenant = own._owner
        return own

    def bound_to(self, tenant: str) -> Self:
        """Return a client that reads and changes the tasks of this tenant alone, whatever it is asked for.

        It shares the connection of this client. Unlike those of `for_tenant`, its calls mean stored keys, and it
        publishes for no tenant unless it is told to. Raises InvalidInput.
        """
        own = copy.copy(self)
        own._owner, own._owns_client = check_tenant(tenant), False
        return own

    def _kept_to_owner(self, operation: Operation[T]) -> Operation[T]:
        return operation if self._owner is None else owned(operation, self._owner)

    def close(self) -> None:
        """Close the driver's client, unless the caller gave it."""
        self._codec.close()
        if self._owns_client:
            self._store.close()

    @property
    def tasks(self) -> SyncCollection:
        """The collection `tasks`."""
        return self._store.tasks

    @property
    def database_name(self) -> str:
        """The database's name."""
        return self._store.database.name

    def init(self, *, repair: bool = True, roles: bool = False) -> datetime:
        """Make the collections, validators and indexes; return the server's time.

        With `roles`, the call also makes the roles that `mtask roles` lists. Only a user administrator may make roles.
        Raises NotReplicaSet, ServerTooOld, SchemaMismatch, AccessDenied or DatabaseUnavailable.
        """
        self._reach()
        collections = setup.ensure(setup.EVERY if repair else setup.ESSENTIAL, repair=repair)
        now = self._execute(setup.ensure_with_roles(self.database_name) if roles else collections)
        self._ready.set()
        return now

    def _execute(self, operation: Operation[T]) -> T:
        return self._store.run(operation)

    def _reach(self) -> None:
        """Find a server within `server_timeout`, once, before the first operation."""
        if self._server_timeout is None:
            return
        usual, self._store.timeout = self._store.timeout, self._server_timeout
        try:
            self._execute(diagnosis.greeting())
        finally:
            self._store.timeout = usual
        self._server_timeout = None

    def _make_ready(self) -> None:
        if self._ready.is_set():
            return
        with self._setup:
            if not self._ready.is_set():
                if self._check:
                    self.init(repair=False)
                else:
                    self._reach()
                    self._ready.set()

    def _run(self, operation: Operation[T], session: SyncSession | None = None) -> T:
        self._make_ready()
        result = self._store.run(self._kept_to_owner(operation), session)
        if not self._codec.is_plain and (tasks := views.tasks_in(result)):
            self._store.run(self._codec.open_tasks(tasks))
        return result

    def _completed(self, preparation: Preparation[T]) -> T:
        """Return what is to be published, once it is known what the handlers of its names declare."""
        return self._run(preparation.complete()) if preparation.lacking else preparation.made

    def _transact(self, make: Callable[[], Operation[T]], session: SyncSession | None = None) -> T:
        """Run an operation in the caller's transaction, or else in a transaction of its own."""
        self._make_ready()
        if session is not None:
            return self._store.run(self._kept_to_owner(make()), session)
        return transactions.transact(self._store, lambda: self._kept_to_owner(make()))

    def _compute(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)
