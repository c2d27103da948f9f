"""Malformed documents: told from others, marked FAIL with the reason, and kept from disturbing the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, DocumentTooLarge, MtaskError
from mtask.model.documents import StoredTask, describe_validation
from mtask.model.status import RunStatus
from mtask.store.driver.encoding import is_code
from mtask.store.driver.stores import AsyncStore
from mtask.store.statements.outcome import Outcome
from mtask.store.tasks import claims, finding
from mtask.worker.log import fields, logger

#: How long a task that the server refuses to change, though it looks well, is left alone, in seconds.
_REFUSED_PAUSE = 30.0
#: How long one that looked malformed, and is well, in seconds.
_MENDED_PAUSE = 1.0
#: How long one is left alone that cannot even be marked, in seconds: only a hand can mend it.
_UNMARKABLE_PAUSE = 600.0
#: Why a task is FAIL whose claim would not fit. Short: it has to find room in the document.
TOO_LARGE = "too large: a claim would exceed MongoDB's 16 MB; put less into params"
_MAX_REASON = 1_000
#: How long a task is left alone that could not be claimed in time, in seconds; twice as long each time, and at most.
_HELD_UP_PAUSE, _MAX_HELD_UP_PAUSE = 0.5, 4.0
_FORGOTTEN_AFTER = 60.0
#: How long a mark may wait for a document that is locked.
_LOCK_WAIT = timedelta(seconds=1)
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

    def was_held_up(self, task_id: str) -> bool:
        """Whether the task was locked when it was last tried, as far as is known."""
        return task_id in self._held_up

    def heard(self, task_id: str) -> None:
        """Take note that a task has changed: the transaction that had locked it is over."""
        if self._held_up.pop(task_id, None) is not None:
            self._left_alone.pop(task_id, None)

    async def examine(self, task_ids: Iterable[Any], refusal: Exception | str | None = None) -> None:
        """Judge whole documents, one by one, that could not be read, or that the server refused to change.

        A malformed one becomes FAIL with the reason, as does one that is too large to be changed; one that looks well
        is left alone for a while. What goes wrong with one keeps no other from being judged.
        """
        for task_id in task_ids:
            try:
                await self._examine(task_id, refusal)
            except DatabaseUnavailable:
                raise
            except Exception as error:
                logger.error("task cannot be examined", extra=fields(task=_name_of(task_id), reason=_told(error)))
                self.leave_alone(task_id, _UNMARKABLE_PAUSE)

    async def _examine(self, task_id: Any, refusal: Exception | str | None) -> None:
        document = await self._store.run(finding.read(task_id))
        if document is None:
            return
        reason = malformation(document)
        if reason is None and isinstance(refusal, DocumentTooLarge):
            reason = TOO_LARGE
        if reason is not None:
            await self._mark(task_id, reason)
        elif refusal is None:
            # It looked malformed a moment ago: what is derived has been derived anew since.
            self.leave_alone(task_id, _MENDED_PAUSE)
        else:
            logger.error("task refused", extra=fields(task=_name_of(task_id), reason=_told(refusal)))
            self.leave_alone(task_id)

    async def end(self, document: Mapping[str, Any], run_id: str, error: Exception) -> bool:
        """End a run that was claimed and cannot be started; return whether it is closed in the task by that."""
        malformed = malformation(document)
        reason = malformed or f"it cannot be run here: {type(error).__name__}: {error}"
        task_id = document["_id"]
        ended: set[str] = set()
        try:
            ending = Outcome(task_id, run_id, RunStatus.FAIL, reason=reason, final=True)
            ended = await self._store.run(claims.finish([ending], _LOCK_WAIT))
        except DatabaseTimeout:
            self.hold_up(task_id)
            return False
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
        name = _name_of(task_id)
        try:
            if await self._store.run(claims.quarantine(task_id, self._worker_id, reason, _LOCK_WAIT)):
                logger.error("malformed task marked FAIL", extra=fields(task=name, reason=reason))
        except DatabaseTimeout:
            # Someone's transaction has locked it, as a rule: what is to be examined behind it does not wait.
            self.hold_up(task_id)
        except DatabaseUnavailable:
            raise
        except MtaskError as refused:
            logger.error(
                "malformed task cannot be marked, `mtask doctor` names it",
                extra=fields(task=name, malformed=reason, reason=str(refused)),
            )
            self.leave_alone(task_id, _UNMARKABLE_PAUSE)


def _name_of(task_id: Any) -> str:
    # An `_id` that is no text, of a malformed document, need not be hashable.
    return task_id if type(task_id) is str else repr(task_id)


def _told(error: Exception | str) -> str:
    return str(error) if isinstance(error, MtaskError | str) else f"{type(error).__name__}: {error}"


def malformation(document: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a task's document, or None."""
    try:
        StoredTask.model_validate(document)
        wrong = _code_in({name: document[name] for name in ("_id", "name", "key", "queue")})
    except ValidationError as error:
        wrong = describe_validation(error)
    except Exception as error:  # whatever it is: what cannot be read cannot be run
        wrong = f"it cannot be read: {type(error).__name__}: {error}"
    return None if wrong is None else f"malformed document: {claims.shortened(wrong, _MAX_REASON)}"


def _code_in(value: Any, path: tuple[str, ...] = ()) -> str | None:
    """Name the field that holds JavaScript code, which Python takes for text, and the server does not."""
    if path[-1:] in (("returns",), ("progress",)):
        return None
    if is_code(value):
        return f"{'.'.join(path)}: it is JavaScript code, not text"
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return next(filter(None, (_code_in(item, (*path, str(name))) for name, item in inner)), None)
