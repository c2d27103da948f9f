"""The routes of bulk changes: plan and count, run, and look how far they have come."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from mtask.arguments.criteria import PageCriteria
from mtask.client import AsyncClient
from mtask.errors import BulkNotFound, MtaskError
from mtask.features.bulk.client import Bulk
from mtask.features.bulk.rules import ACTIONS, Action
from mtask.kernel.driver.extended_json import extended_exactly
from mtask.web import views
from mtask.web.access import Caller, Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, example, taking
from mtask.web.paths import Segment
from mtask.web.problems import InvalidRequest
from mtask.web.routes.common import TheCaller, TheClient, router
from mtask.web.schemas import PARAMS_PATH, says
from mtask.web.settings import WebSettings

#: The longest plan, in characters: it holds the filter.
MAX_PLAN = 100_000


@taking(PageCriteria)
class BulkFilter(Body):
    """The tasks of a bulk change: those that meet all criteria. At least one must be given."""

    params: Annotated[
        dict[str, Any] | None,
        says("Values by their paths in the params, such as user.id.", propertyNames=PARAMS_PATH),
    ] = None


class BulkBody(Body):
    """The body of `POST /v1/bulk/{action}`: a filter with dry_run, or the plan that this returned."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"filter": {"queue": ["mail"], "name": ["send_email"]}, "dry_run": True}],
            "oneOf": [
                {
                    "properties": {
                        "filter": {"type": "object", "minProperties": 1},
                        "dry_run": {"const": True},
                        "plan": {"type": "null"},
                    },
                    "required": ["filter", "dry_run"],
                },
                {
                    "properties": {"filter": {"type": "null"}, "dry_run": {"const": False}, "plan": {"type": "string"}},
                    "required": ["plan"],
                },
            ],
        }
    )

    filter: BulkFilter | None = None
    dry_run: bool = False
    plan: Annotated[str, Field(max_length=MAX_PLAN)] | None = None


class BulkPlanned(BaseModel):
    """A bulk change that was counted and not begun. is_more: the count stopped, and there may be more tasks."""

    model_config = example(
        {
            "action": "retry",
            "count": 42,
            "is_more": False,
            "plan": "WyI0Zj…",
            "cutoff": "2030-12-31T23:59:00.000Z",
            "expires": "2031-01-01T00:09:00.000Z",
        }
    )

    action: str
    count: int
    is_more: bool
    plan: str
    cutoff: str
    expires: str


class BulkState(BaseModel):
    """A bulk change and how far it has come. left_cnt: tasks that were found and could not be changed."""

    bulk_id: str
    action: str
    filter: dict[str, Any]
    done_cnt: int
    left_cnt: int
    is_over: bool
    cutoff: str
    begin_time: str
    end_time: str | None


class BulkList(BaseModel):
    """The newest bulk changes."""

    bulks: list[BulkState]


routes = router("bulk")


def service(client: AsyncClient, settings: WebSettings) -> Bulks:
    """Return what a server does beside the requests."""
    return Bulks(client, is_read_only=settings.is_read_only)


def _route(action: Action) -> None:
    """Register the route of one action. In a path, `{action}` would be the same address as `{bulk_id}`."""

    @routes.post(
        f"/v1/bulk/{action}",
        response_model=BulkPlanned,
        responses={
            202: {"model": BulkState, "description": "The bulk change has begun: Location tells how far it is."}
        },
        summary=f"{action.capitalize()} many",
        openapi_extra=about(Role.OPERATE),
    )
    async def change(request: Request, body: BulkBody, client: TheClient, caller: TheCaller) -> Any:
        """Cancel, retry or remove many tasks. With `dry_run`, count them and return a plan; with a `plan`, do it.

        A plan can be run for ten minutes. It takes tasks that ended, or were created, before it was made; so what fails
        again is not retried again. A plan that is sent twice is carried out once.
        """
        return await _change(request, action, body, client, caller)


for _action in ACTIONS:
    _route(_action)


