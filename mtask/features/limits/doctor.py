"""What a limit lets wait, and the check of permits: those kept by ended runs, and those for which nobody asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf

from mtask.features.controls import client as controls
from mtask.features.controls.rules import Control, Limit
from mtask.features.limits import usage as pools
from mtask.features.limits.operations import PermitPool
from mtask.features.limits.usage import Held, Holder, Listed, PoolContent, Waiter
from mtask.kernel.document import rules
from mtask.kernel.document.identity import check_text
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Finding, Reason, brief, fail, listed

#: The longest time that the permit of an ended run may stay in use while tasks wait. Any worker takes it back earlier.
GRACE = timedelta(minutes=2)
#: The most permits whose runs are read.
_RUNS = 1_000


def kept(bounds: Iterable[Bound]) -> Operation[list[Finding]]:
    """Return findings about limits that are reached, but by runs that ended long ago. Tasks must wait for them."""
    old = []
    for bound in bounds:
        if bound.content is not None and not bound.free:
            old += [(bound, held) for held in bound.running if held.claim_by < bound.content.now - GRACE]
    runs = yield from pools.holders([held for _, held in old[:_RUNS]])
    ended: dict[str, list[str]] = {}
    for bound, held in old[:_RUNS]:
        run = runs.get((held.task_id, held.token))
        assert bound.content is not None
        since = held.claim_by if run is None else run.end_time
        if (run is None or run.is_over) and (since is None or since < bound.content.now - GRACE):
            ended.setdefault(name_of(bound.pool), []).append(held.task_id)
    return [_kept(name, task_ids) for name, task_ids in ended.items()]


def _kept(name: str, task_ids: list[str]) -> Finding:
    count = f"permits of {name}, for which tasks wait, belong to runs that ended over 2 min ago: {len(task_ids)}"
    message = f"{count}, such as that of {brief(task_ids[0])}"
    remedy = "Workers that serve the queue take such permits back within seconds: look into their logs."
    return fail("permits", message, remedy, task_ids=task_ids)


def unasked(bounds: Collection[Bound], live_ids: Collection[str]) -> str:
    """Return what to say of the limits of a task that nobody takes although permits are free: who asked last."""
    if not bounds:
        return ""
    waiters = [waiter for bound in bounds if bound.content is not None for waiter in bound.content.waiters]
    gone = sorted({waiter.worker_id for waiter in waiters} - set(live_ids))
    last = f"; {listed(gone)} asked last, and {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
    return f", and its limits have free permits{last}"


# --- explain ---------------------------------------------------------------------------------------------

# Explains what a limit lets wait: who holds the permits, and which tasks wait for one in which worker.

#: The most permits of one limit whose runs are named.
_NAMED = 3
#: The most limits of a queue's limit_keys and tenants that `in_use` returns.
_MOST_NARROW = 20


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit, and what its pool of permits holds."""

    pool: PermitPool
    limit: Limit
    #: None: no task has asked the pool, or not for long.
    content: PoolContent | None
    #: The runs of the first permits in use, by task_id and token.
    holders: Mapping[tuple[str, str], Holder]

    @property
    def running(self) -> Sequence[Held]:
        """The permits of runs that are in use."""
        return () if self.content is None or self.limit.concurrency is None else self.content.running

    @property
    def starts(self) -> list[datetime]:
        """The starts that count now, the earliest first."""
        if self.content is None or self.limit.window_ms is None:
            return []
        begin = self.content.now - timedelta(milliseconds=self.limit.window_ms)
        return sorted(time for time in self.content.starts if time > begin)

    @property
    def asking(self) -> list[Waiter]:
        """The workers in which tasks wait for a permit."""
        return [] if self.content is None else self.content.asking

    @property
    def free(self) -> float:
        """The number of free permits."""
        runs = inf if self.limit.concurrency is None else self.limit.concurrency - len(self.running)
        starts = inf if self.limit.starts is None else self.limit.starts - len(self.starts)
        return max(0, min(runs, starts))

    @property
    def next_start(self) -> datetime | None:
        """The time at which another start is permitted. None: the limit permits it now, or it is not known."""
        starts, window_ms = self.starts, self.limit.window_ms
        if self.content is None or self.limit.starts is None or window_ms is None or len(starts) < self.limit.starts:
            return None
        awaited = starts[len(starts) - self.limit.starts]
        return awaited + timedelta(milliseconds=window_ms) if awaited <= self.content.now else None


@dataclass(frozen=True, slots=True)
class PermitHolder:
    """A run that holds a permit. `worker_id`: None: it is not claimed yet. `is_over`: the permit is to be returned."""

    task_id: str
    worker_id: str | None
    is_over: bool


