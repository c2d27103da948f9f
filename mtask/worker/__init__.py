"""The worker: finds, claims and runs tasks with the handlers of an app."""

from mtask.app.app import App
from mtask.app.context import Context

__all__ = ["App", "Context"]
