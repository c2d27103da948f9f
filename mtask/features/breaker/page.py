"""Sets the breaker of a queue. The page of the queue shows it."""

from __future__ import annotations

from starlette.responses import Response

from mtask.errors import ControlUnconfirmed, InvalidInput
from mtask.web.access import Role
from mtask.web.page.rendering import url
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
_PATIENCE = 3.0


@addresses.post_at("/queue/breaker", Role.OPERATE, of_database=True)
async def breaker(visit: Visit) -> Response:
    """Set the breaker of a queue. Without a number of failures, remove it."""
    name, failures, wait = visit.query.exact("queue"), visit.form.whole("failures"), visit.form.seconds("wait")
    if not name:
        raise InvalidInput("Name the queue: /queue?queue=NAME.", field="queue")
    done = f"The breaker of {name} is {'removed' if failures is None else 'set'}."
    try:
        await visit.client.set_breaker(name, failures, wait=30.0 if wait is None else wait, timeout=_PATIENCE)
    except ControlUnconfirmed:
        done = f"{done} It is in force; not all workers have confirmed it yet."
    visit.parts.reads.forget()
    return visit.back(url("/queue", queue=name), done)
