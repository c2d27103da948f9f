"""Workers: slots and beats, stop and resize."""

from __future__ import annotations

from starlette.responses import Response

from mtask.web.access import Role
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
#: The most workers that are gone and that the list still shows.
_MOST_GONE = 100


@addresses.get_at("/workers", of_database=True)
async def workers(visit: Visit) -> Response:
    """List the workers: the live ones and, if asked for, those that are gone."""
    state = await visit.parts.reads.state()
    live, silent = state.live, state.silent
    known = {worker.worker_id for worker in (*live, *silent)}
    gone = [worker for worker in state.workers if worker.worker_id not in known]
    gone.sort(key=lambda worker: worker.heartbeat_time, reverse=True)
    is_all = visit.query.text("gone") == "1"
    return visit.html(
        "workers.html",
        now=state.now,
        live=live,
        silent=silent,
        gone=gone[:_MOST_GONE] if is_all else [],
        gone_cnt=len(gone),
        is_all=is_all,
    )


@addresses.post_at("/worker/stop", Role.OPERATE, of_database=True)
async def stop(visit: Visit) -> Response:
    """Ask a worker to stop gracefully."""
    worker_id = visit.query.exact("worker_id") or ""
    await visit.client.stop_worker(worker_id)
    visit.parts.reads.forget()
    return visit.back("/workers", f"{worker_id} was asked to stop: it finishes its runs or hands them back.")


@addresses.post_at("/worker/resize", Role.OPERATE, of_database=True)
async def resize(visit: Visit) -> Response:
    """Change the number of handlers that a worker may run at once."""
    worker_id, concurrency = visit.query.exact("worker_id") or "", visit.form.whole("concurrency")
    await visit.client.set_worker(worker_id, concurrency=concurrency)
    visit.parts.reads.forget()
    what = "as many as at its start" if concurrency is None else str(concurrency)
    return visit.back("/workers", f"{worker_id} may run {what} at once{' (paused)' * (concurrency == 0)}.")
