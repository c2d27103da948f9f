"""The roster: reads the live workers when some may have come, gone or changed. While many do, it reads them seldom."""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import Any

from mtask.errors import MtaskError
from mtask.kernel.operations import workers
from mtask.kernel.worker.discovery.ranks import Ranks
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.scope import Scope

#: The least time between a read and the next one for which a change of some worker asks: in seconds, and as a multiple
#: of the first one's duration, which includes the computation of the ranks. Until then, ranks are those of before. They
#: only suggest who tries a task first.
_PAUSE, _TIMES = 1.0, 20


class Roster:
    """Knows the live workers, and has the ranks computed again when they have changed."""

    def __init__(self, scope: Scope, ranks: Ranks) -> None:
        self._scope = scope
        self._ranks = ranks
        self._live: list[dict[str, Any]] = []
        #: Whether a read is asked for: in any case, or for a change, not before `_next`.
        self._is_overdue, self._is_asked = True, False
        self._next = 0.0

    def ask(self) -> None:
        """Read the live workers soon. Call this when one of them has come, gone or changed."""
        self._is_asked = True

    def ask_now(self) -> None:
        """Read the live workers with the next scan. Call this when changes may have come unheard."""
        self._is_overdue = True

    @property
    def due_at(self) -> float:
        """When the live workers must be read (monotonic seconds); infinity: not before someone asks."""
        if self._is_overdue:
            return 0.0
        return self._next if self._is_asked else inf

    async def read_if_due(self) -> bool:
        """Read the live workers if that is due; return whether the ranks have changed.

        If they cannot be read, the ranks stay those of before. Tasks are found with any ranks, so no scan fails for it.
        """
        sent = monotonic()
        if sent < self.due_at:
            return False
        self._is_overdue = self._is_asked = False  # what changes from now on asks again
        try:
            scope = self._scope
            self._live = await scope.store.run(workers.peers(scope.worker_id, scope.queues, self._live))
            if self._live:  # each document holds the server's time, so an idle worker learns this time, too
                scope.clock.observe(self._live[0]["now"], sent, monotonic())
            return await self._ranks.take(self._live)
        except BaseException as error:
            self._is_asked = True
            if not isinstance(error, MtaskError):
                raise
            logger.warning("live workers not read, will be tried again", extra=fields(reason=told(error)))
            return False
        finally:
            self._next = monotonic() + max(_PAUSE, _TIMES * (monotonic() - sent))
