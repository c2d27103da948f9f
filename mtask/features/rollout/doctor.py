"""Why a task waits because of the versions of its handler, and the doctor's check of what was handed on."""

from __future__ import annotations

from collections.abc import Sequence

from mtask.features.rollout import operations
from mtask.features.rollout.rules import PATIENCE
from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Check, Finding, Reason, examples, listed, ok, warn

_CHECK = "rollout"
_MOST = 100
REMEDY = "Start workers of the code that published the tasks; `mtask handlers` lists the versions that run."


def able(name: str, version: int, workers: Sequence[WorkerDocument]) -> list[WorkerDocument]:
    """Return those of the workers that have this version of a handler, or a later one."""
    return [worker for worker in workers if worker.version_of(name) >= version]


def missing(name: str, version: int, workers: Sequence[WorkerDocument]) -> str:
    """Say which version of a handler none of these workers has."""
    most = max(worker.version_of(name) for worker in workers)
    ids = listed([worker.worker_id for worker in workers])
    return f"its params are of version {version} of {name!r}, and {ids} have version {most} at most"


def handed_on(task: Task) -> list[Reason]:
    """Return the reason why a task waits whose params fitted no worker so far."""
    runs = [run for run in rules.current_runs(task) if run.status is RunStatus.CANCELED]
    if not runs or runs[-1].misfit_since is None:
        return []
    since = runs[-1].misfit_since
    workers = listed(list(dict.fromkeys(run.worker_id for run in runs if run.misfit_since is not None)))
    until = f"it fails at {since + PATIENCE:%H:%M} UTC unless workers of another version come"
    return [Reason("handed_on", f"handed on by {workers}, whose version its params do not fit: {until}")]


def _examine() -> Operation[list[Finding]]:
    found = yield from operations.handed_on(_MOST)
    if not found:
        return [ok(_CHECK, "no task waits for another version of its handler")]
    ids, names = [str(each["_id"]) for each in found], sorted({str(each.get("name")) for each in found})
    message = f"handed on, as the params fit no worker: {examples(ids, _MOST)}"
    return [warn(_CHECK, message, REMEDY, task_ids=ids[:20], names=names)]


CHECKS = [Check(_CHECK, _examine, "tasks")]
