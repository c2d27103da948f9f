"""The janitor of flows: does what a process left undone when it died, and notices that a flow has ended.

The loop in `Scans.run` calls it at intervals, and again after the database has failed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from time import monotonic

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, MtaskError, OperationFailed
from mtask.store.driver.operation import within
from mtask.store.flows import deciding, finding, looking, retention, settling
from mtask.worker.log import fields, logger
from mtask.worker.state.scope import Scope

#: The time limit for settling a change alone, whose document may be locked, and the most that are settled so at once.
_ALONE_TIMEOUT, _MAX_ALONE = timedelta(seconds=1), 16
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


class FlowJanitor:
    """Settles changes of steps that nobody has settled, and ends flows."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._store = scope.store
        #: The changes of steps that could not be settled: until when they are left alone, in monotonic seconds, and the
        #: last pause.
        self._held_up: dict[str, tuple[float, float]] = {}

    async def look_after(self, count: int) -> None:
        """Do what is left undone in flows. `count` is the number of regular scans before this one.

        A database without flows only costs a look now and then: the change stream tells of new flows.
        """
        if count % _FLOWS_EVERY == 0:
            await self.look_for_flows()
        if not self._scope.ledger.has_flows:
            return
        await self._try(self._settle_owed)
        if count % _ORPHANS_EVERY == _ORPHANS_EVERY - 1:
            await self._try(self._decide_orphans)
            await self._try(self._end_flows)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
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
            self._scope.ledger.has_flows = await self._store.run(finding.is_any())
        except OperationFailed as error:
            self._warn_of_flows(error)

    def _warn_of_flows(self, error: OperationFailed) -> None:
        # An index is missing, for example. The other tasks must not wait for that.
        logger.warning("flows not looked after; run `mtask init`", extra=fields(reason=str(error)))

    async def _settle_owed(self) -> None:
        """Tell the tasks of flows of changes of which they have not been told, because a process died, for example."""
        for _ in range(_OWED_ROUNDS):
            now = monotonic()
            left = [task_id for task_id, (until, _) in self._held_up.items() if until > now]
            task_ids = await self._store.run(finding.owed(_OWED_GRACE, besides=left))
            if not task_ids:
                break
            random.shuffle(task_ids)
            for place in range(0, len(task_ids), _OWED_GROUP):
                await self._settle_owed_group(task_ids[place : place + _OWED_GROUP])
            if len(task_ids) < looking.BATCH:
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
        at_once = asyncio.Semaphore(_MAX_ALONE)
        await asyncio.gather(*(self._settle_owed_alone(task_id, at_once) for task_id in apart))

    async def _settle_owed_alone(self, task_id: str, at_once: asyncio.Semaphore) -> None:
        # A locked document costs little, but a change that needs long gets its time at a later try.
        _, pause = self._held_up.get(task_id, (0.0, 0.0))
        limit = min(max(_ALONE_TIMEOUT, timedelta(seconds=pause)), self._store.timeout)
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

    async def _end_flows(self) -> None:
        """Begin the retention of flows that have ended."""
        await self._store.run(retention.end_flows())

    async def _decide_orphans(self) -> None:
        """Decide on the waiting tasks whose holder somebody has removed from the database."""
        task_ids = await self._store.run(finding.orphans())
        if task_ids:
            decided = await self._store.run(deciding.decide(task_ids))
            await self._store.run(settling.settle_all(decided.further))
