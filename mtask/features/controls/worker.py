"""Controls: applies and confirms the pauses, limits and retention that clients set for queues and task names.

A client's call that pauses a queue returns only when no worker claims from the queue any more. So a worker that reads a
new pause first waits until its current claims have ended. Then the worker confirms the pause in its own document. The
call does not wait for a worker with an expired heartbeat, and such a worker may miss the pause. So after a silence, a
worker reads the controls before its next claim: see `Validity`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, TypeAlias

from pydantic import ValidationError

from mtask.errors import DatabaseError, DatabaseUnavailable, MtaskError
from mtask.features.controls import operations as controls
from mtask.features.controls.rules import MENDING, BreakerRule, Control, Kind, Limit, control_id
from mtask.kernel.document.task import describe_validation
from mtask.kernel.driver.stores import CONTROLS
from mtask.kernel.statements.filters import Filter, none_of
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import Backoff, wake_or_wait
from mtask.kernel.worker.running.run import HeldRun

_PAUSE, _REFUSED_PAUSE = 0.2, 30.0
#: The server's clock shows whole milliseconds. A pause is over when the clock shows its end.
_TICK = 0.002
#: A wait that is known counts as long enough if it is at least this part of the wait that a handler asks for.
_ABOUT = 0.9
#: What a handler asks to hold back: a queue or a name, or a limit_key of a queue.
_Held: TypeAlias = tuple[Kind, str, str | None]
#: The interval at which a stopping worker reads the controls, in seconds.
_POLL = 0.5
#: The change stream tells of changed controls. In case it has missed one, they are read at each n-th regular scan: once
#: a minute.
_RECHECKED_EVERY = 12
#: The beginning of the ids of tenants' controls.
_OF_TENANT = control_id("tenant", "")


class Controls(Part):
    """Reads the controls of this worker's queues and task names, and says what of these is paused or limited."""

    def __init__(self, scope: Scope) -> None:
        self._store = scope.store
        self._signals = scope.signals
        self._validity = scope.validity
        self._validity.on_silence = self.wake
        self._clock = scope.clock
        self._queues = list(scope.queues)
        self._names = list(scope.names)
        self.served = scope.served
        #: The limits of tenants in all queues. The key is the tenant.
        self.tenant_limits: dict[str, Limit] = {}
        #: The last readable version of each control. The key is the control's id.
        self._good: dict[str, Control] = {}
        #: The controls that set a limit. The key is the queue.
        self.limits: dict[str, Control] = {}
        #: The controls that set how many finished tasks are kept. The key is the queue.
        self.keeps: dict[str, Control] = {}
        #: The revisions of the controls that were read last, and of those that this worker has confirmed.
        self._found: list[dict[str, Any]] = []
        self._seen: list[dict[str, Any]] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._poll_seconds: float | None = None
        #: The controls with a breaker that has opened, by id, and the breakers of queues.
        self.opened: dict[str, Control] = {}
        self.breakers: dict[str, BreakerRule] = {}
        #: Called when controls have been read, before anybody acts on them.
        self.on_read: Callable[[], object] = lambda: None
        #: Reads the controls again when the next pause ends.
        self._end_timer: asyncio.TimerHandle | None = None
        #: The limit_keys that wait, by queue.
        self._limited_keys: dict[str, frozenset[str]] = {}
        self.is_idle = True
        #: What handlers have asked to hold back, each with the end (monotonic seconds). It is written soon.
        self._asked: dict[_Held, float] = {}
        self._ask = asyncio.Event()

    def watches(self) -> Mapping[str, Callable[[], object]]:
        """Read the controls when they have changed."""
        return {CONTROLS: self.wake}

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Read the controls once a minute, too."""
        if count % _RECHECKED_EVERY == 1:
            self.wake()

    def services(self) -> Sequence[Service]:
        """Read and confirm controls.

        A client that pauses a queue waits until every live worker has confirmed the pause. So a stopping worker goes on
        confirming pauses until its end.
        """
        return (
            Service(self.run, self.stop, begin=self.begin, lasts=True),
            Service(self.run_confirming, lasts=True),
            Service(self.run_holding, lasts=True),
        )

    def guard(self) -> list[Filter]:
        """Leave out the tasks of limit_keys that wait."""
        return none_of(
            [
                {"queue": queue, "task_option.limit_key": {"$in": sorted(keys)}}
                for queue, keys in self._limited_keys.items()
            ]
        )

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether the limit_key of a task waits."""
        keys, option = self._limited_keys.get(document.get("queue") or ""), document.get("task_option")
        return keys is not None and isinstance(option, Mapping) and option.get("limit_key") in keys

    def ended(self, run: HeldRun, outcome: Outcome | None) -> None:
        """Hold back what the handler of a run has asked for."""
        if outcome is None or outcome.holds is None or not outcome.delay_ms:
            return
        key = run.option.limit_key if outcome.holds == "limit_key" else None
        if outcome.holds == "name":
            held: _Held = ("name", run.name, None)
        elif outcome.holds == "limit_key" and key is None:
            return  # the task waits alone
        else:
            held = ("queue", run.queue, key)
        until = monotonic() + outcome.delay_ms / 1000
        self._asked[held] = max(until, self._asked.get(held, 0.0))
        self._ask.set()

    async def run_holding(self) -> None:
        """Write what handlers have asked to hold back, until `stop`. All runs that ask at once cost one write."""
        pauses = Backoff(_PAUSE, _REFUSED_PAUSE)
        while True:
            await self._ask.wait()
            self._ask.clear()
            try:
                await self._write_asked()
                pauses.reset()
            except MtaskError as error:
                logger.warning("tasks not held back, will be tried again", extra=fields(reason=told(error)))
                asyncio.get_running_loop().call_later(pauses.next(), self._ask.set)
            if self._is_stopping:
                return

    async def _write_asked(self) -> None:
        """Write what is to be held back; raise MtaskError."""
        while self._asked:
            held, until = next(iter(self._asked.items()))
            kind, target, key = held
            wait = timedelta(seconds=until - monotonic())
            if wait > timedelta(0) and not self._is_held(held, wait):
                await self._store.run(controls.hold(kind, target, wait, key))
            if self._asked.get(held) == until:
                del self._asked[held]

    def _is_held(self, held: _Held, wait: timedelta) -> bool:
        """Whether these tasks are known to be held back for about as long: many runs may ask for the same."""
        kind, target, key = held
        control = self._good.get(control_id(kind, target))
        if control is None:
            return False
        ends = [each.until for each in control.limited_keys or () if each.limit_key == key]
        end = max(ends, default=None) if key is not None else control.limited_until
        return end is not None and end >= self._clock.now() + wait * _ABOUT

    def beat(self) -> Mapping[str, Any]:
        """Tell the revisions of the controls that this worker has confirmed."""
        return {"controls_seen": self._seen}

    def wake(self) -> None:
        """Read the controls soon. Call this when they have changed, or may have changed."""
        self._wake.set()

    def poll(self) -> None:
        """Read the controls at intervals from now on. Call this when the change stream has ended."""
        self._poll_seconds = _POLL
        self._wake.set()

    def stop(self) -> None:
        """End `run` and `run_confirming`."""
        self._is_stopping = True
        self._wake.set()
        self._changed.set()
        self._ask.set()
        if self._end_timer is not None:
            self._end_timer.cancel()

    async def run(self) -> None:
        """Read the controls after each `wake` until `stop`, and apply them from the next claim on."""
        while True:
            await wake_or_wait(self._wake, self._poll_seconds)
            self._wake.clear()
            if self._is_stopping:
                return
            try:
                if await self.refresh():
                    self._signals.controls_resumed.send()
            except DatabaseError as error:
                logger.warning("controls not read, will be tried again", extra=fields(reason=told(error)))
                pause = _PAUSE if isinstance(error, DatabaseUnavailable) else _REFUSED_PAUSE
                asyncio.get_running_loop().call_later(pause, self._wake.set)
                continue
            except Exception:
                logger.exception("controls not read, will be tried again")
                asyncio.get_running_loop().call_later(_REFUSED_PAUSE, self._wake.set)
                continue
            if self._found != self._seen:
                self._signals.controls_changed.send()
                self._changed.set()

    async def run_confirming(self) -> None:
        """Confirm each change of the controls in this worker's document, until `stop`.

        A change is confirmed when all claims and all removals of finished tasks that began before it have ended.
        """
        while not self._is_stopping:
            await self._changed.wait()
            self._changed.clear()
            found = self._found
            try:
                await self._signals.under_way.wait()
            except Exception:
                self._changed.set()
                raise
            self._seen = found
            self._signals.heartbeat_wanted.send()

    async def refresh(self) -> bool:
        """Read the controls and apply them from the next claim on; return whether a queue or name was resumed.

        Raises DatabaseError.
        """
        silence_cnt = self._validity.silence_cnt
        documents = await self._store.run(controls.of(self._queues, self._names))
        sound, malformed = self._parsed(documents)
        # If a control is malformed, its last readable version stays in force, but no finished tasks are removed. If no
        # version was ever readable, the queue or name counts as paused: the control may be a pause.
        found = [*sound, *(self._good[id_] for id_ in malformed if id_ in self._good)]
        self._good = {control.id: control for control in found}
        now = self._clock.now()
        self._time_ends(found, now)
        found = [control.at(now) for control in found]
        paused = {c.id for c in found if c.holds} | {id_ for id_ in malformed if id_ not in self._good}
        before = self._paused()
        self.served.paused_queues = frozenset(q for q in self._queues if control_id("queue", q) in paused)
        self.served.paused_names = frozenset(n for n in self._names if control_id("name", n) in paused)
        self.served.paused_tenants = frozenset(
            id_.removeprefix(_OF_TENANT) for id_ in paused if isinstance(id_, str) and id_.startswith(_OF_TENANT)
        )
        of_queues = [c for c in found if c.kind == "queue"]
        self.limits = {c.target: c for c in of_queues if c.limit or c.key_limit or c.tenant_limit}
        self.tenant_limits = {c.target: c.limit for c in found if c.kind == "tenant" and c.limit is not None}
        self._limited_keys = {
            c.target: frozenset(each.limit_key for each in c.limited_keys) for c in of_queues if c.limited_keys
        }
        self.opened = {c.id: c for c in found if c.opened is not None}
        self.breakers = {c.target: c.breaker for c in of_queues if c.breaker is not None}
        self.is_idle = not self._limited_keys
        self.on_read()
        self.served.is_limited = bool(self.limits or self.tenant_limits)
        self.served.fair_queues = frozenset(c.target for c in of_queues if c.fair)
        self.keeps = {c.target: c for c in sound if c.keep_success is not None or c.keep_fail is not None}
        after = self._paused()
        if before != after:
            logger.info("paused", extra=fields(what=",".join(sorted(after)) or "nothing"))
        self._found = [{"_id": control.id, "revision": control.revision} for control in found]
        # The heartbeat was valid again before this read began. A pause that this read did not find was set later, and
        # the client that set the pause waits for this worker to confirm it.
        self._validity.caught_up(silence_cnt)
        return bool(before - after)

    def _time_ends(self, found: Sequence[Control], now: datetime) -> None:
        """Read the controls again as soon as the next pause is over. The estimated clock is never early."""
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        following = min((end for control in found for end in control.ends if end > now), default=None)
        if following is not None and not self._is_stopping:
            wait = self._clock.monotonic_of(following) - monotonic()
            self._end_timer = asyncio.get_running_loop().call_later(max(0.0, wait) + _TICK, self.wake)

    def _parsed(self, documents: Sequence[dict[str, Any]]) -> tuple[list[Control], list[str]]:
        """Return the readable controls, and the ids of the malformed controls."""
        sound: list[Control] = []
        malformed: list[str] = []
        for document in documents:
            id_ = document["_id"]
            try:
                sound.append(Control.model_validate(document))
            except ValidationError as error:
                malformed.append(id_)
                logger.error(
                    "malformed control: its last readable version stays in force"
                    if id_ in self._good
                    else "malformed control: its queue or name is not claimed from until it is mended",
                    extra=fields(control=id_, reason=describe_validation(error), remedy=MENDING),
                )
        return sound, malformed

    def _paused(self) -> frozenset[str]:
        of_queues = {f"queue {q}" for q in self.served.paused_queues}
        of_tenants = {f"tenant {t}" for t in self.served.paused_tenants}
        of_keys = {f"limit_key {k} of {q}" for q, keys in self._limited_keys.items() for k in keys}
        return frozenset(of_keys | of_queues | {f"name {n}" for n in self.served.paused_names} | of_tenants)

    async def begin(self) -> None:
        """Read the controls before the first claim.

        If the database refuses the read, an error is logged, and this worker starts without pauses and limits.

        Raises DatabaseUnavailable.
        """
        try:
            await self.refresh()
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            logger.error(
                "controls cannot be read: pauses and limits have no effect on this worker",
                extra=fields(reason=told(error)),
            )
        self._seen = self._found
