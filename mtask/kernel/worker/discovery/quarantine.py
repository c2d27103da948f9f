"""Quarantine: marks malformed tasks FAIL with the reason, and keeps them from disturbing other tasks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, DocumentTooLarge, MtaskError
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask, describe_validation
from mtask.kernel.driver.bson import is_code
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger

#: The pause of a well-formed task that the server refuses to change, in seconds.
_REFUSED_PAUSE = 30.0
#: The pause of a task that seemed malformed but is well-formed, in seconds.
_MENDED_PAUSE = 1.0
#: The pause of a malformed task that cannot be marked FAIL, in seconds: only an operator can mend it.
_UNMARKABLE_PAUSE = 600.0
#: The FAIL reason of a task that has no room for a claim in its document. The reason is short, because it must still
#: fit into the document.
TOO_LARGE = "too large: a claim would exceed MongoDB's 16 MB; put less into params"
_MAX_REASON = 1_000
#: The first and the longest pause of a task with a locked document, in seconds. Each pause is twice the one before.
_HELD_UP_PAUSE, _MAX_HELD_UP_PAUSE = 0.5, 4.0
#: If a task's last pause ended more than this many seconds ago, its next pause is as short as the first one.
_FORGOTTEN_AFTER = 60.0
#: The time limit for marking a task FAIL. The task's document may be locked.
_LOCK_WAIT = timedelta(seconds=1)
#: The most tasks of each kind that are remembered. Tests tune it.
MAX_REMEMBERED = 10_000


class Quarantine:
    """Marks malformed tasks FAIL, and remembers the tasks that this worker must not try for a while.

    The methods call such a task "left alone" until its pause is over.
    """

    def __init__(self, store: AsyncStore, worker_id: str) -> None:
        self._store = store
        self._worker_id = worker_id
        self._left_alone: dict[str, float] = {}
        #: The last pause of each locked task, in seconds.
        self._held_up: dict[str, float] = {}

    def is_left_alone(self, task_id: Any) -> bool:
        """Whether this worker must not try the task now, because the task's pause is not over."""
        return self.left_alone_until(task_id) > monotonic()

    def left_alone_until(self, task_id: Any) -> float:
        """Return the end of the task's last pause (monotonic seconds); 0: the task had no pause."""
        return self._left_alone.get(_name_of(task_id), 0.0)

    def left_alone(self) -> list[str]:
        """Return the ids of the tasks that this worker must not try now."""
        now = monotonic()
        return [name for name, until in self._left_alone.items() if until > now]

    def leave_alone(self, task_id: Any, pause: float = _REFUSED_PAUSE) -> None:
        """Do not try this task for `pause` seconds."""
        now = monotonic()
        if len(self._left_alone) >= MAX_REMEMBERED:
            self._left_alone = {name: until for name, until in self._left_alone.items() if until > now}
        self._left_alone[_name_of(task_id)] = now + pause

    def hold_up(self, task_id: Any) -> None:
        """Pause a task after its change timed out. Usually an open transaction has locked the task's document.

        Each try of the task takes a slot, so each pause is longer than the one before. If the last pause ended more
        than a minute ago, the pauses start again from the first.
        """
        name, now = _name_of(task_id), monotonic()
        is_again = now - self._left_alone.get(name, -inf) < _FORGOTTEN_AFTER
        pause = (
            min(2 * self._held_up[name], _MAX_HELD_UP_PAUSE) if is_again and name in self._held_up else _HELD_UP_PAUSE
        )
        self.leave_alone(task_id, pause)
        if len(self._held_up) >= MAX_REMEMBERED:
            self._held_up = {held: last for held, last in self._held_up.items() if held in self._left_alone}
        self._held_up[name] = pause

    def was_held_up(self, task_id: str) -> bool:
        """Whether the task's document was probably locked at the last try."""
        return task_id in self._held_up

    def heard(self, task_id: str) -> None:
        """Note that a task has changed. If a transaction had locked its document, the transaction has ended."""
        if self._held_up.pop(task_id, None) is not None:
            self._left_alone.pop(task_id, None)

    async def examine(self, task_ids: Iterable[Any], refusal: Exception | str | None = None) -> None:
        """Examine the whole documents of tasks. They could not be read, or the server refused to change them.

        A task is marked FAIL with the reason if its document is malformed, or too large to be changed. Any other task
        is not tried for a while. After an error at one task the next tasks are still examined.
        Raises DatabaseUnavailable.
        """
        for task_id in task_ids:
            try:
                await self._examine(task_id, refusal)
            except DatabaseUnavailable:
                raise
            except Exception as error:
                logger.error("task cannot be examined", extra=fields(task=_name_of(task_id), reason=_text_of(error)))
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
            # The task seemed malformed a moment ago, but is well-formed now: its derived fields were computed again.
            self.leave_alone(task_id, _MENDED_PAUSE)
        else:
            logger.error("task refused", extra=fields(task=_name_of(task_id), reason=_text_of(refusal)))
            self.leave_alone(task_id)

    async def end(self, document: Mapping[str, Any], run_id: str, error: Exception) -> bool:
        """Close a claimed run with FAIL, because it cannot be started; return whether the run is closed.

        Raises DatabaseUnavailable.
        """
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
        elif malformed is not None:  # the run was not closed, for example because its lease has lapsed
            await self._mark(task_id, malformed)
        return bool(ended)

    async def _mark(self, task_id: Any, reason: str) -> None:
        name = _name_of(task_id)
        try:
            if await self._store.run(claims.quarantine(task_id, self._worker_id, reason, _LOCK_WAIT)):
                logger.error("malformed task marked FAIL", extra=fields(task=name, reason=reason))
        except DatabaseTimeout:
            # Usually an open transaction has locked the document. The examination of the next documents must not wait
            # for it.
            self.hold_up(task_id)
        except DatabaseUnavailable:
            raise
        except MtaskError as refused:
            logger.error(
                "malformed task cannot be marked FAIL, `mtask doctor` lists it",
                extra=fields(task=name, malformed=reason, reason=str(refused)),
            )
            self.leave_alone(task_id, _UNMARKABLE_PAUSE)