async def _change(request: Request, action: Action, body: BulkBody, client: AsyncClient, caller: Caller) -> Response:
    within = caller.stored_prefix(None)
    if body.plan is None:
        if not body.dry_run or body.filter is None:
            raise InvalidRequest("Send a filter with dry_run: true first, then the plan that this returns.")
        criteria = body.filter.model_dump(exclude_unset=True)
        if caller.tenant is not None and criteria.get("key"):
            criteria["key"] = [caller.stored_key(one) for one in criteria["key"]]
        planned = await client.plan_bulk(action, **criteria, within=within)
        if len(planned.plan) > MAX_PLAN:
            raise InvalidRequest("The filter is too long for a plan: name fewer names, keys, queues or workers.")
        return views.answer(
            {
                "action": planned.action,
                "count": planned.count.count,
                "is_more": planned.count.is_more,
                "plan": planned.plan,
                "cutoff": views.plain(planned.cutoff),
                "expires": views.plain(planned.expires),
            }
        )
    if body.dry_run or body.filter is not None:
        raise InvalidRequest("Send a filter with dry_run: true, or a plan, and not both.")
    begun = await client.begin_bulk(body.plan, within=within, action=action)
    request.app.state.services["bulk"].carry(begun.bulk_id)
    return views.answer(_bulk(begun, caller), 202, {"Location": f"/v1/bulk/{quote(begun.bulk_id, safe='')}"})


@routes.get("/v1/bulk", response_model=BulkList, openapi_extra=about())
async def find(client: TheClient, caller: TheCaller, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Any:
    """List the newest bulk changes. They are kept for seven days."""
    found = await client.bulks(limit=limit, within=caller.stored_prefix(None))
    return views.answer({"bulks": [_bulk(one, caller) for one in found]})


@routes.get("/v1/bulk/{bulk_id}", response_model=BulkState, openapi_extra=about())
async def get(bulk_id: Segment, client: TheClient, caller: TheCaller) -> Any:
    """Return a bulk change and how far it has come."""
    found = await client.bulk(bulk_id)
    if caller.tenant is not None and found.within != caller.stored_prefix(None):
        raise BulkNotFound(bulk_id)
    return views.answer(_bulk(found, caller))


def _bulk(found: Bulk, caller: Caller) -> dict[str, Any]:
    criteria = {name: extended_exactly(value) for name, value in found.criteria.items()}
    if found.within is not None and "key_prefix" in criteria:
        shown = criteria.pop("key_prefix").removeprefix(found.within) if caller.tenant is not None else None
        criteria |= {"key_prefix": shown} if shown else {}
    if caller.tenant is not None:
        criteria.pop("tenant", None)
    if caller.tenant is not None and "key" in criteria:
        criteria["key"] = [caller.shown_key(one) for one in criteria["key"]]
    return {
        name: criteria if name == "filter" else views.plain(getattr(found, name)) for name in BulkState.model_fields
    }


# --- in the background ------------------------------------------------------------------------------------

logger = logging.getLogger("mtask.web")
#: The time between two searches for bulk changes that nobody carries out, in seconds.
_LOOK_EVERY = 30.0


class Bulks:
    """Carries out the bulk changes that this server began, and those that another process left."""

    def __init__(self, client: AsyncClient, *, is_read_only: bool) -> None:
        self._client = client
        self._is_read_only = is_read_only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._carried: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look for bulk changes that another process has left, now and then."""
        self._loop = asyncio.get_running_loop()
        if not self._is_read_only:
            self._looking = asyncio.create_task(self._look())

    def carry(self, bulk_id: str) -> None:
        """Carry a bulk change out, unless this process does already. Any thread may call this."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._carry_here, bulk_id)

    def _carry_here(self, bulk_id: str) -> None:
        if bulk_id not in self._carried:
            self._carried[bulk_id] = asyncio.create_task(self._carry(bulk_id))

    async def end(self) -> None:
        """Stop. Another process goes on once the leases have lapsed."""
        stopped = [*self._carried.values(), *([] if self._looking is None else [self._looking])]
        for each in stopped:
            each.cancel()
        if stopped:
            await asyncio.wait(stopped)

    async def _carry(self, bulk_id: str) -> None:
        try:
            await self._client.carry_bulk(bulk_id)
        except MtaskError as error:
            logger.warning("a bulk change was left: %s: %s", type(error).__name__, error)
        finally:
            del self._carried[bulk_id]

    async def _look(self) -> None:
        while True:
            with suppress(MtaskError):
                for found in await self._client.bulks(limit=1000):
                    if not found.is_over:
                        self.carry(found.bulk_id)
            await asyncio.sleep(_LOOK_EVERY)
