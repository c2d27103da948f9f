"""The hearing: decides of which new tasks the change stream tells this worker.

In a fleet, a worker hears only of the new tasks for which it ranks first or second. So an insert wakes two processes,
however many wait. If these two have no room for a task, one of them appeals, and all workers hear of all tasks for a
while.
"""

from __future__ import annotations

import random
from math import inf
from time import monotonic

from mtask.kernel.statements.filters import Shares
from mtask.kernel.worker.discovery.fetch import Batches
from mtask.kernel.worker.discovery.ranks import Ranks
from mtask.kernel.worker.process.scope import Scope

#: The least time for which a worker hears of all tasks: after it has opened a stream, after an appeal, and after
#: workers or controls have changed. In seconds.
WIDE_FOR = 10.0
#: The bounds of the time between two appeals, in seconds. They are shorter than `WIDE_FOR`: while appeals go on, nobody
#: stops hearing of all tasks. Each worker draws a time of its own, so that they do not all appeal at once.
APPEAL_PAUSES = (5.0, 8.0)


class Hearing:
    """Decides of which new tasks this worker hears, and when it appeals to the other workers."""

    def __init__(self, scope: Scope, ranks: Ranks, batches: Batches) -> None:
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._ranks = ranks
        self._batches = batches
        self._wide_until = inf
        self._next_appeal = 0.0

    def widen(self) -> None:
        """From now on, hear of all new tasks for a while."""
        self._wide_until = monotonic() + WIDE_FOR

    @property
    def shares(self) -> Shares | None:
        """The shares of which this worker hears; None: it hears of all new tasks."""
        return self._ranks.heard if monotonic() >= self._wide_until and self._is_plain else None

    @property
    def _is_plain(self) -> bool:
        # A limit, fair turns or a paused tenant may hold back one task and not the next. So ranks alone do not tell who
        # takes a task.
        return self._batches.is_plain

    def heard_appeal(self) -> None:
        """Note an appeal, and hear of all new tasks for a while."""
        self._put_off_appeals()
        self.widen()

    def until_appeal(self, now: float) -> float | None:
        """Return the seconds until this worker may appeal; None: nobody needs an appeal, because all hear of all."""
        return None if self._ranks.heard is None or not self._is_plain else max(0.0, self._next_appeal - now)

    def appeal(self) -> None:
        """Tell all workers that due tasks wait, for which this worker has no room. It hears its own appeal, too."""
        self._put_off_appeals()
        self._vitals.appeal_cnt += 1
        self._signals.heartbeat_wanted.send()

    def _put_off_appeals(self) -> None:
        self._next_appeal = monotonic() + random.uniform(*APPEAL_PAUSES)
