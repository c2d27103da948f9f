"""An attempt: the record of one claim that was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtask.features.limits.worker import Admitted
from mtask.kernel.operations import claim as claims


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim: its tasks, its token, and the time at which it was sent (monotonic seconds)."""

    task_ids: Sequence[str]
    token: str
    sent: float
    #: The permits of the tasks; None: the tasks need no permits.
    admitted: Admitted | None = None

    @property
    def run_ids(self) -> dict[str, str]:
        """The run_id that this claim gives to each task. The key is the task's id."""
        return claims.run_ids_of(self.task_ids, self.token)
