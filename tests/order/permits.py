"""Permits and slots over time: which limits held, and how many runs and starts they counted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple

from tests.order.history import FREE, Change, History, Limit, Run, Settings, Task, Up, Worker
from tests.order.spells import Group
from tests.order.times import Times, joined


class Pool(NamedTuple):
    """The permits of a queue, of a limit_key or a tenant in it, or of a tenant over all queues."""

    queue: str | None
    key: str | None = None
    tenant: str | None = None


class Pledge(NamedTuple):
    """The limit of a pool, and since when it has held without a change."""

    limit: Limit
    since: float


Pledges = Mapping[Pool, Pledge]


class Rules:
    """Which limits held when."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self._changes: dict[str, list[Change]] = defaultdict(list)
        for change in sorted(changes, key=lambda change: change.asked):
            self._changes[change.target].append(change)

    def steady(self, target: str, since: float, until: float) -> tuple[Settings, float] | None:
        """Return the settings that held all the time, and since when; None: they were being changed."""
        settings, begun = FREE, -inf
        for change in self._changes.get(target, ()):
            if change.asked > until:
                break
            if change.settled > since:
                return None
            settings, begun = change.settings, change.settled
        return settings, begun

    def pledges(self, of: Group | Task, since: float, until: float) -> Pledges | None:
        """Return the limits that held for a task all the time; None: some were being changed."""
        queue = self.steady(f"queue:{of.queue}", since, until)
        tenant = (FREE, -inf) if of.tenant is None else self.steady(f"tenant:{of.tenant}", since, until)
        if queue is None or tenant is None:
            return None
        (own, begun), (whole, tenant_begun) = queue, tenant
        found = (
            (Pool(of.queue, of.key, of.tenant), of.key is not None and own.key_limit, begun),
            (Pool(of.queue, tenant=of.tenant), of.tenant is not None and own.tenant_limit, begun),
            (Pool(None, tenant=of.tenant), whole.limit, tenant_begun),
            (Pool(of.queue), own.limit, begun),
        )
        return {pool: Pledge(limit, at) for pool, limit, at in found if limit}

    def is_fair(self, queue: str, since: float, until: float) -> bool | None:
        """Whether a queue had fair turns all the time; None: that was being changed."""
        steady = self.steady(f"queue:{queue}", since, until)
        return None if steady is None else steady[0].fair

    def fair_times(self) -> Iterator[tuple[str, Up, Settings]]:
        """Yield each queue with fair turns, when it had them, and its settings."""
        for target, changes in self._changes.items():
            kind, _, queue = target.partition(":")
            for change, following in zip(changes, [*changes[1:], None], strict=True):
                if kind == "queue" and change.settings.fair:
                    yield queue, Up(change.settled, inf if following is None else following.asked), change.settings


class Permits:
    """What took the permits of one pool, or the slots of one worker: runs, from their claims to their ends."""

    def __init__(self, runs: Iterable[Run]) -> None:
        taken = list(runs)
        self.claims = sorted(run.claimed for run in taken)
        #: A start counts from the claim on, and until the window after the start of the handler is over.
        self.starts = sorted(run.claimed if run.started is None else run.started for run in taken)
        # The shortest run takes a while, too: times are whole milliseconds.
        self.releases = sorted(max(run.ended, run.claimed + 0.001) for run in taken)

    def held(self, at: float, lag: float = 0.0) -> int:
        """Return how many are held; with a lag: how many at most, if claims were earlier and ends later by that."""
        return bisect_right(self.claims, at + lag) - bisect_right(self.releases, at - lag)

    def started(self, at: float, window: float, lag: float = 0.0) -> int:
        """Return how many starts count in the window that ends at this instant."""
        return bisect_right(self.claims, at + lag) - bisect_right(self.starts, at - window - lag)

    def is_taken(self, limit: Limit, at: float, lag: float = 0.0) -> bool:
        """Whether none was free at an instant."""
        if limit.concurrency is not None and self.held(at, lag) >= limit.concurrency:
            return True
        return limit.starts is not None and self.started(at, limit.window, lag) >= limit.starts

    def was_taken(self, limit: Limit, since: float, until: float, lag: float = 0.0) -> bool:
        """Whether none was free at some instant between these two, both included."""
        first, last = bisect_left(self.claims, since), bisect_right(self.claims, until + lag)
        instants = [since, *(max(since, claim - lag) for claim in self.claims[first:last])]
        return any(self.is_taken(limit, at, lag) for at in instants)

    def taken(self, limit: Limit, lag: float) -> Times:
        """Return the times in which none may have been free, if claims were earlier and ends later by the lag."""
        claims = [claim - lag for claim in self.claims]
        windows = [start + limit.window + lag for start in self.starts]
        counts = ((limit.concurrency, [end + lag for end in self.releases]), (limit.starts, windows))
        return joined(up for most, ends in counts if most is not None for up in _times_of(most, claims, ends))

    def next_free(self, limit: Limit, since: float, needed: int) -> float:
        """Return the first instant from `since` on by which so many permits have been free, one after the other."""
        at = since
        if limit.concurrency is not None:
            later = self.releases[bisect_right(self.releases, since) :]
            at = max(at, _nth(limit.concurrency - self.held(since), later, since, needed))
        if limit.starts is not None:
            later = [start + limit.window for start in self.starts[bisect_right(self.starts, since - limit.window) :]]
            at = max(at, _nth(limit.starts - self.started(since, limit.window), later, since, needed))
        return at


