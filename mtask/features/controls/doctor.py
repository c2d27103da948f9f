"""The doctor's check of controls: each can be read."""

from __future__ import annotations

from functools import partial

from mtask.doctor.checks import readable
from mtask.features.controls import operations
from mtask.features.controls.client import control_of
from mtask.search.findings import Check

CHECKS = [Check("controls", partial(readable, "controls", operations.every, control_of), "controls")]
