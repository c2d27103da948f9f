"""Ends sessions that dead workers left open. The transaction of an open session locks documents.

Before a run's transaction begins, the worker writes the transaction's session into the task's document. So a worker
that rescues the task can tell the server to end the session at once. Without this command, the server ends the session
only later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from bson.binary import UUID_SUBTYPE, Binary

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import runs_in
from mtask.kernel.driver.operation import Operation, command, tasks
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters

#: Time limit of the read that finds sessions, and of the command that ends them. A rescue waits for both.
_TIMEOUT = timedelta(seconds=2)
_RUNS = {f"{filters.RUNS}.{field}": 1 for field in ("run_id", "status", "session_id")}
_FIELDS = ("status", "ping_expire_time", "session_id")
_VIEW = {**{f"{filters.RUNS}.{field}": 1 for field in _FIELDS}, "now": x.NOW}


def end_lapsed(task_ids: Sequence[Any]) -> Operation[list[Any]]:
    """End the sessions that lapsed runs of these tasks name; return the ids of the tasks with such runs.

    The transaction of a live run is never ended, for two reasons. The read that finds a session also compares the run's
    lease with the server's clock. And a worker uses a session again only after the session's run has committed with a
    live lease.

    Call this before a lapsed run is closed. A database user needs no further right to end their own sessions. Sessions
    of other users stay open.
    """
    found = yield tasks("find", filters.naming_sessions(task_ids), _VIEW, hint="_id_").within(_TIMEOUT)
    by_session = {session: document["_id"] for document in found for session in _lapsed_in(document)}
    if not by_session:
        return []
    yield command("killSessions", [as_document(session) for session in by_session]).within(_TIMEOUT)
    return list({repr(task_id): task_id for task_id in by_session.values()}.values())


def end_of_run(task_id: str, run_id: str) -> Operation[str | None]:
    """End the session that this run names, if it is still RUNNING; return its status afterwards.

    Call this only if the process that held the session has ended. The session's transaction is over then: aborted, or
    committed before.
    """
    guard = {"_id": task_id}
    found = yield tasks("find", guard, _RUNS).within(_TIMEOUT)
    for run in _runs_of(found, run_id):
        named = run.get("session_id")
        if run.get("status") == RunStatus.RUNNING and isinstance(named, str):
            yield command("killSessions", [as_document(UUID(named))]).within(_TIMEOUT)
    found = yield tasks("find", guard, _RUNS).within(_TIMEOUT)
    return next((run.get("status") for run in _runs_of(found, run_id)), None)


def _runs_of(documents: Sequence[dict[str, Any]], run_id: str) -> list[dict[str, Any]]:
    return [run for document in documents for run in runs_in(document) if run.get("run_id") == run_id]


def end(sessions: Sequence[UUID]) -> Operation[None]:
    """Tell the server to forget these sessions of this client. The client does not use them again."""
    yield command("endSessions", [as_document(session) for session in sessions]).within(_TIMEOUT)


def as_document(session: UUID) -> dict[str, Any]:
    """Return a session in the form that commands take. The server adds the session's user to it."""
    return {"id": Binary(session.bytes, UUID_SUBTYPE)}


def _lapsed_in(document: dict[str, Any]) -> Iterator[UUID]:
    for run in runs_in(document):
        if run.get("status") == RunStatus.RUNNING:
            lease, named = run.get("ping_expire_time"), run.get("session_id")
            if isinstance(lease, datetime) and lease <= document["now"] and isinstance(named, str):
                try:
                    yield UUID(named)
                except ValueError:  # this is no session id; somebody wrote it by hand
                    continue
