"""The overview: what waits, what fails, who holds what. Then the workers, and the stream that keeps pages live."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta

from starlette.responses import JSONResponse, Response

from mtask.web.access import Role
from mtask.web.page import rendering
from mtask.web.page.pulse import Page
from mtask.web.page.reads import Queue, State
from mtask.web.page.rows import queue_rows
from mtask.web.page.views import Addresses, Visit, see
from mtask.web.problems import Busy, MethodNotAllowed
from mtask.web.views import EventStream

addresses = Addresses()
#: A due task that no worker has taken for this time is late.
_LATE = timedelta(minutes=1)


@addresses.get_at("/")
async def overview(visit: Visit) -> Response:
    """Show the state of the whole database. A tenant sees its tasks instead."""
    if visit.caller.tenant is not None:
        return see("/tasks")
    state = await visit.parts.reads.state()
    rates = visit.parts.pulse(visit.caller).rates(state.now)
    return visit.html(
        "overview.html",
        state=state,
        queue_table=queue_rows(state, rates),
        now=state.now,
        troubles=troubles(state),
        late=state.now - _LATE,
    )


def troubles(state: State) -> list[tuple[str, str, str, str]]:
    """Return what needs attention: its weight, what it is, why, and the address that shows more."""
    found: list[tuple[str, str, str, str]] = []
    for queue in state.queues.values():
        is_late = _is_late(queue, state)
        found += [
            ("bad" if is_late else "odd", f"{name} in queue {queue.name}", reason, f"queue:{queue.name}")
            for name, reason in sorted(queue.stuck.items())
        ]
        if queue.is_paused and not queue.stuck:
            found.append(("odd", f"Queue {queue.name}", queue.held, f"queue:{queue.name}"))
        elif is_late and not queue.stuck:
            found.append(("odd", f"Queue {queue.name}", "tasks are due and wait for free slots", f"queue:{queue.name}"))
    found += [
        ("odd", f"Task name {control.target}", control.said, "queues:") for control in state.names if control.is_held
    ]
    found += [
        ("bad", f"Worker {worker.worker_id}", f"has sent no heartbeat, on {worker.host}", "workers:")
        for worker in state.silent
    ]
    if not state.live:
        found.insert(0, ("bad", "No worker is live", "start one: mtask-worker package.module:app", "workers:"))
    return sorted(found, key=lambda entry: entry[0])


def _is_late(queue: Queue, state: State) -> bool:
    due = queue.oldest_due(state.now)
    return due is not None and state.now - due > _LATE


# --- workers ---------------------------------------------------------------------------------------------

# Workers: slots and beats, stop and resize.

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


# --- live ------------------------------------------------------------------------------------------------

# The stream that keeps pages live, and the numbers of the charts.

#: The time between two comments on a quiet stream, in seconds: they keep proxies from closing it.
_QUIET = 15.0


@addresses.get_at("/live")
async def live(visit: Visit) -> Response:
    """Tell the page when something has changed, as server-sent events."""
    if visit.request.method == "HEAD":  # its answer has no body, so no stream would ever end
        raise MethodNotAllowed("This address takes GET alone.")
    pulse = visit.parts.pulse(visit.caller)
    if visit.parts.hub.is_closing:
        raise Busy("The server ends. Reload the page in a moment.")
    stack = AsyncExitStack()
    stack.enter_context(visit.parts.rooms.pages.taken(visit.caller))
    page = await stack.enter_async_context(pulse.joined())
    return EventStream(_written(page), stack, rendering.SECURITY)


async def _written(page: Page) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    while (message := await page.next(_QUIET)) is not None:
        yield message or ": quiet\n\n"


@addresses.get_at("/charts")
async def charts(visit: Visit) -> Response:
    """Return the last minutes of starts, ends and lateness, by second, as far as somebody has watched."""
    pulse = visit.parts.pulse(visit.caller)
    now = await visit.parts.reads.now()
    document = {"now": round(now.timestamp() * 1000), "rows": pulse.history()}
    return JSONResponse(document, headers={**rendering.SECURITY, "Cache-Control": "no-store"})
