"""What holds for this worker's queues and task names: what is paused, and until when it may go by that.

A pause must hold for every worker once its caller is told so. So a worker that hears of one lets its claims under way
land, and only then says, in its own document, that it goes by it. And a claim holds only as long as the worker's
heartbeat: one that was out of touch may have missed a pause, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mtask.model.controls import Control
from mtask.model.documents import describe_validation
from mtask.store import controls
from mtask.store.driver import AsyncStore
from mtask.store.filters import Filter, claimable_now
from mtask.worker.log import fields, logger


class Controls:
    """Knows what is paused here, and makes the guard of the claims."""

    def __init__(self, store: AsyncStore, queues: Sequence[str], names: Sequence[str]) -> None:
        self._store = store
        self._queues = list(queues)
        self._names = list(names)
        self.paused_queues: frozenset[str] = frozenset()
        self.paused_names: frozenset[str] = frozenset()
        #: When this worker's heartbeat runs out, by the server's clock.
        self.valid_until: datetime | None = None
        self._seen: list[dict[str, Any]] = []

    @property
    def queues(self) -> list[str]:
        """The queues served here that are not paused."""
        return [queue for queue in self._queues if queue not in self.paused_queues]

    @property
    def names(self) -> list[str]:
        """The task names served here that are not paused."""
        return [name for name in self._names if name not in self.paused_names]

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The revisions that this worker goes by."""
        return self._seen

    def is_paused(self, queue: str | None, name: str) -> bool:
        """Whether a task of this queue and name is not to be claimed now."""
        return name in self.paused_names or queue in self.paused_queues

    def guard(self) -> Filter:
        """Return what a claim asks for beside the task's own state."""
        return claimable_now(self.paused_queues, self.paused_names, self.valid_until)

    async def refresh(self, until_landed: Callable[[], Awaitable[None]]) -> bool:
        """Read what holds and go by it, from the next claim on; return whether something was resumed.

        `until_landed` waits for the claims that were begun before.
        """
        found = [c for document in await self._store.run(controls.of(self._queues, self._names)) if (c := _parsed(document))]
        before = self.paused_queues | self.paused_names
        self.paused_queues = frozenset(c.target for c in found if c.kind == "queue" and c.paused)
        self.paused_names = frozenset(c.target for c in found if c.kind == "name" and c.paused)
        after = self.paused_queues | self.paused_names
        if before != after:
            logger.info("controls changed", extra=fields(paused=",".join(sorted(after)) or "none"))
        await until_landed()
        self._seen = [{"_id": c.id, "revision": c.revision} for c in found]
        return bool(before - after)


def _parsed(document: dict[str, Any]) -> Control | None:
    try:
        return Control.model_validate(document)
    except ValidationError as error:
        logger.error(
            "malformed control left out",
            extra=fields(control=str(document.get("_id")), reason=describe_validation(error)),
        )
        return None
