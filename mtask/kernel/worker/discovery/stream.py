"""The stream loop: passes the events of the worker's change stream on, and opens a new stream after any break.

Events are lost during a break. So a full scan follows when the new stream is open. It finds the tasks of lost events.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any

from mtask.errors import MtaskError
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.driver.stores import CONTROLS, SCHEDULES, AsyncStore
from mtask.kernel.operations.change_stream import Density, Event, EventKind, Stream, Traffic, read_orders
from mtask.kernel.statements.filters import Shares
from mtask.kernel.worker.discovery.fetch import Batches
from mtask.kernel.worker.discovery.fetch_loop import Scans
from mtask.kernel.worker.discovery.fleet import Ranks
from mtask.kernel.worker.discovery.inbox import Inbox, Questions
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Hooks
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import Backoff

_PAUSE, _MAX_PAUSE = 0.1, 2.0
#: A stream that was open for this time, in seconds, has not broken at once: the next pause is short again.
_LIVED_LONG = 10.0
#: After an event of a task for which another worker ranks first, this worker leaves its stream unread for this time, in
#: seconds. Meanwhile the first worker claims the task. The claim and its end then wake no stream that waits.
#: Tests tune it.
GIVE_WAY = 0.015
#: A worker gives way only if its last event came this many seconds ago or earlier. So a series of events is not late.
#: Tests tune it.
APART = 0.05


class StreamLoop:
    """Passes each event of the change stream to the part that it concerns."""

    def __init__(
        self,
        scope: Scope,
        store: AsyncStore,
        inbox: Inbox,
        questions: Questions,
        scans: Scans,
        looks: Looks,
        hearing: Hearing,
        hooks: Hooks,
    ) -> None:
        """Use `store` only for the change stream.

        A stream that waits for events ends only when its MongoDB client is closed. Cancelling the asyncio task does not
        end it.
        """
        self._scope = scope
        self._store = store
        self._inbox = inbox
        self._questions = questions
        self._scans = scans
        self._looks = looks
        self._hearing = hearing
        self._hooks = hooks
        self._traffic = Traffic(monotonic())
        #: Whether a stream was open before this one.
        self._was_open = False
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        #: The time of the last event with which no other came (monotonic seconds).
        self._last_event = -inf
        self.event_cnt = 0
        #: Whether a change stream is open, so that no event is missed.
        self.is_open = False

    def stop(self) -> None:
        """End `run`, even if it waits for an event."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
        self._scope.signals.stream_stopped.send()

    async def run(self) -> None:
        """Handle the events of the change stream until `stop`. After a break, open a new stream and scan again."""
        self._task = asyncio.current_task()
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        while not self._is_stopping:
            began = monotonic()
            try:
                await self.follow()
                pauses.reset()
                if self._may_rest:
                    await self._rest()
                    continue
            except asyncio.CancelledError:
                if not self._is_stopping:
                    raise
            except MtaskError as error:
                if not self._is_stopping:
                    logger.warning("change stream broke, opening a new one", extra=fields(reason=told(error)))
            except Exception:
                logger.exception("change stream failed, opening a new one")
            if not self._is_stopping:
                if monotonic() - began > _LIVED_LONG:
                    pauses.reset()
                self._scans.ask_full()  # until the new stream opens, only scans find tasks
                await asyncio.sleep(pauses.next())

    async def follow(self) -> None:
        """Open a stream and handle its events until the stream breaks or ends."""
        stream = await Stream.open(
            self._store,
            self._scope.worker_id,
            list(self._scope.queues),
            HORIZON // timedelta(milliseconds=1),
            self._traffic,
        )
        self.is_open = True
        self._hearing.widen()
        self._scans.ask_full()
        # Changes that happened while no stream was open were not reported.
        for collection in self._hooks.watches:
            self._hooks.wake(collection)
        if self._was_open:
            self._scope.signals.heartbeat_wanted.send()  # its answer brings the orders to this worker
        self._was_open = True
        watching = asyncio.create_task(self._watch_backlog(stream))
        try:
            await self._store.while_primary(self.read(stream))
        except MtaskError:
            if not self._may_rest:
                raise
        finally:
            watching.cancel()
            self.is_open = False
            with suppress(Exception):
                await stream.close()

    async def read(self, stream: Stream) -> None:
        """Handle the events of an open stream, until it breaks, or a backlog lets this worker rest."""
        while stream.is_open and not self._is_stopping:
            if await stream.hear(self._hearing.shares):
                self._scans.ask_soon()  # it did not hear of the new tasks of before
            event = await stream.next()
            if event is not None and not self.take(event):
                return
            if stream.has_more:
                continue
            if self._may_rest:
                return
            if event is not None:
                await self._give_way(event)

    async def _watch_backlog(self, stream: Stream) -> None:
        """End the wait of the stream when a backlog has come, and writes are dense."""
        pauses = Backoff(INTERVAL, _MAX_PAUSE)
        try:
            while True:
                if not self._scans.is_in_backlog:
                    pauses.reset()
                    await self._scans.was_cut.wait()
                # A stream for dense writes does not wait for long: it notices the backlog between two reads.
                if self._scans.is_in_backlog and stream.density is not Density.DENSE:
                    await self._looks.look_at_orders(self._traffic)
                    if self._may_rest:
                        await stream.interrupt()
                await asyncio.sleep(pauses.next())
        except MtaskError as error:
            logger.warning("change stream goes on in a backlog", extra=fields(reason=told(error)))
        except Exception:
            logger.exception("change stream goes on in a backlog")

    @property
    def _may_rest(self) -> bool:
        """Whether the oplog need not be read now: this worker works off a backlog, and writes are dense."""
        return self._traffic.is_dense and self._scans.is_in_backlog and not self._is_stopping

    async def _rest(self) -> None:
        """Look at intervals, without a stream, while a backlog keeps this worker busy."""
        self._looks.begin()
        while self._may_rest:
            await self._store.while_primary(self._looks.take(self._traffic))
            await asyncio.sleep(INTERVAL)

    async def _give_way(self, event: Event) -> None:
        """Leave the stream unread for a moment if another worker ranks first for a new task."""
        last, self._last_event = self._last_event, monotonic()
        if (
            event.kind is EventKind.TASK_INSERTED
            and event.is_wanted
            and self._last_event - last > APART
            and not self._inbox.ranks_first(event.task_id)
        ):
            await asyncio.sleep(GIVE_WAY)

    def take(self, event: Event) -> bool:
        """Handle one event without a call to the database; return False if a new stream must be opened."""
        self.event_cnt += 1
        try:
            return self._take_event(event)
        except Exception as error:
            self._questions.cannot_take(event.task_id, error)
            return True

    def _take_event(self, event: Event) -> bool:
        if event.begins_flow:
            self._scope.ledger.owing.add("flow")
        if event.kind is EventKind.TASK_INSERTED and event.is_wanted:
            self._inbox.push(event.task_id, event.document or {}, is_simple=event.is_simple)
        elif event.kind is EventKind.TASK_CHANGED:
            self._inbox.push_changed(
                event.task_id, event.preempt_time, is_begun=event.is_begun, concerns_holder=event.concerns_holder
            )
        elif event.kind is EventKind.WORKER_ORDER and event.task_id == self._scope.worker_id:
            self._scope.signals.heartbeat_wanted.send()
        elif event.kind is EventKind.APPEAL:
            self._hearing.heard_appeal()
        elif event.kind in (EventKind.PEERS_CHANGED, EventKind.WORKER_ORDER):
            self._hearing.widen()
            self._scans.ask_peers()
        elif event.kind is EventKind.CONTROLS_CHANGED:
            self._hearing.widen()
            self._hooks.wake(CONTROLS)
        elif event.kind is EventKind.CALLED:
            self._scope.signals.called.send(event.task_id, event.call)
        elif event.kind is EventKind.SCHEDULES_CHANGED:
            self._hooks.wake(SCHEDULES)
        elif event.kind is EventKind.COLLECTION_LOST:
            logger.warning("the collection was dropped or renamed, starting over")
            self._scans.ask_setup()
            return False
        return True


