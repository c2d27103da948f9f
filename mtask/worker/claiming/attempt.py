"""An attempt: one claim that was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtask.store.tasks import claims
from mtask.worker.admission.limits import Admitted


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claim that was sent: of these tasks, under this token, at a monotonic instant (seconds)."""

    task_ids: Sequence[str]
    token: str
    sent: float
    #: The places that its tasks got first, where their queues are limited.
    admitted: Admitted | None = None

    @property
    def run_ids(self) -> dict[str, str]:
        """The run_id that it gives to each task."""
        return claims.run_ids_of(self.task_ids, self.token)
