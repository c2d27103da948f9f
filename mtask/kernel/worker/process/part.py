"""The seam between a worker and the features: a part of a feature overrides the hooks that it needs.

`mtask.parts.worker` lists the parts, and collects what they override. Who is told of the ends of tasks is a `Relay`, as
clients need it, too. The statements have no hooks: each process must send the same ones, whatever it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtask.kernel.document.handlers import Handler
from mtask.kernel.statements.filters import Filter
from mtask.kernel.worker.running.call import Execution

_Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Service:
    """What of a feature goes on beside the worker's own loops."""

    run: _Work | None = None
    #: Ends `run`. The services are stopped in reverse order, and so are their last works done.
    stop: Callable[[], object] | None = None
    #: What is done before the first claim. An error ends the worker.
    begin: _Work | None = None
    #: What is left to do when all runs have ended.
    drain: _Work | None = None
    #: Whether it goes on until all runs of a stopping worker have ended.
    lasts: bool = False


class Part:
    """What a feature does in a worker."""

    def watches(self) -> Mapping[str, Callable[[], object]]:
        """Return what the changes of a collection wake. It is woken, too, when a change may have gone unheard."""
        return {}

    def guard(self) -> list[Filter]:
        """Return what each claim and each scan leaves out now."""
        return []

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether this worker must leave a task alone now. `document`: what a hint or a read tells of the task."""
        return False

    def execution(self, handler: Handler) -> Execution | None:
        """Return where this handler runs; None: as far as this part knows, in the worker's process."""
        return None

    async def upkeep(self, count: int, *, is_full: bool) -> None:
        """Do what a dead process has left undone. Raises DatabaseUnavailable.

        `count` is the number of regular scans before this one. `is_full`: it also looks for what is seldom there.
        """

    def services(self) -> Sequence[Service]:
        """Return what goes on beside the worker's own loops."""
        return ()

    def beat(self) -> Mapping[str, Any]:
        """Return fields of the worker's document that each heartbeat updates. Any thread may call this."""
        return {}


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks that the parts of a worker override, in the order of the parts. What none overrides costs nothing."""

    watches: Mapping[str, Sequence[Callable[[], object]]]
    guards: Sequence[Callable[[], list[Filter]]]
    skips: Callable[[Mapping[str, Any]], bool]
    executions: Sequence[Callable[[Handler], Execution | None]]
    upkeeps: Sequence[Callable[..., Coroutine[Any, Any, None]]]
    services: Sequence[Service]
    beats: Sequence[Callable[[], Mapping[str, Any]]]

    def wake(self, collection: str) -> None:
        """Wake what watches this collection: it has changed, or may have changed."""
        for wake in self.watches.get(collection, ()):
            wake()

    def guard(self) -> list[Filter]:
        """Return what each claim and each scan leaves out now."""
        return [left_out for guard in self.guards for left_out in guard()]
