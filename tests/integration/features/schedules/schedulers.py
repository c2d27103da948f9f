"""Schedulers without a worker around them, and schedules in the state in which a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime

from mtask import App
from mtask.features.schedules.worker import Scheduler
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import AsyncStore, SyncStore


@asynccontextmanager
async def scheduling_by(
    uri: str, database: str, count: int, app: App | None = None
) -> AsyncIterator[list[tuple[Scheduler, AsyncStore]]]:
    """Run so many schedulers, each with connections of its own; return each with its store."""
    async with AsyncExitStack() as stack:
        stores = [connect.async_store(uri, database, "scheduler") for _ in range(count)]
        for store in stores:
            stack.push_async_callback(store.close)
        schedulers = [Scheduler(store, app.schedules if app else []) for store in stores]
        async with asyncio.TaskGroup() as group:
            for scheduler in schedulers:
                group.create_task(scheduler.run())
            yield list(zip(schedulers, stores, strict=True))
            for scheduler in schedulers:
                scheduler.stop()


def set_next(store: SyncStore, schedule_id: str, at: datetime) -> None:
    """Let a schedule stand where it would after a time in which nothing ran."""
    changed = store.collections["schedules"].update_one(
        {"_id": schedule_id}, {"$set": {"schedule_state.next_fire_time": at}}
    )
    assert changed.matched_count == 1


def keys(store: SyncStore) -> list[str]:
    return sorted(document["key"] for document in store.tasks.find({}, {"key": 1}))
