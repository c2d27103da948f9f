"""Limits: takes permits for tasks before the claim. A task that gets no permit is parked until a permit may be free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

from mtask.errors import DatabaseError
from mtask.model.controls import Limit
from mtask.model.documents import StoredTask
from mtask.store.queues import permits
from mtask.store.queues.permits import HeldPermit, PermitPool, PermitRequest
from mtask.store.statements.filters import Filter, in_time, of_others, of_queues_and_keys
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.parking import RECLAIM, Parking
from mtask.worker.log import fields, logger
from mtask.worker.state.lapses import count_lapses
from mtask.worker.state.queue import Entry
from mtask.worker.state.scope import Scope

#: The longest time before another search for dead runs in the same pool, in seconds.
_MAX_RECLAIM = 5.0
#: The most pools that one search for the permits of dead runs covers.
_MAX_POOLS = 200


@dataclass(frozen=True, slots=True)
class Admitted:
    """The result of taking permits for the tasks of one claim."""

    #: The ids of the tasks that got all their permits.
    task_ids: list[str]
    #: The token under which the permits were taken. The run_ids of the claim begin with this token.
    token: str
    #: The permits that each task's run will hold. The key is the task's id.
    held: Mapping[str, Sequence[HeldPermit]]
    #: The pools that granted a permit to each task. The key is the task's id.
    granted: Mapping[str, Sequence[PermitPool]]
    #: All pools that received a request for permits.
    asked: frozenset[PermitPool]
    #: The tasks that got one permit but lack another permit. These tasks are not claimed.
    refused: Sequence[str]
    #: The time until which the tasks may be claimed, by the server's clock; None: no permit was requested.
    claim_by: datetime | None
    #: The queue, the limit_key and the tenant of each task. The guard of the claim refuses a task if one of these has
    #: changed since.
    of: frozenset[tuple[str, str | None, str | None]]

    @property
    def guard(self) -> list[Filter]:
        """The conditions of the claim: what the permits count is unchanged, and `claim_by` has not passed."""
        guards = [of_queues_and_keys(sorted(self.of, key=str))]
        return guards if self.claim_by is None else [*guards, in_time(self.claim_by)]


#: The kinds of limits that may hold for one task: of its limit_key, of its tenant in the queue, of its tenant, and of
#: its queue.
_SCOPES = 4


class Limits:
    """Keeps this worker's claims within the limits of its queues."""

    def __init__(self, scope: Scope, controls: Controls) -> None:
        self._scope = scope
        self._store = scope.store
        self._controls = controls
        self.parking = Parking(scope, controls)
        self._held: dict[tuple[str, str], Sequence[HeldPermit]] = {}
        self._to_give_back: list[HeldPermit] = []
        self._giving = asyncio.Event()
        self._is_stopping = False

    @property
    def is_any(self) -> bool:
        """Whether any queue of this worker, or any tenant, has a limit."""
        return bool(self._controls.limits or self._controls.tenant_limits)

    def is_limited(self, task: Entry | StoredTask) -> bool:
        """Whether a task may need a permit. If its queue is unknown, it may need one if any queue has a limit."""
        if task.tenant in self._controls.tenant_limits:
            return True
        return task.queue in self._controls.limits if task.queue is not None else self.is_any

    def guard_of_free(self) -> list[Filter]:
        """Return the guard of a claim without permits. The guard refuses a task that needs one after all."""
        if not self.is_any:
            return []
        return [of_others(sorted(self._controls.limits), sorted(self._controls.tenant_limits))]

    async def admit(self, tasks: Sequence[StoredTask], token: str) -> Admitted:
        """Take permits for these tasks, in the given order. Park each task that does not get all its permits.

        Raises DatabaseError. The permits that were granted before the error are given back.
        """
        wanted = {task.id: task for task in tasks if not self.parking.park_task(task)}
        asked: set[PermitPool] = set()
        held: dict[str, list[HeldPermit]] = {}
        granted: dict[str, list[PermitPool]] = {}
        claim_by: datetime | None = None
        try:
            # The narrower pools come first: a task without a permit of its limit_key must not take a permit of its
            # queue.
            for scope in range(_SCOPES):
                requests = self._requests(wanted.values(), scope)
                if not requests:
                    continue
                asked.update(request.pool for request in requests)
                answers = await self._store.run(permits.take(requests, token))
                for request in requests:
                    answer = answers.get(request.pool, permits.NONE)
                    claim_by = min(filter(None, (claim_by, answer.claim_by)), default=None)
                    for task_id in answer.task_ids:
                        granted.setdefault(task_id, []).append(request.pool)
                        if request.limit.concurrency is not None:
                            held.setdefault(task_id, []).append(HeldPermit(request.pool, task_id, token))
                    refused_tasks = [wanted.pop(t) for t in request.task_ids if t not in answer.task_ids]
                    self.parking.take_answer(request, answer, refused_tasks)
        except DatabaseError:
            await self.settle(Admitted([], token, {}, granted, frozenset(asked), [], None, frozenset()), {}, [*granted])
            raise
        refused = [task_id for task_id in granted if task_id not in wanted]
        of = frozenset((task.queue, task.task_option.limit_key, task.tenant) for task in wanted.values())
        admitted = Admitted(list(wanted), token, held, granted, frozenset(asked), refused, claim_by, of)
        if refused and not wanted:
            await self.settle(admitted, {}, ())
        return admitted

    def _requests(self, tasks: Iterable[StoredTask], scope: int) -> list[PermitRequest]:
        """Return the requests for the permits of one kind. `scope`: its number, the narrowest kind is 0."""
        found: dict[PermitPool, tuple[Limit, list[str]]] = {}
        for task in tasks:
            control = self._controls.limits.get(task.queue)
            key, tenant = task.task_option.limit_key, task.tenant
            limit, pool = (
                (control and key is not None and control.key_limit, PermitPool(task.queue, key)),
                (control and tenant is not None and control.tenant_limit, PermitPool(task.queue, tenant=tenant)),
                (self._controls.tenant_limits.get(tenant or ""), PermitPool(None, tenant=tenant)),
                (control and control.limit, PermitPool(task.queue)),
            )[scope]
            if limit:
                found.setdefault(pool, (limit, []))[1].append(task.id)
        return [PermitRequest(pool, limit, task_ids) for pool, (limit, task_ids) in found.items()]

    def hold(self, admitted: Admitted, task_ids: Iterable[str]) -> None:
        """Remember the permits of these tasks' runs until `release`."""
        for task_id in task_ids:
            if task_id in admitted.held:
                self._held[admitted.token, task_id] = admitted.held[task_id]

    async def settle(self, admitted: Admitted, claimed: Mapping[str, datetime], lost: Sequence[str]) -> None:
        """Store the claim times of the claimed tasks, and give back the permits of the lost tasks.

        If a task is neither claimed nor lost, the result of its claim is unknown, and the task keeps its permits. If
        the write fails, the permits are reclaimed later: a search finds that their runs do not exist.
        """
        gone = [*lost, *admitted.refused]
        try:
            await self._store.run(permits.settle(admitted.asked, admitted.token, claimed, gone))
        except DatabaseError as error:
            logger.warning(
                "permits not settled: they are reclaimed later", extra=fields(tasks=len(gone), reason=str(error))
            )
        self.parking.try_again({pool for task_id in gone for pool in admitted.granted.get(task_id, ())})

    def release(self, task_id: str, run_id: str, *, is_closed: bool) -> None:
        """Forget the permits of a run, and give them back if `is_closed`.

        `is_closed`: the run is closed, or its task was removed.
        """
        if not self._held:
            return
        held = self._held.pop((permits.token_of(run_id), task_id), None)
        if held and is_closed:
            self._to_give_back += held
            self._giving.set()

    async def run(self) -> None:
        """Let parked tasks try again when permits may be free, until `stop_trying`."""
        while not self.parking.is_closed:
            await self.parking.wait()
            try:
                await self._reclaim_dead()
            except DatabaseError as error:
                logger.warning(
                    "permits of dead runs not reclaimed, will be tried again", extra=fields(reason=str(error))
                )
            except Exception:
                logger.exception("permits of dead runs not reclaimed, will be tried again")
            self.parking.try_due()

    async def run_giving_back(self) -> None:
        """Give back the permits of closed runs. After `stop`, give back the remaining permits and end."""
        while not self._is_stopping or self._to_give_back:
            await self._giving.wait()
            self._giving.clear()
            held, self._to_give_back = self._to_give_back, []
            if not held:
                continue
            try:
                await self._store.run(permits.give_back(held))
            except DatabaseError as error:
                # The permits are not lost. The search for dead runs will find that the runs of these permits are
                # closed.
                logger.warning(
                    "permits not given back: they are reclaimed later", extra=fields(runs=len(held), reason=str(error))
                )
            self.parking.try_again({entry.pool for entry in held})

    def stop_trying(self) -> None:
        """End `run`."""
        self.parking.close()

    def stop(self) -> None:
        """End `run_giving_back` once all permits of closed runs are given back."""
        self.stop_trying()
        self._is_stopping = True
        self._giving.set()

    async def _reclaim_dead(self) -> None:
        """Give back the permits that dead runs hold in those pools for which the search is due."""
        now = monotonic()
        crowded = self.parking.crowded(now)
        asked = list(crowded)[:_MAX_POOLS]
        for pool in asked:
            crowded[pool].reclaim_at = now + RECLAIM
        if not asked:
            return
        reclaimed = await self._store.run(permits.reclaim(asked))
        await count_lapses(self._scope, reclaimed.lapsed, reclaimed.closed_cnt)
        if reclaimed.has_found:
            self.parking.try_again(asked)
            return
        # The next search is due when the next lease lapses, but after `_MAX_RECLAIM` at the latest. The limit is needed
        # because a worker may close a run and die before it gives the permit back.
        lapse = _MAX_RECLAIM if reclaimed.next_lapse is None else reclaimed.next_lapse.total_seconds()
        for pool in asked:
            crowded[pool].reclaim_at = now + min(max(RECLAIM, lapse), _MAX_RECLAIM)
