"""The janitor of tasks: settles lapsed runs that no worker has rescued, and finds malformed and unserved tasks.

The loop in `Scans.run` calls it at intervals, and again after the database has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from mtask.errors import DatabaseTimeout, MtaskError, OperationFailed
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due
from mtask.kernel.worker.discovery.inbox import MAX_UNSERVED, Inbox, Questions
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope

#: The time after a lease has lapsed, in ms. If no worker has preempted the task by then, any worker settles the run.
#: Tests tune it.
SETTLE_GRACE_MS = 2_000
_SETTLE_LIMIT = 500
#: The time limit for settling tasks, whose documents may be locked. The second value is the most tasks that are settled
#: at the same time, each in a statement of its own.
_SETTLE_TIMEOUT, _MAX_APART = timedelta(seconds=1), 16
_MALFORMED_LIMIT = 1000


class TaskJanitor:
    """Settles lapsed runs, and finds tasks that no scan for due tasks finds."""

    def __init__(self, scope: Scope, quarantine: Quarantine, questions: Questions, inbox: Inbox) -> None:
        self._scope = scope
        self._store = scope.store
        self._quarantine = quarantine
        self._questions = questions
        self._inbox = inbox

    async def note_unserved(self) -> None:
        """Note the names of waiting tasks in this worker's queues for which this worker has no handler."""
        scope = self._scope
        for name in await self._store.run(find_due.unserved_names(list(scope.queues), list(scope.names), MAX_UNSERVED)):
            self._inbox.note_unserved(str(name))

    async def look_for_malformed(self) -> None:
        """Ask for a lookup of the malformed documents that no scan can find."""
        found = await self._store.run(find_due.undiscoverable(_MALFORMED_LIMIT))
        self._questions.suspect_all(document["_id"] for document in found)

    async def settle_lapsed(self) -> None:
        """Close the lapsed runs of tasks that no worker has preempted."""
        lapsed = await self._store.run(find_due.lapsed(SETTLE_GRACE_MS, _SETTLE_LIMIT))
        task_ids = [task_id for task_id in lapsed if not self._quarantine.is_left_alone(task_id)]
        if not task_ids:
            return
        try:
            closed_cnt = await self._store.run(claims.settle(task_ids, _SETTLE_TIMEOUT))
            await count_lapses(self._scope, task_ids, closed_cnt)
            if closed_cnt < len(task_ids):
                self._questions.suspect_all(task_ids)  # another worker was faster, or some tasks are malformed
        except (OperationFailed, DatabaseTimeout):
            # A single document that is malformed, too large or locked makes the whole batch fail or wait.
            await self._settle_apart(task_ids)

    async def _settle_apart(self, task_ids: Sequence[Any]) -> None:
        """Settle each task in a statement of its own.

        So a locked or unchangeable document does not hold up the others.
        """
        at_once = asyncio.Semaphore(_MAX_APART)
        await asyncio.gather(*(self._settle_alone(task_id, at_once) for task_id in task_ids))

    async def _settle_alone(self, task_id: Any, at_once: asyncio.Semaphore) -> None:
        try:
            async with at_once:
                closed_cnt = await self._store.run(claims.settle([task_id], _SETTLE_TIMEOUT))
            await count_lapses(self._scope, [task_id], closed_cnt)
        except DatabaseTimeout:
            logger.warning("task is locked, left alone for a while", extra=fields(task=task_id))
            self._quarantine.hold_up(task_id)
        except OperationFailed as error:
            self._questions.doubt(task_id, error)
        except MtaskError as error:
            logger.warning("task not settled", extra=fields(task=task_id, reason=told(error)))


# --- silence ---------------------------------------------------------------------------------------------

# Which silent workers count as dead: those that were seen to be silent for long.

#: The time for which a worker must be seen to be silent, in seconds. Its heartbeat has expired before. After the
#: database was away, the heartbeats of all workers may have expired, but each worker beats again sooner than this.
SILENCE = 15.0


class Silence:
    """Remembers since when workers are silent, by their incarnations."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._looked_at = 0.0

    def dead_among(self, silent: Collection[str], now: float) -> set[str]:
        """Return those that are silent for long. `now` is in monotonic seconds.

        Where nobody could look for long, the database was away. Then the time counts anew.
        """
        before = {} if now - self._looked_at > SILENCE else self._since
        self._looked_at = now
        self._since = {one: before.get(one, now) for one in silent}
        return {one for one, since in self._since.items() if now - since >= SILENCE}


# --- reaped ----------------------------------------------------------------------------------------------

# Counts lapsed runs that this worker has closed without a claim.

#: No statement that closes lapsed runs takes longer, together with its time limit.
_RECENT = timedelta(seconds=15)


async def count_lapses(scope: Scope, task_ids: Collection[Any], task_cnt: int) -> None:
    """Count the lapsed runs of a statement that has changed this number of these tasks. Leases seldom lapse.

    An error only makes the count too low.
    """
    if not task_cnt:
        return
    try:
        scope.meter.lapsed(
            await scope.store.run(find_due.lapses_closed(task_ids, task_cnt, scope.clock.now() - _RECENT))
        )
    except MtaskError as error:
        logger.warning("lapsed runs not counted", extra=fields(tasks=task_cnt, reason=told(error)))
