"""The stream loop: passes the events of the worker's change stream on, and opens a new stream after any break.

Events are lost during a break. So a full scan follows when the new stream is open. It finds the tasks of lost events.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic

from mtask.errors import MtaskError
from mtask.features.controls.worker import Controls
from mtask.kernel.document.rules import HORIZON
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations.change_stream import Density, Event, EventKind, Stream, Traffic
from mtask.kernel.worker.discovery.fetch_loop import Scans
from mtask.kernel.worker.discovery.hearing import Hearing
from mtask.kernel.worker.discovery.inbox import Inbox
from mtask.kernel.worker.discovery.looks import INTERVAL, Looks
from mtask.kernel.worker.discovery.questions import Questions
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.scope import Scope
from mtask.kernel.worker.process.timing import Backoff

_PAUSE, _MAX_PAUSE = 0.1, 2.0
#: A stream that was open for this time, in seconds, has not broken at once: the next pause is short again.
_LIVED_LONG = 10.0
#: After an event of a task for which another worker ranks first, this worker leaves its stream unread for this time, in
#: seconds. Meanwhile the first worker claims the task. The claim and its end then wake no stream that waits.
_GIVE_WAY = 0.015
#: A worker gives way only if its last event came this many seconds ago or earlier. So a series of events is not late.
_APART = 0.05


class StreamLoop:
    """Passes each event of the change stream to the part that it concerns."""

    def __init__(
        self,
        scope: Scope,
        store: AsyncStore,
        inbox: Inbox,
        questions: Questions,
        controls: Controls,
        scans: Scans,
        looks: Looks,
        hearing: Hearing,
    ) -> None:
        """Use `store` only for the change stream.

        A stream that waits for events ends only when its MongoDB client is closed. Cancelling the asyncio task does not
        end it.
        """
        self._scope = scope
        self._store = store
        self._inbox = inbox
        self._questions = questions
        self._controls = controls
        self._scans = scans
        self._looks = looks
        self._hearing = hearing
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

    async def run(self) -> None:
        """Handle the events of the change stream until `stop`. After a break, open a new stream and scan again."""
        self._task = asyncio.current_task()
        pauses = Backoff(_PAUSE, _MAX_PAUSE)
        while not self._is_stopping:
            began = monotonic()
            try:
                await self._follow()
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

    async def _follow(self) -> None:
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
        self._scope.signals.schedules_changed.send()
        self._controls.wake()
        if self._was_open:
            self._scope.signals.heartbeat_wanted.send()  # its answer brings the orders to this worker
        self._was_open = True
        watching = asyncio.create_task(self._watch_backlog(stream))
        try:
            await self._store.while_primary(self._read(stream))
        except MtaskError:
            if not self._may_rest:
                raise
        finally:
            watching.cancel()
            self.is_open = False
            with suppress(Exception):
                await stream.close()

    async def _read(self, stream: Stream) -> None:
        while stream.is_open and not self._is_stopping:
            if await stream.hear(self._hearing.shares):
                self._scans.ask_soon()  # it did not hear of the new tasks of before
            event = await stream.next()
            if event is not None and not self._take(event):
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
            and self._last_event - last > _APART
            and not self._inbox.ranks_first(event.task_id)
        ):
            await asyncio.sleep(_GIVE_WAY)

    def _take(self, event: Event) -> bool:
        """Handle one event without a call to the database; return False if a new stream must be opened."""
        self.event_cnt += 1
        try:
            return self._take_event(event)
        except Exception as error:
            self._questions.cannot_take(event.task_id, error)
            return True

    def _take_event(self, event: Event) -> bool:
        if event.begins_flow:
            self._scope.ledger.has_flows = True
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
            self._controls.wake()
        elif event.kind is EventKind.PERMITS_CALLED:
            self._scope.signals.permits_called.send(event.task_id, event.permit_cnt)
        elif event.kind is EventKind.SCHEDULES_CHANGED:
            self._scope.signals.schedules_changed.send()
        elif event.kind is EventKind.COLLECTION_LOST:
            logger.warning("the collection was dropped or renamed, starting over")
            self._scans.ask_setup()
            return False
        return True
