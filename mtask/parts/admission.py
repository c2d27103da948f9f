"""Checks: the parts of features that the kernel still asks by name whether a task may be claimed now."""

from __future__ import annotations

from dataclasses import dataclass

from mtask.features.controls.worker import Controls
from mtask.features.encryption.worker import Keys


@dataclass(frozen=True, slots=True)
class Checks:
    """Holds controls and keys."""

    controls: Controls
    keys: Keys
