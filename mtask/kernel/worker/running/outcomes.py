"""Outcomes: makes the outcome that is written at the end of a run.

A run ends because its handler returned, because its handler raised an exception, or because the worker ended the run.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

from mtask.errors import (
    MAX_DELAY,
    DocumentTooLarge,
    Fail,
    InvalidParams,
    NotStorable,
    RateLimited,
    Retry,
    TransactionConflict,
)
from mtask.kernel.document.handlers import UpcastError
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run
from mtask.kernel.document.values import storable
from mtask.kernel.driver.bson import stored_size
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import transactions
from mtask.kernel.operations.publish import milliseconds
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.running.run import EndReason, HeldRun

#: An outcome, and the size of what it stores in bytes.
Judged: TypeAlias = tuple[Outcome, int]
MAX_REASON = 2000
#: The longest traceback that is stored, in bytes. Of a longer one the end is kept: it says what was raised, and where.
_MAX_TRACEBACK = 8192
_UNREADABLE = "(its text cannot be read)"
_NAME, _QUALNAME = type.__dict__["__name__"], type.__dict__["__qualname__"]


class ExecutorDied(Exception):
    """The process in which the handler ran has ended, or could not start. The text says what happened."""


class RaisedElsewhere(Exception):
    """The handler raised an exception in an executor, and the executor has made the outcome of it."""

    def __init__(self, outcome: Outcome, error_type: str) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome
        self.error_type = error_type  #: the name of its class


#: `CONFLICT_DELAY_MS`: the longest random delay after a first write conflict, in ms. The longest delay grows with each
#: conflict. `_FREE_CONFLICTS`: the number of conflicts that do not count as failures. Further conflicts count, because
#: their cause may be in the handler itself. Tests tune `CONFLICT_DELAY_MS`.
CONFLICT_DELAY_MS, _FREE_CONFLICTS = 200, 15
_CONFLICT = "to be tried again: "


class Chaining(Protocol):
    """Lets tasks go on as other tasks: it judges what handlers return before anything else does."""

    @property
    def kind(self) -> type:
        """The type of what a handler returns to say that its task goes on."""

    def returned(self, run: HeldRun, value: Any) -> Judged | None:
        """Return what becomes of a run whose handler has returned this. None: it is a value, and the run ends here."""

    def next_name(self, run: HeldRun, value: Any) -> str | None:
        """Return the name by which a next task is given. None: the run does not go on, or a handler is given."""

    def room_of(self, next_one: OwedTask) -> str | None:
        """Return the key of what must have room for this next task. None: nothing must."""

    def take_room(self, key: str, count: int) -> Operation[None]:
        """Count so many next tasks; raise InvalidInput if there is no room for them."""


class Successes:
    """Makes the outcomes of runs whose handlers have ended."""

    def __init__(self, chaining: Chaining) -> None:
        self._chaining = chaining
        self.take_room = chaining.take_room

    def concluded(self, run: HeldRun, returned: Any, raised: BaseException | None) -> Judged:
        """Return the outcome of a run whose handler has returned or raised this.

        To read the one or the other runs code of the app. Whatever that raises, a SystemExit even, the run fails.
        """
        try:
            if raised is not None:
                return failed(run, raised), 0
            return self.outcome(run, run.result if run.has_result else returned)
        except BaseException as error:
            logger.exception("outcome could not be made", extra=fields(task=run.task_id, run=run.run_id))
            return refusal(run, f"what the handler returned or raised cannot be read: {describe(error)}"), 0

    def outcome(self, run: HeldRun, returned: Any) -> Judged:
        """Return a SUCCESS, or a final FAIL if the value or the next task cannot be stored."""
        if run.handler.next is None and not isinstance(returned, self._chaining.kind):
            return succeeded(run, returned)
        return self._chaining.returned(run, returned) or succeeded(run, returned)

    def next_name(self, run: HeldRun, returned: Any) -> str | None:
        """Return the name by which a next task is given. None: the run does not go on, or a handler is given."""
        return self._chaining.next_name(run, run.result if run.has_result else returned)

    def room_of(self, outcome: Outcome) -> str | None:
        """Return the key of what must have room for the outcome's next task. None: nothing must."""
        return None if outcome.next is None else self._chaining.room_of(outcome.next)


def succeeded(run: HeldRun, returned: Any) -> Judged:
    """Return the SUCCESS of a run with this value, or a final FAIL if it cannot be stored."""
    value, size, refused = checked(returned)
    if refused:
        return refusal(run, refused), 0
    return Outcome(run.task_id, run.run_id, RunStatus.SUCCESS, value), size


def refusal(run: HeldRun, reason: str) -> Outcome:
    """Return a final failure for a value that cannot be stored: another run would return the same value."""
    return Outcome(run.task_id, run.run_id, RunStatus.FAIL, reason=reason, final=True)


def checked(returned: Any) -> tuple[Any, int, str | None]:
    """Return the value in its stored form, its size in bytes, and an error text.

    The error text tells why the value cannot be stored. It is None if the value can be stored.
    """
    if returned is None:
        return None, 0, None
    try:
        value = storable(returned)
        return value, stored_size(value), None
    except NotStorable as error:
        return None, 0, f"the handler's return value cannot be stored as BSON: {error.reason}"
    except DocumentTooLarge as error:
        return None, 0, f"the handler's return value is too large to be stored: {error.reason}"
    except BaseException as error:  # a property of the value may raise anything
        return None, 0, f"the handler's return value cannot be read: {name_of(error)}: {text_of(error)}"


