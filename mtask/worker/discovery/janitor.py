"""The janitor: settles lapsed runs that no worker has rescued, and finds malformed documents and unserved names.

The loop in `Scans.run` calls the janitor at intervals, and again after the database has failed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, MtaskError, OperationFailed
from mtask.store.driver.operation import within
from mtask.store.flows import retention, settling
from mtask.store.tasks import claims, finding
from mtask.worker.admission.quarantine import Quarantine
from mtask.worker.discovery.inbox import MAX_UNSERVED, Inbox
from mtask.worker.discovery.questions import Questions
from mtask.worker.log import fields, logger
from mtask.worker.state.scope import Scope

#: The time after a lease has lapsed, in ms. If no worker has preempted the task by then, any worker settles the run.
_SETTLE_GRACE_MS = 2_000
_SETTLE_LIMIT = 500
#: The time limit for settling tasks, whose documents may be locked. The second value is the most tasks that are settled
#: at the same time, each in a statement of its own.
_SETTLE_TIMEOUT, _MAX_APART = timedelta(seconds=1), 16
_MALFORMED_LIMIT = 1000
#: The time after which any worker tells the other tasks of a flow of a change. Usually whoever made the change does.
_OWED_GRACE = timedelta(seconds=2)
#: The most changes that a worker settles at once. Several workers may find the same changes. Each takes small groups in
#: an order of its own, and a group leaves out what others have settled meanwhile.
_OWED_GROUP = 100
#: The most batches of changes that one scan settles. A batch that cannot be settled now must not hold up the scan.
_OWED_ROUNDS = 40
#: The first and the longest pause of a change that cannot be settled, in seconds, and the most such changes that are
#: remembered. A document may be locked or malformed.
_HELD_UP_PAUSE, _MAX_HELD_UP_PAUSE, _MAX_HELD_UP = 5.0, 300.0, 1_000
#: While no flows are known, each n-th regular scan looks whether there are any: every 20 s. With flows, each n-th scan
#: looks for waiting tasks whose holder was removed, and for flows that have ended: once a minute.
_FLOWS_EVERY, _ORPHANS_EVERY = 4, 12


class Janitor:
    """Settles lapsed runs, and finds tasks that no scan for due tasks finds."""

    def __init__(self, scope: Scope, quarantine: Quarantine, questions: Questions, inbox: Inbox) -> None:
        self._scope = scope
        self._store = scope.store
        self._quarantine = quarantine
        self._questions = questions
        self._inbox = inbox
        #: The changes of steps that could not be settled: until when they are left alone, in monotonic seconds, and the
        #: last pause.
        self._held_up: dict[str, tuple[float, float]] = {}

    async def note_unserved(self) -> None:
        """Note the names of waiting tasks in this worker's queues for which this worker has no handler."""
        scope = self._scope
        for name in await self._store.run(finding.unserved_names(list(scope.queues), list(scope.names), MAX_UNSERVED)):
            self._inbox.note_unserved(str(name))

    async def look_for_malformed(self) -> None:
        """Ask for a lookup of the malformed documents that no scan can find."""
        found = await self._store.run(finding.undiscoverable(_MALFORMED_LIMIT))
        self._questions.suspect_all(document["_id"] for document in found)

    async def settle_lapsed(self) -> None:
        """Close the lapsed runs of tasks that no worker has preempted."""
        lapsed = await self._store.run(finding.lapsed(_SETTLE_GRACE_MS, _SETTLE_LIMIT))
        task_ids = [task_id for task_id in lapsed if not self._quarantine.is_left_alone(task_id)]
        if not task_ids:
            return
        try:
            if await self._store.run(claims.settle(task_ids, _SETTLE_TIMEOUT)) < len(task_ids):
                self._questions.suspect_all(task_ids)  # another worker was faster, or some tasks are malformed
        except (OperationFailed, DatabaseTimeout):
            # A single document that is malformed, too large or locked makes the whole batch fail or wait.
            await self._settle_apart(task_ids)

    async def settle_flows(self, count: int) -> None:
        """Do what is left undone in flows. `count` is the number of regular scans before this one.

        A database without flows only costs a look now and then: the change stream tells of new flows.
        """
        if count % _FLOWS_EVERY == 0:
            await self.look_for_flows()
        if not self._scope.ledger.has_flows:
            return
        await self._look_after(self.settle_owed)
        if count % _ORPHANS_EVERY == _ORPHANS_EVERY - 1:
            await self._look_after(self.decide_orphans)
            await self._look_after(self.end_flows)

    async def _look_after(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do one part of the work on flows. If it fails, neither the other parts nor the other tasks wait for it."""
        try:
            await work()
        except OperationFailed as error:
            self._warn_of_flows(error)
        except DatabaseTimeout as error:
            logger.warning("flows not looked after, a document may be locked", extra=fields(reason=str(error)))
        except DatabaseUnavailable:
            raise
        except Exception:
            logger.exception("flows not looked after")

    async def look_for_flows(self) -> None:
        """Look whether the database holds flows, unless that is known."""
        if self._scope.ledger.has_flows:
            return
        try:
            self._scope.ledger.has_flows = await self._store.run(settling.is_any())
        except OperationFailed as error:
            self._warn_of_flows(error)

    def _warn_of_flows(self, error: OperationFailed) -> None:
        # An index is missing, for example. The other tasks must not wait for that.
        logger.warning("flows not looked after; run `mtask init`", extra=fields(reason=str(error)))

    async def settle_owed(self) -> None:
        """Tell the tasks of flows of changes of which they have not been told, because a process died, for example."""
        for _ in range(_OWED_ROUNDS):
            now = monotonic()
            left = [task_id for task_id, (until, _) in self._held_up.items() if until > now]
            task_ids = await self._store.run(settling.owed(_OWED_GRACE, besides=left))
            if not task_ids:
                break
            random.shuffle(task_ids)
            for place in range(0, len(task_ids), _OWED_GROUP):
                await self._settle_owed_group(task_ids[place : place + _OWED_GROUP])
            if len(task_ids) < settling.BATCH:
                break

    async def _settle_owed_group(self, task_ids: Sequence[str]) -> None:
        """Settle these changes. If some cannot be settled, settle each apart, so that one holds up no other."""
        apart = [task_id for task_id in task_ids if task_id in self._held_up]
        together = [task_id for task_id in task_ids if task_id not in self._held_up]
        try:
            if together:
                await self._store.run(settling.settle_all(together))
        except DatabaseUnavailable as error:
            if not isinstance(error, DatabaseTimeout):
                raise
            apart += together
        except Exception:
            apart += together  # the one that cannot be settled is logged below
        at_once = asyncio.Semaphore(_MAX_APART)
        await asyncio.gather(*(self._settle_owed_alone(task_id, at_once) for task_id in apart))

    async def _settle_owed_alone(self, task_id: str, at_once: asyncio.Semaphore) -> None:
        # A locked document costs little, but a change that needs long gets its time at a later try.
        _, pause = self._held_up.get(task_id, (0.0, 0.0))
        limit = min(max(_SETTLE_TIMEOUT, timedelta(seconds=pause)), self._store.timeout)
        try:
            async with at_once:
                await self._store.run(within(settling.settle_all([task_id]), lambda: limit))
            self._held_up.pop(task_id, None)
        except DatabaseUnavailable as error:
            if not isinstance(error, DatabaseTimeout):
                raise
            self._hold_up(task_id, error)
        except Exception as error:
            self._hold_up(task_id, error)

    def _hold_up(self, task_id: str, error: Exception) -> None:
        """Do not settle this change for a while. Only the first failure is logged, and each pause is longer."""
        now = monotonic()
        if task_id not in self._held_up:
            reason = str(error) if isinstance(error, MtaskError) else repr(error)
            logger.warning(
                "change of a step not settled, left alone for a while", extra=fields(task=task_id, reason=reason)
            )
        _, pause = self._held_up.get(task_id, (now, _HELD_UP_PAUSE / 2))
        pause = min(2 * pause, _MAX_HELD_UP_PAUSE)
        self._held_up[task_id] = (now + pause, pause)
        if len(self._held_up) > _MAX_HELD_UP:
            del self._held_up[next(iter(self._held_up))]

    async def end_flows(self) -> None:
        """Begin the retention of flows that have ended."""
        await self._store.run(retention.end_flows())

    async def decide_orphans(self) -> None:
        """Decide on the waiting tasks whose holder somebody has removed from the database."""
        task_ids = await self._store.run(settling.orphans())
        if task_ids:
            await self._store.run(settling.settle_all(await self._store.run(settling.decide(task_ids))))

    async def _settle_apart(self, task_ids: Sequence[Any]) -> None:
        """Settle each task in a statement of its own.

        So a locked or unchangeable document does not hold up the others.
        """
        at_once = asyncio.Semaphore(_MAX_APART)
        await asyncio.gather(*(self._settle_alone(task_id, at_once) for task_id in task_ids))

    async def _settle_alone(self, task_id: Any, at_once: asyncio.Semaphore) -> None:
        try:
            async with at_once:
                await self._store.run(claims.settle([task_id], _SETTLE_TIMEOUT))
        except DatabaseTimeout:
            logger.warning("task is locked, left alone for a while", extra=fields(task=task_id))
            self._quarantine.hold_up(task_id)
        except OperationFailed as error:
            self._questions.doubt(task_id, error)
        except MtaskError as error:
            logger.warning("task not settled", extra=fields(task=task_id, reason=str(error)))
