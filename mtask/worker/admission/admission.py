"""Admission: whether a task may be taken now. The parts of it, together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mtask.worker.admission.controls import Controls
from mtask.worker.admission.limits import Limits
from mtask.worker.admission.losses import Losses
from mtask.worker.admission.quarantine import Quarantine


@dataclass(frozen=True, slots=True)
class Admission:
    """Pauses, limits, documents that are left alone, and claims that were lost."""

    controls: Controls
    limits: Limits
    quarantine: Quarantine
    losses: Losses = field(default_factory=Losses)

    def lost(self, task_ids: Sequence[str], won: Iterable[str]) -> None:
        """Count the claims of these tasks that were lost; those of the others were won."""
        for task_id in won:
            self.losses.forget(task_id)
        self.losses.add(task_ids)
