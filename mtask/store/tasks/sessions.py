"""Sessions that dead workers left open: their transactions keep documents locked until the server ends them.

A run names the session of its transaction in its document before the transaction begins. So whoever rescues the task
can have the server end that session at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from bson.binary import UUID_SUBTYPE, Binary

from mtask.model.documents import runs_in
from mtask.model.status import RunStatus
from mtask.store.driver.operation import Operation, command, tasks
from mtask.store.statements import expressions as x
from mtask.store.statements import filters

#: How long the read, and the command, may take: a rescue waits for both.
_TIMEOUT = timedelta(seconds=2)
_FIELDS = ("status", "ping_expire_time", "session_id")
_VIEW = {**{f"{filters.RUNS}.{field}": 1 for field in _FIELDS}, "now": x.NOW}


def end_lapsed(task_ids: Sequence[Any]) -> Operation[list[Any]]:
    """End the sessions that lapsed runs of these tasks name; return the tasks concerned.

    The server's clock tells, in the same read, whether a lease has lapsed, and the session of a run that committed
    under its lease is the only one that is used again: so no live run's transaction is ended. Call it before a lapsed
    run is closed. A user may end its own sessions without a further right; one of another user stays as it is.
    """
    found = yield tasks("find", filters.naming_sessions(task_ids), _VIEW, hint="_id_").within(_TIMEOUT)
    by_session = {session: document["_id"] for document in found for session in _lapsed_in(document)}
    if not by_session:
        return []
    yield command("killSessions", [as_document(session) for session in by_session]).within(_TIMEOUT)
    return list({repr(task_id): task_id for task_id in by_session.values()}.values())


def end(sessions: Sequence[UUID]) -> Operation[None]:
    """Have the server forget sessions of this client that are not used again."""
    yield command("endSessions", [as_document(session) for session in sessions]).within(_TIMEOUT)


def as_document(session: UUID) -> dict[str, Any]:
    """Return how commands name a session; the server adds who is asking."""
    return {"id": Binary(session.bytes, UUID_SUBTYPE)}


def _lapsed_in(document: dict[str, Any]) -> Iterator[UUID]:
    for run in runs_in(document):
        if run.get("status") == RunStatus.RUNNING:
            lease, named = run.get("ping_expire_time"), run.get("session_id")
            if isinstance(lease, datetime) and lease <= document["now"] and isinstance(named, str):
                try:
                    yield UUID(named)
                except ValueError:  # written by hand
                    continue
