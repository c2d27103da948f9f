"""The registrar: registers this worker, so that no two live processes share a worker_id."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from mtask.errors import MtaskError, WorkerIdInUse
from mtask.kernel.document.identity import fresh_token
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import workers
from mtask.kernel.worker.process.host import host_name, is_known_dead, pid_scope
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.scope import Scope
from mtask.version import __version__


class Registrar:
    """Registers and unregisters this process under its worker_id.

    If the worker's document is gone, the process is registered again.
    """

    def __init__(self, store: AsyncStore, registration: workers.Registration) -> None:
        self._store = store
        self.registration = registration
        self._again: asyncio.Task[None] | None = None

    async def register(self) -> dict[str, Any]:
        """Register this process and return the worker's document.

        Raises WorkerIdInUse if another process has the id. The id is free again when the heartbeat of that process has
        expired, or when that process is known to be dead.
        Raises DatabaseError.
        """
        try:
            return await self._store.run(workers.register(self.registration))
        except WorkerIdInUse:
            former = await self._store.run(workers.find(self.registration.worker_id))
            if former is None or not is_known_dead(former):
                raise
            logger.info("taking the worker_id over from a dead process", extra=fields(pid=former.get("pid")))
            dead = former.get("incarnation")
            return await self._store.run(workers.register(self.registration, dead_incarnation=dead))

    def register_again(
        self, on_registered: Callable[[dict[str, Any]], None], on_taken_over: Callable[[WorkerIdInUse], None]
    ) -> None:
        """Register again in the background, and then call `on_registered`.

        If another process has the worker_id, call `on_taken_over` instead.
        """
        if self._again is None:
            self._again = asyncio.get_running_loop().create_task(self._register_again(on_registered, on_taken_over))

    async def _register_again(
        self, on_registered: Callable[[dict[str, Any]], None], on_taken_over: Callable[[WorkerIdInUse], None]
    ) -> None:
        worker_id = self.registration.worker_id
        try:
            on_registered(await self._store.run(workers.register(self.registration)))
            logger.warning("registered again: the worker's document was gone", extra=fields(worker=worker_id))
        except WorkerIdInUse as error:
            logger.error("another process took this worker_id over: stopping", extra=fields(worker=worker_id))
            on_taken_over(error)
        except MtaskError as error:
            logger.warning("could not register again yet", extra=fields(reason=told(error)))
        finally:
            self._again = None

    async def leave(self, last: workers.Heartbeat) -> None:
        """Store that this worker has stopped, if the database can be reached."""
        try:
            await self._store.run(workers.heartbeat(self.registration, last))
        except MtaskError as error:
            logger.warning("could not unregister: the heartbeat will expire", extra=fields(reason=told(error)))


def registration(
    worker_id: str, queues: Sequence[str], names: Sequence[str], concurrency: int, heartbeat_timeout: timedelta
) -> workers.Registration:
    """Return the registration of this process."""
    return workers.Registration(
        worker_id=worker_id,
        incarnation=fresh_token(),
        host=host_name(),
        pid=os.getpid(),
        pid_scope=pid_scope(),
        queues=queues,
        names=names,
        concurrency=concurrency,
        version=__version__,
        heartbeat_timeout=heartbeat_timeout,
    )


def heartbeat(scope: Scope) -> workers.Heartbeat:
    """Return the content of a heartbeat that is sent now. Any thread may call this."""
    return workers.Heartbeat(
        status=scope.vitals.status,
        running_cnt=len(scope.ledger.running),
        concurrency=scope.vitals.concurrency,
        unserved_names=sorted(scope.ledger.unserved_names),
        unusable_keys=sorted(scope.ledger.unusable_keys),
        controls_seen=scope.vitals.controls_seen,
        appeal_cnt=scope.vitals.appeal_cnt,
    )
