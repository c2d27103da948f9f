"""Limits: takes permits for tasks before the claim. A task that gets no permit waits in a window until one may be free.

A limit changes when a task begins, but not in which order. A request names the ranks of its tasks, and the pool gives
its permits to the best rank of all workers. A worker that asks in vain is listed in the pool, and is called when a
permit is left for it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from math import inf
from sys import getswitchinterval
from threading import get_ident
from time import monotonic

from mtask.errors import DatabaseError
from mtask.features.controls.worker import Controls
from mtask.features.limits import operations as permits
from mtask.features.limits.operations import KINDS, MAX_WAITING, HeldPermit, PermitGrant, PermitPool, PermitRequest
from mtask.features.limits.pools import Lane, Pools, PoolState, lane_of_task
from mtask.features.limits.requests import Requests, order_of
from mtask.features.limits.statements import LEAD_MS, left_by
from mtask.features.limits.targets import Targets
from mtask.features.limits.windows import Windows, lane_of
from mtask.kernel.document import rules
from mtask.kernel.document.task import StoredTask
from mtask.kernel.operations.claim import token_of
from mtask.kernel.statements.filters import Filter, due_by, in_time, of_others, of_queues_and_keys
from mtask.kernel.worker.discovery.ready import Entry
from mtask.kernel.worker.discovery.reaper import count_lapses
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part, ScanTarget, Service
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait
from mtask.kernel.worker.running.run import HeldRun

#: The time from a refusal to a search for dead runs, and the least time between two searches, in seconds. A pool is
#: searched if runs hold all its permits.
_RECLAIM = 0.5
#: The longest time before another search for dead runs in the same pool, in seconds.
_MAX_RECLAIM = 5.0
#: The most pools that one search for the permits of dead runs covers.
_MAX_POOLS = 200
#: The pause before the next request to a pool whose permits are all in use, in seconds. A returned permit is told at
#: once: this is for what was not told. It must be shorter than `permits.WAIT_MS`. Tests tune it.
POLL = 2.0
#: A pool of starts is asked this time before another start is permitted, in seconds. The starts that are permitted soon
#: after it, within `_TOGETHER`, are asked for together.
_LEAD = 0.6 * LEAD_MS / 1000
_TOGETHER = timedelta(milliseconds=LEAD_MS) - timedelta(seconds=_LEAD)
#: The time that the call of a handler may take, in seconds: its first line runs so much later than it is counted.
_CALL = 0.001
#: The time before the end of a permit at which a handler begins at the latest, in seconds: the way to its first line.
#: Tests tune it.
BEGIN = 0.2
#: The longest time for which starts are gathered that are to be stored, in seconds; for windows under 1 s, this part.
_GATHER = 0.03
#: The first and the longest pause while free permits are left for better tasks of other workers, in seconds.
_GIVE_WAY, _MAX_GIVE_WAY = 0.1, 1.0
#: The time between the requests of workers that wait for the same starts, in seconds: the mean.
_SPREAD = 0.03
#: The first and the longest pause of a worker all of whose tasks others have just taken, in seconds.
_STEP_ASIDE, _MAX_STEP_ASIDE = 0.05, 0.3
#: The number of requests in a row that may follow each other at once where tenants take turns.
_AT_ONCE = 2
#: The number of tasks that may ask for each one that turned out to be gone.
_NEXT = 4
#: The time that a called worker has to ask, in seconds. Then its waiting tasks are withdrawn, so that others may go.
_ANSWER = 0.5
#: The number of times that it has this time anew, while it has room for a task.
_LATE = 2
#: The least time between two scans for more waiting tasks, in seconds, if the first scan was useful, and if it was not.
#: A scan was useful if at least `_USEFUL` permits were granted after it.
_MORE, _MORE_OF_LITTLE, _USEFUL = 0.25, 1.0, 100


@dataclass(frozen=True, slots=True)
class Admitted:
    """The result of taking permits for the tasks of one claim."""

    limits: Limits
    #: The ids of the tasks that got all their permits.
    task_ids: list[str]
    #: The token under which the permits were taken. The run_ids of the claim begin with this token.
    token: str
    #: The permits that each task's run will hold. The key is the task's id.
    held: Mapping[str, Sequence[HeldPermit]]
    #: The pools that granted a permit to each task. The key is the task's id.
    granted: Mapping[str, Sequence[PermitPool]]
    #: The pools in which starts are counted.
    timed: frozenset[PermitPool]
    #: The earliest time of a handler's start, by the task's id.
    not_before: Mapping[str, datetime]
    #: The tasks that got one permit but lack another permit. These tasks are not claimed.
    incomplete: Sequence[str]
    #: The time until which the tasks may be claimed, by the server's clock; None: no permit was requested.
    claim_by: datetime | None
    #: The queue, the limit_key and the tenant of each task. The guard of the claim refuses a task if one of these has
    #: changed since.
    of: frozenset[Lane]
    #: The server's time at which the tasks were read. The guard refuses a task that has become due again since: another
    #: worker has run it, and others may go before it.
    read_at: datetime

    @property
    def guard(self) -> list[Filter]:
        """The conditions of the claim: what the permits count is unchanged, and `claim_by` has not passed."""
        guards = [of_queues_and_keys(sorted(self.of, key=str)), due_by(self.read_at)]
        return guards if self.claim_by is None else [*guards, in_time(self.claim_by)]

    def hold(self, task_ids: Iterable[str]) -> None:
        """Remember the permits of these tasks' runs until they are released."""
        self.limits.hold(self, task_ids)

    def time_begin(self, run: HeldRun) -> None:
        """Have the start of this run's handler counted, and let it wait for its time, if its starts are limited."""
        self.limits.time_begin(run, self)

    async def settle(self, lost: Sequence[str]) -> None:
        """Give back the permits of the lost tasks."""
        await self.limits.settle(self, lost)

    def release(self, task_id: str, run_id: str, *, is_closed: bool) -> None:
        """Forget the permits of a run, and give them back if `is_closed`."""
        self.limits.release(task_id, run_id, is_closed=is_closed)


