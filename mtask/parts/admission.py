"""Admission: the parts that decide whether a task may be claimed now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mtask.features.controls.worker import Controls
from mtask.features.encryption.worker import Keys
from mtask.features.limits.worker import Limits
from mtask.kernel.worker.discovery.quarantine import Losses, Quarantine


@dataclass(frozen=True, slots=True)
class Admission:
    """Holds the five parts of the admission: controls, limits, quarantine, keys and losses."""

    controls: Controls
    limits: Limits
    quarantine: Quarantine
    keys: Keys
    losses: Losses = field(default_factory=Losses)

    def lost(self, task_ids: Sequence[str], won: Iterable[str]) -> None:
        """Count one more lost claim of each task in `task_ids`, and forget the lost claims of the tasks in `won`."""
        for task_id in won:
            self.losses.forget(task_id)
        self.losses.add(task_ids)
