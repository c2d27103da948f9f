"""The room for isolated handlers: how many of their tasks a worker claims. The others stay for other workers."""

from __future__ import annotations

from collections.abc import Mapping

from mtask.features.isolation.pool import Executors
from mtask.kernel.document.handlers import Handler
from mtask.kernel.worker.process.state import Ledger

#: A claim waits until there is room for this part of the runs that may wait for an executor: one in this number.
_LEAST_SHARE = 3


class ExecutorRoom:
    """Counts the runs of isolated handlers that the worker holds or claims, against the executors."""

    def __init__(self, ledger: Ledger, handlers: Mapping[str, Handler], executors: Executors) -> None:
        self._ledger = ledger
        self._executors = executors
        self._names = frozenset(name for name, handler in handlers.items() if executors.execution(handler) is not None)
        self.is_shared = len(self._names) < len(handlers)  #: whether the worker has other handlers, too

    def isolates(self, name: str) -> bool:
        """Whether tasks of this name run in executors."""
        return name in self._names

    def count(self) -> int:
        """Return the number of tasks of isolated handlers that the worker should claim now."""
        names = self._names
        held = sum(run.name in names for run in self._ledger.held)
        claiming = sum(task_id.partition(":")[0] in names for task_id in self._ledger.claiming)
        width = self._executors.width
        room = width - held - claiming
        # One claim takes several tasks. Each run that ends wakes the claimer, which looks again then.
        return room if room * _LEAST_SHARE >= width - self._executors.size else 0

    def count_idle(self) -> int:
        """Return the number of tasks of isolated handlers that could begin at once.

        If it is 0, an executor is started, as far as the options allow. It wakes the claimer when it is ready.
        """
        waiting = sum(run.name in self._names and run.began_at is None for run in self._ledger.held)
        claiming = sum(task_id.partition(":")[0] in self._names for task_id in self._ledger.claiming)
        idle = self._executors.idle_cnt - waiting - claiming
        if idle <= 0:
            self._executors.prepare()
        return max(0, idle)
