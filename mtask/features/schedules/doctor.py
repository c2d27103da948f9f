"""The doctor's check of schedules: each can be read."""

from __future__ import annotations

from functools import partial

from mtask.doctor.checks import readable
from mtask.features.schedules import operations
from mtask.features.schedules.client import schedule_of
from mtask.search.findings import Check

CHECKS = [Check("schedules", partial(readable, "schedules", operations.every, schedule_of), "schedules")]