# --- hearing ---------------------------------------------------------------------------------------------

# The hearing: decides of which new tasks the change stream tells this worker.
#
# In a fleet, a worker hears only of the new tasks for which it ranks first or second. So an insert wakes two processes,
# however many wait. If these two have no room for a task, one of them appeals, and all workers hear of all tasks for a
# while.

#: The least time for which a worker hears of all tasks: after it has opened a stream, after an appeal, and after
#: workers or controls have changed. In seconds.
WIDE_FOR = 10.0
#: The bounds of the time between two appeals, in seconds. They are shorter than `WIDE_FOR`: while appeals go on, nobody
#: stops hearing of all tasks. Each worker draws a time of its own, so that they do not all appeal at once.
APPEAL_PAUSES = (5.0, 8.0)


class Hearing:
    """Decides of which new tasks this worker hears, and when it appeals to the other workers."""

    def __init__(self, scope: Scope, ranks: Ranks, batches: Batches) -> None:
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._ranks = ranks
        self._batches = batches
        self._wide_until = inf
        self._next_appeal = 0.0

    def widen(self) -> None:
        """From now on, hear of all new tasks for a while."""
        self._wide_until = monotonic() + WIDE_FOR

    @property
    def shares(self) -> Shares | None:
        """The shares of which this worker hears; None: it hears of all new tasks."""
        return self._ranks.heard if monotonic() >= self._wide_until and self.is_plain else None

    @property
    def is_plain(self) -> bool:
        """Whether the ranks of the workers alone tell who takes a task."""
        # The gate, fair turns or a paused tenant may hold back one task and not the next. So ranks alone do not tell
        # who takes a task.
        return self._batches.is_plain

    def heard_appeal(self) -> None:
        """Note an appeal, and hear of all new tasks for a while."""
        self._put_off_appeals()
        self.widen()

    def until_appeal(self, now: float) -> float | None:
        """Return the seconds until this worker may appeal; None: nobody needs an appeal, because all hear of all."""
        return None if self._ranks.heard is None or not self.is_plain else max(0.0, self._next_appeal - now)

    def appeal(self) -> None:
        """Tell all workers that due tasks wait, for which this worker has no room. It hears its own appeal, too."""
        self._put_off_appeals()
        self._vitals.appeal_cnt += 1
        self._signals.heartbeat_wanted.send()

    def _put_off_appeals(self) -> None:
        self._next_appeal = monotonic() + random.uniform(*APPEAL_PAUSES)


