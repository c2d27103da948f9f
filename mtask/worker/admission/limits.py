"""The limits of queues: takes places for what is to be claimed, and has what got none wait until there may be one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from time import monotonic

from mtask.errors import DatabaseError
from mtask.model.controls import Limit
from mtask.model.documents import StoredTask
from mtask.store.queues import permits
from mtask.store.queues.permits import HeldPermit, PermitGrant, PermitPool, PermitRequest
from mtask.store.statements.filters import Filter, in_time, of_other_queues, of_queues_and_keys
from mtask.worker.admission.controls import Controls
from mtask.worker.admission.parking import Rank, Waiting
from mtask.worker.log import fields, logger
from mtask.worker.state.queue import Entry
from mtask.worker.state.scope import Scope
from mtask.worker.state.timing import wake_or_wait

#: How long what found its place crowded waits, in seconds: at random, that not all workers ask at once; and at most,
#: when it has found it so again and again.
_CROWDED, _MAX_CROWDED = 0.25, 1.0
#: How long after a place was found crowded the dead are looked for among those that take it up, and again, in seconds.
_DEAD, _MAX_DEAD = 0.5, 5.0
#: Places that are looked through for the dead at once.
_MAX_LOOK = 200
#: Between two scans for what waits beyond what is known here, in seconds: after one that was of use, and one that was
#: not, since few of the tasks that it found could start.
_MORE, _MORE_OF_LITTLE, _OF_USE = 0.25, 1.0, 100
#: How many tasks wait here for each place at least, for a queue's and for a key's; beyond, a scan finds them again.
_PARKED, _PARKED_OF_KEY = 1_000, 10
#: Keys that are left out of scans, at most. Beyond that, tasks of other keys of the same queue may have to wait.
_MAX_LEFT_OUT = 5_000


@dataclass(frozen=True, slots=True)
class Part:
    """What one scan is to look for."""

    queues: list[str]
    #: limit_keys that need not be looked for.
    left_out: Sequence[str] = ()
    #: Some of this queue has to wait: what is beyond the batch `note_more` is told.
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The tasks of a claim that got their places."""

    task_ids: list[str]
    token: str
    #: By task, the places that its run takes up, and all that it was granted; and all places that were asked.
    held: Mapping[str, Sequence[HeldPermit]]
    granted: Mapping[str, Sequence[PermitPool]]
    asked: frozenset[PermitPool]
    #: The tasks that got a place, and lacked another.
    refused: Sequence[str]
    #: Until when they may be claimed, by the server's clock; None: no place was asked for.
    claim_by: datetime | None
    #: Of what queues and keys they were: a task may have been changed since.
    of: frozenset[tuple[str, str | None]]

    @property
    def guard(self) -> list[Filter]:
        """What their claim asks for beside the tasks' own state."""
        guards = [of_queues_and_keys(sorted(self.of, key=str))]
        return guards if self.claim_by is None else [*guards, in_time(self.claim_by)]


