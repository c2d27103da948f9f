"""The routes of schedules: add or change, read, list, pause, resume and remove. They concern the whole database."""

from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from mtask.errors import InvalidInput, ScheduleNotFound
from mtask.features.schedules.client import When
from mtask.features.schedules.rules import MAX_CATCH_UP, MAX_ID_BYTES, MAX_JITTER_MS, Schedule
from mtask.kernel.document.identity import check_name
from mtask.kernel.document.options import WHOLE
from mtask.kernel.driver.extended_json import extended_exactly
from mtask.kernel.operations.publish import IfExists
from mtask.web import views
from mtask.web.access import Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, Instant, OpenAnswer, Params, Removed, Seconds
from mtask.web.paths import DECODED, text_segment
from mtask.web.routes.common import TheCaller, TheClient, checked_options, router, tenant_of
from mtask.web.schemas import TEXT, Lookup, Name, Options, Tenant, Text, says

ScheduleId = Annotated[str, text_segment(MAX_ID_BYTES, {**TEXT, "maxLength": MAX_ID_BYTES}), DECODED]
Jitter = Annotated[float, Field(ge=0, allow_inf_nan=False), says("Seconds.", maximum=MAX_JITTER_MS / 1000)]
CatchUpLimit = Annotated[int, says(minimum=1, maximum=MAX_CATCH_UP), WHOLE]


def _without(*names: str) -> dict[str, Any]:
    """Return the properties of a schema that are null, or not given."""
    return {name: {"type": "null"} for name in names}


class PutSchedule(Body):
    """The body of `PUT /v1/schedules/{schedule_id}`. Give one of cron, every and at. A timezone goes with cron."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "report", "cron": "30 2 * * *", "timezone": "Europe/Berlin"}],
            "oneOf": [
                {"required": ["cron"], "properties": {"cron": {"type": "string"}, **_without("every", "at")}},
                {
                    "required": ["every"],
                    "properties": {"every": {"type": "number"}, **_without("cron", "at", "timezone")},
                },
                {
                    "required": ["at"],
                    "properties": {"at": {"type": "string"}, **_without("cron", "every", "timezone", "jitter")},
                },
            ],
        }
    )

    name: Name
    params: Params = None
    cron: Annotated[str, says("A crontab of five fields.")] | None = None
    every: Annotated[float, Field(ge=1, le=316_224_000, allow_inf_nan=False)] | None = None
    at: Instant | None = None
    timezone: str | None = None
    start_time: Instant | None = None
    end_time: Instant | None = None
    jitter: Jitter | None = None
    catch_up: Literal["none", "last", "all"] = "last"
    catch_up_limit: CatchUpLimit = 100
    overlap: Literal["allow", "skip"] = "allow"
    expires: Seconds | None = None
    paused: bool | None = None
    queue: Text | None = None
    lookup: Lookup | None = None
    options: Options = Field(default_factory=dict)
    #: Whose tasks it publishes. Left out: a schedule that exists keeps its tenant.
    tenant: Tenant | None = None
    if_exists: IfExists = "update"


class ScheduleEntry(OpenAnswer):
    """A schedule. next_firings: only if they were asked for."""

    id: Annotated[str, Field(alias="_id")]
    name: str
    queue: str
    params: Any
    task_option: dict[str, Any]
    trigger: dict[str, Any]
    paused: bool
    schedule_state: dict[str, Any]
    next_firings: list[str] | None = None


class ScheduleList(BaseModel):
    """The schedules."""

    schedules: list[ScheduleEntry]


routes = router("operating")

_READ, _OPERATE = about(of_database=True), about(Role.OPERATE, of_database=True)


@routes.get("/v1/schedules", response_model=ScheduleList, openapi_extra=_READ)
async def schedules(client: TheClient) -> Any:
    """List the schedules."""
    return views.answer({"schedules": [_schedule(one) for one in await client.schedules()]})


@routes.get("/v1/schedules/{schedule_id}", response_model=ScheduleEntry, openapi_extra=_READ)
async def get_schedule(
    schedule_id: ScheduleId,
    client: TheClient,
    firings: Annotated[int, Query(ge=0, le=100, description="The number of next firings to add.")] = 0,
) -> Any:
    """Return a schedule."""
    made = _schedule(await client.get_schedule(schedule_id))
    if firings:
        made["next_firings"] = views.plain(await client.next_firings(schedule_id, firings))
    return views.answer(made)


@routes.put("/v1/schedules/{schedule_id}", response_model=ScheduleEntry, openapi_extra=_OPERATE)
async def put_schedule(schedule_id: ScheduleId, body: PutSchedule, client: TheClient, caller: TheCaller) -> Any:
    """Add or change a schedule. Its tenant stays."""
    taken = ("name", "params", "cron", "every", "at", "options", "tenant", "if_exists")
    given = {name: getattr(body, name) for name in type(body).model_fields if name not in taken}
    made = await client.add_schedule(
        schedule_id,
        check_name(body.name),
        _when(body),
        body.params,
        if_exists=body.if_exists,
        tenant=tenant_of(body.tenant, caller),
        **given,
        **checked_options(body.options),
    )
    return views.answer(_schedule(made))


def _when(body: PutSchedule) -> When:
    every = None if body.every is None else timedelta(seconds=body.every)
    given: list[When] = [when for when in (body.cron, every, body.at) if when is not None]
    if len(given) != 1:
        raise InvalidInput("give one of cron, every and at.", field="cron")
    return given[0]


@routes.post("/v1/schedules/{schedule_id}:pause", response_model=ScheduleEntry, openapi_extra=_OPERATE)
async def pause_schedule(schedule_id: ScheduleId, client: TheClient) -> Any:
    """Stop firing a schedule until it is resumed."""
    return views.answer(_schedule(await client.pause_schedule(schedule_id)))


@routes.post("/v1/schedules/{schedule_id}:resume", response_model=ScheduleEntry, openapi_extra=_OPERATE)
async def resume_schedule(schedule_id: ScheduleId, client: TheClient) -> Any:
    """Let a schedule fire again."""
    return views.answer(_schedule(await client.resume_schedule(schedule_id)))


@routes.delete("/v1/schedules/{schedule_id}", response_model=Removed, openapi_extra=_OPERATE)
async def remove_schedule(schedule_id: ScheduleId, client: TheClient) -> Any:
    """Remove a schedule. The tasks that it has published stay."""
    if not await client.remove_schedule(schedule_id):
        raise ScheduleNotFound(schedule_id)
    return views.answer({"removed": True})


def _schedule(found: Schedule) -> Any:
    """Return a schedule."""
    made: Any = views.plain(found.model_dump(by_alias=True, exclude={"params", "lookup"}))
    made["params"] = extended_exactly(found.params)
    return made
