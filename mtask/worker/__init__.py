"""The worker: discovery, preemption queue, claimer, runner, pinger, and the registry of handlers."""

from mtask.app.app import App
from mtask.app.context import Context

__all__ = ["App", "Context"]