class Limits:
    """Keeps this worker's claims within the limits of its queues."""

    def __init__(self, scope: Scope, controls: Controls) -> None:
        self._store = scope.store
        self._clock = scope.clock
        self._signals = scope.signals
        self._controls = controls
        self._waiting: dict[PermitPool, Waiting] = {}
        #: Places granted since the last scan for more, when that was, and the next.
        self._granted_cnt = 0
        self._more_at = 0.0
        self._more: asyncio.TimerHandle | None = None
        self._held: dict[tuple[str, str], Sequence[HeldPermit]] = {}
        self._to_give_back: list[HeldPermit] = []
        self._wake = asyncio.Event()
        self._giving = asyncio.Event()
        self._tries_no_more = self._is_stopping = False

    @property
    def is_any(self) -> bool:
        """Whether a queue served here is limited."""
        return bool(self._controls.limits)

    def is_limited(self, queue: str | None) -> bool:
        """Whether a task of this queue may need a place; None: of an unknown one."""
        return queue in self._controls.limits if queue is not None else self.is_any

    def guard_of_free(self) -> list[Filter]:
        """Return what a claim of tasks asks for that need no place: one may have moved to a limited queue."""
        return [of_other_queues(sorted(self._controls.limits))] if self._controls.limits else []

    def park(self, entry: Entry) -> bool:
        """Have a task wait where nothing of its queue can be claimed now; return whether it does."""
        waiting = None if entry.queue is None else self._blocked(PermitPool(entry.queue))
        if waiting is not None:
            waiting.park(entry.task_id, (-entry.priority, entry.due))
        return waiting is not None

    def changed(self) -> None:
        """Try all that waits again: the limits may be others now."""
        waiting, self._waiting = self._waiting, {}
        parked = [task_id for one in waiting.values() for task_id in one.parked]
        if parked and not self._tries_no_more:
            self._signals.tasks_doubtful.send(parked)
        if any(one.has_more for one in waiting.values()):
            self._ask_for_more()

    def _blocked(self, place: PermitPool) -> Waiting | None:
        waiting = self._waiting.get(place)
        return waiting if waiting is not None and waiting.is_blocked else None

    def parts(self, queues: Sequence[str]) -> list[Part]:
        """Return what is to be scanned for. What has to wait for its place is left out.

        A queue of which anything waits is scanned apart: what has to wait there never fills the batch of the others.
        """
        apart: dict[str, list[str]] = {}
        full: set[str] = set()
        for place, waiting in self._waiting.items():
            keys = apart.setdefault(place.queue, [])
            if waiting.is_hungry:
                waiting.has_more = False
            else:
                waiting.has_more = True
                if place.key is None:
                    full.add(place.queue)
                else:
                    keys.append(place.key)
        together = [queue for queue in queues if queue not in apart]
        found = [Part(together)] if together else []
        for queue in queues:
            if queue in apart and queue not in full:
                keys = apart[queue]
                if len(keys) > _MAX_LEFT_OUT:
                    keys = random.sample(keys, _MAX_LEFT_OUT)
                found.append(Part([queue], keys, is_apart=True))
        return found

    def note_more(self, part: Part) -> None:
        """Take down that a scan of a queue that is looked for apart found more than it could bring."""
        for place, waiting in self._waiting.items():
            waiting.has_more |= place.queue in part.queues
        self._ask_for_more()

    async def admit(self, tasks: Sequence[StoredTask], token: str) -> Admitted:
        """Take places for these tasks, the most urgent first; what gets none waits here."""
        wanted = {task.id: task for task in tasks if not self._has_to_wait(task)}
        asked: set[PermitPool] = set()
        held: dict[str, list[HeldPermit]] = {}
        granted: dict[str, list[PermitPool]] = {}
        claim_by: datetime | None = None
        try:
            # Keys first: they are the narrower, and what they refuse takes up no place of the queue.
            for of_key in (True, False):
                requests = self._requests(wanted.values(), of_key=of_key)
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
                    self._take(request, answer, [wanted.pop(t) for t in request.task_ids if t not in answer.task_ids])
        except DatabaseError:
            await self.settle(Admitted([], token, {}, granted, frozenset(asked), [], None, frozenset()), {}, [*granted])
            raise
        refused = [task_id for task_id in granted if task_id not in wanted]
        of = frozenset((task.queue, task.task_option.limit_key) for task in wanted.values())
        admitted = Admitted(list(wanted), token, held, granted, frozenset(asked), refused, claim_by, of)
        if refused and not wanted:
            await self.settle(admitted, {}, ())
        return admitted

    def _has_to_wait(self, task: StoredTask) -> bool:
        """Whether a place that this task needs is known to be blocked: then it waits, and nobody is asked."""
        key = task.task_option.limit_key
        for place in (PermitPool(task.queue), *(() if key is None else (PermitPool(task.queue, key),))):
            waiting = self._blocked(place)
            if waiting is not None:
                waiting.park(task.id, self._rank(task))
                return True
        return False

    def _rank(self, task: StoredTask) -> Rank:
        moment = task.task_state.next_preempt_time
        return (-task.task_option.priority, 0.0 if moment is None else self._clock.monotonic_of(moment))

    def _requests(self, tasks: Iterable[StoredTask], *, of_key: bool) -> list[PermitRequest]:
        found: dict[PermitPool, tuple[Limit, list[str]]] = {}
        for task in tasks:
            key = task.task_option.limit_key
            limit = self._controls.limit_of(task.queue, of_key=of_key)
            if limit is not None and not (of_key and key is None):
                place = PermitPool(task.queue, key if of_key else None)
                found.setdefault(place, (limit, []))[1].append(task.id)
        return [PermitRequest(place, limit, task_ids) for place, (limit, task_ids) in found.items()]

    def _take(self, request: PermitRequest, answer: PermitGrant, refused: Sequence[StoredTask]) -> None:
        """Take the answer of one place: have what got none wait, or let more of what waits go."""
        waiting = self._waiting.get(request.pool)
        self._granted_cnt += len(answer.task_ids)
        if not refused:
            if waiting is not None:
                waiting.refusals = 0
                self._open([request.pool])
            return
        now = monotonic()
        width = max(filter(None, (request.limit.concurrency, request.limit.starts)))
        most = max(_PARKED if request.pool.key is None else _PARKED_OF_KEY, 2 * width)
        if waiting is None:
            waiting = self._waiting[request.pool] = Waiting(width, most)
        waiting.width, waiting.most = width, most
        waiting.is_blocked = True
        waiting.refusals = 0 if answer.task_ids else waiting.refusals + 1
        next_time = answer.next_time(self._clock.now())
        if next_time is not None:
            waiting.until = self._clock.monotonic_of(next_time)
        else:
            pause = min(_CROWDED * 2 ** min(waiting.refusals, 8), _MAX_CROWDED)
            waiting.until = now + pause * (0.5 + random.random())
        if answer.is_crowded and waiting.dead_at is None:
            waiting.dead_at = now + _DEAD
        for task in refused:
            waiting.park(task.id, self._rank(task))
        if waiting.is_hungry:
            self._ask_for_more()
        self._wake.set()

    def hold(self, admitted: Admitted, task_ids: Iterable[str]) -> None:
        """Take down what the runs of these tasks take up, until they are over."""
        for task_id in task_ids:
            if task_id in admitted.held:
                self._held[admitted.token, task_id] = admitted.held[task_id]

    async def settle(self, admitted: Admitted, claimed: Mapping[str, datetime], lost: Sequence[str]) -> None:
        """Say when the tasks were claimed, and give back the places of those that were not; the rest is in doubt.

        What cannot be written is found later: no place stays taken for a run that there is not.
        """
        gone = [*lost, *admitted.refused]
        try:
            await self._store.run(permits.settle(admitted.asked, admitted.token, claimed, gone))
        except DatabaseError as error:
            logger.warning("places not settled", extra=fields(tasks=len(gone), reason=str(error)))
        self._open({place for task_id in gone for place in admitted.granted.get(task_id, ())})

    def release(self, task_id: str, run_id: str, *, is_closed: bool) -> None:
        """Let go of what a run took up, and give it back where the run is closed in its document, or the task gone."""
        held = self._held.pop((permits.token_of(run_id), task_id), None)
        if held and is_closed:
            self._to_give_back += held
            self._giving.set()

    async def run(self) -> None:
        """Have what waits tried again when it may get its place, until `stop_trying`."""
        while not self._tries_no_more:
            self._wake.clear()
            moments = [
                moment
                for waiting in self._waiting.values()
                for moment in (waiting.until, waiting.dead_at)
                if moment is not None
            ]
            await wake_or_wait(self._wake, max(0.0, min(moments) - monotonic()) if moments else None)
            try:
                await self._bury_dead()
            except DatabaseError as error:
                logger.warning("places not looked through", extra=fields(reason=str(error)))
            except Exception:
                logger.exception("places not looked through")
            now = monotonic()
            self._open([place for place, waiting in self._waiting.items() if waiting.until <= now])

    async def run_giving_back(self) -> None:
        """Give places back whose runs are closed, until `stop`, and then what is left."""
        while not self._is_stopping or self._to_give_back:
            await self._giving.wait()
            self._giving.clear()
            held, self._to_give_back = self._to_give_back, []
            if not held:
                continue
            try:
                await self._store.run(permits.give_back(held))
            except DatabaseError as error:
                # Whoever finds the places crowded sees that their runs are closed.
                logger.warning("places not given back", extra=fields(runs=len(held), reason=str(error)))
            self._open({entry.pool for entry in held})

    def stop_trying(self) -> None:
        """End `run`."""
        self._tries_no_more = True
        self._wake.set()

    def stop(self) -> None:
        """End `run_giving_back`, when all that was held is given back."""
        self.stop_trying()
        self._is_stopping = True
        self._giving.set()

    def _open(self, asked: Iterable[PermitPool]) -> None:
        """Let some go of what waits for these places: there may be free ones."""
        gone: list[str] = []
        for place in asked:
            waiting = self._waiting.get(place)
            if waiting is None or self._tries_no_more:
                continue
            waiting.is_blocked = False
            gone += waiting.let_go()
            # If nothing is heard of those, as they are done elsewhere, the next are let go all the same.
            waiting.until = monotonic() + _CROWDED
            if waiting.is_hungry:
                self._ask_for_more()
            if not waiting.parked:
                del self._waiting[place]
        if gone:
            self._wake.set()
            self._signals.tasks_doubtful.send(gone)

    def _ask_for_more(self) -> None:
        if self._more is None and not self._tries_no_more:
            least = _MORE if self._granted_cnt >= _OF_USE else _MORE_OF_LITTLE
            pause = max(0.0, self._more_at + least - monotonic())
            self._more = asyncio.get_running_loop().call_later(pause, self._look_for_more)

    def _look_for_more(self) -> None:
        self._more, self._more_at, self._granted_cnt = None, monotonic(), 0
        if not self._tries_no_more:
            self._signals.permits_freed.send()

    async def _bury_dead(self) -> None:
        """Give back what the dead take up, in places that were found crowded a while ago."""
        now = monotonic()
        crowded = {place: waiting for place, waiting in self._waiting.items() if (waiting.dead_at or inf) <= now}
        asked = list(crowded)[:_MAX_LOOK]
        for place in asked:
            crowded[place].dead_at = now + _DEAD
        if not asked:
            return
        reclaimed = await self._store.run(permits.reclaim(asked))
        if reclaimed.has_found:
            self._open(asked)
            return
        # A live run cannot be over before its lease is; whose worker died after it ended is found later.
        lapse = _MAX_DEAD if reclaimed.next_lapse is None else reclaimed.next_lapse.total_seconds()
        for place in asked:
            crowded[place].dead_at = now + min(max(_DEAD, lapse), _MAX_DEAD)