@dataclass(frozen=True, slots=True)
class PermitWaiter:
    """A worker in which tasks wait for a permit, at most 100 of them. `best_task_id`: the one that goes first."""

    worker_id: str
    task_cnt: int
    best_task_id: str | None


@dataclass(frozen=True, slots=True)
class PermitUse:
    """How many permits of a limit are in use, and who waits for one. A limit of a queue has no limit_key and tenant."""

    queue: str
    limit_key: str | None
    tenant: str | None
    limit: Limit
    running_cnt: int  #: the permits that runs hold; 0 if the runs at once are not limited
    start_cnt: int  #: the starts that count now; 0 if the starts are not limited
    #: The time at which another start is permitted. None: now, or it is not known yet.
    next_start_time: datetime | None
    holders: tuple[PermitHolder, ...]  #: at most three
    waiters: tuple[PermitWaiter, ...]  #: none where a single worker serves the queue


def limit_of(pool: PermitPool, holds: Iterable[Control]) -> Limit | None:
    """Return the limit that is in force for a pool; None: there is none."""
    kind, target = ("tenant", pool.tenant) if pool.queue is None else ("queue", pool.queue)
    control = next((each for each in holds if (each.kind, each.target) == (kind, target)), None)
    limit: Limit | None = getattr(control, pool.limited_by, None)
    return limit


def limited_pools(task: Task, holds: Sequence[Control]) -> dict[PermitPool, Limit]:
    """Return the pools from which a task needs a permit, with their limits. The narrowest comes first."""
    wanted = filter(None, PermitPool.of_task(task.queue, task.task_option.limit_key, task.tenant))
    return {pool: limit for pool in wanted if (limit := limit_of(pool, holds)) is not None}


def of_tasks(tasks: Sequence[Task], holds: Sequence[Control]) -> Operation[dict[PermitPool, Bound]]:
    """Return the limits from which these tasks need a permit. Each costs the same, however many runs it permits."""
    limits: dict[PermitPool, Limit] = {}
    for task in tasks:
        limits |= limited_pools(task, holds)
    if not limits:
        return {}
    contents = yield from pools.read(limits)
    return (yield from _bounds(limits, contents))


def _bounds(
    limits: Mapping[PermitPool, Limit], contents: Mapping[PermitPool, PoolContent]
) -> Operation[dict[PermitPool, Bound]]:
    named = [held for content in contents.values() for held in content.running[:_NAMED]]
    holders = yield from pools.holders(named)
    return {pool: Bound(pool, limit, contents.get(pool), holders) for pool, limit in limits.items()}


def in_use(queue: str) -> Operation[list[PermitUse]]:
    """Return the limits of a queue with the permits that are in use: its own, and those of its limit_keys and tenants.

    Of the latter, at most 20 are returned: those for which most tasks wait, and only those with permits in use.
    Raises InvalidInput.
    """
    check_text("queue", queue)
    holds = yield from controls.known()
    found = {content.pool: content for content in (yield from pools.of_queue(queue, _MOST_NARROW))}
    limits = {pool: limit for pool in [PermitPool(queue), *found] if (limit := limit_of(pool, holds)) is not None}
    bounds = yield from _bounds(limits, found)
    return [_use(queue, bound) for bound in bounds.values()]


def _use(queue: str, bound: Bound) -> PermitUse:
    waiters = [
        PermitWaiter(waiter.worker_id, waiter.count, waiter.tasks[0].task_id if waiter.tasks else None)
        for waiter in sorted(bound.asking, key=lambda waiter: (-waiter.count, waiter.worker_id))
    ]
    runs = [(held, bound.holders.get((held.task_id, held.token))) for held in bound.running[:_NAMED]]
    holding = [
        PermitHolder(held.task_id, run.worker_id if run else None, run is not None and run.is_over)
        for held, run in runs
    ]
    return PermitUse(
        queue,
        bound.pool.key,
        bound.pool.tenant,
        bound.limit,
        len(bound.running),
        len(bound.starts),
        bound.next_start,
        tuple(holding),
        tuple(waiters),
    )


# --- reasons ----------------------------------------------------------------------------------------------------


def waits_for_permits(
    task: Task, bounds: Mapping[PermitPool, Bound], holds: Sequence[Control], now: datetime, viewer: str | None = None
) -> list[Reason]:
    """Return the reasons why the task gets no permit.

    `viewer`: the tenant that reads them. They name no task of others. None: they may name all.
    """
    reasons: list[Reason] = []
    for pool in limited_pools(task, holds):
        bound = bounds.get(pool)
        if bound is not None and bound.content is not None:
            reasons += _reasons(task, bound, bound.content, now, viewer)
    return reasons


