"""The scope: the objects that every part of a worker needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.worker.process.counts import Meter
from mtask.kernel.worker.process.signals import Signals
from mtask.kernel.worker.process.state import Ledger
from mtask.kernel.worker.process.tempo import Tempo
from mtask.kernel.worker.process.time import ServerClock


@dataclass(slots=True)
class Vitals:
    """The state of this worker that heartbeats report. The event loop sets it, and the pinger's thread reads it."""

    concurrency: int
    status: WorkerStatus = WorkerStatus.READY
    #: The revisions of the controls that this worker has confirmed.
    controls_seen: list[dict[str, Any]] = field(default_factory=list)
    #: How often this worker has appealed to the others.
    appeal_cnt: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    """The worker's id, the queues and task names that it serves, and the state that all its parts share."""

    store: AsyncStore
    worker_id: str
    queues: Sequence[str]
    names: Sequence[str]
    clock: ServerClock
    tempo: Tempo
    vitals: Vitals
    ledger: Ledger = field(default_factory=Ledger)
    meter: Meter = field(default_factory=Meter)
    signals: Signals = field(default_factory=Signals)
