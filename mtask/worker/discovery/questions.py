"""Questions: the tasks that have to be read again, and when. Passive: `mtask.worker.discovery.lookups` answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from mtask.worker.admission.quarantine import Quarantine
from mtask.worker.log import fields, logger
from mtask.worker.state.due import DueLooks
from mtask.worker.state.ledger import Ledger

#: The most tasks that are looked at when they come due: about 200 bytes each.
_MAX_DUE_LOOKS = 10_000


class Questions:
    """What a hint alone does not tell."""

    def __init__(self, ledger: Ledger, quarantine: Quarantine) -> None:
        self._ledger = ledger
        self._quarantine = quarantine
        #: Tasks to be read now, by a name of their `_id` that is hashable.
        self.suspects: dict[str, Any] = {}
        #: Tasks whose documents raised an unforeseen error, or whose claims are lost again and again; and what is odd.
        self.doubted: list[tuple[Any, Exception | str]] = []
        #: Tasks whose run here may have to end.
        self.holders: set[str] = set()
        #: Tasks to be read when they come due.
        self.due = DueLooks(_MAX_DUE_LOOKS)
        #: Set when there is something to be read now; and when the first due look has changed.
        self.wake, self.wake_due = asyncio.Event(), asyncio.Event()
        #: Tasks that changed while their claim was under way; and whether in a way that concerns their holder.
        self._missed: dict[str, bool] = {}

    @property
    def is_any(self) -> bool:
        """Whether there is something to be read now."""
        return bool(self.suspects or self.holders or self.doubted)

    def suspect(self, task_id: Any) -> None:
        """Read this task soon."""
        # By its text: the `_id` of a malformed document need not be hashable.
        self.suspects[task_id if type(task_id) is str else repr(task_id)] = task_id
        self.wake.set()

    def suspect_all(self, task_ids: Iterable[Any]) -> None:
        """Read these tasks soon, with one batched read."""
        for task_id in task_ids:
            self.suspect(task_id)

    def cannot_take(self, task_id: Any, error: Exception) -> None:
        """Examine a task soon whose document raised an unforeseen error; to be called while that is handled."""
        if self.doubt(task_id, error):
            logger.exception("a document that cannot be taken is examined", extra=fields(task=repr(task_id)))

    def doubt(self, task_id: Any, error: Exception | str) -> bool:
        """Examine the whole document of a task soon, for this reason; return False where it is left alone for now."""
        if self._quarantine.is_left_alone(task_id):
            return False
        self.doubted.append((task_id, error))
        self.wake.set()
        return True

    def ask_holder(self, task_id: str) -> None:
        """Find out soon whether the run held here may go on; after the claim that is under way, if there is one."""
        if task_id in self._ledger.claiming:
            self._missed[task_id] = True
        else:
            self.holders.add(task_id)
            self.wake.set()

    def missed(self, task_id: str) -> None:
        """Note that a hint came while the task's claim was under way: the claim may be older than the hint."""
        self._missed.setdefault(task_id, False)

    def landed(self, task_ids: Iterable[str]) -> None:
        """Take up the hints that came while the claim of these tasks was under way."""
        if not self._missed:
            return
        for task_id in task_ids:
            concerns_holder = self._missed.pop(task_id, None)
            if concerns_holder is None:
                continue
            if self._ledger.held_run(task_id) is None:
                self.suspect(task_id)
            elif concerns_holder:
                self.ask_holder(task_id)

    def ask_when_due(self, task_id: str, when: float) -> None:
        """Read this task at a monotonic instant (seconds)."""
        self.due.put(task_id, when)
        if self.due.next_time() == when:
            self.wake_due.set()
