"""The features of a worker: what they add to its app, and their parts, in the order of their hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtask.app.app import App
from mtask.features.callbacks import worker as callbacks
from mtask.features.encryption import worker as encryption
from mtask.features.flows.worker import Chains, FlowPart
from mtask.kernel.document.handlers import Handler
from mtask.kernel.worker.process.options import WorkerOptions
from mtask.kernel.worker.process.part import Part
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.running.outcomes import Successes
from mtask.parts.relays import RELAYS


def extended(app: App, options: WorkerOptions) -> tuple[App, WorkerOptions]:
    """Return the app with the handlers that features bring, and the options with what these and the app ask for."""
    return callbacks.extended(app, encryption.extended(app, options))


def successes(handlers: Mapping[str, Handler]) -> Successes:
    """Return what judges the values that handlers return, in a worker and in its executors."""
    return Successes(Chains(handlers))


def parts(scope: Scope, incarnation: str) -> Sequence[Part]:
    """Return the parts of a worker. `incarnation`: that of the worker."""
    return [FlowPart(scope, incarnation, RELAYS), callbacks.CallbackPart(scope)]
