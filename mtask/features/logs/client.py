"""Reads the kept logs of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mtask.errors import InvalidInput, SchemaMismatch, TaskNotFound
from mtask.features.encryption import decrypt as unsealing
from mtask.features.logs import operations as run_logs
from mtask.features.logs.rules import RunLog as RunLog
from mtask.kernel.document.identity import is_text
from mtask.kernel.document.task import describe_validation
from mtask.kernel.driver.operation import Operation


def of_task(task_id: str, run_id: str | None, owner: str | None = None) -> Operation[list[RunLog]]:
    """Check the arguments; return the operation that reads the logs. Raises InvalidInput.

    `owner`: the tenant that reads them.
    """
    if run_id is not None and (not isinstance(run_id, str) or not run_id or not is_text(run_id)):
        raise InvalidInput("run_id is the id of a run: give text.", field="run_id")

    def operation() -> Operation[list[RunLog]]:
        is_own = owner is not None and (yield from run_logs.is_task(task_id))
        whose = None if owner is None else run_logs.of_tenant(owner, is_own=is_own)
        found = yield from run_logs.of_task(task_id, run_id, whose)
        if not found and not is_own and not (yield from run_logs.is_task(task_id)):
            raise TaskNotFound(task_id)
        logs = [_log_of(document) for document in found]
        yield from unsealing.open_logs(logs)
        return logs

    return operation()


def _log_of(document: Mapping[str, Any]) -> RunLog:
    try:
        return RunLog.model_validate(document)
    except ValidationError as error:
        reason = f"the log of run {document.get('_id')!r} is malformed: {describe_validation(error)}"
        raise SchemaMismatch("logs", reason, "Remove its document.") from None
