"""An app with as many task names as a large service has."""

from __future__ import annotations

from benchmarks.measuring.app import noop  # this module also makes the worker end with the benchmark
from mtask import App

NAMES = [f"job_{number}" for number in range(201)]

app = App()
for name in NAMES:
    app.task(name=name)(noop)
