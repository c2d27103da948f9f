"""The recorder: stores this worker's tally in the collection `metrics`, and folds the tallies of dead workers.

The time wakes it. It writes at most once in each interval, and only if something was counted. A worker that dies has
lost what it counted since its last write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from mtask.errors import MtaskError
from mtask.features.metrics import operations as tallies
from mtask.kernel.operations.workers import Registration
from mtask.kernel.worker.process.counts import Tally
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait

#: The time between two writes.
INTERVAL = timedelta(seconds=10)
#: The time limit of the last write, in seconds. A stop does not wait longer for it.
_LAST_WRITE = 3.0


class Recorder(Part):
    """Stores the counts of the meter."""

    def __init__(self, scope: Scope, registration: Registration, interval: timedelta = INTERVAL) -> None:
        self._store = scope.store
        self._tally = scope.meter.tally
        self._registration = registration
        self._interval = interval.total_seconds()
        self._stopped = asyncio.Event()
        self._writing = asyncio.Lock()
        #: The number of tallies that this worker has begun. Usually one: the next one follows if it was folded.
        self._number = 1
        #: What the former tallies of this worker hold. It is not part of the present one.
        self._former = Tally()
        #: The state that was stored last: the revision and the runs that it counts, and the time (monotonic seconds).
        self._stored_revision: int | None = None
        self._stored = Tally()
        self._stored_at = monotonic()
        self._is_refused = False
        self.write_cnt = 0

    def services(self) -> Sequence[Service]:
        """Store the counts until the worker stops, and the last ones at its end."""
        return (Service(self.run, self.stop, drain=self.end),)

    @property
    def tally_id(self) -> str:
        """The `_id` of the present tally."""
        suffix = "" if self._number == 1 else f"-{self._number}"
        return f"{self._registration.incarnation}{suffix}"

    def stop(self) -> None:
        """End `run`. The caller then calls `end`."""
        self._stopped.set()

    async def run(self) -> None:
        """Fold the tallies of dead workers, then write at each interval until `stop`."""
        try:
            folded = await self._store.run(tallies.fold())
            if folded:
                logger.debug("metrics of dead workers added to the totals", extra=fields(tallies=folded))
        except MtaskError as error:
            # The tallies stay, and count as before. The next worker that starts folds them.
            logger.debug("metrics of dead workers not added up", extra=fields(reason=told(error)))
        while not self._stopped.is_set():
            await wake_or_wait(self._stopped, self._interval)
            if not self._stopped.is_set():
                await self.write()

    async def end(self) -> None:
        """Write what was counted since the last write."""
        try:
            async with asyncio.timeout(_LAST_WRITE):
                await self.write()
        except TimeoutError:
            logger.warning("the last metrics of this worker were not stored")

    async def write(self) -> None:
        """Store the tally, unless nothing was counted since the last write. Later writes repeat one that failed."""
        async with self._writing:
            if self._tally.revision == (self._stored_revision or 0):
                return
            try:
                await self._write()
            except MtaskError as error:
                if not self._is_refused:
                    logger.warning("metrics not stored, will be tried again", extra=fields(reason=told(error)))
                self._is_refused = True
            else:
                self._is_refused = False

    async def _write(self) -> None:
        revision, now = self._tally.revision, monotonic()
        while True:
            present = Tally()
            present.add(self._tally)
            present.add(self._former, -1)
            is_first = self._stored_revision is None
            document = self._document(present, now, is_first=is_first)
            if await self._store.run(tallies.record(self.tally_id, document, is_first=is_first)):
                break
            await self._begin_next()
        self._stored_revision, self._stored, self._stored_at = revision, present, now
        self.write_cnt += 1

    def _document(self, present: Tally, now: float, *, is_first: bool) -> dict[str, Any]:
        since = Tally() if is_first else self._stored
        return {
            **present.document(),
            "worker_id": self._registration.worker_id,
            "incarnation": self._registration.incarnation,
            "recent_runs": max(0, present.run_cnt - since.run_cnt),
            "recent_seconds": now - self._stored_at,
        }

    async def _begin_next(self) -> None:
        """Begin another tally: others took this worker for dead and have folded the present one, or it is gone.

        What the folded one holds is not part of the next one. It may hold more than this worker knows to be stored,
        because the reply to a write can be lost.
        """
        found = await self._store.run(tallies.find_tally(self.tally_id))
        self._former.add(self._stored if found is None else found)
        self._number += 1
        self._stored_revision, self._stored = None, Tally()
