"""The claimer: decides when tasks are claimed, and how many. It considers the preemption queue and the free slots."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic

from mtask.errors import DatabaseError
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.discovery.fleet import Ranks
from mtask.kernel.worker.discovery.quarantine import Quarantine
from mtask.kernel.worker.discovery.ready import Entry
from mtask.kernel.worker.discovery.rereads import Lookups
from mtask.kernel.worker.discovery.stream import Hearing
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.part import Gate
from mtask.kernel.worker.process.state import Scope
from mtask.kernel.worker.process.time import wake_or_wait
from mtask.kernel.worker.running.claim import Sender
from mtask.kernel.worker.running.finisher import Finisher
from mtask.kernel.worker.running.slots import Slots

MAX_GROUP = 400
MAX_IN_FLIGHT = 4
#: The most unwritten outcomes. While there are more, the worker claims no tasks.
_MAX_UNWRITTEN = 2_000
_PAUSE = 0.05


class Claimer:
    """Claims due tasks in groups, and fills the free slots with them."""

    def __init__(
        self,
        scope: Scope,
        queue: PreemptionQueue,
        quarantine: Quarantine,
        gate: Gate | None,
        slots: Slots,
        sender: Sender,
        finisher: Finisher,
        overflow: Overflow,
        ranks: Ranks,
    ) -> None:
        self._ledger = scope.ledger
        self._signals = scope.signals
        self._queue = queue
        self._served = scope.served
        self._validity = scope.validity
        self._quarantine = quarantine
        self._gate = gate
        self._slots = slots
        self._sender = sender
        self._finisher = finisher
        self._overflow = overflow
        self._ranks = ranks
        self._wake = asyncio.Event()
        #: The claims of groups under way, and those of them that ask the gate: no other group waits for these.
        self._in_flight: set[asyncio.Task[None]] = set()
        self._gated: set[asyncio.Task[None]] = set()
        self._next_group = NextGroup()
        self._is_stopping = False

    def wake(self) -> None:
        """Check the queue again. Call this when a task was queued or a slot is free."""
        self._wake.set()

    def room_made(self) -> None:
        """Check the queue again, and ask for more tasks if few are left. Call this when slots may be free."""
        self._wake.set()
        self._ask_for_more()

    def _ask_for_more(self) -> None:
        if self._queue.may_have_more:
            self._signals.tasks_wanted.send()

    async def run(self) -> None:
        """Claim tasks until `stop`. Check the queue after each `wake`, when a task becomes due or when a claim ends."""
        while not self._is_stopping:
            self._wake.clear()
            if self._room > 0 and not self._is_held_back():
                # Once for all slots that became free since the last check; and before a claim, as the tasks of a claim
                # under way would be read again.
                self._ask_for_more()
            await wake_or_wait(self._wake, self.launch())
        for under_way in (self._in_flight, *self._sender.under_way):
            while under_way:
                await asyncio.wait(under_way)
        self._slots.close()

    async def until_landed(self) -> None:
        """Wait until each claim that is under way now has ended, or can no longer take effect."""
        for under_way in (self._in_flight, *self._sender.under_way):
            begun = set(under_way)
            if begun:
                await asyncio.wait(begun)

    def stop(self) -> None:
        """Claim no more tasks, and hand back runs that have not started. `run` returns when all claims have ended."""
        self._is_stopping = True
        self._sender.stop()
        self._overflow.stop()
        self._slots.stop()
        self._wake.set()

    @property
    def is_at_rest(self) -> bool:
        """Whether no claim is under way."""
        return not (self._in_flight or any(self._sender.under_way))

    @property
    def _room(self) -> int:
        """The number of tasks that may be claimed now."""
        return self._slots.free_cnt + self._slots.ahead_cnt

    def is_backed_up(self) -> bool:
        """Whether too many outcomes are unwritten."""
        return self._finisher.pending > _MAX_UNWRITTEN

    def _is_held_back(self) -> bool:
        """Whether nothing may be claimed now: too many outcomes are unwritten, or a pause may have gone unheard."""
        return self.is_backed_up() or self._validity.is_over()

    def _is_helping_at_end(self, now: float) -> bool:
        """Whether the next task is another worker's, and this worker knows of no more tasks than those in its queue.

        At the end of a backlog, several workers know its last tasks. If each claimed them ahead, their own worker would
        lose them while this worker has not even a free slot for them.
        """
        queue = self._queue
        return not (queue.has_more or queue.is_rescue_next or queue.is_own_next(now, past_isolated=True))

    def launch(self) -> float | None:
        """Begin the claims that can begin now; return the seconds until the next check.

        None: the next check follows `wake`.
        """
        while not self._is_stopping:
            room = self._room
            now = monotonic()
            self._queue.puts_gated_off = len(self._gated) >= MAX_IN_FLIGHT
            if room <= 0 or len(self._in_flight) - len(self._gated) >= MAX_IN_FLIGHT:
                return self._overflow.look(now)
            if self._is_held_back():
                self._overflow.look(now)
                return _PAUSE
            pause = self._queue.next_ready(now)
            if pause is None or pause > 0:
                # Ready tasks of isolated handlers may wait for an executor.
                return min((wait for wait in (pause, self._overflow.look(now)) if wait is not None), default=None)
            is_gated = self._queue.is_gated_next
            if is_gated or self._is_helping_at_end(now):
                room = self._slots.free_cnt  # what has passed the gate keeps others waiting, so it must start at once
                if room <= 0:
                    return self._overflow.look(now)
            before = self._gated if is_gated else self._in_flight - self._gated
            if before and not self._queue.is_rescue_next:  # a rescue waits for no other task
                left = self._next_group.seconds_left(
                    now,
                    is_shared=self._ranks.has_others(self._served.names),
                    room=room,
                    in_queue=len(self._queue),
                    queued_cnt=self._queue.queued_cnt,
                    most=self._slots.all_cnt,
                )
                if left > 0:
                    return left  # more tasks join meanwhile; the end of the current claim wakes the loop
            entries = self._queue.take(self._slots.within_bytes(min(room, MAX_GROUP)), now)
            if is_gated and self._gate is not None:
                self._gate.pick(entries)
            else:
                entries = self._without_locked(entries)
            if entries:
                self._begin(entries, now, is_gated=is_gated)
        return None

    def _begin(self, entries: list[Entry], now: float, *, is_gated: bool) -> None:
        """Begin the claim of a group."""
        task_ids = [entry.task_id for entry in entries]
        self._ledger.claiming.update(task_ids)
        is_rescue = entries[0].is_begun
        # The tasks of a rescue need no lookup before the claim: a lookup has just read them.
        lookup_first = entries[0].rank > 0 and not is_rescue
        is_simple = len(entries) == 1 and entries[0].is_simple
        sender = self._sender
        claim = (
            partial(sender.claim_gated, task_ids, is_rescue=is_rescue)
            if is_gated
            else partial(
                sender.claim_free, task_ids, lookup_first=lookup_first, is_rescue=is_rescue, is_simple=is_simple
            )
        )
        job = asyncio.get_running_loop().create_task(sender.claim(task_ids, claim))
        self._in_flight.add(job)
        if is_gated:
            self._gated.add(job)
        self._next_group.began(now)
        job.add_done_callback(self._landed)

    def _without_locked(self, entries: list[Entry]) -> list[Entry]:
        """Give a claim of its own to each task that was locked at its last try. Return the other tasks.

        So no group has to wait for a locked document.
        """
        locked = [entry.task_id for entry in entries if self._quarantine.was_held_up(entry.task_id)]
        if not locked:
            return entries
        self._ledger.claiming.update(locked)
        self._sender.claim_apart(locked)
        return [entry for entry in entries if entry.task_id not in self._ledger.claiming]

    def _landed(self, job: asyncio.Task[None]) -> None:
        self._in_flight.discard(job)
        self._gated.discard(job)
        if not job.cancelled() and job.exception() is not None:
            logger.error("claimer failed and goes on", exc_info=job.exception())
        self._wake.set()


# --- next group ------------------------------------------------------------------------------------------

# The next group: how long it waits for further tasks while the claim of another group is under way.

#: The least number of tasks in a group that a worker without others claims while another group is under way. It is half
#: of what the worker could claim if it held nothing, within these bounds: small groups cost the server and the worker
#: more for each task.
_MIN_FURTHER, _MAX_FURTHER = 50, 360
#: The longest time for which another group waits after the previous group's claim began, in seconds. So a slow claim
#: does not hold the next group back for longer.
_MAX_GATHER = 0.2
#: If no task was queued for this time, in seconds, another group waits no longer if it holds all queued tasks: no
#: further task would join it. So the end of a backlog need not wait for the group before it.
_QUIET = 0.01


class NextGroup:
    """Decides when the next group of tasks is worth a claim beside the claims that are under way."""

    def __init__(self) -> None:
        self._began_at = 0.0
        #: The number of tasks that had been queued at the last look, and the time of the first look that saw it.
        self._queued_cnt, self._queued_at = 0, 0.0

    def began(self, now: float) -> None:
        """Note that the claim of a group has begun. All times are monotonic seconds."""
        self._began_at = now

    def seconds_left(
        self, now: float, *, is_shared: bool, room: int, in_queue: int, queued_cnt: int, most: int
    ) -> float:
        """Return the seconds for which the next group should wait; at most 0: claim it now.

        `is_shared`: whether other workers share the tasks. Then even a large group waits: the groups of all workers
        keep the database at work. With more, each takes longer, and other workers try its tasks meanwhile.

        `room`: the number of tasks that may be claimed now. `in_queue`: the number of tasks in the queue. `queued_cnt`:
        the number of tasks that were queued so far. `most`: the number of runs that the worker may hold.
        """
        if queued_cnt != self._queued_cnt:
            self._queued_cnt, self._queued_at = queued_cnt, now
        if not is_shared and min(room, in_queue) >= min(max(_MIN_FURTHER, most // 2), _MAX_FURTHER):
            return 0.0
        left = self._began_at + _MAX_GATHER - now
        return left if room < in_queue else min(left, self._queued_at + _QUIET - now)


# --- overflow --------------------------------------------------------------------------------------------

# The overflow: the due tasks that this worker knows, while it has no room for them.
#
# Most other workers may not hear of these tasks. So this worker reads whether they still wait, and appeals if they do.

#: The most tasks of one read. One task that waits is reason enough for an appeal.
_MAX_TASKS = 50
#: A task that has been due for this time, in seconds, should have been taken by another worker that knows it.
_OVERDUE = 0.1
#: The least time between two reads, and after one that has failed, in seconds.
_PAUSE_OF_READS, _PAUSE_AFTER_ERROR = 0.25, 1.0


class Overflow:
    """Appeals to the other workers when due tasks wait for which this worker has no room."""

    def __init__(self, scope: Scope, queue: PreemptionQueue, lookups: Lookups, hearing: Hearing) -> None:
        self._vitals = scope.vitals
        self._signals = scope.signals
        self._queue = queue
        self._lookups = lookups
        self._hearing = hearing
        self._next_read = 0.0
        self._reading: asyncio.Task[None] | None = None

    def look(self, now: float) -> float | None:
        """Begin a read if this worker, which has no room, knows overdue tasks; return the seconds until the next look.

        None: the next look follows a change of the queue or of the room.
        """
        pause = self._hearing.until_appeal(now)
        if pause is None or self._reading is not None or not self._vitals.concurrency:
            return None  # with concurrency 0, the other workers do not count on this one
        pause = max(pause, self._next_read - now)
        if not self._queue.has_ready(now):
            next_waiting = self._queue.next_waiting(now)
            return None if next_waiting is None else max(pause, next_waiting + _OVERDUE)
        if pause > 0:
            return pause
        self._next_read = now + _PAUSE_OF_READS
        task_ids = self._queue.overdue(now - _OVERDUE, _MAX_TASKS)
        if not task_ids:
            return _PAUSE_OF_READS
        self._reading = asyncio.get_running_loop().create_task(self._read(task_ids, now))
        return None

    async def _read(self, task_ids: list[str], sent: float) -> None:
        try:
            if await self._lookups.look_whether_due(task_ids, sent) and not self._hearing.until_appeal(monotonic()):
                self._hearing.appeal()
        except Exception as error:
            self._next_read = monotonic() + _PAUSE_AFTER_ERROR
            if isinstance(error, DatabaseError):
                logger.warning("lookup failed, will be repeated", extra=fields(reason=told(error)))
            else:
                logger.exception("lookup failed, will be repeated")
        finally:
            self._reading = None
            self._signals.room_made.send()  # the claimer looks again

    def stop(self) -> None:
        """End the read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