class Limits(Part):
    """Keeps this worker's claims within the limits of its queues: the gate of a worker."""

    def __init__(self, scope: Scope, controls: Controls) -> None:
        self._scope = scope
        self._store = scope.store
        self._clock = scope.clock
        self._worker_id = scope.worker_id
        self._controls = controls
        self._wake = asyncio.Event()
        self.pools = Pools(controls, self._wake.set)
        self.windows = Windows(self.pools)
        self._held: dict[tuple[str, str], Sequence[HeldPermit]] = {}
        self._to_give_back: list[HeldPermit] = []
        #: The pools that count the start of a run. The key is the task and the token.
        self._timed: dict[tuple[str, str], Sequence[PermitPool]] = {}
        #: The starts that are to be stored, each with its pools and its time, in seconds of the server's clock.
        self._begun: list[tuple[tuple[str, str], Sequence[PermitPool], float]] = []
        self._storing: asyncio.TimerHandle | None = None
        #: One update of pools at a time. Two would change the same documents, and the server would make one again.
        self._turn = asyncio.Lock()
        self._giving = asyncio.Event()
        #: The tasks that were taken from the windows and have no answer yet. They still wait.
        self._picked: dict[str, Entry] = {}
        self._targets = Targets(scope, controls, self.pools, self.windows)
        self._requests = Requests(scope, self.pools, self.windows, self._picked, self._held)
        #: The number of permits granted since the last scan for more tasks, the time of that scan (monotonic seconds),
        #: and the timer of the next one.
        self._granted_cnt = 0
        self._more_at = 0.0
        self._more: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_stopping = False

    def services(self) -> Sequence[Service]:
        """Let waiting tasks ask until the worker stops, and give permits back until all runs have ended."""
        return (Service(self.run, self.stop_trying), Service(self.run_giving_back, self.stop, lasts=True))

    @property
    def parking(self) -> Windows:
        """Where ready tasks wait for permits."""
        return self.windows

    def needs(self, task: Entry | StoredTask) -> bool:
        """Whether a task may need a permit. If its queue is unknown, it may need one if any queue has a limit."""
        if task.tenant in self._controls.tenant_limits:
            return True
        return task.queue in self._controls.limits if task.queue is not None else self.pools.is_any

    def guard_of_free(self) -> list[Filter]:
        """Return the guard of a claim without permits. The guard refuses a task that needs one after all."""
        return [of_others(sorted(self._controls.limits), sorted(self._controls.tenant_limits))]

    # --- taking permits -------------------------------------------------------------------------------------

    def pick(self, entries: Iterable[Entry]) -> None:
        """Note the tasks that were taken from the windows. The caller must call `landed` for each."""
        self._picked.update((entry.task_id, entry) for entry in entries)

    def has_fallen_back(self, task: StoredTask, now: datetime) -> bool:
        """Whether a task that was taken from the windows has lost its place there, as its document says.

        Another worker has run it, and it is to be tried again. So others may go before it now.
        """
        entry, order = self._picked.get(task.id), order_of(rules.rank(task, now))
        return entry is not None and not entry.is_lapsed and order[0] and order > entry.order

    def landed(self, task_ids: Iterable[str]) -> None:
        """Let other tasks ask in place of those that did not."""
        picked = filter(None, [self._picked.pop(task_id, None) for task_id in task_ids])
        pools = Counter(pool for entry in picked for pool in self.pools.of(lane_of(entry)))
        if pools:
            # Others may have taken the next ones, too: see how many are gone in a few lookups.
            self.let_ask({pool: _NEXT * count for pool, count in pools.items()})
            self._wake.set()  # none may be left of those that are listed
        self.look_for_more()

    async def admit(
        self,
        tasks: Sequence[StoredTask],
        token: str,
        now: datetime,
        refuse: Callable[[Sequence[StoredTask], Sequence[StoredTask]], None],
        dead: Sequence[tuple[str, str]] = (),
    ) -> Admitted:
        """Take permits for these tasks, as far as they are free.

        `now`: the server's time at which the tasks were read. `dead`: the tasks and the tokens of closed runs, whose
        permits are returned first. `refuse` is called at once with the tasks that got no permit, which wait again, and
        with those that another worker is about to claim.
        Raises DatabaseError. The permits that were granted before the error are given back.
        """
        wanted = {task.id: task for task in tasks}
        timed: set[PermitPool] = set()
        held: dict[str, list[HeldPermit]] = {}
        granted: dict[str, list[PermitPool]] = {}
        not_before: dict[str, datetime] = {}
        claim_by: datetime | None = None
        try:
            for kind in range(KINDS):
                requests = self._requests.of(wanted.values(), kind, now)
                if not requests:
                    continue
                timed.update(request.pool for request in requests if request.limit.starts is not None)
                gone = [HeldPermit(request.pool, *run) for request in requests[:1] for run in dead]
                async with self._turn:
                    requests = list(map(self._requests.with_waiting, requests))
                    before = {}
                    for request in requests:
                        state = self.pools.state(request.pool)
                        state.withdraw_at, before[request.pool] = inf, (state.news, state.came)
                        state.late_cnt = 0
                        state.asks += 1
                    returned = [held for held in self._to_give_back if held.pool in before]
                    take = permits.take(requests, self._worker_id, token, [*gone, *returned])
                    answers = await self._store.run(take)
                    self._to_give_back = [held for held in self._to_give_back if held not in returned]
                for request in requests:
                    answer = answers.get(request.pool, permits.NONE)
                    claim_by = min(filter(None, (claim_by, answer.claim_by)), default=None)
                    for task_id in answer.task_ids:
                        granted.setdefault(task_id, []).append(request.pool)
                        if request.limit.concurrency is not None:
                            held.setdefault(task_id, []).append(HeldPermit(request.pool, task_id, token))
                    for task_id, time in answer.not_before.items():
                        not_before[task_id] = max(time, not_before.get(task_id, time))
                    lost = [wanted.pop(each.task_id) for each in request.wanted if each.task_id not in answer.task_ids]
                    self._answered(lost)
                    self._take_answer(request, answer, *before[request.pool])
                    # These ask no wider pool, so other tasks may.
                    wider = (self.pools.wider(lane_of_task(task), request.pool) for task in lost)
                    self.let_ask(Counter(chain.from_iterable(wider)))
                    refuse(
                        [task for task in lost if task.id not in answer.under_way],
                        [task for task in lost if task.id in answer.under_way],
                    )
        except DatabaseError:
            none = Admitted(self, [], token, {}, granted, frozenset(timed), {}, [], None, frozenset(), now)
            await self.settle(none, [*granted])
            raise  # the tasks without an answer ask again: see `landed`
        self._answered(wanted.values())
        incomplete = [task_id for task_id in granted if task_id not in wanted]
        of = frozenset(lane_of_task(task) for task in wanted.values())
        # The order of the request may differ from that of the server, where tenants take turns.
        admitted = Admitted(
            self,
            list(wanted),
            token,
            held,
            granted,
            frozenset(timed),
            not_before,
            incomplete,
            claim_by,
            of,
            now,
        )
        if incomplete and not wanted:
            await self.settle(admitted, ())
        return admitted

    def _answered(self, tasks: Iterable[StoredTask]) -> None:
        for task in tasks:
            self._picked.pop(task.id, None)

    def _take_answer(self, request: PermitRequest, answer: PermitGrant, news: int, came: int) -> None:
        """Note what an answer tells of a pool. `news`, `came`: those of its state when it was asked."""
        pool = request.pool
        self._granted_cnt += len(answer.task_ids)
        if request.is_fair and pool.queue is not None:
            self.windows.advance(pool.queue, self.pools.note_turns(pool.queue, answer.turn, answer.turns))
        if not answer.is_full and answer.under_way and not answer.task_ids:
            # Others have taken these tasks, and are about to take the next: this worker would ask in vain again.
            state = self.pools.state(pool)
            state.is_listed, state.withdraw_at, state.budget = answer.is_listed, inf, 0
            state.refusals += 1
            pause = min(_STEP_ASIDE * 2 ** min(state.refusals - 1, 8), _MAX_STEP_ASIDE)
            state.retry_at, state.coming = monotonic() + pause * (0.5 + random.random()), MAX_WAITING
            self._wake.set()
            return
        if not answer.is_full and not answer.is_listed:
            if self.pools.states.pop(pool, None) is not None:
                self.let_ask({pool: inf})
            return
        state = self.pools.state(pool)
        state.is_listed, state.withdraw_at = answer.is_listed, inf
        if request.does_wait:
            tasks = (task for task in (*request.wanted, *request.waiting) if task.task_id not in answer.task_ids)
            listed = {task.task_id: (task.tenant, order_of(task.rank)) for task in tasks if task.rank is not None}
            self.pools.show(pool, listed, are_all=len(request.waiting) < self._requests.most_waiting(pool))
        if not answer.is_full:
            self._see_to(pool)
            self._open({pool: inf})  # not `let_ask`: the tasks that have just got their permits still count as asking
            return
        now = monotonic()
        state.budget = 0
        state.refusals = 0 if answer.task_ids else state.refusals + 1
        # By now it is known whose turn it is.
        is_turn_known = request.is_fair and answer.is_open and state.refusals <= _AT_ONCE
        if is_turn_known or state.news > news:
            state.retry_at, state.coming = now, max(state.coming, min(answer.left, MAX_WAITING))
            self._wake.set()
            return
        next_time = answer.next_time(self._clock.now())
        next_start = inf if next_time is None else max(self._clock.monotonic_of(next_time) - _LEAD, now)
        state.coming = 0
        if next_start <= now + POLL or (next_start < inf and not answer.is_listed):
            # All workers know this time. Those that ask at the same time would ask for the same tasks.
            state.retry_at = next_start + answer.peer_cnt * _SPREAD * random.random()
            state.coming = max(answer.count_within(_TOGETHER), int(self.pools.rate(pool) * _TOGETHER.total_seconds()))
        elif next_start < inf:
            state.retry_at = now + POLL  # or what is listed would no longer hold when the start is free
        elif answer.is_crowded:
            state.retry_at = now + POLL * (0.75 + random.random() / 4)
        else:
            pause = min(_GIVE_WAY * 2 ** min(state.refusals, 8), _MAX_GIVE_WAY)
            state.retry_at = now + pause * (0.5 + random.random())
        if answer.is_crowded and state.reclaim_at is None:
            state.reclaim_at = now + _RECLAIM
        if not answer.is_crowded:
            state.reclaim_at = None
        if state.came > came:
            self.pools.list_soon(state)
        self._wake.set()

    def hold(self, admitted: Admitted, task_ids: Iterable[str]) -> None:
        """Remember the permits of these tasks' runs until `release`."""
        for task_id in task_ids:
            if task_id in admitted.held:
                self._held[admitted.token, task_id] = admitted.held[task_id]
            pools = [pool for pool in admitted.granted.get(task_id, ()) if pool in admitted.timed]
            if pools:
                self._timed[task_id, admitted.token] = pools

    async def settle(self, admitted: Admitted, lost: Sequence[str]) -> None:
        """Give back the permits of the lost tasks.

        If a task is neither claimed nor lost, the result of its claim is unknown, and the task keeps its permits. If
        the write fails, the permits are reclaimed later: a search finds that their runs do not exist.
        """
        gone = [*lost, *admitted.incomplete]
        pools = {pool for task_id in gone for pool in admitted.granted.get(task_id, ())}
        if not pools:
            return
        runs = [(task_id, admitted.token) for task_id in gone]
        try:
            async with self._turn:
                await self._store.run(permits.settle(pools, self._worker_id, {}, runs, self._requests.room))
        except DatabaseError as error:
            logger.warning(
                "permits not settled: they are reclaimed later", extra=fields(tasks=len(gone), reason=told(error))
            )
        self.let_ask(Counter(pool for task_id in gone for pool in admitted.granted.get(task_id, ())))

    # --- permits of runs ------------------------------------------------------------------------------------

    def release(self, task_id: str, run_id: str, *, is_closed: bool) -> None:
        """Forget the permits of a run, and give them back if `is_closed`.

        `is_closed`: the run is closed, or its task was removed.
        """
        if not (self._held or self._timed):
            return
        self._begin((task_id, token_of(run_id)))  # a run that ends before its handler begins counts, too
        held = self._held.pop((token_of(run_id), task_id), None)
        if held and is_closed:
            self._to_give_back += held
            self._giving.set()

    def time_begin(self, run: HeldRun, admitted: Admitted) -> None:
        """Have the start of this run's handler counted, and let it wait for its time, if its starts are limited."""
        name = (run.task_id, token_of(run.run_id))
        if name not in self._timed:
            return
        if (not_before := admitted.not_before.get(run.task_id)) is not None:
            run.not_before = self._clock.monotonic_of(not_before)
        if admitted.claim_by is not None:
            # Until then, the start is counted for later than it is. A handler that begins after it would be counted for
            # earlier, and so the window could have one too many.
            now = monotonic()
            run.begin_by = now + admitted.claim_by.timestamp() - self._clock.latest(now) - BEGIN
        loop, thread = asyncio.get_running_loop(), get_ident()

        def begin() -> None:
            if get_ident() == thread:
                self._begin(name)
            else:  # to tell the loop may take one turn of the threads
                loop.call_soon_threadsafe(self._begin, name, monotonic() + getswitchinterval())

        run.on_begin = begin

    def _begin(self, name: tuple[str, str], when: float | None = None) -> None:
        """Have the start of a handler stored, unless it was stored before. `when`: monotonic seconds; None: now."""
        pools = self._timed.pop(name, None)
        if pools is not None:
            # No start is counted for earlier than it was.
            self._begun.append((name, pools, self._clock.latest(monotonic() if when is None else when) + _CALL))
            if self._storing is None:
                pause = min(_GATHER, *(self.pools.window(pool) * _GATHER for pool in pools))
                self._storing = asyncio.get_running_loop().call_later(pause, self._giving.set)

    async def _store_begun(self) -> None:
        begun, self._begun, self._storing = self._begun, [], None
        pools = {pool for _, pools, _ in begun for pool in pools}
        times = {name: self._clock.instant_of(seconds) for name, _, seconds in begun}
        try:
            await self._store.run(permits.settle(pools, self._worker_id, times, (), self._requests.room))
        except DatabaseError as error:
            logger.warning("starts not stored: they count for longer", extra=fields(reason=told(error)))

    async def run_giving_back(self) -> None:
        """Give back the permits of closed runs. After `stop`, give back the remaining permits and end."""
        while not self._is_stopping or self._to_give_back or self._begun:
            await self._giving.wait()
            self._giving.clear()
            async with self._turn:
                if self._begun:
                    await self._store_begun()
                held, self._to_give_back = self._to_give_back, []
                if not held:
                    continue
                try:
                    await self._store.run(permits.give_back(held, self._worker_id, self._requests.room))
                except DatabaseError as error:
                    # The permits are not lost. The search for dead runs will find that the runs of these permits are
                    # closed.
                    fate = fields(runs=len(held), reason=told(error))
                    logger.warning("permits not given back: they are reclaimed later", extra=fate)
            pools = Counter(entry.pool for entry in held)
            for pool in pools:
                self._see_to(pool)
            self.let_ask(pools)

    def _see_to(self, pool: PermitPool) -> None:
        """Ask this pool soon, or withdraw what it lists: for what this worker asks itself, no other one is called."""
        if (state := self.pools.states.get(pool)) is not None and state.is_listed:
            state.withdraw_at = min(state.withdraw_at, monotonic() + _ANSWER)
            self._wake.set()

    async def run(self) -> None:
        """Let waiting tasks ask again when permits may be free, until `stop_trying`."""
        while not self._is_closed:
            self._wake.clear()
            next_time = min(map(_next_time, self.pools.states.values()), default=inf)
            await wake_or_wait(self._wake, None if next_time == inf else max(0.0, next_time - monotonic()))
            try:
                await self._withdraw()
                await self.reclaim_dead()
            except DatabaseError as error:
                logger.warning(
                    "permits of dead runs not reclaimed, will be tried again", extra=fields(reason=told(error))
                )
                await asyncio.sleep(_ANSWER)
            except Exception:
                logger.exception("permits of dead runs not reclaimed, will be tried again")
                await asyncio.sleep(_ANSWER)
            self._try_due()
        for state in self.pools.states.values():
            state.withdraw_at = 0.0
        try:
            await self._withdraw()
        except DatabaseError as error:
            logger.warning("waiting tasks not withdrawn: they expire soon", extra=fields(reason=told(error)))

    def _try_due(self) -> None:
        """Let tasks ask again in each pool whose time has come. Forget the pools for which none waits."""
        now = monotonic()
        due = {}
        for pool, state in list(self.pools.states.items()):
            if state.retry_at > now:
                continue
            if self.windows.waits_for(pool):
                state.retry_at = now + POLL
                due[pool] = state.coming or 1
                state.coming = 0
            elif state.is_listed:
                state.withdraw_at, state.retry_at = now, now + _ANSWER
            else:
                del self.pools.states[pool]
        self.let_ask(due)

    def called(self, pool_id: str, call: object) -> None:
        """Ask the pool again: permits are left for tasks that wait in this worker."""
        pool = PermitPool.of_id(pool_id)
        if (state := self.pools.states.get(pool)) is not None:
            state.news += 1
            state.withdraw_at = min(state.withdraw_at, monotonic() + _ANSWER)
            self.let_ask({pool: left_by(call)})
            self._wake.set()

    def limits_changed(self) -> None:
        """Let all waiting tasks ask again. Call this when the limits have changed."""
        self.pools.forget()
        self.windows.sort_anew()
        self._wake.set()

    def let_ask(self, counts: Mapping[PermitPool, float]) -> None:
        """Let more tasks ask these pools, this number of each.

        Where others wait, one request is made after the other: two at once would compete for the same permits.
        """
        states = self.pools.states
        asking = self._asking() if any(pool in states and states[pool].is_listed for pool in counts) else set()
        opened: dict[PermitPool, float] = {}
        for pool, count in counts.items():
            state = states.get(pool)
            if state is not None and state.is_listed and pool in asking:
                state.news += 1
                state.coming = max(state.coming, int(min(count, MAX_WAITING)))
            else:
                opened[pool] = count
        self._open(opened)

    def _open(self, counts: Mapping[PermitPool, float]) -> None:
        """Let more tasks ask these pools at once, this number of each."""
        if not counts or self._is_closed:
            return
        for pool, count in counts.items():
            self.pools.give([pool], max(count, self.windows.least_asked(pool)))
        self.windows.reopen(counts)
        self._scope.signals.room_made.send()

    def _asking(self) -> set[PermitPool]:
        """Return the pools that this worker is asking, or is about to ask."""
        return {pool for entry in self._picked.values() for pool in self.pools.of(lane_of(entry))}

    async def _withdraw(self) -> None:
        """Withdraw the waiting tasks from pools that have called this worker, and that it has not asked since.

        It has no room for them, or none waits here any more: another worker may have run what this one has listed.
        """
        now = monotonic()
        requests = []
        asking = self._asking()
        for pool, state in list(self.pools.states.items()):
            if state.withdraw_at == inf or (state.withdraw_at > now and self.windows.waits_for(pool)):
                continue
            # A worker that has room may be slow. But others do not wait for it for long.
            is_late = state.late_cnt < _LATE and self._requests.room > 0 and self.windows.waits_for(pool)
            if (is_late or pool in asking) and not self._is_closed:
                state.late_cnt += 1
                state.withdraw_at = now + _ANSWER  # a request is under way, or about to be sent
            else:
                state.withdraw_at = inf
                limit = self.pools.limit_of(pool)
                if state.is_listed and limit is not None:
                    requests.append(
                        PermitRequest(pool, limit, (), does_wait=False, is_fair=self.pools.takes_turns(pool))
                    )
                state.is_listed = False
                if state.shown is not None:
                    state.shown = {}
        if requests:
            states = self.pools.states
            asks = {request.pool: states[request.pool].asks for request in requests}
            async with self._turn:
                await self._store.run(permits.take(requests, self._worker_id, "none"))
            # A request that was sent meanwhile may have come first, and what it listed is gone.
            again = [pool for pool, count in asks.items() if pool in states and states[pool].asks != count]
            self.let_ask(dict.fromkeys(again, 1))

    def stop_trying(self) -> None:
        """End `run`."""
        self._is_closed = True
        self._wake.set()
        if self._more is not None:
            self._more.cancel()

    def stop(self) -> None:
        """End `run_giving_back` once all permits of closed runs are given back."""
        self.stop_trying()
        self._is_stopping = True
        self._giving.set()

    async def reclaim_dead(self) -> None:
        """Give back the permits that dead runs hold in those pools for which the search is due."""
        now = monotonic()
        crowded = {
            pool: state
            for pool, state in self.pools.states.items()
            if state.reclaim_at is not None and state.reclaim_at <= now
        }
        for pool, state in crowded.items():
            if not self.windows.waits_for(pool):
                state.reclaim_at = None
        asked = [pool for pool, state in crowded.items() if state.reclaim_at is not None][:_MAX_POOLS]
        for pool in asked:
            crowded[pool].reclaim_at = now + _RECLAIM
        if not asked:
            return
        reclaimed = await self._store.run(permits.reclaim(asked, self._worker_id))
        await count_lapses(self._scope, reclaimed.lapsed, reclaimed.closed_cnt)
        if reclaimed.has_found:
            self.let_ask({pool: self.pools.width(pool) + 1 for pool in asked})
            return
        # The next search is due when the next lease lapses, but after `_MAX_RECLAIM` at the latest. The limit is needed
        # because a worker may close a run and die before it gives the permit back.
        lapse = _MAX_RECLAIM if reclaimed.next_lapse is None else reclaimed.next_lapse.total_seconds()
        for pool in asked:
            crowded[pool].reclaim_at = now + min(max(_RECLAIM, lapse), _MAX_RECLAIM)

    # --- scans ----------------------------------------------------------------------------------------------

    def targets(self, queues: Sequence[str]) -> list[ScanTarget]:
        """Return the scans that cover these queues."""
        return self._targets.of(queues)

    def wants_more(self, queue: str) -> bool:
        """Whether a scan should find more tasks of this queue."""
        return self.windows.wants_more(queue)

    def look_for_more(self) -> None:
        """Ask for a scan soon, if few tasks wait here for permits, and more wait in the database."""
        if self._more is not None or self._is_closed or not self.pools.is_any:
            return
        if not any(self.windows.wants_more(queue) for queue in self._scope.served.queues):
            return
        least = _MORE if self._granted_cnt >= _USEFUL else _MORE_OF_LITTLE
        pause = max(0.0, self._more_at + least - monotonic())
        self._more = asyncio.get_running_loop().call_later(pause, self._scan_for_more)

    def _scan_for_more(self) -> None:
        self._more, self._more_at, self._granted_cnt = None, monotonic(), 0
        if not self._is_closed:
            self._scope.signals.gate_drained.send()


def _next_time(state: PoolState) -> float:
    reclaim_at = inf if state.reclaim_at is None else state.reclaim_at
    return min(state.retry_at, reclaim_at, state.withdraw_at)
