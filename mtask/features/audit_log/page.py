"""The action log: who changed what and when."""

from __future__ import annotations

from starlette.responses import Response

from mtask.errors import InvalidInput
from mtask.web.page.drawing.rows import action_rows
from mtask.web.page.rendering import url
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
_PAGE = 100
_KINDS = {"task": "/task", "queue": "/queue", "flow": "/flow", "worker": "/workers", "schedule": "/schedules"}


@addresses.get_at("/log", of_database=True)
async def log(visit: Visit) -> Response:
    """List the newest actions."""
    query, reads = visit.query, visit.parts.reads
    given = {name: query.text(name) for name in ("actor", "intent", "target") if query.text(name)}
    wrong, found = "", []
    try:
        reading = visit.client.actions(
            actor=given.get("actor"),
            intent=given.get("intent"),
            target=given.get("target"),
            limit=_PAGE,
            after=query.text("cursor") or None,
        )
        found = await reads.within(reading)
    except InvalidInput as error:
        wrong = str(error)
    now = await reads.now()
    more = url("/log", **given, cursor=found[-1].id) if len(found) == _PAGE else None
    return visit.html(
        "log.html",
        code=422 if wrong else 200,
        actions=found,
        table=action_rows([(action, _address(action.target)) for action in found], now),
        given={name: given.get(name, "") for name in ("actor", "intent", "target")},
        more=more,
        wrong=wrong,
        now=now,
        is_first=not query.text("cursor"),
    )


def _address(target: str) -> str | None:
    """Return the address of what an action concerns."""
    kind, _, rest = target.partition(":")
    if kind == "task":
        name, _, key = rest.partition(":")
        return url("/task", name=name, key=key)
    if kind in ("queue", "flow"):
        return url(_KINDS[kind], **{"queue" if kind == "queue" else "key": rest})
    return _KINDS.get(kind)
