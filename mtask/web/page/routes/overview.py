"""The overview: what waits, what fails, who holds what."""

from __future__ import annotations

from datetime import timedelta

from starlette.responses import Response

from mtask.web.page.drawing.rows import queue_rows
from mtask.web.page.reads import Queue, State
from mtask.web.page.views import Addresses, Visit, see

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
            found.append(("odd", f"Queue {queue.name}", "is paused", f"queue:{queue.name}"))
        elif is_late and not queue.stuck:
            found.append(("odd", f"Queue {queue.name}", "tasks are due and wait for free slots", f"queue:{queue.name}"))
    found += [
        ("odd", f"Task name {control.target}", "is paused", "queues:") for control in state.names if control.paused
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
