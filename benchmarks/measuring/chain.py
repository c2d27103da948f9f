"""The raw ceiling of latency, as a process of its own: change stream event -> find_one_and_update -> note the time.

`python -m benchmarks.measuring.chain URI DATABASE`: it takes the tasks that bare inserts create, until a signal.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from pymongo import AsyncMongoClient, ReturnDocument

from benchmarks.measuring.app import FOLDER_VARIABLE, Starts
from benchmarks.measuring.raw import AsyncTasks, claim_guard, claim_pipeline
from benchmarks.measuring.server import GUARANTEES

Document = dict[str, Any]
READY = "ready"


async def follow(uri: str, database: str, folder: Path) -> None:
    """Claim every task that is inserted, and note the time of the claim."""
    starts = Starts(folder)
    under_way: set[asyncio.Task[None]] = set()
    async with AsyncMongoClient[Document](uri, tz_aware=True) as client:
        tasks = client[database].get_collection("tasks", **GUARANTEES)
        wanted: list[Document] = [{"$match": {"operationType": "insert"}}, {"$project": {"documentKey": 1}}]
        async with await tasks.watch(wanted, max_await_time_ms=10_000, batch_size=1_000) as stream:
            (folder / READY).touch()
            async for change in stream:
                claiming = asyncio.create_task(_claim(tasks, change["documentKey"]["_id"], starts))
                under_way.add(claiming)
                claiming.add_done_callback(under_way.discard)


async def _claim(tasks: AsyncTasks, task_id: str, starts: Starts) -> None:
    pipeline = claim_pipeline(uuid4().hex)
    won = await tasks.find_one_and_update(claim_guard([task_id]), pipeline, return_document=ReturnDocument.AFTER)
    if won is not None:
        starts.add(won["key"], time.monotonic())


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    asyncio.run(follow(sys.argv[1], sys.argv[2], Path(os.environ[FOLDER_VARIABLE])))
