"""Ranks: which of the live workers goes first for a task, and which tasks this worker ranks first for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtask.store.statements.filters import Filter, of_shares
from mtask.worker.state.peers import Peers
from mtask.worker.state.queue import PreemptionQueue
from mtask.worker.state.scope import Scope


class Ranks:
    """Ranks this worker among its peers, and the queue's tasks by that."""

    def __init__(self, scope: Scope, queue: PreemptionQueue) -> None:
        self._ledger = scope.ledger
        self._names = scope.names
        self._queue = queue
        self._peers = Peers(scope.worker_id, scope.queues)

    async def take(self, live: Sequence[Mapping[str, Any]]) -> None:
        """Rank anew among these workers."""
        # In a thread: ranks among a thousand workers take a tenth of a second.
        await asyncio.to_thread(self._peers.prepare, live, self._names)
        self._peers.update(live)
        self._queue.rerank((task_id, self.rank(task_id, name)) for task_id, name in self._queue.names())

    def rank(self, task_id: str, name: str) -> int:
        """Return how many live workers go before this one for the task."""
        # A task that is due again after a run here did not succeed. Another worker may do better; ranked by the task's
        # id alone, it would come back here each time, until its limit is used up.
        return self._peers.last(name) if self._ledger.was_claimed(task_id) else self._peers.rank(task_id, name)

    def share(self, names: Iterable[str]) -> tuple[list[Filter], float]:
        """Return a filter that matches only tasks this worker ranks first for, and at least which part of all that is.

        No filter where all of them are its own.
        """
        shares = self._peers.shares(names)
        part = min((slots.count("1") / len(slots) for _, slots in shares), default=1.0)
        return ([of_shares(shares)] if shares else []), part
