"""arq: 100 jobs at once, no results, and a poll every 10 ms instead of every 500."""

from __future__ import annotations

import asyncio
import os

import publishing
from arq import create_pool
from arq.connections import RedisSettings
from notes import handle_async

_settings = RedisSettings.from_dsn(os.environ["PEER_URI"])


async def noop(_context: object, number: int, sent: int, hold_ms: int) -> None:
    """Note the start."""
    await handle_async(number, sent, hold_ms)


class WorkerSettings:
    """What `arq peer_arq.WorkerSettings` runs."""

    functions = (noop,)
    redis_settings = _settings
    max_jobs = 100
    keep_result = 0
    poll_delay = 0.01
    log_results = False
    # A job of a dead worker is due again 10 s after this timeout.
    job_timeout = max(1.0, publishing.lease(310.0) - 10.0)


async def main() -> None:
    """Be the publisher."""
    pool = await create_pool(_settings)
    await publishing.publish(lambda *payload: pool.enqueue_job("noop", *payload), None)


if __name__ == "__main__":
    asyncio.run(main())
