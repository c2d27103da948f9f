"""The worker: discovery, preemption queue, claimer, runner, pinger, and the registry of handlers."""

from mtask.worker.context import Context
from mtask.worker.registry import App

__all__ = ["App", "Context"]
