"""Breakers in a worker: it counts failures in a row in memory, opens breakers, and makes probes.

While a breaker is open, each worker leaves the target's tasks alone, but for the task of its own probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

from mtask.errors import MtaskError
from mtask.features.breaker import operations
from mtask.features.breaker.rules import HOLD, may_probe, probe_time, verdict
from mtask.features.controls.rules import Control, Kind, Opened, control_id
from mtask.features.controls.worker import Controls
from mtask.kernel.document.handlers import Handler
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements.filters import Filter, none_of
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Part, Service
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait
from mtask.kernel.worker.running.run import HeldRun

#: The interval at which a worker looks for a task to probe with, and for how its probe goes on, in seconds.
_LOOK = 1.0
#: The pause after an error of the database, in seconds.
_PAUSE = 1.0
#: The longest reason that is stored, in characters.
_MAX_REASON = 500
#: The server's clock shows whole milliseconds.
_TICK = 0.002


class _Target(NamedTuple):
    """What a breaker holds back: a queue, or the tasks of a name."""

    kind: Kind
    name: str

    @property
    def id(self) -> str:
        """The id of its control."""
        return control_id(self.kind, self.name)


class _News(NamedTuple):
    """What has become of a breaker: a probe has ended, or enough runs in a row have failed."""

    is_probe: bool
    is_good: bool
    reason: str


class Breakers(Part):
    """Opens and closes the breakers of this worker's queues and handlers."""

    def __init__(self, scope: Scope, controls: Controls, handlers: Mapping[str, Handler]) -> None:
        self._scope = scope
        self._store, self._clock, self._ledger = scope.store, scope.clock, scope.ledger
        self._controls = controls
        controls.on_read = self._read
        self._of_names = {name: handler.breaker for name, handler in handlers.items() if handler.breaker is not None}
        #: The failures in a row.
        self._counts: dict[_Target, int] = {}
        #: The open breakers, as this worker last heard of them.
        self._opened: dict[str, Control] = {}
        #: The task of the probe of each breaker whose probe this worker has. None: none is due.
        self._probes: dict[str, str | None] = {}
        #: When this worker last said that it lives and has the probe (monotonic seconds).
        self._kept: dict[str, float] = {}
        #: What is to be written of each breaker.
        self._news: dict[_Target, _News] = {}
        self._wake = asyncio.Event()
        self._wake.set()
        self._is_stopping = False
        self._read()

    def _read(self) -> None:
        """Note whether a breaker is open or may open: if none, the kernel asks nothing here."""
        self.is_idle = not self._controls.opened
        self.hears_successes = bool(self._of_names or self._controls.breakers or self._controls.opened)

    # --- what the kernel asks -------------------------------------------------------------------------------

    def guard(self) -> list[Filter]:
        """Leave out the tasks of open breakers, but for those of this worker's probes."""
        return none_of([self._held(control) for control in self._controls.opened.values()])

    def _held(self, control: Control) -> Filter:
        held: Filter = {control.kind: control.target}
        probe = self._probes.get(control.id)
        return held if probe is None else {**held, "_id": {"$ne": probe}}

    def skips(self, document: Mapping[str, Any]) -> bool:
        """Whether the breaker of a task is open, and the task is no probe of this worker."""
        task_id = document.get("_id")
        return any(
            document.get(control.kind) == control.target and (task_id is None or self._probes.get(id_) != task_id)
            for id_, control in self._controls.opened.items()
        )

    def ended(self, run: HeldRun, outcome: Outcome | None) -> None:
        """Count a run that has failed, or judge a probe."""
        for target, limit in self._breakers_of(run):
            is_good = verdict(outcome)
            reason = "" if outcome is None else outcome.reason or ""
            if target.id in self._controls.opened:
                if self._probes.get(target.id) == run.task_id:
                    self._probes[target.id] = None
                    if is_good is not None:
                        self._news[target] = _News(True, is_good, reason)
                    self._wake.set()
            elif is_good:
                self._counts.pop(target, None)
            elif is_good is False:
                self._counts[target] = count = self._counts.get(target, 0) + 1
                if count >= limit:
                    self._news[target] = _News(False, False, reason)
                    self._wake.set()

    def _breakers_of(self, run: HeldRun) -> list[tuple[_Target, int]]:
        """Return the breakers of a run's queue and of its name, each with the failures that open it."""
        found: list[tuple[_Target, int]] = []
        if (rule := self._controls.breakers.get(run.queue)) is not None:
            found.append((_Target("queue", run.queue), rule.failures))
        if (declared := self._of_names.get(run.name)) is not None:
            found.append((_Target("name", run.name), declared.failures))
        return found

    def changed(self) -> None:
        """Hear that controls have changed."""
        self._wake.set()

    def services(self) -> Sequence[Service]:
        """Write what becomes of breakers, and make probes."""
        return (Service(self.run, self.stop),)

    def stop(self) -> None:
        """End `run`."""
        self._is_stopping = True
        self._wake.set()

    # --- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tend the breakers after each wake, and when a probe may begin, until `stop`."""
        wait: float | None = None
        while True:
            await wake_or_wait(self._wake, wait)
            self._wake.clear()
            if self._is_stopping:
                return
            try:
                await self._write_news()
                await self._probe()
                wait = self._next_look()
            except MtaskError as error:
                logger.warning("breakers not tended, will be tried again", extra=fields(reason=told(error)))
                wait = _PAUSE

    async def _write_news(self) -> None:
        while self._news:
            target, news = next(iter(self._news.items()))
            me, reason = self._scope.worker_id, news.reason[:_MAX_REASON]
            if not news.is_probe:
                if target.id not in self._controls.opened:  # else another worker was faster
                    logger.error("breaker opened", extra=fields(what=target.id, reason=reason))
                    await self._store.run(operations.open_(target.kind, target.name, me, self._wait_ms(target), reason))
            elif news.is_good:
                logger.info("breaker closed", extra=fields(what=target.id))
                await self._store.run(operations.close(target.kind, target.name, me))
            else:
                await self._store.run(operations.reopen(target.kind, target.name, me, reason))
            self._counts.pop(target, None)
            del self._news[target]
            self._controls.wake()

    def _wait_ms(self, target: _Target) -> int:
        if target.kind == "queue":
            return self._controls.breakers[target.name].wait_ms if target.name in self._controls.breakers else 30_000
        return self._of_names[target.name].wait_ms

    async def _probe(self) -> None:
        """Take the probes that this worker may make, and find a task for each."""
        opened = self._controls.opened
        for gone in self._probes.keys() - opened.keys():
            self._probes.pop(gone), self._kept.pop(gone, None)
        if self._opened.keys() - opened.keys():
            self._scope.signals.controls_resumed.send()
        self._opened = dict(opened)
        now, me = self._clock.now(), self._scope.worker_id
        for id_, control in opened.items():
            if control.opened is None or not self._concerns(control):
                continue
            if not may_probe(control.opened, me, now):
                self._probes.pop(id_, None)
                self._kept.pop(id_, None)
            elif await self._has(control):
                await self._choose(control)

    def _concerns(self, control: Control) -> bool:
        return control.target in (self._scope.served.queues if control.kind == "queue" else self._scope.served.names)

    async def _has(self, control: Control) -> bool:
        """Take the probe of an open breaker, or say that this worker still has it. False: another worker has it."""
        kept = self._kept.get(control.id)
        if kept is not None and monotonic() - kept < HOLD / timedelta(seconds=3):
            return True
        sent = monotonic()
        written = await self._store.run(operations.take_probe(control.kind, control.target, self._scope.worker_id))
        opened = written.get("opened") or {}
        if opened.get("by") == self._scope.worker_id and opened["until"] <= written["update_time"]:
            self._kept[control.id] = sent
            return True
        self._probes.pop(control.id, None)
        self._kept.pop(control.id, None)
        return False

    async def _choose(self, control: Control) -> None:
        """Find a due task for the probe, unless this worker runs one."""
        probe = self._probes.get(control.id)
        if probe is not None and (self._ledger.held_run(probe) is not None or probe in self._ledger.claiming):
            return
        served = self._scope.served
        queues = [control.target] if control.kind == "queue" else served.queues
        names = [control.target] if control.kind == "name" else served.names
        others: list[Filter] = [
            {each.kind: each.target} for each in self._controls.opened.values() if each.id != control.id
        ]
        found = await self._store.run(
            finding.scan(queues, list(names), self._scope.worker_id, 0, 1, also=none_of(others))
        )
        chosen = str(found.documents[0]["_id"]) if found.documents else None
        self._probes[control.id] = chosen
        if chosen is not None:
            self._scope.signals.controls_resumed.send()

    def _next_look(self) -> float | None:
        """Return the seconds until a probe may begin, or is looked after. None: no breaker is open."""
        waits = []
        for id_, control in self._controls.opened.items():
            opened: Opened | None = control.opened
            if id_ in self._probes:
                waits.append(_LOOK)
            elif opened is not None:
                begin = self._clock.monotonic_of(probe_time(opened, self._scope.worker_id))
                waits.append(max(_TICK, begin + _TICK - monotonic()))
        return min(waits, default=None)
