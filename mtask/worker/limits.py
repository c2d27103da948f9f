"""The limits of queues: takes places for what is to be claimed, and has what got none wait until there may be one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic

from mtask.errors import DatabaseError
from mtask.model.controls import Limit
from mtask.model.documents import StoredTask
from mtask.store import places
from mtask.store.driver import AsyncStore
from mtask.store.filters import Filter, in_time, of_other_queues, of_queues_and_keys
from mtask.store.places import Held, Place, Taken, Wish
from mtask.worker.clock import ServerClock
from mtask.worker.controls import Controls
from mtask.worker.log import fields, logger

#: How long what found its place crowded waits, in seconds: at random, that not all workers ask at once.
_CROWDED = 0.25
#: How long after a place was found crowded the dead are looked for among those that take it up, and again, in seconds.
_DEAD = 0.5
#: Between two scans for what waits beyond what is known here, in seconds.
_MORE = 0.25
#: How many tasks wait here for each place at least; beyond, a scan finds them again.
_MIN_PARKED = 20
#: Blocked keys that are left out of scans, at most.
_MAX_LEFT_OUT = 500


@dataclass(slots=True)
class _Blocked:
    """A place that had none free: until when nothing is asked of it, and what waits for it."""

    until: float  #: monotonic seconds
    most: int
    parked: dict[str, None] = field(default_factory=dict)
    #: More wait than are known here.
    has_more: bool = False

    def park(self, task_id: str) -> None:
        """Have a task wait."""
        if len(self.parked) < self.most:
            self.parked[task_id] = None
        else:
            self.has_more = True


@dataclass(frozen=True, slots=True)
class Admitted:
    """The tasks of a claim that got their places."""

    task_ids: list[str]
    token: str
    #: By task, the places that its run takes up; and all of them that were asked.
    held: Mapping[str, Sequence[Held]]
    asked: frozenset[Place]
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

    def __init__(
        self,
        store: AsyncStore,
        controls: Controls,
        clock: ServerClock,
        on_free: Callable[[Iterable[str]], None],
        on_more: Callable[[], None],
    ) -> None:
        self._store = store
        self._controls = controls
        self._clock = clock
        #: Look at these tasks again; and look for more than are known here.
        self._on_free, self._on_more = on_free, on_more
        self._blocked: dict[Place, _Blocked] = {}
        #: Places that were found crowded, and when the dead are to be looked for there (monotonic seconds).
        self._crowded: dict[Place, float] = {}
        self._more_at = 0.0
        self._more: asyncio.TimerHandle | None = None
        self._held: dict[tuple[str, str], Sequence[Held]] = {}
        self._to_give_back: list[Held] = []
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

    def park(self, queue: str | None, task_id: str) -> bool:
        """Have a task wait where nothing of its queue can be claimed now; return whether it does."""
        if queue is None or self._blocked_until(Place(queue)) is None:
            return False
        self._blocked[Place(queue)].park(task_id)
        return True

    def changed(self) -> None:
        """Try all that waits again: the limits may be others now."""
        self._open(list(self._blocked))

    def _blocked_until(self, place: Place) -> float | None:
        blocked = self._blocked.get(place)
        return blocked.until if blocked is not None and blocked.until > monotonic() else None

    def left_out(self) -> tuple[list[str], dict[str, list[str]]]:
        """Return the queues, and by queue the keys, that a scan need not look for now: their places are taken."""
        queues = [place.queue for place in self._blocked if place.key is None]
        keys: dict[str, list[str]] = {}
        for place, blocked in list(self._blocked.items())[:_MAX_LEFT_OUT]:
            if place.key is not None:
                keys.setdefault(place.queue, []).append(place.key)
            blocked.has_more = True
        return queues, keys

    async def admit(self, tasks: Sequence[StoredTask], token: str) -> Admitted:
        """Take places for these tasks, the most urgent first; what gets none waits here."""
        wanted = {task.id: task for task in tasks if not self._has_to_wait(task)}
        asked: set[Place] = set()
        held: dict[str, list[Held]] = {}
        claim_by: datetime | None = None
        granted: set[str] = set()
        try:
            # Keys first: they are the narrower, and what they refuse takes up no place of the queue.
            for of_key in (True, False):
                wishes = self._wishes(wanted.values(), of_key=of_key)
                if not wishes:
                    continue
                asked.update(wish.place for wish in wishes)
                answers = await self._store.run(places.take(wishes, token))
                for wish in wishes:
                    answer = answers.get(wish.place, places.NONE)
                    granted |= answer.task_ids
                    claim_by = min(filter(None, (claim_by, answer.claim_by)), default=None)
                    for task_id in wish.task_ids:
                        if task_id not in answer.task_ids:
                            del wanted[task_id]
                            self._refused(wish, task_id, answer)
                        elif wish.limit.concurrency is not None:
                            held.setdefault(task_id, []).append(Held(wish.place, task_id, token))
        except DatabaseError:
            await self.settle(Admitted([], token, {}, frozenset(asked), [], None, frozenset()), {}, list(granted))
            raise
        refused = [task_id for task_id in granted if task_id not in wanted]
        of = frozenset((task.queue, task.task_option.limit_key) for task in wanted.values())
        admitted = Admitted(list(wanted), token, held, frozenset(asked), refused, claim_by, of)
        if refused and not wanted:
            await self.settle(admitted, {}, ())
        return admitted

    def _has_to_wait(self, task: StoredTask) -> bool:
        """Whether a place that this task needs is known to be blocked: then it waits, and nobody is asked."""
        key = task.task_option.limit_key
        for place in (Place(task.queue), *(() if key is None else (Place(task.queue, key),))):
            if self._blocked_until(place) is not None:
                self._blocked[place].park(task.id)
                return True
        return False

    def _wishes(self, tasks: Iterable[StoredTask], *, of_key: bool) -> list[Wish]:
        found: dict[Place, tuple[Limit, list[str]]] = {}
        for task in tasks:
            key = task.task_option.limit_key
            limit = self._controls.limit_of(task.queue, of_key=of_key)
            if limit is not None and not (of_key and key is None):
                place = Place(task.queue, key if of_key else None)
                found.setdefault(place, (limit, []))[1].append(task.id)
        return [Wish(place, limit, task_ids) for place, (limit, task_ids) in found.items()]

    def _refused(self, wish: Wish, task_id: str, answer: Taken) -> None:
        blocked = self._blocked.get(wish.place)
        if blocked is None or blocked.until <= monotonic():
            until = monotonic() + _CROWDED * (0.5 + random.random())
            next_time = answer.next_time(self._clock.now())
            if next_time is not None:
                until = self._clock.monotonic_of(next_time)
            most = max(_MIN_PARKED, 2 * max(filter(None, (wish.limit.concurrency, wish.limit.starts))))
            if blocked is None:
                blocked = self._blocked[wish.place] = _Blocked(until, most)
            blocked.until, blocked.most = until, most
        blocked.park(task_id)
        if answer.is_crowded:
            self._crowded.setdefault(wish.place, monotonic() + _DEAD)
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
            await self._store.run(places.settle(admitted.asked, admitted.token, claimed, gone))
        except DatabaseError as error:
            logger.warning("places not settled", extra=fields(tasks=len(gone), reason=str(error)))
        if gone:
            self._open(admitted.asked)

    def over(self, task_id: str, run_id: str, *, is_closed: bool) -> None:
        """Let go of what a run took up, and give it back where the run is closed in its document, or the task gone."""
        held = self._held.pop((places.token_of(run_id), task_id), None)
        if held and is_closed:
            self._to_give_back += held
            self._giving.set()

    async def run(self) -> None:
        """Have what waits tried again when it may get its place, until `stop_trying`."""
        while not self._tries_no_more:
            self._wake.clear()
            moments = [*(blocked.until for blocked in self._blocked.values()), *self._crowded.values()]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(moments) - monotonic()) if moments else None):
                    await self._wake.wait()
            try:
                await self._bury_dead()
            except DatabaseError as error:
                logger.warning("places not looked through", extra=fields(reason=str(error)))
            except Exception:
                logger.exception("places not looked through")
            now = monotonic()
            self._open([place for place, blocked in self._blocked.items() if blocked.until <= now])

    async def run_giving_back(self) -> None:
        """Give places back whose runs are closed, until `stop`, and then what is left."""
        while not self._is_stopping or self._to_give_back:
            await self._giving.wait()
            self._giving.clear()
            held, self._to_give_back = self._to_give_back, []
            if not held:
                continue
            try:
                await self._store.run(places.give_back(held))
            except DatabaseError as error:
                # Whoever finds the places crowded sees that their runs are closed.
                logger.warning("places not given back", extra=fields(runs=len(held), reason=str(error)))
            self._open({entry.place for entry in held})

    def stop_trying(self) -> None:
        """End `run`."""
        self._tries_no_more = True
        self._wake.set()

    def stop(self) -> None:
        """End `run_giving_back`, when all that was held is given back."""
        self.stop_trying()
        self._is_stopping = True
        self._giving.set()

    def _open(self, asked: Iterable[Place]) -> None:
        parked: list[str] = []
        has_more = False
        for place in asked:
            blocked = self._blocked.pop(place, None)
            if blocked is not None:
                parked += blocked.parked
                has_more |= blocked.has_more
        if self._tries_no_more:
            return
        if parked:
            self._on_free(parked)
        if has_more and self._more is None:
            pause = max(0.0, self._more_at + _MORE - monotonic())
            self._more = asyncio.get_running_loop().call_later(pause, self._look_for_more)

    def _look_for_more(self) -> None:
        self._more, self._more_at = None, monotonic()
        if not self._tries_no_more:
            self._on_more()

    async def _bury_dead(self) -> None:
        """Give back what the dead take up, in places that were found crowded a while ago."""
        now = monotonic()
        asked = [place for place, when in self._crowded.items() if when <= now]
        for place in asked:
            del self._crowded[place]
        if not asked:
            return
        has_found = await self._store.run(places.give_back_dead(asked))
        if has_found:
            self._open(asked)
