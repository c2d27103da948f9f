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
from mtask.store.filters import Filter, in_time
from mtask.store.places import Held, Place, Taken, Wish
from mtask.worker.clock import ServerClock
from mtask.worker.controls import Controls
from mtask.worker.log import fields, logger

#: How long what found its place crowded waits, in seconds: at random, that not all workers ask at once.
_CROWDED = 0.25
#: Between two looks for the dead among those that take a place, in seconds.
_DEAD = 0.5
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
    #: Runs take up the place; some may be dead.
    is_crowded: bool = False
    #: More wait than are known here.
    has_more: bool = False


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

    @property
    def guard(self) -> list[Filter]:
        """What their claim asks for beside the tasks' own state."""
        return [] if self.claim_by is None else [in_time(self.claim_by)]


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
        self._looked_for_dead: dict[Place, float] = {}
        self._held: dict[str, Sequence[Held]] = {}
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
        wanted = {task.id: task for task in tasks}
        asked: set[Place] = set()
        held: dict[str, list[Held]] = {}
        claim_by: datetime | None = None
        granted: set[str] = set()
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
                        self._park(wish, task_id, answer)
                    elif wish.limit.concurrency is not None:
                        held.setdefault(task_id, []).append(Held(wish.place, task_id, token))
        refused = [task_id for task_id in granted if task_id not in wanted]
        admitted = Admitted(list(wanted), token, held, frozenset(asked), refused, claim_by)
        if refused and not wanted:
            await self.settle(admitted, {}, ())
        return admitted

    def _wishes(self, tasks: Iterable[StoredTask], *, of_key: bool) -> list[Wish]:
        found: dict[Place, tuple[Limit, list[str]]] = {}
        for task in tasks:
            key = task.task_option.limit_key
            limit = self._controls.limit_of(task.queue, of_key=of_key)
            if limit is not None and not (of_key and key is None):
                place = Place(task.queue, key if of_key else None)
                found.setdefault(place, (limit, []))[1].append(task.id)
        return [Wish(place, limit, task_ids) for place, (limit, task_ids) in found.items()]

    def _park(self, wish: Wish, task_id: str, answer: Taken) -> None:
        blocked = self._blocked.get(wish.place)
        if blocked is None:
            places_in_all = max(filter(None, (wish.limit.concurrency, wish.limit.starts)))
            blocked = self._blocked[wish.place] = _Blocked(0.0, max(_MIN_PARKED, 2 * places_in_all))
        until = monotonic() + _CROWDED * (0.5 + random.random())
        if answer.next_time is not None:
            until = self._clock.monotonic_of(answer.next_time)
        blocked.until = max(blocked.until, until)
        blocked.is_crowded |= answer.is_crowded
        if len(blocked.parked) < blocked.most:
            blocked.parked[task_id] = None
        else:
            blocked.has_more = True
        self._wake.set()

    def hold(self, admitted: Admitted, task_ids: Iterable[str]) -> None:
        """Take down what the runs of these tasks take up, until they are closed."""
        for task_id in task_ids:
            if task_id in admitted.held:
                self._held[f"{admitted.token} {task_id}"] = admitted.held[task_id]

    async def settle(self, admitted: Admitted, claimed: Mapping[str, datetime], lost: Sequence[str]) -> None:
        """Say when the tasks were claimed, and give back the places of those that were not; the rest is in doubt.

        What cannot be written is found later: no place stays taken for a run that there is not.
        """
        try:
            await self._store.run(places.settle(admitted.asked, admitted.token, claimed, [*lost, *admitted.refused]))
        except DatabaseError as error:
            logger.warning("places not settled", extra=fields(tasks=len(lost), reason=str(error)))

    def closed(self, task_id: str, run_id: str) -> None:
        """Give back the places of a run that is closed in its document."""
        held = self._held.pop(f"{run_id.rpartition('-')[0]} {task_id}", None)
        if held:
            self._to_give_back += held
            self._giving.set()

    async def run(self) -> None:
        """Have what waits tried again when it may get its place, until `stop_trying`."""
        while not self._tries_no_more:
            self._wake.clear()
            first = min((blocked.until for blocked in self._blocked.values()), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if first is None else max(0.0, first - monotonic())):
                    await self._wake.wait()
            now = monotonic()
            due = [place for place, blocked in self._blocked.items() if blocked.until <= now]
            if due and not self._tries_no_more:
                await self._bury_dead([place for place in due if self._blocked[place].is_crowded])
                self._open(due)

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
        self._on_free(parked)
        if has_more:
            self._on_more()

    async def _bury_dead(self, crowded: Sequence[Place]) -> None:
        now = monotonic()
        asked = [place for place in crowded if now - self._looked_for_dead.get(place, -_DEAD) >= _DEAD]
        if not asked:
            return
        self._looked_for_dead = {p: when for p, when in self._looked_for_dead.items() if when > now - _DEAD}
        self._looked_for_dead |= dict.fromkeys(asked, now)
        try:
            await self._store.run(places.give_back_dead(asked))
        except DatabaseError as error:
            logger.warning("places not looked through", extra=fields(places=len(asked), reason=str(error)))