# --- looks -----------------------------------------------------------------------------------------------

# Looks: reads at intervals what the change stream would report, while the worker works off a backlog without a stream.
#
# A look costs a few small reads, however many writes the server has taken since the last one. A stream costs the server
# two entries of the oplog for each task of each worker.

#: The interval between two looks, in seconds.
INTERVAL = 0.25
#: Urgent tasks and schedules are looked for with each n-th look only. A look for urgent tasks passes the keys of the
#: index that claims have removed, and the server keeps these for minutes. Each m-th look asks for a full scan, which
#: also reads the live workers and looks for what features have left. Tests tune `FULL_EVERY`.
_URGENT_EVERY, _SCHEDULES_EVERY, FULL_EVERY = 2, 4, 20


class Looks:
    """Reads this worker's orders, the controls, its own runs, and the tasks that go before the backlog."""

    def __init__(
        self, scope: Scope, store: AsyncStore, scans: Scans, batches: Batches, lookups: Lookups, hooks: Hooks
    ) -> None:
        """`store` has the connections of the change stream, which are free now."""
        self._scope = scope
        self._store = store
        self._scans = scans
        self._batches = batches
        self._lookups = lookups
        self._hooks = hooks
        self._count = 0
        self._control: Any = None
        #: The run_ids of the runs that this worker held at the last look.
        self._held: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Forget the former rest of the stream."""
        self._count, self._control, self._held = 0, None, frozenset()

    async def take(self, traffic: Traffic) -> None:
        """Look once, and note in `traffic` how many writes the server has taken. Raises DatabaseError."""
        self._count += 1
        await self.look_at_orders(traffic)
        self._hooks.wake(CONTROLS)
        if self._count % _SCHEDULES_EVERY == 0:
            self._hooks.wake(SCHEDULES)
        if self._count % FULL_EVERY == 0:
            self._scans.ask_full()
        await self._look_at_held()
        if self._count % _URGENT_EVERY == 0:
            await self._batches.look_for_urgent()

    async def look_at_orders(self, traffic: Traffic) -> None:
        """Look for orders to this worker alone, and note the server's writes. Raises DatabaseError."""
        orders, written = await read_orders(self._store, self._scope.worker_id)
        if written is not None:
            traffic.note(written.time, written.inc, monotonic())
        if orders != self._control:  # also at the first look: nothing reported the orders just before it
            self._scope.signals.heartbeat_wanted.send()
        self._control = orders

    async def _look_at_held(self) -> None:
        """Check the runs that were held at the last look, too. Most runs of a quick backlog have ended before that."""
        runs = [run for run in self._scope.ledger.held if run.run_id in self._held]
        self._held = frozenset(run.run_id for run in self._scope.ledger.held)
        await self._lookups.check_held([run.task_id for run in runs])
