"""Ranks: orders the live workers for each task, and finds the share of tasks for which this worker ranks first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtask.kernel.statements.filters import Filter, Shares, of_shares
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fleet import Peers
from mtask.kernel.worker.process import aside
from mtask.kernel.worker.process.scope import Scope

#: Of the new tasks of a name that this number of other workers serve, or more, a worker hears only if it is among the
#: first `_HEARERS` for the task.
_FLEET, _HEARERS = 3, 2


class Ranks:
    """Ranks this worker among all live workers, and orders the preemption queue by these ranks."""

    def __init__(self, scope: Scope, queue: PreemptionQueue) -> None:
        self._ledger = scope.ledger
        self._worker_id = scope.worker_id
        self._names = scope.names
        self._queue = queue
        self._peers = Peers(scope.worker_id, scope.queues)
        #: The number of times that the ranks were computed.
        self.version = 0
        #: The shares of new tasks of which this worker must hear; None: of all tasks, as it is not one of a fleet.
        self.heard: Shares | None = None

    async def take(self, live: Sequence[Mapping[str, Any]]) -> bool:
        """Compute the ranks again for these live workers; return False if nothing that matters has changed."""
        self._ledger.has_peers = any(worker["_id"] != self._worker_id for worker in live)
        if not self._peers.is_news(live):
            return False
        # The computation runs in a thread, because it takes 0.1 s for a thousand workers.
        await aside.to_thread(self._peers.prepare, live, self._names)
        self._peers.update(live)
        self.version += 1
        shares = self._peers.shares(self._names, _HEARERS, _FLEET) if self._peers.do_all_appeal else []
        self.heard = shares if any("0" in buckets for _, buckets in shares) else None
        self._queue.rerank((task_id, self.rank(task_id, name)) for task_id, name in self._queue.names())
        return True

    def rank(self, task_id: str, name: str) -> int:
        """Return this worker's rank: the number of live workers that should try the task before this worker."""
        # If this worker has claimed the task before, the run did not succeed. Another worker may do better, so this
        # worker ranks last. If only the task's id decided, the task might come back to this worker until no try is
        # left.
        return self._peers.last(name) if self._ledger.was_claimed(task_id) else self._peers.rank(task_id, name)

    def rank_in_share(self, task_id: str, name: str) -> int:
        """Return the same as `rank` for a task that is in this worker's share."""
        if self._ledger.was_claimed(task_id):
            return self._peers.last(name)
        # To find the bucket takes a third of all that is done for a task of a scan.
        return 0 if self._peers.is_divided(name) else self._peers.rank(task_id, name)

    def has_others(self, names: Iterable[str]) -> bool:
        """Whether other live workers share the tasks of these names with this worker."""
        return self._peers.has_others(names)

    def share(self, names: Iterable[str]) -> tuple[list[Filter], float]:
        """Return the filter for this worker's share, and the size of the share as a fraction of all tasks.

        The share is the tasks for which this worker ranks first. If the fraction differs between the names, the
        smallest is returned. If this worker ranks first for all tasks, the list of filters is empty.
        """
        shares = self._peers.shares(names)
        fraction = min((buckets.count("1") / len(buckets) for _, buckets in shares), default=1.0)
        return ([of_shares(shares)] if shares else []), fraction
