"""Lost claims: after repeated losses a task is tried at growing intervals, so that it does not keep the worker busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

#: The number of losses in a row from which a task is paused. Fewer losses are usual: another worker was faster, or the
#: task was not as simple as it seemed.
_USUAL = 3
#: The first pause of such a task, and the longest, in seconds. Each pause is twice as long as the one before.
_PAUSE, _MAX_PAUSE = 0.1, 30.0
#: The number of losses in a row after which the whole document is examined.
_SUSPICIOUS = 6
_MAX_REMEMBERED = 10_000


@dataclass(slots=True)
class _Lost:
    count: int = 0
    paused_cnt: int = 0  #: the count of losses at the last pause
    was_examined: bool = False


class Losses:
    """Counts for each task the claims that were lost in a row while the task stayed due."""

    def __init__(self) -> None:
        self._lost: OrderedDict[str, _Lost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, task_ids: Iterable[str]) -> None:
        """Count one more lost claim of each task. Beyond a maximum the tasks with the oldest losses are forgotten."""
        for task_id in task_ids:
            self._lost.setdefault(task_id, _Lost()).count += 1
            self._lost.move_to_end(task_id)
        while len(self._lost) > _MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def forget(self, task_id: str) -> None:
        """Forget the losses of a task: it was claimed, or is not due any more."""
        if self._lost:
            self._lost.pop(task_id, None)

    def pause(self, task_id: str) -> float:
        """Return the pause, in seconds, before a task that is still due is tried again. Each loss causes one pause."""
        lost = self._lost.get(task_id)
        if lost is None or lost.count < _USUAL or lost.paused_cnt == lost.count:
            return 0.0
        lost.paused_cnt = lost.count
        return float(min(_PAUSE * 2 ** min(lost.count - _USUAL, 20), _MAX_PAUSE))

    def is_suspicious(self, task_id: str) -> bool:
        """Whether the whole document is to be examined now. The answer is True only once in a row of losses."""
        lost = self._lost.get(task_id)
        if lost is None or lost.was_examined or lost.count < _SUSPICIOUS:
            return False
        lost.was_examined = True
        return True
