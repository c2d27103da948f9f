"""Schedules: the last and the next firings, pause, add, remove."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

from starlette.responses import Response

from mtask.errors import InvalidInput, ScheduleNotFound
from mtask.features.schedules.client import When
from mtask.features.schedules.rules import Schedule
from mtask.kernel.document.identity import check_name
from mtask.web.access import Role
from mtask.web.page.rendering import clock, pretty
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
_FIRINGS, _FEW = 3, 200


@addresses.get_at("/schedules", of_database=True)
async def schedules(visit: Visit) -> Response:
    """List the schedules."""
    reads = visit.parts.reads
    found = await reads.within(visit.client.schedules())
    firings = await asyncio.to_thread(_firings, found[:_FEW])
    rows = [
        {"schedule": one, "when": str(one.trigger), "firings": firings.get(one.id, []), "params": pretty(one.params)}
        for one in found
    ]
    return visit.html("schedules.html", rows=rows, now=await reads.now())


def _firings(schedules: list[Schedule]) -> dict[str, list[datetime]]:
    """Return the next firings of each schedule. Crons take about a millisecond each to compute."""
    made = {}
    for one in schedules:
        first = one.schedule_state.next_fire_time
        made[one.id] = [] if one.paused or first is None else [first, *one.next_firings(first, _FIRINGS - 1)]
    return made


@addresses.post_at("/schedule/add", Role.OPERATE, of_database=True)
async def add(visit: Visit) -> Response:
    """Add a schedule."""
    form = visit.form
    schedule_id = form.needed("id")
    given: dict[str, Any] = {"timezone": form.text("timezone")} if form.text("timezone") else {}
    made = await visit.client.add_schedule(
        schedule_id,
        check_name(form.needed("name")),
        _when(visit),
        form.value("params"),
        if_exists="reject",
        queue=form.text("queue") or None,
        overlap="skip" if form.text("overlap") == "skip" else "allow",
        catch_up=_catch_up(form.text("catch_up")),
        paused=bool(form.text("paused")),
        **given,
    )
    next_time = made.schedule_state.next_fire_time
    return visit.back("/schedules", f"The schedule {made.id} is added; it fires next at {clock(next_time)} UTC.")


def _catch_up(text: str) -> Any:
    return text or "last"


def _when(visit: Visit) -> When:
    form, kind = visit.form, visit.form.text("kind")
    if kind == "every":
        seconds = form.seconds("when")
        if seconds is None:
            raise InvalidInput("when: give a length of time, such as 90s, 5m or 1d.", field="when")
        return timedelta(seconds=seconds)
    if kind == "at":
        moment = form.instant("when")
        if moment is None:
            raise InvalidInput("when: give an instant, such as 2030-12-31 23:59.", field="when")
        return moment
    return form.needed("when")


@addresses.post_at("/schedule/pause", Role.OPERATE, of_database=True)
async def pause(visit: Visit) -> Response:
    """Stop firing a schedule."""
    made = await visit.client.pause_schedule(visit.query.exact("id") or "")
    return visit.back("/schedules", f"The schedule {made.id} is paused.")


@addresses.post_at("/schedule/resume", Role.OPERATE, of_database=True)
async def resume(visit: Visit) -> Response:
    """Let a schedule fire again."""
    made = await visit.client.resume_schedule(visit.query.exact("id") or "")
    return visit.back("/schedules", f"The schedule {made.id} is resumed.")


@addresses.post_at("/schedule/remove", Role.OPERATE, of_database=True)
async def remove(visit: Visit) -> Response:
    """Remove a schedule. The tasks that it has published stay."""
    schedule_id = visit.query.exact("id") or ""
    if not await visit.client.remove_schedule(schedule_id):
        raise ScheduleNotFound(schedule_id)
    return visit.back("/schedules", f"The schedule {schedule_id} is removed; its tasks stay.")
