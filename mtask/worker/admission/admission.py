"""Admission: the parts that decide whether a task may be claimed now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mtask.worker.admission.controls import Controls
from mtask.worker.admission.limits import Limits
from mtask.worker.admission.losses import Losses
from mtask.worker.admission.quarantine import Quarantine


@dataclass(frozen=True, slots=True)
class Admission:
    """Controls, limits, quarantined documents and lost claims."""

    controls: Controls
    limits: Limits
    quarantine: Quarantine
    losses: Losses = field(default_factory=Losses)

    def lost(self, task_ids: Sequence[str], won: Iterable[str]) -> None:
        """Count one lost claim for each task in `task_ids`, and forget the losses of the tasks in `won`."""
        for task_id in won:
            self.losses.forget(task_id)
        self.losses.add(task_ids)
