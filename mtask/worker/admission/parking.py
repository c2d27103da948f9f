"""Parking: keeps the tasks that got no permit, lets them try again, and tells which tasks scans should look for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from mtask.model.documents import StoredTask
from mtask.store.queues.permits import PermitGrant, PermitPool, PermitRequest
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.parked_tasks import ParkedTasks, Rank
from mtask.worker.state.queue import Entry
from mtask.worker.state.scope import Scope
from mtask.worker.state.timing import wake_or_wait

#: The first and the longest pause before the next request to a pool that had no free permit, in seconds. Each refusal
#: doubles the pause. A random factor keeps the workers from sending their requests at the same instant.
_CROWDED, _MAX_CROWDED = 0.25, 1.0
#: The time from a refusal to a search for dead runs, and the least time between two searches, in seconds. A pool is
#: searched if runs hold all its permits.
RECLAIM = 0.5
#: The first two numbers: the least time between two scans for more waiting tasks, in seconds, if the first scan was
#: useful, and if it was not. The third number: a scan was useful if at least this number of permits was granted after
#: it.
_MORE, _MORE_OF_LITTLE, _USEFUL = 0.25, 1.0, 100
#: The least number of parked tasks that are kept: for the pool of a queue, and for the pool of a limit_key or a
#: tenant. Further tasks may be dropped. A scan finds dropped tasks again.
_PARKED, _PARKED_OF_KEY = 1_000, 10
#: The most tenants with parked tasks that are scanned one by one in one round of scans. The others follow.
_TENANTS_APART = 16
#: The most limit_keys that a scan excludes. If more limit_keys are blocked, their tasks may fill the scan. Then tasks
#: of other limit_keys in the queue may have to wait.
_MAX_LEFT_OUT = 5_000


@dataclass(frozen=True, slots=True)
class ScanTarget:
    """The queues that one scan covers, and the limit_keys and tenants that the scan excludes."""

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


def _pools_of(queue: str, key: str | None, tenant: str | None) -> list[PermitPool]:
    """Return the pools from which a task may need a permit."""
    of_key = [] if key is None else [PermitPool(queue, key)]
    of_tenant = [] if tenant is None else [PermitPool(queue, tenant=tenant), PermitPool(None, tenant=tenant)]
    return [PermitPool(queue), *of_key, *of_tenant]


class Parking:
    """The parked tasks of a worker, by the pool from which they need a permit."""

    def __init__(self, scope: Scope, controls: Controls) -> None:
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
        self._wake = asyncio.Event()
        self.is_closed = False  #: whether no task tries again: see `close`

    def park_entry(self, entry: Entry) -> bool:
        """Park a task if its queue or its tenant has no free permit now; return whether the task is parked."""
        pools = () if entry.queue is None else _pools_of(entry.queue, None, entry.tenant)
        parked = next((blocked for pool in pools if (blocked := self._blocked(pool)) is not None), None)
        if parked is not None:
            parked.park(entry.task_id, (-entry.priority, entry.due))
        return parked is not None

    def try_all(self) -> None:
        """Try all parked tasks again. Call this when the limits have changed."""
        pools, self._parked = self._parked, {}
        task_ids = [task_id for parked in pools.values() for task_id in parked.tasks]
        if task_ids and not self.is_closed:
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

    def park_task(self, task: StoredTask) -> bool:
        """Park the task without a request if one of its pools is blocked; return whether the task is parked."""
        for pool in _pools_of(task.queue, task.task_option.limit_key, task.tenant):
            parked = self._blocked(pool)
            if parked is not None:
                parked.park(task.id, self._rank(task))
                return True
        return False

    def take_answer(self, request: PermitRequest, answer: PermitGrant, refused: Sequence[StoredTask]) -> None:
        """Park the tasks that a pool has refused. If the pool has refused no task, let its parked tasks try again."""
        parked = self._parked.get(request.pool)
        self._granted_cnt += len(answer.task_ids)
        if not refused:
            if parked is not None:
                parked.refusals = 0
                self.try_again([request.pool])
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
            parked.reclaim_at = now + RECLAIM
        for task in refused:
            parked.park(task.id, self._rank(task))
        if parked.wants_scan:
            self._ask_for_more()
        self._wake.set()

    def try_again(self, pools: Iterable[PermitPool]) -> None:
        """Let the most urgent parked tasks of these pools try again, because permits may be free."""
        gone: list[str] = []
        for pool in pools:
            parked = self._parked.get(pool)
            if parked is None or self.is_closed:
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

    async def wait(self) -> None:
        """Wait until parked tasks or a search for dead runs may be due, until their times change, or until `close`."""
        self._wake.clear()
        moments = [
            moment
            for parked in self._parked.values()
            for moment in (parked.retry_at, parked.reclaim_at)
            if moment is not None
        ]
        await wake_or_wait(self._wake, max(0.0, min(moments) - monotonic()) if moments else None)

    def try_due(self) -> None:
        """Let tasks try again in each pool whose time has come."""
        now = monotonic()
        self.try_again([pool for pool, parked in self._parked.items() if parked.retry_at <= now])

    def crowded(self, now: float) -> dict[PermitPool, ParkedTasks]:
        """Return the pools whose search for dead runs is due by `now` (monotonic seconds), with their parked tasks.

        The caller sets the time of the next search.
        """
        return {
            pool: parked
            for pool, parked in self._parked.items()
            if parked.reclaim_at is not None and parked.reclaim_at <= now
        }

    def close(self) -> None:
        """Let no task try again, and ask for no further scan, from now on. This ends `wait`."""
        self.is_closed = True
        self._wake.set()

    def _ask_for_more(self) -> None:
        if self._more is None and not self.is_closed:
            least = _MORE if self._granted_cnt >= _USEFUL else _MORE_OF_LITTLE
            pause = max(0.0, self._more_at + least - monotonic())
            self._more = asyncio.get_running_loop().call_later(pause, self._scan_for_more)

    def _scan_for_more(self) -> None:
        self._more, self._more_at, self._granted_cnt = None, monotonic(), 0
        if not self.is_closed:
            self._signals.permits_freed.send()

    def _rank(self, task: StoredTask) -> Rank:
        moment = task.task_state.next_preempt_time
        return (-task.task_option.priority, 0.0 if moment is None else self._clock.monotonic_of(moment))