def _times_of(most: int, claims: Iterable[float], ends: Iterable[float]) -> Iterator[Up]:
    """Yield the times in which so many have been claimed and have not ended."""
    held, since = 0, inf
    for at, change in sorted([*((at, 1) for at in claims), *((at, -1) for at in ends)]):
        if held < most <= held + change:
            since = at
        elif held + change < most <= held:
            yield Up(since, at)
        held += change
    if held >= most:
        yield Up(since)


def _nth(free: int, later: list[float], since: float, needed: int) -> float:
    if free >= needed:
        return since
    place = needed - free - 1
    return later[place] if place < len(later) else inf


class Book:
    """The permits of all pools and the slots of all workers."""

    def __init__(self, history: History) -> None:
        self.rules = Rules(history.changes)
        self.workers = {worker.id: worker for worker in history.workers}
        self._by_pool: dict[Pool, list[Run]] = defaultdict(list)
        self._by_worker: dict[str, list[Run]] = defaultdict(list)
        self._permits: dict[tuple[Pool, float], Permits] = {}
        self._slots: dict[tuple[str, Up], Permits] = {}
        for task in history.tasks:
            for pool in set(_pools(task)):
                self._by_pool[pool] += task.runs
            for run in task.runs:
                self._by_worker[run.worker].append(run)

    def permits(self, pool: Pool, pledge: Pledge) -> Permits:
        """Return what took permits of a pool since this limit has held."""
        key = (pool, pledge.since)
        if key not in self._permits:
            self._permits[key] = Permits(run for run in self._by_pool[pool] if run.claimed >= pledge.since)
        return self._permits[key]

    def slots(self, worker: Worker, up: Up) -> Permits:
        """Return what took slots of a worker since it began to work."""
        key = (worker.id, up)
        if key not in self._slots:
            runs = self._by_worker[worker.id]
            self._slots[key] = Permits(run for run in runs if up.since <= run.claimed <= up.until)
        return self._slots[key]

    def has_worker(self, task: Task, since: float, until: float, lag: float, claimant: str | None = None) -> bool:
        """Whether some worker could take a task all the time. The claimant had a slot: it has just used it."""
        return any(self._had_slot(worker, since, until, lag, claimant) for worker in self.serving(task))

    def serving(self, task: Task) -> Iterator[Worker]:
        """Yield the workers that serve a task."""
        return (worker for worker in self.workers.values() if worker.serves(task))

    def _had_slot(self, worker: Worker, since: float, until: float, lag: float, claimant: str | None) -> bool:
        up = worker.up_at(since, until)
        if up is None:
            return False
        slots = Limit(worker.slots)
        return worker.id == claimant or not self.slots(worker, up).was_taken(slots, since, until, lag)

    def first_slot(self, task: Task, at: float) -> float:
        """Return the first instant from then on at which some worker could take the task."""
        found = inf
        for worker in self.serving(task):
            for up in worker.ups:
                free = self.slots(worker, up).next_free(Limit(worker.slots), max(at, up.since), 1)
                if free <= up.until:
                    found = min(found, free)
        return found


def _pools(task: Task) -> Iterator[Pool]:
    yield Pool(task.queue)
    if task.key is not None:
        yield Pool(task.queue, task.key, task.tenant)
    if task.tenant is not None:
        yield Pool(task.queue, tenant=task.tenant)
        yield Pool(None, tenant=task.tenant)
