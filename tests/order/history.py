"""What happened, as the model of the order reads it: tasks, their runs, the limits, the workers.

All instants are seconds of the server's clock, from any zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

#: How a run ended. A "hand-back" leaves the task where it was. A "retry" is a delay that the handler asked for.
End = Literal["success", "failure", "lapse", "hand-back", "retry", "cancel"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a task."""

    worker: str
    claimed: float
    ended: float = inf  #: when it was closed; if it lapsed: the end of its lease
    end: End | None = None  #: None: it has not ended
    started: float | None = None  #: when its handler started; None: the handler noted nothing
    retry_at: float | None = None  #: the task is not due again before this instant


@dataclass(frozen=True, slots=True)
class Task:
    """One task of one seat, with all its runs."""

    id: str
    due: float = 0.0
    queue: str = "queue"
    name: str = "work"
    tenant: str | None = None
    key: str | None = None  #: its limit_key
    priority: int = 0
    named: frozenset[str] = frozenset()  #: its specific_worker_ids
    runs: Sequence[Run] = ()
    gone: float = inf  #: from then on, nobody may take it: it is final, or it was removed
    #: Whether its rank is known at all times. It is not if somebody changed it, or if it has several seats. Its runs
    #: still take permits and slots.
    is_judged: bool = True


class Limit(NamedTuple):
    """The most runs at once, and the most starts in a window (seconds)."""

    concurrency: int | None = None
    starts: int | None = None
    window: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for a queue, or for a tenant."""

    limit: Limit | None = None
    key_limit: Limit | None = None
    tenant_limit: Limit | None = None
    fair: bool = False


FREE = Settings()


@dataclass(frozen=True, slots=True)
class Change:
    """New settings of "queue:NAME" or "tenant:NAME". Between the call and its return, the old or the new ones hold."""

    target: str
    asked: float
    settled: float
    settings: Settings


class Up(NamedTuple):
    """A time in which a worker took tasks."""

    since: float
    until: float = inf


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker. `queues` and `names`: those that it serves; None: all."""

    id: str
    slots: int = 100
    queues: frozenset[str] | None = None
    names: frozenset[str] | None = None
    ups: Sequence[Up] = (Up(-inf),)

    def serves(self, task: Task) -> bool:
        """Whether it takes tasks of this queue, of this name, and for these workers."""
        return (
            (self.queues is None or task.queue in self.queues)
            and (self.names is None or task.name in self.names)
            and (not task.named or self.id in task.named)
        )

    def up_at(self, since: float, until: float) -> Up | None:
        """Return the time in which it took tasks, if that spans these two instants."""
        return next((up for up in self.ups if up.since <= since and until <= up.until), None)


class Trouble(NamedTuple):
    """A time in which something was broken: claims in it are judged with another grace, or with none at all."""

    since: float
    until: float
    grace: float = inf


@dataclass(frozen=True, slots=True)
class History:
    """All that happened."""

    tasks: Sequence[Task]
    workers: Sequence[Worker]
    changes: Sequence[Change] = ()
    troubles: Sequence[Trouble] = ()
    #: Times in which claims that came to nothing may hold permits: for example after the death of a worker.
    unsure: Sequence[Up] = field(default=())
