"""The features of a worker: what they add to its app, and their parts, in the order of their hooks."""

from __future__ import annotations

from collections.abc import Sequence

from mtask.app.app import App
from mtask.features.callbacks import worker as callbacks
from mtask.features.encryption import worker as encryption
from mtask.kernel.worker.process.options import WorkerOptions
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope


def extended(app: App, options: WorkerOptions) -> tuple[App, WorkerOptions]:
    """Return the app with the handlers that features bring, and the options with what these and the app ask for."""
    return callbacks.extended(app, encryption.extended(app, options))


def parts(scope: Scope) -> Sequence[Part]:
    """Return the parts of a worker."""
    return [callbacks.CallbackPart(scope)]
