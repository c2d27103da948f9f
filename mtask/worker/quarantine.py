"""Malformed documents: told from others, marked FAIL with the reason, and kept from disturbing the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseUnavailable, MtaskError
from mtask.model.documents import StoredTask, describe_validation
from mtask.model.status import RunStatus
from mtask.store import claims
from mtask.store.driver import AsyncStore
from mtask.store.pipelines import Outcome
from mtask.worker.log import fields, logger

#: How long a task that the server refuses to change, though it looks well, is left alone, in seconds.
_REFUSED_PAUSE = 30.0
#: How long a task is left alone that could not be claimed in time, in seconds; twice as long each time, and at most.
_HELD_UP_PAUSE, _MAX_HELD_UP_PAUSE = 0.5, 4.0
_FORGOTTEN_AFTER = 60.0
_MAX_REMEMBERED = 10_000


class Quarantine:
    """Marks malformed documents FAIL, and remembers what had better be left alone for a while."""

    def __init__(self, store: AsyncStore, worker_id: str) -> None:
        self._store = store
        self._worker_id = worker_id
        self._left_alone: dict[str, float] = {}
        #: The last pause of what was held up, in seconds.
        self._held_up: dict[str, float] = {}

    def is_left_alone(self, task_id: Any) -> bool:
        """Whether the server refused to change this task a short while ago."""
        return self.left_alone_until(task_id) > monotonic()

    def left_alone_until(self, task_id: Any) -> float:
        """Return until when (monotonic seconds) it is left alone; what is past says that it is not."""
        return self._left_alone.get(_name_of(task_id), 0.0)

    def left_alone(self) -> list[str]:
        """Return the tasks that are left alone now, by their ids."""
        now = monotonic()
        return [name for name, until in self._left_alone.items() if until > now]

    def leave_alone(self, task_id: Any, pause: float = _REFUSED_PAUSE) -> None:
        """Do not try this task for so long (seconds)."""
        now = monotonic()
        if len(self._left_alone) >= _MAX_REMEMBERED:
            self._left_alone = {name: until for name, until in self._left_alone.items() if until > now}
        self._left_alone[_name_of(task_id)] = now + pause

    def hold_up(self, task_id: Any) -> None:
        """Leave a task alone that could not be claimed in time: someone's open transaction holds it, as a rule.

        Each try takes a slot, so they become rare; a task that was not held up for a minute begins anew.
        """
        name, now = _name_of(task_id), monotonic()
        is_again = now - self._left_alone.get(name, -inf) < _FORGOTTEN_AFTER
        pause = (
            min(2 * self._held_up[name], _MAX_HELD_UP_PAUSE) if is_again and name in self._held_up else _HELD_UP_PAUSE
        )
        self.leave_alone(task_id, pause)
        if len(self._held_up) >= _MAX_REMEMBERED:
            self._held_up = {held: last for held, last in self._held_up.items() if held in self._left_alone}
        self._held_up[name] = pause

    def heard(self, task_id: str) -> None:
        """Take note that a task has changed: the transaction that had locked it is over."""
        if self._held_up.pop(task_id, None) is not None:
            self._left_alone.pop(task_id, None)

    async def examine(self, task_ids: Sequence[Any], refusal: MtaskError | None = None) -> None:
        """Judge whole documents that could not be read, or that the server refused to change.

        A malformed one becomes FAIL with the reason; one that looks well is left alone for a while.
        """
        if not task_ids:
            return
        for document in await self._store.run(claims.read(task_ids)):
            reason = malformation(document)
            if reason is not None:
                await self._mark(document["_id"], reason)
            else:
                logger.error("task refused", extra=fields(task=document["_id"], reason=str(refusal)))
                self.leave_alone(document["_id"])

    async def end(self, document: Mapping[str, Any], run_id: str, error: Exception) -> bool:
        """End a run that was claimed and cannot be started; return whether it is closed in the task by that."""
        malformed = malformation(document)
        reason = malformed or f"it cannot be run here: {type(error).__name__}: {error}"
        task_id = document["_id"]
        ended: set[str] = set()
        try:
            ending = Outcome(task_id, run_id, RunStatus.FAIL, reason=reason, final=True)
            ended = await self._store.run(claims.finish([ending]))
        except DatabaseUnavailable:
            raise
        except MtaskError as refused:
            logger.warning("finish refused", extra=fields(task=task_id, reason=str(refused)))
        if ended:
            logger.error("task that cannot be run marked FAIL", extra=fields(task=task_id, reason=reason))
        elif malformed is not None:  # without a lease that holds, say
            await self._mark(task_id, malformed)
        return bool(ended)

    async def _mark(self, task_id: Any, reason: str) -> None:
        try:
            if await self._store.run(claims.quarantine(task_id, self._worker_id, reason)):
                logger.error("malformed task marked FAIL", extra=fields(task=task_id, reason=reason))
        except DatabaseUnavailable:
            raise
        except MtaskError as refused:
            logger.error("malformed task cannot be marked", extra=fields(task=task_id, reason=str(refused)))
            self.leave_alone(task_id)


def _name_of(task_id: Any) -> str:
    # An `_id` that is no text, of a malformed document, need not be hashable.
    return task_id if type(task_id) is str else repr(task_id)


def malformation(document: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a task's document, or None."""
    try:
        StoredTask.model_validate(document)
    except ValidationError as error:
        return f"malformed document: {describe_validation(error)}"
    return None
