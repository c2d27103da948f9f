"""The action log: who changed what and when."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from markupsafe import Markup
from starlette.responses import Response

from mtask.errors import InvalidInput
from mtask.features.audit_log.client import Action
from mtask.web.page.rendering import age, brief, shown, url
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


def action_rows(actions: Iterable[tuple[Action, str | None]], now: datetime) -> Markup:
    """Return the rows of the action log. Each action has the address of what it concerns, if there is one."""
    return Markup("".join([_action_row(action, address, now) for action, address in actions]))


def _action_row(action: Action, address: str | None, now: datetime) -> str:
    target = shown(brief(action.target, 72))
    if address:
        target = f'<a href="{shown(address)}" title="{shown(action.target)}"><bdi>{target}</bdi></a>'
    if action.result == "done":
        result = '<span class="dim">done</span>'
    elif action.result:
        result = f'<span class="c-FAIL">{shown(action.result)}</span>'
    else:
        result = '<span class="dim" title="It is under way, or its process ended before it">open</span>'
    return (
        f'<tr><td class="nowrap">{age(action.time, now)}</td><td>{shown(brief(action.actor, 32))} '
        f'<span class="dim wide-inline">{shown(action.via)}</span></td><td class="nowrap">{shown(action.intent)}</td>\n'
        f'<td class="grow">{target}</td>\n'
        f'<td class="wide dim outcome">{shown(brief(action.detail, 100))}</td><td>{result}</td></tr>\n'
    )