def _name_of(task_id: Any) -> str:
    # The `_id` of a malformed document may be something other than text, and may not be hashable.
    return task_id if type(task_id) is str else repr(task_id)


def _text_of(error: Exception | str) -> str:
    return str(error) if isinstance(error, MtaskError | str) else f"{type(error).__name__}: {error}"


def malformation(document: Mapping[str, Any]) -> str | None:
    """Return the reason why a task's document is malformed; None: the document is well-formed."""
    try:
        StoredTask.model_validate(document)
        wrong = _code_in({name: document[name] for name in ("_id", "name", "key", "queue")})
    except ValidationError as error:
        wrong = describe_validation(error)
    except Exception as error:  # any error means that the task cannot be run
        wrong = f"it cannot be read: {type(error).__name__}: {error}"
    return None if wrong is None else f"malformed document: {claims.shortened(wrong, _MAX_REASON)}"


def _code_in(value: Any, path: tuple[str, ...] = ()) -> str | None:
    """Return a complaint if a field holds JavaScript code; None: no field holds such code.

    Python reads JavaScript code as text. The server does not treat it as text.
    """
    if path[-1:] in (("returns",), ("progress",)):
        return None
    if is_code(value):
        return f"{'.'.join(path)}: it is JavaScript code, not text"
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return next(filter(None, (_code_in(item, (*path, str(name))) for name, item in inner)), None)


# --- losses ----------------------------------------------------------------------------------------------

# Lost claims: a task whose claims are lost repeatedly is tried less often. So it does not keep the worker busy.

#: The number of lost claims in a row after which a task is paused. Fewer losses are usual: another worker was faster,
#: or the claim wrongly assumed that the task was simple.
_USUAL = 3
#: The first and the longest pause of a task after lost claims, in seconds. Each pause is twice the one before.
_PAUSE, _MAX_PAUSE = 0.1, 30.0
#: The number of lost claims in a row after which the task's whole document is examined.
_SUSPICIOUS = 6
#: The most tasks whose lost claims are counted. Tests tune it.
MAX_LOSSES = 10_000


@dataclass(slots=True)
class _Lost:
    count: int = 0
    paused_cnt: int = 0  #: the value of `count` when the task was last paused
    was_examined: bool = False


class Losses:
    """Counts how many claims of a task were lost in a row. The count ends when the task is no longer due."""

    def __init__(self) -> None:
        self._lost: OrderedDict[str, _Lost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, task_ids: Iterable[str]) -> None:
        """Count one more lost claim of each task. Beyond a maximum, forget the tasks with the oldest losses."""
        for task_id in task_ids:
            self._lost.setdefault(task_id, _Lost()).count += 1
            self._lost.move_to_end(task_id)
        while len(self._lost) > MAX_LOSSES:
            self._lost.popitem(last=False)

    def forget(self, task_id: str) -> None:
        """Forget the losses of a task. Call this when the task was claimed or is no longer due."""
        if self._lost:
            self._lost.pop(task_id, None)

    def pause(self, task_id: str) -> float:
        """Return the pause before the next try of a task, in seconds. Each loss causes at most one pause."""
        lost = self._lost.get(task_id)
        if lost is None or lost.count < _USUAL or lost.paused_cnt == lost.count:
            return 0.0
        lost.paused_cnt = lost.count
        return float(min(_PAUSE * 2 ** min(lost.count - _USUAL, 20), _MAX_PAUSE))

    def is_suspicious(self, task_id: str) -> bool:
        """Whether the task's whole document must be examined now. In a row of losses the answer is True only once."""
        lost = self._lost.get(task_id)
        if lost is None or lost.was_examined or lost.count < _SUSPICIOUS:
            return False
        lost.was_examined = True
        return True
