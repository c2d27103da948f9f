"""The hearing: decides of which new tasks the change stream tells this worker.

In a fleet, a worker hears only of the new tasks for which it ranks first or second. So an insert wakes two processes,
however many wait. If the first two have no room for a task, the second one appeals, and all workers hear of all tasks
for a while.
"""

from __future__ import annotations

from math import inf
from time import monotonic

from mtask.store.statements.filters import Shares
from mtask.worker.discovery.ranks import Ranks
from mtask.worker.discovery.scans import Scans
from mtask.worker.state.scope import Scope

#: The least time for which a worker hears of all tasks: after it has opened a stream, after an appeal, and after
#: workers or controls have changed. In seconds.
WIDE_FOR = 10.0
#: The least time between two appeals of a fleet, in seconds. It is shorter than `WIDE_FOR`: while appeals go on, nobody
#: stops hearing of all tasks.
APPEAL_PAUSE = 5.0


class Hearing:
    """Decides of which new tasks this worker hears, and when it appeals to the other workers."""

    def __init__(self, scope: Scope, ranks: Ranks, scans: Scans) -> None:
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._ranks = ranks
        self._scans = scans
        self._wide_until = inf
        self._last_appeal = -inf

    def widen(self) -> None:
        """From now on, hear of all new tasks for a while."""
        self._wide_until = monotonic() + WIDE_FOR

    @property
    def shares(self) -> Shares | None:
        """The shares of which this worker hears; None: it hears of all new tasks."""
        # A limit, fair turns or a paused tenant may hold back one task and not the next. So ranks alone do not tell who
        # takes a task.
        return self._ranks.heard if monotonic() >= self._wide_until and self._scans.is_plain else None

    def heard_appeal(self) -> None:
        """Note the appeal of another worker, and hear of all new tasks for a while."""
        self._last_appeal = monotonic()
        self.widen()

    def until_appeal(self, now: float) -> float | None:
        """Return the seconds until this worker may appeal; None: nobody needs an appeal, because all hear of all."""
        if self._ranks.heard is None or not self._scans.is_plain:
            return None
        return max(0.0, self._last_appeal + APPEAL_PAUSE - now)

    def appeal(self) -> None:
        """Tell the other workers that due tasks wait, for which this worker has no room."""
        self._last_appeal = monotonic()
        self._vitals.appeal_cnt += 1
        self._signals.heartbeat_wanted.send()
