"""The rollout part of a worker: hands misfits on, remembers them, and leaves tasks of later versions to others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from mtask.errors import MtaskError
from mtask.features.registry.rules import hash_of
from mtask.features.rollout import operations
from mtask.features.rollout.rules import (
    PATIENCE,
    above_one,
    is_known_version,
    may_fit_others,
    misfit_since,
    of_known_versions,
    waits_in_vain,
)
from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.status import RunStatus
from mtask.kernel.statements.filters import Filter, none_of
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.outcomes import MAX_REASON, ended
from mtask.kernel.worker.running.run import EndReason, HeldRun

#: The time for which a worker leaves a misfit alone, in seconds. Tests tune it.
LEFT_ALONE = 30.0
#: The longest delay of a misfit that is handed on, in ms. Meanwhile, the others hear of it.
MAX_DELAY_MS = 200
#: After so many misfits that were made for one version, a worker leaves alone all that are made for it.
MANY = 100
#: The time for which a worker believes what it has read of the registry, in seconds.
_LASTS = 1.0
#: So begins the reason of a run that is handed on.
HANDED_ON = "handed on: the params do not fit this version"

#: The name of a handler, and the hash of a version that a publisher knew.
_Made = tuple[str, str]


class Rollout(Part):
    """Lets workers of other versions run what does not fit this one."""

    def __init__(
        self, scope: Scope, handlers: Mapping[str, Handler], quarantine: Quarantine, *, hands_on: bool = True
    ) -> None:
        """`hands_on`: whether there may be workers of other versions. If not, a misfit is FAIL at once."""
        self._store = scope.store
        self._quarantine = quarantine
        self._hands_on = hands_on
        self._versions = above_one(handlers.values())
        self.always = [of_known_versions(self._versions)]
        self.is_idle = True
        #: The last time at which the registry was read, by name, and what was read (monotonic seconds).
        self._read: dict[str, tuple[float, list[str]]] = {}
        self._reading = asyncio.Lock()
        #: The misfits of late: until when their number counts (monotonic seconds), and the number.
        self._counts: dict[_Made, tuple[float, int]] = {}
        #: What is left alone altogether, until when (monotonic seconds).
        self._left_alone: dict[_Made, float] = {}
        self._logged: set[_Made] = set()

    # --- what this worker leaves to others ------------------------------------------------------------------

    field = "version"

    def guard(self) -> list[Filter]:
        """Return the guard that keeps out of claims and scans what does not fit, beside later versions."""
        now = monotonic()
        self._left_alone = {made: until for made, until in self._left_alone.items() if until > now}
        self.is_idle = not self._left_alone
        return none_of([{"name": name, "declared": made} for name, made in self._left_alone])

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether this worker must not claim a task now: it is of a later version, or made for one that others have."""
        if not is_known_version(document, self._versions):
            return True
        if not self._left_alone:
            return False
        return self._left_alone.get((str(document.get("name")), str(document.get("declared"))), 0.0) > monotonic()

    def beat(self) -> Mapping[str, Any]:
        """Tell which versions this worker's handlers have."""
        return {"handler_versions": [f"{name}@{version}" for name, version in sorted(self._versions.items())]}

    # --- misfits --------------------------------------------------------------------------------------------

    async def judge(self, run: HeldRun, outcome: Outcome) -> Outcome:
        """Return what becomes of a run whose params do not fit: it is handed on, or fails as `outcome` says."""
        declared = run.declared
        if not self._hands_on or declared is None or declared == hash_of(run.handler):
            return outcome
        try:
            if not await self._may_fit_others(run, declared):
                return outcome
        except asyncio.CancelledError:  # the run was ended meanwhile
            return ended(run, run.end_reason or EndReason.WORKER_STOP)
        if waits_in_vain(run.task, run.run_id):
            hours = f"{PATIENCE.total_seconds() / 3600:g} h"
            return replace(outcome, reason=f"{outcome.reason} (no worker fitted them within {hours})"[:MAX_REASON])
        self._remember(run, declared)
        return Outcome(
            run.task_id,
            run.run_id,
            RunStatus.CANCELED,
            reason=f"{HANDED_ON}: {outcome.reason}"[:MAX_REASON],
            delay_ms=random.randint(1, MAX_DELAY_MS),
            misfit_since=misfit_since(run.task, run.run_id),
            traceparent=outcome.traceparent,
        )

    async def _may_fit_others(self, run: HeldRun, declared: str) -> bool:
        own = hash_of(run.handler)
        async with self._reading:  # the misfits of a backlog share one read
            read_at, started = self._read.get(run.name, (0.0, []))
            if read_at + _LASTS < monotonic():
                try:
                    started = await self._store.run(operations.started(run.name))
                except MtaskError as error:
                    logger.warning("registry not read, misfit handed on", extra=fields(reason=told(error)))
                    return True
                self._read[run.name] = monotonic(), started
        return may_fit_others(declared, own, started)

    def _remember(self, run: HeldRun, declared: str) -> None:
        """Leave a misfit alone for a while. After many, leave all alone that were made for the same version."""
        self._quarantine.leave_alone(run.task_id, LEFT_ALONE)
        made, now = (run.name, declared), monotonic()
        until, count = self._counts.get(made, (0.0, 0))
        until, count = (until, count + 1) if until > now else (now + LEFT_ALONE, 1)
        self._counts[made] = until, count
        if count >= MANY:
            self._left_alone[made] = now + LEFT_ALONE
            self.is_idle = False
            del self._counts[made]
        if made not in self._logged and len(self._logged) < MANY:
            self._logged.add(made)
            logger.warning(
                "tasks of a later version of the handler are handed on to other workers",
                extra=fields(name=run.name, declared=declared, task=run.task_id),
            )
