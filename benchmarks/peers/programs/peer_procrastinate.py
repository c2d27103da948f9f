"""Procrastinate on PostgreSQL: async tasks, LISTEN/NOTIFY, finished jobs deleted."""

from __future__ import annotations

import asyncio
import os

import procrastinate
import publishing
from notes import handle_async

_lease = os.environ.get("PEER_LEASE")
_CONCURRENCY = 100

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ["PEER_URI"], min_size=4, max_size=16)
)


@app.task(name="noop")
async def noop(number: int, sent: int, hold_ms: int) -> None:
    """Note the start."""
    await handle_async(number, sent, hold_ms)


if _lease:

    @app.periodic(cron="* * * * * */2")
    @app.task(name="retry_stalled", queueing_lock="retry_stalled", pass_context=True)
    async def retry_stalled(context: procrastinate.JobContext, timestamp: int) -> None:
        """Do what its guide on stalled jobs shows."""
        for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=float(_lease)):
            await app.job_manager.retry_job(job)


def _kwargs(number: int, sent: int, hold_ms: int) -> dict[str, int]:
    return {"number": number, "sent": sent, "hold_ms": hold_ms}


async def main() -> None:
    """Be the worker or the publisher."""
    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        if publishing.is_worker():
            times = (
                {"update_heartbeat_interval": float(_lease) / 3, "stalled_worker_timeout": float(_lease)}
                if _lease
                else {}
            )
            await app.run_worker_async(concurrency=_CONCURRENCY, delete_jobs="successful", **times)
        else:
            await publishing.publish(
                lambda *payload: noop.defer_async(**_kwargs(*payload)),
                lambda payloads: noop.batch_defer_async(*(_kwargs(*one) for one in payloads)),
            )


if __name__ == "__main__":
    asyncio.run(main())
