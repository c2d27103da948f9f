"""Controls: applies and confirms the pauses, limits and retention that clients set for queues and task names.

A client's call that pauses a queue returns only when no worker claims from the queue any more. So a worker that reads a
new pause first waits until its current claims have ended. Then the worker confirms the pause in its own document. The
call does not wait for a worker with an expired heartbeat, and such a worker may miss the pause. So a worker's claims
are valid only until the worker's heartbeat expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from mtask.errors import DatabaseError, DatabaseUnavailable
from mtask.features.controls import operations as controls
from mtask.features.controls.rules import MENDING, Control, Limit, control_id
from mtask.kernel.document.task import describe_validation
from mtask.kernel.statements.filters import Filter, claimable_now, in_time
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait

_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_PAUSE, _REFUSED_PAUSE = 0.2, 30.0
#: The interval at which a stopping worker reads the controls, in seconds.
_POLL = 0.5
#: The beginning of the ids of tenants' controls.
_OF_TENANT = control_id("tenant", "")


class Controls:
    """Reads the controls of this worker's queues and task names, and builds the guard for this worker's claims."""

    def __init__(self, scope: Scope) -> None:
        self._store = scope.store
        self._clock = scope.clock
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._queues = list(scope.queues)
        self._names = list(scope.names)
        self.paused_queues: frozenset[str] = frozenset()
        self.paused_names: frozenset[str] = frozenset()
        self.paused_tenants: frozenset[str] = frozenset()
        #: The queues whose tenants take turns.
        self.fair_queues: frozenset[str] = frozenset()
        #: The limits of tenants in all queues. The key is the tenant.
        self.tenant_limits: dict[str, Limit] = {}
        #: The last readable version of each control. The key is the control's id.
        self._good: dict[str, Control] = {}
        #: The controls that set a limit. The key is the queue.
        self.limits: dict[str, Control] = {}
        #: The controls that set how many finished tasks are kept. The key is the queue.
        self.keeps: dict[str, Control] = {}
        #: The time until which this worker's claims are valid (server's clock): usually the expiry of its heartbeat.
        #: None: this worker has had no heartbeat yet.
        self._valid_until: datetime | None = None
        #: While the heartbeat is expired, this worker may miss a pause. So afterwards no claim is valid until the
        #: controls are read again. This value is then copied to `_valid_until`. None: no such read is needed.
        self._valid_then: datetime | None = None
        #: The expiry of the last heartbeat that the server answered (server's clock).
        self._heard_until: datetime | None = None
        self._silence_cnt = 0
        self._found: list[dict[str, Any]] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._poll_seconds: float | None = None

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
            if self._found != self._vitals.controls_seen:
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
            self._vitals.controls_seen = found
            self._signals.heartbeat_wanted.send()

    @property
    def queues(self) -> list[str]:
        """The queues that this worker serves and that are not paused."""
        return [queue for queue in self._queues if queue not in self.paused_queues]

    @property
    def names(self) -> Sequence[str]:
        """The task names that this worker handles and that are not paused."""
        # The claimer asks at each of its looks. An app may have hundreds of names, and seldom is one of them paused.
        return [name for name in self._names if name not in self.paused_names] if self.paused_names else self._names

    def is_paused(self, queue: str | None, name: str, tenant: str | None = None) -> bool:
        """Whether a task must not be claimed now because its queue, its name or its tenant is paused."""
        return name in self.paused_names or queue in self.paused_queues or tenant in self.paused_tenants

    def is_fair(self, queue: str | None) -> bool:
        """Whether the tenants of this queue take turns."""
        return queue in self.fair_queues

    def guard(self) -> Filter:
        """Return the guard of a claim: nothing of it is paused, and this worker's heartbeat has not expired."""
        return claimable_now(self.paused_queues, self.paused_names, self._valid_until, self.paused_tenants)

    def validity(self) -> list[Filter]:
        """Return the condition that this worker's heartbeat has not expired.

        Before the first heartbeat there is no such condition, and the list is empty.
        """
        return [] if self._valid_until is None else [in_time(self._valid_until)]

    def is_out_of_touch(self) -> bool:
        """Whether this worker's heartbeat has expired, so that no claim of this worker would be valid now."""
        return self._valid_until is not None and self._clock.now() >= self._valid_until

    def heard(self, valid_until: datetime, *, at: datetime, was_silent: bool) -> None:
        """Note the answer to a heartbeat: it was stored at the time `at` and expires at `valid_until` (server's clock).

        If the previous heartbeat had expired before `at`, this worker reads the controls before its next claim. The
        server reports such an expiry as `was_silent`. The reply with this report may have been lost, so this method
        compares the times, too.
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
        """Make all claims of this worker invalid until `heard` is called. Call this when the registration is gone."""
        self._valid_until = self._heard_until = _LONG_AGO

    async def refresh(self) -> bool:
        """Read the controls and apply them from the next claim on; return whether a queue or name was resumed.

        Raises DatabaseError.
        """
        silence_cnt = self._silence_cnt
        documents = await self._store.run(controls.of(self._queues, self._names))
        sound, malformed = self._parsed(documents)
        # If a control is malformed, its last readable version stays in force, but no finished tasks are removed. If no
        # version was ever readable, the queue or name counts as paused: the control may be a pause.
        found = [*sound, *(self._good[id_] for id_ in malformed if id_ in self._good)]
        self._good = {control.id: control for control in found}
        paused = {c.id for c in found if c.paused} | {id_ for id_ in malformed if id_ not in self._good}
        before = self._paused()
        self.paused_queues = frozenset(q for q in self._queues if control_id("queue", q) in paused)
        self.paused_names = frozenset(n for n in self._names if control_id("name", n) in paused)
        self.paused_tenants = frozenset(
            id_.removeprefix(_OF_TENANT) for id_ in paused if isinstance(id_, str) and id_.startswith(_OF_TENANT)
        )
        of_queues = [c for c in found if c.kind == "queue"]
        self.limits = {c.target: c for c in of_queues if c.limit or c.key_limit or c.tenant_limit}
        self.tenant_limits = {c.target: c.limit for c in found if c.kind == "tenant" and c.limit is not None}
        self.fair_queues = frozenset(c.target for c in of_queues if c.fair)
        self.keeps = {c.target: c for c in sound if c.keep_success is not None or c.keep_fail is not None}
        after = self._paused()
        if before != after:
            logger.info("paused", extra=fields(what=",".join(sorted(after)) or "nothing"))
        self._found = [{"_id": control.id, "revision": control.revision} for control in found]
        if self._valid_then is not None and silence_cnt == self._silence_cnt:
            # The heartbeat was valid again before this read began. A pause that this read did not find was set later,
            # and the client that set the pause waits for this worker to confirm it.
            self._valid_until, self._valid_then = self._valid_then, None
        return bool(before - after)

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
        of_queues = {f"queue {q}" for q in self.paused_queues}
        of_tenants = {f"tenant {t}" for t in self.paused_tenants}
        return frozenset(of_queues | {f"name {n}" for n in self.paused_names} | of_tenants)

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
        self._vitals.controls_seen = self._found
