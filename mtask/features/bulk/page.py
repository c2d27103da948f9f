"""Bulk changes: counted first, then carried out in batches, with progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from mtask.errors import BulkNotFound, InvalidInput
from mtask.features.bulk.client import Bulk
from mtask.kernel.driver.extended_json import extended_exactly
from mtask.web.access import Role
from mtask.web.page.rendering import url
from mtask.web.page.tasks import given_in, search_of
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
_MOST = 50
ACTIONS = ("retry", "cancel", "remove")


@addresses.post_at("/bulk/plan", Role.OPERATE)
async def plan(visit: Visit) -> Response:
    """Count the tasks that a list shows, and ask whether all of them are to be changed."""
    action = visit.form.needed("action")
    if action not in ACTIONS:
        raise InvalidInput(f"action: use {', '.join(ACTIONS)}.", field="action")
    caller, reads = visit.caller, visit.parts.reads
    now = await reads.now()
    wanted = search_of(visit.query, now)
    if wanted.since is not None or wanted.until is not None:
        raise InvalidInput("A bulk change takes no times: leave them out of the filter.", field="since")
    planning = visit.client.plan_bulk(action, **wanted.criteria(caller), within=caller.stored_prefix(None))
    planned = await reads.within(planning)
    given = given_in(visit.query)
    return visit.html("bulk_plan.html", planned=planned, given=_words(given), back=url("/tasks", **given), now=now)


def _words(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, " or ".join(values)) for name, values in given.items()]


@addresses.post_at("/bulk/run", Role.OPERATE)
async def run(visit: Visit) -> Response:
    """Begin the change of a plan."""
    begun = await visit.client.begin_bulk(
        visit.form.needed("plan"), within=visit.caller.stored_prefix(None), action=visit.form.needed("action")
    )
    visit.parts.services["bulk"].carry(begun.bulk_id)
    return visit.back(url("/bulk", id=begun.bulk_id), "The bulk change has begun.")


@addresses.get_at("/bulk")
async def bulk(visit: Visit) -> Response:
    """Show a bulk change and how far it has come, or the newest ones."""
    reads, client, within = visit.parts.reads, visit.client, visit.caller.stored_prefix(None)
    bulk_id = visit.query.text("id")
    if bulk_id:
        found = [await reads.within(client.bulk(bulk_id))]
        if visit.caller.tenant is not None and found[0].within != within:
            raise BulkNotFound(bulk_id)
    else:
        found = await reads.within(client.bulks(limit=_MOST, within=within))
    rows = [(one, criteria_of(one, visit)) for one in found]
    return visit.html("bulk.html", rows=rows, is_one=bool(bulk_id), now=await reads.now())


def criteria_of(found: Bulk, visit: Visit) -> list[tuple[str, str]]:
    """Return the criteria of a bulk change in words, as the caller may see them."""
    shown = []
    hidden = {"key_prefix"} if found.within is not None else set()
    hidden |= {"tenant"} if visit.caller.tenant is not None else set()
    for name, value in found.criteria.items():
        if name in hidden:  # it is the tenant
            continue
        values = value if isinstance(value, list) else [value]
        if name == "key":
            values = [visit.caller.shown_key(str(one)) for one in values]
        shown.append((name, " or ".join(one if isinstance(one, str) else str(extended_exactly(one)) for one in values)))
    return shown
