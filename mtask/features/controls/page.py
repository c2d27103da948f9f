"""Queues: pause, limits and retention, and the pauses of task names."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.responses import Response

from mtask.errors import ControlUnconfirmed, InvalidInput
from mtask.features.controls.rules import Control, Limit
from mtask.web.access import Role
from mtask.web.page.forms import Form
from mtask.web.page.reads import Queue
from mtask.web.page.rendering import url
from mtask.web.page.rows import queue_rows
from mtask.web.page.views import Addresses, Visit
from mtask.web.paths import path_in

addresses = Addresses()
#: The longest time, in seconds, that a change waits for the workers to confirm it. It is in force before.
_PATIENCE = 3.0


@addresses.get_at("/queues", of_database=True)
async def queues(visit: Visit) -> Response:
    """List the queues, and the task names that are paused."""
    state = await visit.parts.reads.state()
    rates = visit.parts.pulse(visit.caller).rates(state.now)
    return visit.html("queues.html", state=state, queue_table=queue_rows(state, rates), now=state.now)


@addresses.get_at("/queue", of_database=True)
async def queue(visit: Visit) -> Response:
    """Show a queue, with its task names and its controls."""
    name = _named(visit)
    state = await visit.parts.reads.state()
    found = state.queues.get(name, Queue(name))
    serving = [worker for worker in state.live if name in worker.queues]
    control = found.control
    return visit.html(
        "queue.html",
        queue=found,
        state=state,
        now=state.now,
        serving=serving,
        paused={control.target for control in state.names if control.is_held},
        breaker=None if control is None else control.breaker,
        holds="" if control is None else control.said,
        held_until=None if control is None or not control.is_held else control.known_end,
        limit=(control and control.limit) or _NONE,
        key_limit=(control and control.key_limit) or _NONE,
        tenant_limit=(control and control.tenant_limit) or _NONE,
        permits=await visit.parts.reads.permits(found),
        is_fair=control is not None and control.fair,
        keep=(None, None) if control is None else (control.keep_success, control.keep_fail),
        window=_window,
    )


#: A limit that limits nothing.
_NONE = Limit.model_construct(concurrency=None, starts=None, window_ms=None)


def _window(limit: Limit) -> str:
    return "" if limit.window_ms is None else f"{limit.window_ms / 1000:g}"


def _named(visit: Visit) -> str:
    name = visit.query.exact("queue")
    if not name:
        raise InvalidInput("Name the queue: /queue?queue=NAME.", field="queue")
    return name


async def _confirmed(visit: Visit, changing: Awaitable[Control], done: str, address: str) -> Response:
    """Tell of a change: it is in force, and all live workers know it, or not all of them yet."""
    try:
        await changing
    except ControlUnconfirmed as error:
        names = ", ".join(list(error.worker_ids)[:5])
        done = f"{done} It is in force; not confirmed yet by {names}."
    visit.parts.reads.forget()
    return visit.back(address, done)


def _back(visit: Visit, name: str) -> str:
    """Return the page from which the form came, of those that have it."""
    came = path_in(visit.request.headers.get("referer", ""))
    return came if came in ("/", "/queues") else url("/queue", queue=name)


@addresses.post_at("/queue/pause", Role.OPERATE, of_database=True)
async def pause(visit: Visit) -> Response:
    """Stop workers from claiming tasks of a queue."""
    name = _named(visit)
    lasts = visit.form.seconds("for")
    changing = visit.client.pause(queue=name, until=lasts, timeout=_PATIENCE)
    ends = "" if lasts is None else f" for {lasts:g} s"
    return await _confirmed(visit, changing, f"The queue {name} is paused{ends}.", _back(visit, name))


@addresses.post_at("/queue/resume", Role.OPERATE, of_database=True)
async def resume(visit: Visit) -> Response:
    """Let workers claim tasks of a queue again."""
    name = _named(visit)
    changing = visit.client.resume(queue=name, timeout=_PATIENCE)
    return await _confirmed(visit, changing, f"The queue {name} is resumed.", _back(visit, name))


@addresses.post_at("/name/pause", Role.OPERATE, of_database=True)
async def pause_name(visit: Visit) -> Response:
    """Stop workers from claiming tasks of a name, in all queues."""
    name = visit.form.needed("name")
    changing = visit.client.pause(name=name, timeout=_PATIENCE)
    return await _confirmed(visit, changing, f"The task name {name} is paused in all queues.", "/queues")


@addresses.post_at("/name/resume", Role.OPERATE, of_database=True)
async def resume_name(visit: Visit) -> Response:
    """Let workers claim tasks of a name again."""
    name = visit.form.needed("name")
    changing = visit.client.resume(name=name, timeout=_PATIENCE)
    return await _confirmed(visit, changing, f"The task name {name} is resumed.", "/queues")


@addresses.post_at("/queue/limit", Role.OPERATE, of_database=True)
async def limit(visit: Visit) -> Response:
    """Replace all limits of a queue."""
    name, form = _named(visit), visit.form
    changing = visit.client.limit(
        name,
        concurrency=form.whole("concurrency"),
        rate=_rate(form, ""),
        key_concurrency=form.whole("key_concurrency"),
        key_rate=_rate(form, "key_"),
        tenant_concurrency=form.whole("tenant_concurrency"),
        tenant_rate=_rate(form, "tenant_"),
        timeout=_PATIENCE,
    )
    return await _confirmed(visit, changing, f"The limits of {name} are set.", url("/queue", queue=name))


@addresses.post_at("/queue/fair", Role.OPERATE, of_database=True)
async def fair(visit: Visit) -> Response:
    """Let the tenants of a queue take turns."""
    name = _named(visit)
    changing = visit.client.set_fair(name, timeout=_PATIENCE)
    return await _confirmed(visit, changing, f"The tenants of {name} take turns.", url("/queue", queue=name))


@addresses.post_at("/queue/unfair", Role.OPERATE, of_database=True)
async def unfair(visit: Visit) -> Response:
    """Let the tenants of a queue no longer take turns."""
    name = _named(visit)
    changing = visit.client.set_fair(name, False, timeout=_PATIENCE)
    done = f"The tasks of {name} go by priority and age."
    return await _confirmed(visit, changing, done, url("/queue", queue=name))


def _rate(form: Form, prefix: str) -> tuple[int, float] | None:
    starts, window = form.whole(f"{prefix}starts"), form.seconds(f"{prefix}window")
    if (starts is None) != (window is None):
        raise InvalidInput("starts and window: give both, or none.", field=f"{prefix}starts")
    return None if starts is None or window is None else (starts, window)


@addresses.post_at("/queue/keep", Role.OPERATE, of_database=True)
async def keep(visit: Visit) -> Response:
    """Keep only the newest finished tasks of a queue."""
    name, form = _named(visit), visit.form
    changing = visit.client.keep(name, success=form.whole("success"), fail=form.whole("fail"), timeout=_PATIENCE)
    return await _confirmed(visit, changing, f"The retention of {name} is set.", url("/queue", queue=name))
