"""Controls: applies the pauses, limits and retention of this worker's queues and task names, and confirms them.

When a client's call that sets a pause returns, no worker may claim from the queue any more. So a worker that reads a
new pause first waits for its claims under way, and then confirms the pause in its own document. A worker that cannot
reach the database may miss a pause, and the call does not wait for it. So a claim is valid only until the worker's
heartbeat expires.
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
#: The interval at which a stopping worker reads the controls, in seconds.
_POLL = 0.5


class Controls:
    """Reads the controls of this worker's queues and names, and makes the guard of its claims."""

    def __init__(self, scope: Scope) -> None:
        self._store = scope.store
        self._clock = scope.clock
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._queues = list(scope.queues)
        self._names = list(scope.names)
        self.paused_queues: frozenset[str] = frozenset()
        self.paused_names: frozenset[str] = frozenset()
        #: The last readable version of each control, by its id.
        self._good: dict[str, Control] = {}
        #: The controls with limits, by queue.
        self.limits: dict[str, Control] = {}
        #: The controls that bound the number of finished tasks, by queue.
        self.keeps: dict[str, Control] = {}
        #: The time at which this worker's heartbeat expires, by the server's clock. Its claims are valid until then.
        self._valid_until: datetime | None = None
        #: The value that `_valid_until` gets at the next read of the controls; None: no silence came before. After a
        #: silence no claim is valid until that read, because no call waited for this worker to confirm a pause.
        self._valid_then: datetime | None = None
        #: The time at which the last answered heartbeat expires.
        self._heard_until: datetime | None = None
        self._silence_cnt = 0
        self._found: list[dict[str, Any]] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._poll_seconds: float | None = None

    def wake(self) -> None:
        """Read the controls soon: they have changed, or may have changed."""
        self._wake.set()

    def poll(self) -> None:
        """Read the controls at intervals from now on: the change stream has ended and reports no changes."""
        self._poll_seconds = _POLL
        self._wake.set()

    def stop(self) -> None:
        """End `run` and `run_confirming`."""
        self._is_stopping = True
        self._wake.set()
        self._changed.set()

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
        """Confirm applied controls until `stop`.

        Before each confirmation, all claims and removals that began earlier must have ended.
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
        """Whether tasks of this queue or name must not be claimed now."""
        return name in self.paused_names or queue in self.paused_queues

    def limit_of(self, queue: str, *, of_key: bool) -> Limit | None:
        """Return the limit of a queue, or with `of_key` the limit of each limit_key in the queue; None: no limit."""
        control = self.limits.get(queue)
        if control is None:
            return None
        return control.key_limit if of_key else control.limit

    def guard(self) -> Filter:
        """Return the conditions that pauses and the expiry of this worker's heartbeat set for a claim."""
        return claimable_now(self.paused_queues, self.paused_names, self._valid_until)

    def validity(self) -> list[Filter]:
        """Return the condition that this worker's heartbeat has not expired, or none before the first heartbeat."""
        return [] if self._valid_until is None else [in_time(self._valid_until)]

    def is_out_of_touch(self) -> bool:
        """Whether the heartbeat has expired, so that no claim would be valid now."""
        return self._valid_until is not None and self._clock.now() >= self._valid_until

    def heard(self, valid_until: datetime, *, at: datetime, was_silent: bool) -> None:
        """Note that a heartbeat was answered: its time was `at`, its expiry is `valid_until` (server's clock).

        If the previous heartbeat had expired by then, the controls are read before the next claim. The server reports
        this silence as `was_silent`. If the reply with that report was lost, a comparison of the times shows the
        silence.
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

    def registration_lost(self) -> None:
        """Make claims invalid until `heard` is called: this worker's registration is gone."""
        self._valid_until = self._heard_until = _LONG_AGO

    async def refresh(self) -> bool:
        """Read the controls and apply them from the next claim on; return whether a queue or name was resumed.

        Raises DatabaseError.
        """
        silence_cnt = self._silence_cnt
        documents = await self._store.run(controls.of(self._queues, self._names))
        sound, malformed = self._parsed(documents)
        # The last readable version of a malformed control stays in force, except that it removes no tasks. If no
        # version was readable, no task of its queue or name is claimed, because the control may be a pause.
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
            # The heartbeat that ended the silence came before this read. If this read did not see a pause, the pause
            # was set later, and the call that set it waits for this worker again.
            self._valid_until, self._valid_then = self._valid_then, None
        return bool(before - after)

    def _parsed(self, documents: Sequence[dict[str, Any]]) -> tuple[list[Control], list[str]]:
        """Return the controls that can be read, and the ids of the malformed ones."""
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
        return frozenset({f"queue {q}" for q in self.paused_queues} | {f"name {n}" for n in self.paused_names})

    async def begin(self) -> None:
        """Read the controls before the first claim. If the database user may not read them, there are no pauses.

        Raises DatabaseUnavailable.
        """
        try:
            await self.refresh()
        except DatabaseUnavailable:
            raise
        except DatabaseError as error:
            logger.error(
                "controls cannot be read: pauses and limits have no effect on this worker",
                extra=fields(reason=str(error)),
            )
        self._vitals.controls_seen = self._found
