"""The bodies of bulk changes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mtask.arguments.criteria import PageCriteria
from mtask.web.models.common import Body, taking
from mtask.web.schemas import PARAMS_PATH, says

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

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "action": "retry",
                    "count": 42,
                    "is_more": False,
                    "plan": "WyI0Zj…",
                    "cutoff": "2030-12-31T23:59:00.000Z",
                    "expires": "2031-01-01T00:09:00.000Z",
                }
            ]
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
