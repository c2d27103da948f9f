"""One interface to the three kinds of client, so that one test covers all of them. Also runs without a worker."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient

from mtask import AsyncClient, Client, RunStatus
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome

Kind = Literal["sync", "asyncio", "motor"]
KINDS: tuple[Kind, ...] = ("sync", "asyncio", "motor")


def with_options(uri: str, options: str) -> str:
    """Return the URI with further options."""
    return f"{uri}{'&' if '?' in uri else '/?'}{options}"


class AnyClient:
    """A client of one kind, with the methods of the sync client. It runs coroutines to their end."""

    def __init__(self, kind: Kind, client: Any, source: Any, runner: asyncio.Runner) -> None:
        self.kind = kind
        self.client = client
        self.source = source
        self.runner = runner

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = getattr(self.client, method)(*args, **kwargs)
            return self.runner.run(answer) if inspect.iscoroutine(answer) else answer

        return call

    def for_tenant(self, tenant: str) -> AnyClient:
        """Return a client of this tenant, of the same kind."""
        return AnyClient(self.kind, self.client.for_tenant(tenant), self.source, self.runner)

    def in_transaction(self, *steps: Callable[[Any], Any]) -> list[Any]:
        """Run the steps in one transaction of the caller's own client. The transaction aborts if a step raises.

        Each step is called with the session; what they return, or come to when awaited, is returned.
        """
        if self.kind == "sync":
            with self.source.start_session() as session, session.start_transaction():
                return [step(session) for step in steps]

        async def scenario() -> list[Any]:
            async with await _awaited(self.source.start_session()) as session:  # noqa: SIM117 one needs the other
                async with await _awaited(session.start_transaction()):
                    return [await _awaited(step(session)) for step in steps]

        return self.runner.run(scenario())


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) and not hasattr(answer, "__aenter__") else answer


@contextmanager
def open_client(kind: Kind, uri: str, database: str | None, **options: Any) -> Iterator[AnyClient]:
    """Connect with a driver client of the caller's own. Close it at the end of the block."""
    with asyncio.Runner() as runner:
        if kind == "sync":
            sync_source: MongoClient[dict[str, Any]] = MongoClient(uri, **options)
            with sync_source:
                yield AnyClient(kind, Client(sync_source, database=database), sync_source, runner)
        elif kind == "asyncio":
            source: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(uri, **options)
            try:
                yield AnyClient(kind, AsyncClient(source, database=database), source, runner)
            finally:
                runner.run(source.close())
        else:
            motor: Any = AsyncIOMotorClient(uri, **options)
            try:
                yield AnyClient(kind, AsyncClient(motor, database=database), motor, runner)
            finally:
                motor.close()


@contextmanager
def open_store(uri: str, database: str) -> Iterator[SyncStore]:
    """Connect as the engine does."""
    store = connect.sync_store(uri, database)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Do something in a thread while the block runs."""
    with ThreadPoolExecutor(1) as executor:
        under_way = executor.submit(work)
        yield
        under_way.result()


def claim(store: SyncStore, task_id: str, worker_id: str = "worker-1") -> str:
    """Claim the task for a worker of this name, as the engine does. Return the run_id."""
    token = secrets.token_hex(8)
    claimed = store.run(claims.claim([task_id], worker_id, token))
    assert [document["_id"] for document in claimed] == [task_id], f"{task_id} could not be claimed by {worker_id}"
    return claims.run_ids_of([task_id], token)[task_id]


def is_claimable(store: SyncStore, task_id: str, worker_id: str = "worker-1") -> bool:
    """Claim the task for this worker. Return whether the claim succeeded."""
    return bool(store.run(claims.claim([task_id], worker_id, secrets.token_hex(8))))


def succeed(store: SyncStore, task_id: str, run_id: str, returns: Any = None) -> None:
    """End a run as SUCCESS."""
    assert store.run(claims.finish([Outcome(task_id, run_id, RunStatus.SUCCESS, returns=returns)])) == {run_id}


def fail(store: SyncStore, task_id: str, run_id: str, reason: str = "no luck", *, final: bool = False) -> None:
    """End a run as FAIL."""
    outcome = Outcome(task_id, run_id, RunStatus.FAIL, reason=reason, final=final)
    assert store.run(claims.finish([outcome])) == {run_id}


def server_now(asked: MongoClient[dict[str, Any]] | SyncStore) -> datetime:
    """Return the server's time."""
    client = asked.database.client if isinstance(asked, SyncStore) else asked
    now: datetime = client.admin.command("hello")["localTime"]
    return now.replace(tzinfo=UTC)  # a command's answer is not decoded by the client's options
