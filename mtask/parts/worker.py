"""The features of a worker: their options, what they add to its app, and their parts, in the order of their hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from mtask.app.app import App
from mtask.errors import InvalidInput
from mtask.features.breaker.worker import Breakers
from mtask.features.callbacks import worker as callbacks
from mtask.features.callbacks.worker import CallbackPart
from mtask.features.controls.keep import Retention
from mtask.features.controls.worker import Controls
from mtask.features.encryption.settings import Encryption, check_installed
from mtask.features.encryption.worker import Keys
from mtask.features.flows.worker import FlowPart
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.limits.worker import Limits
from mtask.features.logs.options import LogOptions
from mtask.features.metrics.worker import Recorder
from mtask.features.registry.worker import HandlerRegistrar
from mtask.features.rollout.worker import Rollout
from mtask.features.schedules.worker import Scheduler
from mtask.kernel.worker.process.options import ProcessOptions
from mtask.kernel.worker.process.part import Hooks, Part
from mtask.kernel.worker.process.state import Scope

if TYPE_CHECKING:  # few workers need these
    from mtask.features.isolation.pool import Executors
    from mtask.features.logs.worker import LogKeeper


@dataclass(frozen=True, slots=True)
class WorkerOptions(ProcessOptions):
    """The options of one worker process."""

    scheduler: bool = True  #: whether this process also makes the firings of schedules
    #: Which handlers run in child processes, and in how many.
    executors: ExecutorOptions = field(default_factory=ExecutorOptions)
    #: Which lines of the log are kept in the database, and in which format executors log.
    logs: LogOptions = field(default_factory=LogOptions)
    #: The keys of encrypted tasks. None: those of the app, if it has any.
    encryption: Encryption | None = field(default=None, repr=False)
    #: Whether tasks whose params do not fit are handed on, as workers of another version may come. Tests say no.
    hands_on: bool = True

    def checked_executors(self, app: App) -> ExecutorOptions | None:
        """Return the options of the executors, or None if no handler runs in one; raise InvalidInput."""
        self.executors.check()
        isolated = [name for name, handler in app.handlers.items() if self.executors.isolates(handler)]
        if not isolated:
            return None
        if self.executors.app is None:
            raise InvalidInput(
                f"handler {isolated[0]} is isolated: say which app the executors import, as package.module:app.",
                field="executors",
            )
        return self.executors


def extended(app: App, options: WorkerOptions) -> tuple[App, WorkerOptions]:
    """Return the app with the handlers that features bring, and the options with the queues of these and its keys.

    Raises InvalidInput if the keys cannot be used here.
    """
    if options.encryption is None:
        options = replace(options, encryption=app.encryption)
    if options.encryption is not None:
        check_installed()
    return callbacks.extended(app, options)


#: The parts that need nothing but what all parts share, and that no other part knows.
PARTS: Sequence[Callable[[Scope], Part]] = (CallbackPart,)


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of features in a worker, in the order of their hooks."""

    controls: Controls
    retention: Retention
    keys: Keys
    breakers: Breakers
    limits: Limits
    flows: FlowPart
    others: Sequence[Part]  #: those of `PARTS`
    scheduler: Scheduler | None
    keeper: LogKeeper | None
    recorder: Recorder
    handlers: HandlerRegistrar
    rollout: Rollout
    executors: Executors | None

    def hooks(self) -> Hooks:
        """Collect the hooks that the parts override."""
        found: list[Part] = []
        for each in fields(self):
            part = getattr(self, each.name)
            found += [part] if isinstance(part, Part) else part or ()
        return collected(found)


def collected(parts: Sequence[Part]) -> Hooks:
    """Return the hooks that these parts override, in the order of the parts."""
    watches: dict[str, list[Callable[[], object]]] = {}
    for part in parts:
        for collection, wake in part.watches().items():
            watches.setdefault(collection, []).append(wake)
    return Hooks(
        watches,
        guarding=_overriding(parts, "guard"),
        skipping=_overriding(parts, "skips"),
        executions=_overridden(parts, "execution"),
        hearing=_overriding(parts, "ended"),
        upkeeps=_overridden(parts, "upkeep"),
        services=tuple(service for part in parts for service in part.services()),
        beats=_overridden(parts, "beat"),
    )


def _overriding(parts: Sequence[Part], name: str) -> tuple[Part, ...]:
    return tuple(part for part in parts if getattr(type(part), name) is not getattr(Part, name))


def _overridden(parts: Sequence[Part], name: str) -> tuple[Callable[..., Any], ...]:
    return tuple(getattr(part, name) for part in _overriding(parts, name))
