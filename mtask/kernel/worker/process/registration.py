"""The registrar: registers this worker, so that no two live processes share a worker_id."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from mtask.errors import MtaskError, WorkerIdInUse
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import workers
from mtask.kernel.operations.claim import fresh_token
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope
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
    told_by_features: dict[str, Any] = {}
    for beat in scope.vitals.beats:
        told_by_features.update(beat())
    return workers.Heartbeat(
        status=scope.vitals.status,
        running_cnt=len(scope.ledger.running),
        concurrency=scope.vitals.concurrency,
        unserved_names=sorted(scope.ledger.unserved_names),
        appeal_cnt=scope.vitals.appeal_cnt,
        **told_by_features,
    )


# --- host ------------------------------------------------------------------------------------------------

# Identifies this process by its host, its pid and the scope in which the pid is unique.

#: The bound of pids: all pids of Linux and macOS are smaller.
_PID_LIMIT = 2**31


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()


def pid_scope(pid: int | None = None) -> str | None:
    """Return the boot id, the pid namespace and the start time of a process.

    Together with the pid, the three values identify the process for ever. `pid`: None stands for this process. Returns
    None if the system does not show these values, or if the process does not exist.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        start = _start_of(os.getpid() if pid is None else pid)
    except OSError:
        return None
    return None if start is None else f"{boot}/{namespace}/{start}"


def _start_of(pid: int) -> str | None:
    """Return the start time of a process, in the kernel's clock ticks; None: it has ended and waits to be reaped.

    Raises OSError if /proc does not show the process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def automatic_worker_id() -> str:
    """Return a new worker_id: the host, the pid and a random part."""
    return f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


def is_known_dead(document: Mapping[str, Any]) -> bool:
    """Whether the process of this worker document is known to be dead.

    The process is known to be dead if two conditions hold: it ran on this host, in this boot and pid namespace; and no
    process now has the same pid and start time.
    """
    theirs, ours, pid = document.get("pid_scope"), pid_scope(), document.get("pid")
    if not isinstance(theirs, str) or ours is None or not isinstance(pid, int) or document.get("host") != host_name():
        return False
    scope, _, start = theirs.rpartition("/")
    if scope != ours.rpartition("/")[0] or not 0 < pid < _PID_LIMIT:
        return False
    try:
        return _start_of(pid) != start
    except OSError:
        # If /proc is mounted with hidepid, /proc shows no process of another user, dead or alive.
        return not _exists(pid)


def _exists(pid: int) -> bool:
    """Whether a process has this pid. The check does not need /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process exists and belongs to another user
        return True
    return True
