"""Lost claims: a task whose claims are lost repeatedly is tried less often. So it does not keep the worker busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

#: The number of lost claims in a row after which a task is paused. Fewer losses are usual: another worker was faster,
#: or the claim wrongly assumed that the task was simple.
_USUAL = 3
#: The first and the longest pause of a task after lost claims, in seconds. Each pause is twice the one before.
_PAUSE, _MAX_PAUSE = 0.1, 30.0
#: The number of lost claims in a row after which the task's whole document is examined.
_SUSPICIOUS = 6
_MAX_REMEMBERED = 10_000


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
        while len(self._lost) > _MAX_REMEMBERED:
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
