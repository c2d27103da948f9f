"""The connection of the asyncio client. It runs operations, and prepares the database before the first operation.

This module is written by hand, like `connection_sync.py`. The client's calls are in `aio.py`. `sync.py` is generated
from `aio.py`.
"""

from __future__ import annotations

import asyncio
import copy
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
from mtask.kernel.driver.stores import AsyncStore, SyncStore
from mtask.kernel.operations import transactions
from mtask.parts.codec import codec_of

if TYPE_CHECKING:
    from mtask.kernel.driver.types import AsyncMongoClient


class AsyncConnection:
    """A connection through an AsyncMongoClient or a Motor client. See `AsyncClient`.

    The caller gives the driver's client, or the connection makes one from a URI.
    """

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self,
        source: str | AsyncMongoClient | Any = None,
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
        store: AsyncStore | SyncStore
        if isinstance(source, str):
            named = connect.database_of(source, database, DEFAULT_DATABASE)
            store = connect.async_store(source, named)
        else:
            store = connect.store_for(source, database, DEFAULT_DATABASE)
            if isinstance(store, SyncStore) and not connect.is_motor(source):
                raise InvalidInput("this client is for sync code: use mtask.Client.", field="client")
        self._source: Any = source
        self._store = store
        store.codec = self._codec
        if timeout is not None:
            store.timeout = timeout
        self._check = check
        self._middleware = tuple(middleware)
        self._server_timeout = server_timeout
        #: Shared by the clients of `for_tenant`.
        self._ready = asyncio.Event()
        self._setup = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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

    async def close(self) -> None:
        """Close the driver's client, unless the caller gave it."""
        if not self._codec.is_plain:
            await asyncio.to_thread(self._codec.close)
        if self._owns_client and isinstance(self._store, AsyncStore):
            await self._store.close()

    @property
    def tasks(self) -> Any:
        """The collection `tasks`: an AsyncCollection. For Motor: a Motor collection with the same guarantees."""
        if isinstance(self._store, AsyncStore):
            return self._store.tasks
        return connect.motor_collection(self._source, self._store.tasks)

    @property
    def database_name(self) -> str:
        """The database's name."""
        return self._store.database.name

    async def init(self, *, repair: bool = True, roles: bool = False) -> datetime:
        """Make the collections, validators and indexes; return the server's time.

        With `roles`, the call also makes the roles that `mtask roles` lists. Only a user administrator may make roles.
        Raises NotReplicaSet, ServerTooOld, SchemaMismatch, AccessDenied or DatabaseUnavailable.
        """
        await self._reach()
        collections = setup.ensure(setup.EVERY if repair else setup.ESSENTIAL, repair=repair)
        now = await self._execute(setup.ensure_with_roles(self.database_name) if roles else collections)
        self._ready.set()
        return now

    async def _execute(self, operation: Operation[T], session: Any = None) -> T:
        if isinstance(self._store, AsyncStore):
            return await self._store.run(operation, session)
        # Motor itself runs the driver's sync client in threads. This call does the same.
        return await asyncio.to_thread(self._store.run, operation, connect.inner_session(session))

    async def _reach(self) -> None:
        """Find a server within `server_timeout`, once, before the first operation."""
        if self._server_timeout is None:
            return
        usual, self._store.timeout = self._store.timeout, self._server_timeout
        try:
            await self._execute(diagnosis.greeting())
        finally:
            self._store.timeout = usual
        self._server_timeout = None

    async def _make_ready(self) -> None:
        if self._ready.is_set():
            return
        async with self._setup:
            if not self._ready.is_set():
                if self._check:
                    await self.init(repair=False)
                else:
                    await self._reach()
                    self._ready.set()

    async def _run(self, operation: Operation[T], session: Any = None) -> T:
        if not self._ready.is_set():
            await self._make_ready()
        result = await self._execute(self._kept_to_owner(operation), session)
        if not self._codec.is_plain and (tasks := views.tasks_in(result)):
            await self._execute(self._codec.open_tasks(tasks))
        return result

    async def _completed(self, preparation: Preparation[T]) -> T:
        """Return what is to be published, once it is known what the handlers of its names declare."""
        return await self._run(preparation.complete()) if preparation.lacking else preparation.made

    async def _transact(self, make: Callable[[], Operation[T]], session: Any = None) -> T:
        """Run an operation in the caller's transaction, or else in a transaction of its own."""
        await self._make_ready()
        if session is not None:
            return await self._execute(self._kept_to_owner(make()), session)
        if isinstance(self._store, AsyncStore):
            return await transactions.transact_async(self._store, lambda: self._kept_to_owner(make()))
        return await asyncio.to_thread(transactions.transact, self._store, lambda: self._kept_to_owner(make()))

    async def _compute(self, function: Callable[..., T], *args: Any) -> T:
        """Call a slow function in a thread, so that the event loop stays free."""
        return await asyncio.to_thread(function, *args)
