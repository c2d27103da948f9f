"""The settlers: each tells others of the ends of tasks, by one relay.

The end of a task and the mark that others are owed are one write. So nothing is lost if this worker dies, or if the
settler fails: a scan of any worker finds the mark, and does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Generic, TypeVar

from mtask.errors import DatabaseTimeout, DatabaseUnavailable, MtaskError, OperationFailed
from mtask.kernel.driver.operation import Operation, within
from mtask.kernel.driver.stores import AsyncStore
from mtask.kernel.operations.relays import Relay, settle
from mtask.kernel.worker.process.log import fields, logger, told

#: The most ended tasks that are settled together.
_MAX_GROUP = 200


class Settler:
    """Settles the ends of tasks in groups. While one group is under way, the next one gathers."""

    def __init__(self, store: AsyncStore, relays: Sequence[Relay]) -> None:
        """The first of these relays is that of this settler. The others settle what follows from the same ends."""
        self.relay = relays[0]
        self._relays = relays
        self._store = store
        self._waiting: dict[str, None] = {}
        self._under_way: asyncio.Task[None] | None = None

    def submit(self, task_id: str) -> None:
        """Settle the end of this task soon."""
        self._waiting[task_id] = None
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self._settle_waiting())
            self._under_way.add_done_callback(self._landed)

    async def drain(self) -> None:
        """Wait until each submitted end is settled, or left to a scan."""
        while self._under_way is not None:
            await asyncio.wait((self._under_way,))

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._under_way = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("settler failed and goes on", exc_info=task.exception())
        if self._waiting:
            self.submit(next(iter(self._waiting)))

    async def _settle_waiting(self) -> None:
        while self._waiting:
            group = list(self._waiting)[:_MAX_GROUP]
            for task_id in group:
                del self._waiting[task_id]
            try:
                await self._store.run(settle(self._relays, group))
            except MtaskError as error:
                logger.warning(
                    "end of a task not settled, left to a scan", extra=fields(tasks=len(group), reason=told(error))
                )


# --- undone ----------------------------------------------------------------------------------------------

# Work that another process left undone: done together where possible, and apart where one item holds up the others.
#
# The parts of features share this. A database without what they look after waits for none.

#: The time limit for one item alone, whose document may be locked, and the most items that are tried so at once.
#: Tests tune `ALONE_TIMEOUT`.
ALONE_TIMEOUT, _MAX_ALONE = timedelta(seconds=1), 16
#: The most items that are settled together. Several workers may find the same ones. What others have settled meanwhile
#: is left out.
_GROUP = 100
#: The first and the longest pause of an item that cannot be settled, in seconds, and the most such items that are
#: remembered. A document may be locked or malformed.
_PAUSE, _MAX_PAUSE, _MAX_HELD_UP = 5.0, 300.0, 1_000

Item = TypeVar("Item")


class Undone(Generic[Item]):
    """Settles items. An item that cannot be settled is left alone for a while, and holds up no other."""

    def __init__(
        self,
        store: AsyncStore,
        settle: Callable[[Sequence[Item]], Operation[Any]],
        task_id_of: Callable[[Item], Any],
        complaint: str,
    ) -> None:
        """`complaint`: what the log says of an item that cannot be settled."""
        self._store = store
        self._settle = settle
        self._task_id_of = task_id_of
        self._complaint = complaint
        #: By the task of each item that could not be settled: until when it is left alone, in monotonic seconds, and
        #: the last pause.
        self._held_up: dict[Any, tuple[float, float]] = {}

    def left_alone(self) -> list[Any]:
        """Return the ids of the tasks that are left alone now."""
        now = monotonic()
        return [task_id for task_id, (until, _) in self._held_up.items() if until > now]

    async def settle(self, items: Sequence[Item]) -> None:
        """Settle these items in groups."""
        for place in range(0, len(items), _GROUP):
            await self._settle_group(items[place : place + _GROUP])

    async def _settle_group(self, items: Sequence[Item]) -> None:
        apart = [item for item in items if self._task_id_of(item) in self._held_up]
        together = [item for item in items if self._task_id_of(item) not in self._held_up]
        try:
            if together:
                await self._store.run(self._settle(together))
        except Exception as error:
            _raise_outage(error)
            apart += together  # the one that cannot be settled is logged below
        at_once = asyncio.Semaphore(_MAX_ALONE)
        await asyncio.gather(*(self._settle_alone(item, at_once) for item in apart))

    async def _settle_alone(self, item: Item, at_once: asyncio.Semaphore) -> None:
        task_id = self._task_id_of(item)
        # A locked document costs little, but an item that needs long gets its time at a later try.
        _, pause = self._held_up.get(task_id, (0.0, 0.0))
        limit = min(max(ALONE_TIMEOUT, timedelta(seconds=pause)), self._store.timeout)
        try:
            async with at_once:
                await self._store.run(within(self._settle([item]), lambda: limit))
            self._held_up.pop(task_id, None)
        except Exception as error:
            _raise_outage(error)
            self._hold_up(task_id, error)

    def _hold_up(self, task_id: Any, error: Exception) -> None:
        """Leave this item alone for a while. Only the first failure is logged, and each pause is longer."""
        if task_id not in self._held_up:
            reason = str(error) if isinstance(error, MtaskError) else repr(error)
            logger.warning(f"{self._complaint}, left alone for a while", extra=fields(task=task_id, reason=reason))
        _, pause = self._held_up.get(task_id, (0.0, _PAUSE / 2))
        pause = min(2 * pause, _MAX_PAUSE)
        self._held_up[task_id] = (monotonic() + pause, pause)
        if len(self._held_up) > _MAX_HELD_UP:
            del self._held_up[next(iter(self._held_up))]


def _raise_outage(error: Exception) -> None:
    """Raise the error again if the database is away: then nothing can be done, neither together nor apart."""
    if isinstance(error, DatabaseUnavailable) and not isinstance(error, DatabaseTimeout):
        raise error


async def look_after(subject: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do one part of a janitor's work. If it fails, no other part and no task of the users waits for it.

    `subject`: what the part looks after, for the log. Raises DatabaseUnavailable.
    """
    try:
        await work()
    except OperationFailed as error:
        warn_of_refusal(subject, error)
    except DatabaseTimeout as error:
        logger.warning(f"{subject} not looked after, a document may be locked", extra=fields(reason=told(error)))
    except DatabaseUnavailable:
        raise
    except Exception:
        logger.exception(f"{subject} not looked after")


def warn_of_refusal(subject: str, error: OperationFailed) -> None:
    """Log that the server refuses what the janitor asks for: an index is missing, for example."""
    logger.warning(f"{subject} not looked after; run `mtask init`", extra=fields(reason=told(error)))
