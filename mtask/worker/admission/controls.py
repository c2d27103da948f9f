"""What holds for this worker's queues and task names: what is paused, and until when it may go by that.

A pause must hold for every worker once its caller is told so. So a worker that hears of one lets its claims under way
land, and only then says, in its own document, that it goes by it. And a claim holds only as long as the worker's
heartbeat: one that was out of touch may have missed a pause, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseError, DatabaseUnavailable
from mtask.model.controls import MENDING, Control, Limit, control_id
from mtask.model.documents import describe_validation
from mtask.store.queues import controls
from mtask.store.statements.filters import Filter, claimable_now, in_time
from mtask.worker.log import fields, logger
from mtask.worker.state.scope import Scope
from mtask.worker.state.timing import wake_or_wait

_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_PAUSE, _REFUSED_PAUSE = 0.2, 30.0
#: How often a worker looks that stops, in seconds.
_POLL = 0.5


class Controls:
    """Knows what is paused here, and makes the guard of the claims."""

    def __init__(self, scope: Scope) -> None:
        self._store = scope.store
        self._clock = scope.clock
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._queues = list(scope.queues)
        self._names = list(scope.names)
        self.paused_queues: frozenset[str] = frozenset()
        self.paused_names: frozenset[str] = frozenset()
        #: By id, those that could be read last.
        self._good: dict[str, Control] = {}
        #: By queue, what bounds it.
        self.limits: dict[str, Control] = {}
        #: By queue, how much of what has finished is kept.
        self.keeps: dict[str, Control] = {}
        #: When this worker's heartbeat runs out, by the server's clock: so long its claims are valid.
        self._valid_until: datetime | None = None
        #: The same, once what holds has been read: it was out of touch, and nobody waited for it.
        self._valid_then: datetime | None = None
        #: When the last heartbeat runs out that was answered.
        self._heard_until: datetime | None = None
        self._silence_cnt = 0
        self._found: list[dict[str, Any]] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._poll_seconds: float | None = None

    def wake(self) -> None:
        """Read what holds, soon: it has changed, or may have."""
        self._wake.set()

    def poll(self) -> None:
        """Look again and again: there is no change stream any more that would tell."""
        self._poll_seconds = _POLL
        self._wake.set()

    def stop(self) -> None:
        """End `run` and `run_confirming`."""
        self._is_stopping = True
        self._wake.set()
        self._changed.set()

    async def run(self) -> None:
        """Apply what holds from the next claim on, until `stop`."""
        while True:
            await wake_or_wait(self._wake, self._poll_seconds)
            self._wake.clear()
            if self._is_stopping:
                return
            try:
                if await self.refresh():
                    self._signals.controls_resumed.send()
            except DatabaseError as error:
                logger.warning("controls not read, will be tried again", extra=fields(reason=str(error)))
                pause = _PAUSE if isinstance(error, DatabaseUnavailable) else _REFUSED_PAUSE
                asyncio.get_running_loop().call_later(pause, self._wake.set)
                continue
            except Exception:
                logger.exception("controls not read, will be tried again")
                asyncio.get_running_loop().call_later(_REFUSED_PAUSE, self._wake.set)
                continue
            if self._found != self._vitals.controls_seen:
                self._signals.controls_changed.send()
                self._changed.set()

    async def run_confirming(self) -> None:
        """Confirm what this worker has applied once everything that began before has landed, until `stop`."""
        while not self._is_stopping:
            await self._changed.wait()
            self._changed.clear()
            found = self._found
            try:
                await self._signals.under_way.wait()
            except Exception:
                self._changed.set()
                raise
            self._vitals.controls_seen = found
            self._signals.heartbeat_wanted.send()

    @property
    def queues(self) -> list[str]:
        """The queues served here that are not paused."""
        return [queue for queue in self._queues if queue not in self.paused_queues]

    @property
    def names(self) -> list[str]:
        """The task names served here that are not paused."""
        return [name for name in self._names if name not in self.paused_names]

    def is_paused(self, queue: str | None, name: str) -> bool:
        """Whether a task of this queue and name is not to be claimed now."""
        return name in self.paused_names or queue in self.paused_queues

    def limit_of(self, queue: str, *, of_key: bool) -> Limit | None:
        """Return what bounds a queue, or each limit_key in it."""
        control = self.limits.get(queue)
        if control is None:
            return None
        return control.key_limit if of_key else control.limit

    def guard(self) -> Filter:
        """Return what a claim asks for beside the task's own state."""
        return claimable_now(self.paused_queues, self.paused_names, self._valid_until)

    def validity(self) -> list[Filter]:
        """Return what asks for nothing but that this worker's heartbeat has not run out."""
        return [] if self._valid_until is None else [in_time(self._valid_until)]

    def is_out_of_touch(self) -> bool:
        """Whether no claim would be valid now."""
        return self._valid_until is not None and self._clock.now() >= self._valid_until

    def heard(self, valid_until: datetime, *, at: datetime, was_silent: bool) -> None:
        """Take down until when the heartbeat holds that was sent `at` a time of the server's clock.

        Where the one before had run out, what holds is read first. The server says so (`was_silent`); but where the
        reply was lost that did, only the times tell.
        """
        was_silent |= self._heard_until is not None and at >= self._heard_until
        self._heard_until = valid_until
        if was_silent:
            self._silence_cnt += 1
            self._valid_until, self._valid_then = _LONG_AGO, valid_until
            self.wake()
        elif self._valid_then is not None:
            self._valid_then = valid_until
        else:
            self._valid_until = valid_until

    def is_gone(self) -> None:
        """Claim nothing until `heard`: this worker's place in the registry is gone."""
        self._valid_until = self._heard_until = _LONG_AGO

    async def refresh(self) -> bool:
        """Read what holds and go by it, from the next claim on; return whether something was resumed."""
        silence_cnt = self._silence_cnt
        documents = await self._store.run(controls.of(self._queues, self._names))
        sound, malformed = self._parsed(documents)
        # Of what cannot be read the last that could be holds on, but that nothing is removed by it. Where there was
        # none, nothing is claimed: it may have been a pause.
        found = [*sound, *(self._good[id_] for id_ in malformed if id_ in self._good)]
        self._good = {control.id: control for control in found}
        paused = {c.id for c in found if c.paused} | {id_ for id_ in malformed if id_ not in self._good}
        before = self._paused()
        self.paused_queues = frozenset(q for q in self._queues if control_id("queue", q) in paused)
        self.paused_names = frozenset(n for n in self._names if control_id("name", n) in paused)
        self.limits = {c.target: c for c in found if c.limit is not None or c.key_limit is not None}
        self.keeps = {c.target: c for c in sound if c.keep_success is not None or c.keep_fail is not None}
        after = self._paused()
        if before != after:
            logger.info("paused", extra=fields(what=",".join(sorted(after)) or "nothing"))
        self._found = [{"_id": control.id, "revision": control.revision} for control in found]
        if self._valid_then is not None and silence_cnt == self._silence_cnt:
            # The heartbeat that made it live again came before this read: who pauses since waits for it.
            self._valid_until, self._valid_then = self._valid_then, None
        return bool(before - after)

    def _parsed(self, documents: Sequence[dict[str, Any]]) -> tuple[list[Control], list[str]]:
        """Return the controls that can be read, and the ids of those that cannot."""
        sound: list[Control] = []
        malformed: list[str] = []
        for document in documents:
            id_ = document["_id"]
            try:
                sound.append(Control.model_validate(document))
            except ValidationError as error:
                malformed.append(id_)
                logger.error(
                    "malformed control: what it last said holds"
                    if id_ in self._good
                    else "malformed control: nothing of it is claimed until it is mended",
                    extra=fields(control=id_, reason=describe_validation(error), remedy=MENDING),
                )
        return sound, malformed

    def _paused(self) -> frozenset[str]:
        return frozenset({f"queue {q}" for q in self.paused_queues} | {f"name {n}" for n in self.paused_names})

    async def begin(self) -> None:
        """Read what holds, for the first claims; a user who may not read it goes on without."""
        try:
            await self.refresh()
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            logger.error("controls cannot be read: pauses do not hold here", extra=fields(reason=str(error)))
        self._vitals.controls_seen = self._found
