"""Reads the kept logs of runs."""

from __future__ import annotations

from collections.abc import Sequence

from mtask.errors import InvalidInput, TaskNotFound
from mtask.features.logs import operations as run_logs
from mtask.features.logs.rules import LogLine
from mtask.features.logs.rules import RunLog as RunLog
from mtask.kernel.document.identity import is_text
from mtask.kernel.document.parts import READABLE, Sealed
from mtask.kernel.document.task import read_as
from mtask.kernel.driver.codec import GET_CODEC, Codec, Owner
from mtask.kernel.driver.operation import Operation, tasks


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
        logs = [read_as(RunLog, one, "the log of run", "logs", "Remove its document.") for one in found]
        yield from _open(task_id, logs)
        return logs

    return operation()


def _open(task_id: str, logs: Sequence[RunLog]) -> Operation[None]:
    """Decode the lines of a task's runs in place. In place of lines that stay closed, or are refused, one says why."""
    codec: Codec = yield GET_CODEC
    name, _, key = task_id.partition(":")
    plain = [log for log in logs if log.lines and not isinstance(log.sealed_lines, Sealed)]
    if plain and not codec.is_plain:
        task = (yield tasks("find_one", {"_id": task_id}, {"queue": 1, "sealed": 1})) or {}
        if codec.is_readable_refused(Owner(name, key, [str(task.get("queue"))], task.get("sealed"))):
            for log in plain:
                log.lines = [_unreadable(log, f"refused: {READABLE}")]
    closed = [log for log in logs if isinstance(log.sealed_lines, Sealed)]
    owners = [Owner(name, key, [log.queue or ""]) for log in closed]
    opened = yield from codec.open_values(
        [(owner, run_logs.LINES, log.sealed_lines) for owner, log in zip(owners, closed, strict=True)]
    )
    for log, lines in zip(closed, opened, strict=True):
        if isinstance(lines, Sealed):
            log.lines = [_unreadable(log, f"encrypted: {lines.why}")]
            continue
        try:
            log.lines = [LogLine.model_validate(line) for line in lines]
        except (TypeError, ValueError):
            log.lines = [_unreadable(log, "encrypted: what was encrypted is no log of mtask")]


def _unreadable(log: RunLog, why: str) -> LogLine:
    log.first = max(0, log.line_cnt - 1)
    return LogLine(time=log.update_time, level="WARNING", logger="mtask", message=f"({why})")
