"""The janitor: settles lapsed runs that no worker has rescued, and finds malformed documents and unserved names.

The loop in `Scans.run` calls the janitor at intervals, and again after the database has failed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mtask.errors import DatabaseTimeout, MtaskError, OperationFailed
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
        try:
            if self._scope.ledger.has_flows:
                await self.settle_owed()
                if count % _ORPHANS_EVERY == _ORPHANS_EVERY - 1:
                    await self.decide_orphans()
                    await self._store.run(retention.end_flows())
        except OperationFailed as error:
            self._warn_of_flows(error)

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
            task_ids = await self._store.run(settling.owed(_OWED_GRACE))
            if not task_ids:
                break
            random.shuffle(task_ids)
            for place in range(0, len(task_ids), _OWED_GROUP):
                await self._settle_owed_group(task_ids[place : place + _OWED_GROUP])
            if len(task_ids) < settling.BATCH:
                break

    async def _settle_owed_group(self, task_ids: Sequence[str]) -> None:
        """Settle these changes. If the server refuses something, settle each apart, so that one holds up no other."""
        try:
            await self._store.run(settling.settle_all(task_ids))
        except OperationFailed:
            for task_id in task_ids:
                try:
                    await self._store.run(settling.settle_all([task_id]))
                except OperationFailed as error:
                    logger.warning("change of a step not settled", extra=fields(task=task_id, reason=str(error)))

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
