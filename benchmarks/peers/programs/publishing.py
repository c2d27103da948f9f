"""The publisher of the Python peers: `publish KIND COUNT FIRST HOLD_MS BOUND`, answered by one line of JSON.

KIND is `bulk` (one call; one after another where the peer has none), `single` (one call after another) or `paced` (one
call every 1/BOUND seconds). For other kinds BOUND is the seconds after which no further call begins, 0 for no bound.
Tasks are numbered from FIRST on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

Payload = tuple[int, int, int]
Single = Callable[[int, int, int], Awaitable[object] | object]
Bulk = Callable[[Sequence[Payload]], Awaitable[object] | object]


async def publish(single: Single, bulk: Bulk | None) -> None:
    """Publish as the command line says, and print the seconds that it took."""
    kind = sys.argv[2]
    count, first, hold_ms = (int(text) for text in sys.argv[3:6])
    bound = float(sys.argv[6])
    began = time.monotonic()
    published = count
    if kind == "bulk" and bulk is not None:
        await _done(bulk([(number, 0, hold_ms) for number in range(first, first + count)]))
    else:
        for index in range(count):
            if kind == "paced":
                await asyncio.sleep(max(0.0, began + index / bound - time.monotonic()))
            elif bound and time.monotonic() - began > bound:
                published = index
                break
            await _done(single(first + index, time.monotonic_ns(), hold_ms))
    answer = {"seconds": time.monotonic() - began, "count": published, "is_bulk": bulk is not None}
    print(json.dumps(answer), flush=True)


async def _done(result: Awaitable[object] | object) -> None:
    if inspect.isawaitable(result):
        await result


def is_worker() -> bool:
    """Tell whether this process is to be a worker."""
    return sys.argv[1] == "worker"


def lease(usual: float) -> float:
    """Return the seconds after which a dead worker's task is due again: those of the trial, else the peer's default."""
    return float(os.environ.get("PEER_LEASE") or usual)


def run(single: Single, bulk: Bulk | None = None) -> None:
    """Be the publisher of a sync peer."""
    asyncio.run(publish(single, bulk))