def _reasons(task: Task, bound: Bound, content: PoolContent, now: datetime, viewer: str | None) -> Iterable[Reason]:
    if any(held.task_id == task.id and held.claim_by > content.now for held in content.running):
        return  # it has its permit, and is about to be claimed
    better = _better(task, content, now)
    workers = sorted({waiter.worker_id for waiter in content.asking if better.keys() & _ids(waiter)})
    name = name_of(bound.pool)
    if not bound.free:
        yield _reached(bound, name, viewer)
        if better:
            count = f"{len(better)} better task{'s' * (len(better) > 1)}"
            waits = "waits" if len(better) == 1 else "wait"
            yield Reason("behind", f"{count} {waits} for a permit of {name} before it, in {listed(workers)}")
    elif len(better) >= bound.free:
        best = min(better.values(), key=lambda each: (each.key, each.task_id))
        which = f": {brief(best.task_id)}" if viewer in (None, best.tenant) else ""
        more = f", and {len(better) - 1} more" if len(better) > 1 else ""
        message = f"a free permit of {name} is kept for a better task{which}{more}, which"
        yield Reason("reserved", f"{message} {'wait' if more else 'waits'} in {listed(workers)}")


def shared(bounds: Iterable[Bound], lately: timedelta) -> Reason | None:
    """Return the reason why a task may wait although permits are free: workers have asked a pool lately.

    Between the end of a run and the next claim, a permit is free for a moment. It goes to the best task.
    """
    for bound in bounds:
        content = bound.content
        if content is not None and content.update_time is not None and content.now - content.update_time <= lately:
            name, used = name_of(bound.pool), max(len(bound.running), len(bound.starts))
            message = f"the limit of {name}, {bound.limit}, is shared with tasks that go before it; {used} in use now"
            return Reason("limited", message)
    return None


def _ids(waiter: Waiter) -> set[str]:
    return {each.task_id for each in waiter.tasks}


def _better(task: Task, content: PoolContent, now: datetime) -> dict[str, Listed]:
    """Return the listed tasks that go before this one, by id. A task may wait in several workers."""
    found = {each.task_id: each for waiter in content.asking for each in waiter.tasks}
    own = found.pop(task.id, None)
    key = _key(task, content, found.values(), now) if own is None else own.key
    return {task_id: each for task_id, each in found.items() if each.key < key}


def _key(task: Task, content: PoolContent, others: Iterable[Listed], now: datetime) -> pools.Key:
    """Return the key of a task that is not listed: those of its tenant that are go before it, if they are better."""
    begins, priority, time = rules.rank(task, now)
    rank = (begins, priority, time.timestamp())
    tenant = task.tenant or ""
    # The keys of fair turns hold a rank's parts, with the number and the turn behind the first one.
    own = ((each.key[0], *each.key[-2:]) for each in others if each.tenant == tenant)
    return content.key(rank, tenant=tenant, index=sum(key < rank for key in own))


def _reached(bound: Bound, name: str, viewer: str | None) -> Reason:
    concurrency, running = bound.limit.concurrency, bound.running
    if concurrency is None or len(running) < concurrency:
        starts = Limit.model_construct(concurrency=None, starts=bound.limit.starts, window_ms=bound.limit.window_ms)
        return Reason("limited", f"the limit of {name}, {starts}, is reached", bound.next_start)
    named = [_holder(held, bound) for held in running[:_NAMED] if viewer in (None, _tenant(held, bound))]
    others = len(running) - len(named)
    rest = f"{others} more" if named else f"{others} other task{'s' * (others > 1)}"
    who = " and ".join([*filter(None, [", ".join(named)]), *([rest] if others else [])])
    hold = "holds its permit" if len(running) == 1 else "hold its permits"
    return Reason("limited", f"the limit of {name}, {concurrency} at once, is reached: {who} {hold}")


def _holder(held: Held, bound: Bound) -> str:
    run = bound.holders.get((held.task_id, held.token))
    if run is None:
        return brief(held.task_id)
    return f"{brief(held.task_id)} ({'ended' if run.is_over else 'running'} in {run.worker_id})"


def _tenant(held: Held, bound: Bound) -> str | None:
    """Return the tenant of a run's task; None: there is none, or it is not known. The key does not tell it."""
    run = bound.holders.get((held.task_id, held.token))
    return None if run is None else run.tenant


def name_of(pool: PermitPool) -> str:
    """Return whose permits a pool holds, as text."""
    parts = [("limit_key", pool.key), ("tenant", pool.tenant)]
    whose = " of ".join(f"the {kind} {name!r}" for kind, name in parts if name is not None)
    queue = "" if pool.queue is None else f"the queue {pool.queue!r}"
    return " in ".join(filter(None, (whose, queue)))