def ended(run: HeldRun, reason: EndReason) -> Outcome:
    """Return the outcome of a run that was ended for this reason, not by its handler."""
    if reason is EndReason.RUN_TIMEOUT:
        limit = run.option.run_timeout_ms
        return _outcome(run, RunStatus.FAIL, f"the run took longer than run_timeout_ms ({limit} ms)")
    words = {
        EndReason.CANCELED: "canceled on request",
        EndReason.WORKER_STOP: "handed back: the worker stopped",
        EndReason.NO_SLOT: "handed back: the worker had no slot free for it in time",
        EndReason.UNREADABLE: "handed back: this worker cannot decrypt it",
        EndReason.LATE: "handed back: the worker could not begin it in time",
    }
    return _outcome(run, RunStatus.CANCELED, words.get(reason, reason.value))


def failed(run: HeldRun, error: BaseException) -> Outcome:
    """Return the outcome of a run whose handler raised an exception."""
    if isinstance(error, RaisedElsewhere):
        return error.outcome
    if isinstance(error, ExecutorDied):
        logger.warning("executor died", extra=fields(task=run.task_id, run=run.run_id, cause=str(error)))
        return _outcome(run, RunStatus.FAIL, f"executor {error}", final=run.handler.on_exception == "fail")
    if isinstance(error, Retry):
        # The handler may have changed the delay since `Retry` checked it.
        wait = error.delay if isinstance(error.delay, timedelta) else timedelta(0)
        bounded = milliseconds(min(max(wait, timedelta(0)), MAX_DELAY))
        counts = error.counted is True
        outcome = _outcome(run, RunStatus.FAIL if counts else RunStatus.CANCELED, error.reason, delay_ms=bounded)
        if isinstance(error, RateLimited):
            outcome.holds = None if error.scope == "task" else error.scope
        return outcome
    if isinstance(error, TransactionConflict) or transactions.is_conflict(error):
        uncounted = sum(_is_conflict(before) for before in run.task.runs)
        if uncounted < _FREE_CONFLICTS:
            delay = int(CONFLICT_DELAY_MS * (1 + uncounted) * random.random())
            return _outcome(run, RunStatus.CANCELED, f"{_CONFLICT}{error}", delay_ms=delay, conflict=True)
    if isinstance(error, Fail):
        return replace(_outcome(run, RunStatus.FAIL, error.reason, final=True, raised=error), is_verdict=True)
    if isinstance(error, InvalidParams):
        outcome = _outcome(run, RunStatus.FAIL, str(error), final=True, is_misfit=run.is_misfit)
        return replace(outcome, is_verdict=True)
    if isinstance(error, UpcastError):
        logger.warning("upcast failed", extra=fields(task=run.task_id, run=run.run_id), exc_info=error)
        cause = error.__cause__
        reason = error.reason or ("" if cause is None else describe(cause))
        return _outcome(run, RunStatus.FAIL, f"{error}: {reason}", final=True)
    logger.warning("handler failed", extra=fields(task=run.task_id, run=run.run_id), exc_info=error)
    return _outcome(run, RunStatus.FAIL, describe(error), final=run.handler.on_exception == "fail", raised=error)


def _is_conflict(run: Run) -> bool:
    is_canceled = run.status is RunStatus.CANCELED and not run.past
    # Runs of before revision 7 have no field for it, but a reason that anybody can read.
    return is_canceled and (run.conflict or (run.fail_reason or "").startswith(_CONFLICT))


def name_of(error: BaseException, *, is_qualified: bool = False) -> str:
    """Return the name of an exception's class, whatever its metaclass does."""
    name: str = (_QUALNAME if is_qualified else _NAME).__get__(type(error))
    return name


def text_of(error: BaseException) -> str:
    """Return the text of an exception; its class may raise anything when it is asked for it."""
    try:
        return str(error)
    except BaseException:
        return _UNREADABLE


def describe(error: BaseException) -> str:
    """Return a text that describes an exception: its type, its message and the line that raised it."""
    text = "the handler raised it itself" if isinstance(error, asyncio.CancelledError) else text_of(error)
    kind = name_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    said = f"{kind}: {text}" if text else kind
    return said[: MAX_REASON - len(where)] + where


def _error_of(raised: BaseException) -> dict[str, str] | None:
    """Return what is stored of an exception. A Fail that was raised from another exception stands for that one."""
    try:
        kind = type(raised.__cause__ if isinstance(raised, Fail) and raised.__cause__ is not None else raised)
        text = "".join(traceback.format_exception(raised)).encode("utf-8", "replace")
        kept = text if len(text) <= _MAX_TRACEBACK else b"..." + text[3 - _MAX_TRACEBACK :]
        return {"type": f"{kind.__module__}.{kind.__qualname__}", "traceback": kept.decode("utf-8", "ignore")}
    except BaseException:  # code of the app may raise anything; the reason says what is known
        return None


def _outcome(
    run: HeldRun,
    status: Literal[RunStatus.FAIL, RunStatus.CANCELED],
    reason: Any,
    *,
    final: bool = False,
    delay_ms: int | None = None,
    conflict: bool = False,
    is_misfit: bool = False,
    raised: BaseException | None = None,
) -> Outcome:
    try:
        text = reason if isinstance(reason, str) else repr(reason)
    except BaseException:
        text = _UNREADABLE
    text = text[:MAX_REASON].encode("utf-8", "replace").decode() or "no reason given"
    return Outcome(
        run.task_id,
        run.run_id,
        status,
        reason=text,
        final=final,
        conflict=conflict,
        is_misfit=is_misfit,
        delay_ms=delay_ms,
        jitter=random.random(),
        error=None if raised is None else _error_of(raised),
    )
