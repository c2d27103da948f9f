"""Replies: updates the runs that this worker holds from documents. A ping or a lookup has read the documents."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from mtask.kernel.document.options import ping_seconds
from mtask.kernel.document.status import RunStatus
from mtask.kernel.operations import claim as claims
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.running.run import EndReason, HeldRun, trusted_until


def apply(runs: Sequence[HeldRun], documents: Sequence[dict[str, Any]], sent: float | None, worker_id: str) -> None:
    """Extend the lease of each run, or end the run, according to the document of its task.

    `sent`: the time at which the ping was sent (monotonic seconds). None: the documents were only read, and no lease is
    extended.
    """
    by_id = {document["_id"]: document for document in documents}
    for run in runs:
        if sent is not None:
            run.next_ping = sent + run.ping_interval
        try:
            _apply(run, by_id.get(run.task_id), sent, worker_id, is_alone=len(runs) == 1)
        except Exception:
            # Only the lease of this run is not extended. The leases of the other runs are extended.
            logger.exception("a held task cannot be read", extra=fields(task=run.task_id, run=run.run_id))


def _apply(
    run: HeldRun, document: dict[str, Any] | None, sent: float | None, worker_id: str, *, is_alone: bool
) -> None:
    if run.is_finishing:
        if sent is not None and document is not None:
            _extend(run, document, sent)
        return  # the finisher finds out whether this run's lease is lost
    reason = _end_reason(run, document, worker_id)
    if reason is not None:
        if reason is EndReason.REMOVED and sent is not None and is_alone:
            reason = EndReason.LEASE_LOST  # a ping of a single run returns no document in either case
        run.end(reason)
    if document is not None and reason not in (EndReason.REMOVED, EndReason.LEASE_LOST) and sent is not None:
        _extend(run, document, sent)


def _extend(run: HeldRun, document: dict[str, Any], sent: float) -> None:
    if not _is_held(run, document):
        return
    run.trusted_until = max(run.trusted_until, trusted_until(sent, run.lease_ms))
    interval = _option(document, "ping_interval_ms")
    if isinstance(interval, int | float) and 0 < interval < run.lease_ms:
        run.ping_interval = ping_seconds(interval, run.lease_ms)
        run.next_ping = sent + run.ping_interval


def _option(document: dict[str, Any], name: str) -> Any:
    option = document.get("task_option")
    return option.get(name) if isinstance(option, dict) else None


def _is_held(run: HeldRun, document: dict[str, Any]) -> bool:
    own = claims.run_of(document, run.run_id)
    if own is None or own.get("status") != RunStatus.RUNNING:
        return False
    expiry = own.get("ping_expire_time")
    return isinstance(expiry, datetime) and expiry > document["now"]


def _end_reason(run: HeldRun, document: dict[str, Any] | None, worker_id: str) -> EndReason | None:
    if document is None:
        return EndReason.REMOVED
    if not _is_held(run, document):
        return EndReason.LEASE_LOST
    if document["task_state"].get("cancel_requested"):
        return EndReason.CANCELED
    admitted = _option(document, "specific_worker_ids")
    if isinstance(admitted, list) and admitted and worker_id not in admitted:
        return EndReason.EXCLUDED
    return None
