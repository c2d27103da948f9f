"""Limits: takes permits for tasks before the claim. A task that gets no permit is parked until a permit may be free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from time import monotonic

from mtask.errors import DatabaseError
from mtask.model.controls import Limit
from mtask.model.documents import StoredTask
from mtask.store.queues import permits
from mtask.store.queues.permits import HeldPermit, PermitGrant, PermitPool, PermitRequest
from mtask.store.statements.filters import Filter, in_time, of_others, of_queues_and_keys
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.parking import ParkedTasks, Rank
from mtask.worker.log import fields, logger
from mtask.worker.state.lapses import count_lapses
from mtask.worker.state.queue import Entry
from mtask.worker.state.scope import Scope
from mtask.worker.state.timing import wake_or_wait

#: The first and the longest pause before the next request to a pool that had no free permit, in seconds. Each refusal
#: doubles the pause. A random factor keeps the workers from sending their requests at the same instant.
_CROWDED, _MAX_CROWDED = 0.25, 1.0
#: The shortest and the longest time before a search for dead runs, in seconds. A pool is searched if runs hold all its
#: permits.
_RECLAIM, _MAX_RECLAIM = 0.5, 5.0
#: The most pools that one search for the permits of dead runs covers.
_MAX_POOLS = 200
#: The first two numbers: the least time between two scans for more waiting tasks, in seconds, if the first scan was
#: useful, and if it was not. The third number: a scan was useful if at least this number of permits was granted after
#: it.
_MORE, _MORE_OF_LITTLE, _USEFUL = 0.25, 1.0, 100
#: The least number of parked tasks that are kept: for the pool of a queue, and for the pool of a limit_key. Further
#: tasks may be dropped. A scan finds dropped tasks again.
_PARKED, _PARKED_OF_KEY = 1_000, 10
#: The most tenants with parked tasks that are scanned one by one in one round of scans. The others follow.
_TENANTS_APART = 16
#: The most limit_keys that a scan excludes. If more limit_keys are blocked, their tasks may fill the scan. Then tasks
#: of other limit_keys in the queue may have to wait.
_MAX_LEFT_OUT = 5_000


@dataclass(frozen=True, slots=True)
class ScanTarget:
    """The queues that one scan covers, and the limit_keys that the scan excludes."""

    queues: list[str]
    #: The limit_keys whose tasks the scan excludes.
    excluded_keys: Sequence[str] = ()
    #: The tenants whose tasks the scan excludes, by queue. None: in all queues.
    excluded_tenants: Mapping[str | None, Collection[str]] = field(default_factory=dict)
    #: The only tenant whose tasks the scan covers. None: any.
    tenant: str | None = None
    #: Whether the scan covers a single queue, whose tenants take turns.
    is_fair: bool = False
    #: Whether the scan covers a single queue that has parked tasks, or a tenant that has. If the batch of such a scan
    #: cannot hold all the tasks found, the caller must call `note_more`.
    is_apart: bool = False


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


def _pools(queue: str, key: str | None, tenant: str | None) -> list[PermitPool]:
    """Return the pools from which a task may need a permit."""
    of_key = [] if key is None else [PermitPool(queue, key)]
    of_tenant = [] if tenant is None else [PermitPool(queue, tenant=tenant), PermitPool(None, tenant=tenant)]
    return [PermitPool(queue), *of_key, *of_tenant]


class Limits:
    """Keeps this worker's claims within the limits of its queues."""

    def __init__(self, scope: Scope, controls: Controls) -> None:
        self._scope = scope
        self._store = scope.store
        self._clock = scope.clock
        self._signals = scope.signals
        self._controls = controls
        self._parked: dict[PermitPool, ParkedTasks] = {}
        #: The number of permits granted since the last scan for more tasks.
        self._granted_cnt = 0
        #: The time of the last scan for more tasks (monotonic seconds).
        self._more_at = 0.0
        #: The timer of the next scan for more tasks.
        self._more: asyncio.TimerHandle | None = None
        self._held: dict[tuple[str, str], Sequence[HeldPermit]] = {}
        self._to_give_back: list[HeldPermit] = []
        self._wake = asyncio.Event()
        self._giving = asyncio.Event()
        self._tries_no_more = self._is_stopping = False

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

    def park(self, entry: Entry) -> bool:
        """Park a task if its queue or its tenant has no free permit now; return whether the task is parked."""
        pools = () if entry.queue is None else _pools(entry.queue, None, entry.tenant)
        parked = next((blocked for pool in pools if (blocked := self._blocked(pool)) is not None), None)
        if parked is not None:
            parked.park(entry.task_id, (-entry.priority, entry.due))
        return parked is not None

    def changed(self) -> None:
        """Try all parked tasks again. Call this when the limits have changed."""
        pools, self._parked = self._parked, {}
        task_ids = [task_id for parked in pools.values() for task_id in parked.tasks]
        if task_ids and not self._tries_no_more:
            self._signals.tasks_doubtful.send(task_ids)
        if any(parked.has_more for parked in pools.values()):
            self._ask_for_more()

    def _blocked(self, pool: PermitPool) -> ParkedTasks | None:
        parked = self._parked.get(pool)
        return parked if parked is not None and parked.is_blocked else None

    def scan_targets(self, queues: Sequence[str]) -> list[ScanTarget]:
        """Return the scans that cover these queues. They exclude tasks that would have to wait for a permit.

        A queue with parked tasks gets a scan of its own. In a common scan, its waiting tasks could fill the batch and
        keep out the tasks of other queues.
        """
        apart: dict[str, list[str]] = {}
        full: set[str] = set()
        excluded, of_tenants = self._parked_tenants(queues)
        for pool, parked in self._parked.items():
            if pool.queue is None or pool.tenant is not None:
                continue
            keys = apart.setdefault(pool.queue, [])
            if parked.wants_scan:
                parked.has_more = False
            else:
                parked.has_more = True
                if pool.key is None:
                    full.add(pool.queue)
                else:
                    keys.append(pool.key)
        fair = self._controls.fair_queues
        together = [queue for queue in queues if queue not in apart and queue not in fair]
        # A malformed task may be of no queue: the common scan finds it, also if each queue is scanned alone.
        found = [ScanTarget(together, excluded_tenants=excluded)] if together or fair else []
        for queue in queues:
            if (queue in apart or queue in fair) and queue not in full:
                keys, is_apart = apart.get(queue, []), queue in apart
                if len(keys) > _MAX_LEFT_OUT:
                    keys = random.sample(keys, _MAX_LEFT_OUT)
                found.append(ScanTarget([queue], keys, excluded, is_fair=queue in fair, is_apart=is_apart))
        return [*found, *of_tenants]

    def _parked_tenants(self, queues: Sequence[str]) -> tuple[dict[str | None, set[str]], list[ScanTarget]]:
        """Return the tenants that common scans exclude, by queue, and the scans of those with parked tasks."""
        excluded: dict[str | None, set[str]] = {}
        if self._controls.paused_tenants:
            excluded[None] = set(self._controls.paused_tenants)
        wanted = []
        for pool, parked in self._parked.items():
            if pool.tenant is None:
                continue
            excluded.setdefault(pool.queue, set()).add(pool.tenant)
            if parked.wants_scan and (pool.queue is None or pool.queue in queues):
                wanted.append(pool)
            parked.has_more = True
        chosen = random.sample(wanted, min(len(wanted), _TENANTS_APART))
        for pool in chosen:
            self._parked[pool].has_more = False
        return excluded, [
            ScanTarget(list(queues) if pool.queue is None else [pool.queue], tenant=pool.tenant, is_apart=True)
            for pool in chosen
        ]

    def note_more(self, target: ScanTarget) -> None:
        """Note that the queue of this scan has more waiting tasks than the batch could hold."""
        for pool, parked in self._parked.items():
            if target.tenant is None or target.tenant == pool.tenant:
                parked.has_more |= pool.queue is None or pool.queue in target.queues
        self._ask_for_more()

    async def admit(self, tasks: Sequence[StoredTask], token: str) -> Admitted:
        """Take permits for these tasks, in the given order. Park each task that does not get all its permits.

        Raises DatabaseError. The permits that were granted before the error are given back.
        """
        wanted = {task.id: task for task in tasks if not self._has_to_wait(task)}
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
                    self._apply_grant(request, answer, refused_tasks)
        except DatabaseError:
            await self.settle(Admitted([], token, {}, granted, frozenset(asked), [], None, frozenset()), {}, [*granted])
            raise
        refused = [task_id for task_id in granted if task_id not in wanted]
        of = frozenset((task.queue, task.task_option.limit_key, task.tenant) for task in wanted.values())
        admitted = Admitted(list(wanted), token, held, granted, frozenset(asked), refused, claim_by, of)
        if refused and not wanted:
            await self.settle(admitted, {}, ())
        return admitted

    def _has_to_wait(self, task: StoredTask) -> bool:
        """Park the task without a request if one of its pools is blocked; return whether the task is parked."""
        for pool in _pools(task.queue, task.task_option.limit_key, task.tenant):
            parked = self._blocked(pool)
            if parked is not None:
                parked.park(task.id, self._rank(task))
                return True
        return False

    def _rank(self, task: StoredTask) -> Rank:
        moment = task.task_state.next_preempt_time
        return (-task.task_option.priority, 0.0 if moment is None else self._clock.monotonic_of(moment))

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

    def _apply_grant(self, request: PermitRequest, answer: PermitGrant, refused: Sequence[StoredTask]) -> None:
        """Park the tasks that a pool has refused. If the pool has refused no task, let its parked tasks try again."""
        parked = self._parked.get(request.pool)
        self._granted_cnt += len(answer.task_ids)
        if not refused:
            if parked is not None:
                parked.refusals = 0
                self._unpark([request.pool])
            return
        now = monotonic()
        width = max(filter(None, (request.limit.concurrency, request.limit.starts)))
        is_narrow = request.pool.key is not None or request.pool.tenant is not None
        keep = max(_PARKED_OF_KEY if is_narrow else _PARKED, 2 * width)
        if parked is None:
            parked = self._parked[request.pool] = ParkedTasks(width, keep)
        parked.width, parked.keep = width, keep
        parked.is_blocked = True
        parked.refusals = 0 if answer.task_ids else parked.refusals + 1
        next_time = answer.next_time(self._clock.now())
        if next_time is not None:
            parked.retry_at = self._clock.monotonic_of(next_time)
        else:
            pause = min(_CROWDED * 2 ** min(parked.refusals, 8), _MAX_CROWDED)
            parked.retry_at = now + pause * (0.5 + random.random())
        if answer.is_crowded and parked.reclaim_at is None:
            parked.reclaim_at = now + _RECLAIM
        for task in refused:
            parked.park(task.id, self._rank(task))
        if parked.wants_scan:
            self._ask_for_more()
        self._wake.set()

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
        self._unpark({pool for task_id in gone for pool in admitted.granted.get(task_id, ())})

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
        while not self._tries_no_more:
            self._wake.clear()
            moments = [
                moment
                for parked in self._parked.values()
                for moment in (parked.retry_at, parked.reclaim_at)
                if moment is not None
            ]
            await wake_or_wait(self._wake, max(0.0, min(moments) - monotonic()) if moments else None)
            try:
                await self._reclaim_dead()
            except DatabaseError as error:
                logger.warning(
                    "permits of dead runs not reclaimed, will be tried again", extra=fields(reason=str(error))
                )
            except Exception:
                logger.exception("permits of dead runs not reclaimed, will be tried again")
            now = monotonic()
            self._unpark([pool for pool, parked in self._parked.items() if parked.retry_at <= now])

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
            self._unpark({entry.pool for entry in held})

    def stop_trying(self) -> None:
        """End `run`."""
        self._tries_no_more = True
        self._wake.set()

    def stop(self) -> None:
        """End `run_giving_back` once all permits of closed runs are given back."""
        self.stop_trying()
        self._is_stopping = True
        self._giving.set()

    def _unpark(self, asked: Iterable[PermitPool]) -> None:
        """Let the most urgent parked tasks of these pools try again, because permits may be free."""
        gone: list[str] = []
        for pool in asked:
            parked = self._parked.get(pool)
            if parked is None or self._tries_no_more:
                continue
            parked.is_blocked = False
            gone += parked.take_most_urgent()
            # Other workers may claim these tasks, so that this worker sends no request for them. In this case the next
            # parked tasks try again at this time.
            parked.retry_at = monotonic() + _CROWDED
            if parked.wants_scan:
                self._ask_for_more()
            if not parked.tasks:
                del self._parked[pool]
        if gone:
            self._wake.set()
            self._signals.tasks_doubtful.send(gone)

    def _ask_for_more(self) -> None:
        if self._more is None and not self._tries_no_more:
            least = _MORE if self._granted_cnt >= _USEFUL else _MORE_OF_LITTLE
            pause = max(0.0, self._more_at + least - monotonic())
            self._more = asyncio.get_running_loop().call_later(pause, self._scan_for_more)

    def _scan_for_more(self) -> None:
        self._more, self._more_at, self._granted_cnt = None, monotonic(), 0
        if not self._tries_no_more:
            self._signals.permits_freed.send()

    async def _reclaim_dead(self) -> None:
        """Give back the permits that dead runs hold in those pools for which the search is due."""
        now = monotonic()
        crowded = {pool: parked for pool, parked in self._parked.items() if (parked.reclaim_at or inf) <= now}
        asked = list(crowded)[:_MAX_POOLS]
        for pool in asked:
            crowded[pool].reclaim_at = now + _RECLAIM
        if not asked:
            return
        reclaimed = await self._store.run(permits.reclaim(asked))
        await count_lapses(self._scope, reclaimed.lapsed, reclaimed.closed_cnt)
        if reclaimed.has_found:
            self._unpark(asked)
            return
        # The next search is due when the next lease lapses, but after `_MAX_RECLAIM` at the latest. The limit is needed
        # because a worker may close a run and die before it gives the permit back.
        lapse = _MAX_RECLAIM if reclaimed.next_lapse is None else reclaimed.next_lapse.total_seconds()
        for pool in asked:
            crowded[pool].reclaim_at = now + min(max(_RECLAIM, lapse), _MAX_RECLAIM)
