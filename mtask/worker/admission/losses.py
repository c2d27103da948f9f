"""Claims in vain: a task that looks due and is not taken, again and again, is tried ever more rarely."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

#: So many losses in a row are usual: another worker was faster, or the task was not as plain as it looked.
_USUAL = 3
#: The first pause after them, in seconds; twice as long each time, and at most.
_PAUSE, _MAX_PAUSE = 0.1, 30.0
#: After so many losses the whole document is examined.
_SUSPICIOUS = 6
_MAX_REMEMBERED = 10_000


@dataclass(slots=True)
class _Lost:
    count: int = 0
    paused_cnt: int = 0  #: the losses that were paused for
    was_examined: bool = False


class Losses:
    """Counts the claims of each task that were lost in a row, though nobody else took it."""

    def __init__(self) -> None:
        self._lost: OrderedDict[str, _Lost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, task_ids: Iterable[str]) -> None:
        """Count one more lost claim of each; the longest known are forgotten where there are many."""
        for task_id in task_ids:
            self._lost.setdefault(task_id, _Lost()).count += 1
            self._lost.move_to_end(task_id)
        while len(self._lost) > _MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def forget(self, task_id: str) -> None:
        """Begin anew: the task was taken, or is not due any more."""
        if self._lost:
            self._lost.pop(task_id, None)

    def pause(self, task_id: str) -> float:
        """Return the seconds until a task that is still due should be tried again: once for each loss."""
        lost = self._lost.get(task_id)
        if lost is None or lost.count < _USUAL or lost.paused_cnt == lost.count:
            return 0.0
        lost.paused_cnt = lost.count
        return float(min(_PAUSE * 2 ** min(lost.count - _USUAL, 20), _MAX_PAUSE))

    def is_suspicious(self, task_id: str) -> bool:
        """Whether the document is to be examined now: once in a row of losses."""
        lost = self._lost.get(task_id)
        if lost is None or lost.was_examined or lost.count < _SUSPICIOUS:
            return False
        lost.was_examined = True
        return True
