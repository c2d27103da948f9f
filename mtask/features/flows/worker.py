"""Flows in a worker: tasks go on as others, what a dead process left undone is done, and the end of a flow is noticed.

It also says that values are lost that dead workers still owed, of any tasks: these have the same mark as changes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from time import monotonic

from mtask.errors import OperationFailed
from mtask.features.flows import read, retention
from mtask.features.flows import settle as settling
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import transactions, workers
from mtask.kernel.operations.relays import Relay, settle, settle_all
from mtask.kernel.worker.discovery.reaper import Silence
from mtask.kernel.worker.discovery.relays import Undone, look_after, warn_of_refusal
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope

#: The time after which any worker tells the other tasks of a flow of a change. Usually whoever made the change does.
#: Tests tune it.
OWED_GRACE = timedelta(seconds=2)
#: The most batches of changes that one scan settles. A batch that cannot be settled now must not hold up the scan.
_OWED_ROUNDS = 40
#: While no flows are known, each n-th regular scan looks for a task that owes others something: every 20 s. With flows,
#: each n-th scan looks for waiting tasks whose holder was removed, and for flows that have ended: once a minute. So a
#: flow in which no task owes anything is looked for as seldom.
_OWED_EVERY, _ORPHANS_EVERY = 4, 12
#: The fields of tasks that this part looks after.
_FIELDS = frozenset({"flow", "chain"})


class FlowPart(Part):
    """Settles changes of steps that nobody has settled, and ends flows."""

    def __init__(self, scope: Scope, incarnation: str, relays: Sequence[Relay]) -> None:
        """`incarnation`: that of this worker. `relays`: that of flows, and those that settle what follows from it."""
        self._incarnation = incarnation
        self._relays = relays
        self._ledger = scope.ledger
        self._store = scope.store
        self._silence = Silence()
        self._owed: Undone[str] = Undone(
            scope.store, partial(settle, relays), lambda task_id: task_id, "change of a step not settled"
        )

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Do what is left undone in flows.

        A database without flows only costs a look now and then: the change stream tells of new flows.
        """
        if is_full or count % _ORPHANS_EVERY == 0:
            await self._look_for(read.is_any())
        if count % _OWED_EVERY == 0 and count % _ORPHANS_EVERY:
            await self._look_for(read.is_any_owed())
        if not self._has_flows:
            return
        await look_after("lost values", self._lose_values)
        await look_after("flows", self._settle_owed)
        if count % _ORPHANS_EVERY == _ORPHANS_EVERY - 1:
            await look_after("flows", self._decide_orphans)
            await look_after("flows", self._end_flows)

    @property
    def _has_flows(self) -> bool:
        """Whether the database is known to hold flows, or tasks that go on as others."""
        return not self._ledger.owing.isdisjoint(_FIELDS)

    async def _look_for(self, question: Operation[bool]) -> None:
        if self._has_flows:
            return
        try:
            if await self._store.run(question):
                self._ledger.owing.add("flow")
        except OperationFailed as error:
            warn_of_refusal("flows", error)

    async def _lose_values(self) -> None:
        """Say of the values that are still to be returned which are lost, because the workers are dead.

        So are those of handlers of this worker that have ended: if the answer to a commit was lost, a handler fails and
        returns nothing.
        """
        owed = await self._store.run(transactions.owed_returns())
        for run_id, (task_id, incarnation) in owed.runs.items():
            if incarnation != self._incarnation or run_id in self._ledger.running:
                continue
            # The value may have come since the read. Then nothing is lost.
            if await self._store.run(transactions.lose_return(task_id, run_id, transactions.UNANSWERED)):
                logger.warning("value lost: its handler has ended", extra=fields(task=task_id, run=run_id))
        worker_ids = sorted({*owed.workers.values()})
        signs = await self._store.run(workers.signs_of_life(worker_ids)) if worker_ids else []
        ended, silent = transactions.gone(owed, signs)
        dead = ended | self._silence.dead_among(silent, monotonic())
        if dead:
            await self._store.run(transactions.lose_returns_of(owed, dead))
            logger.warning("values lost: their workers are gone", extra=fields(tasks=len(owed.task_ids)))

    async def _settle_owed(self) -> None:
        """Tell the tasks of flows of changes of which they have not been told, because a process died, for example."""
        for _ in range(_OWED_ROUNDS):
            task_ids = await self._store.run(read.owed(OWED_GRACE, besides=self._owed.left_alone()))
            random.shuffle(
                task_ids
            )  # several workers may find the same changes: each takes them in an order of its own
            await self._owed.settle(task_ids)
            if len(task_ids) < read.BATCH:
                break

    async def _end_flows(self) -> None:
        """Begin the retention of flows that have ended."""
        await self._store.run(retention.end_flows())

    async def _decide_orphans(self) -> None:
        """Decide on the waiting tasks whose holder somebody has removed from the database."""
        task_ids = await self._store.run(read.orphans())
        if task_ids:
            decided = await self._store.run(settling.decide(task_ids))
            await self._store.run(settle_all(self._relays, decided.further))
