"""The bodies of schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtask.kernel.operations.publish import IfExists
from mtask.web.models.common import Body, Instant, OpenAnswer, Params
from mtask.web.schemas import CatchUpLimit, Jitter, Lookup, Name, Options, Tenant, Text, says


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
