"""The bodies of reading and changing one task, and of lists."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mtask.web.models.common import Body, OpenAnswer, Params
from mtask.web.schemas import Options, says


class ChangeOptions(Body):
    """The body of `PATCH /v1/tasks/{name}/{key}`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"options": {"priority": 9}}]})

    options: Annotated[Options, says(minProperties=1)]


class RetryTask(Body):
    """The body of `POST /v1/tasks/{name}/{key}:retry`. Without `params`, the task keeps its params."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"params": {"to": "a@b.c"}}]})

    params: Params = None


class TaskDocument(BaseModel):
    """A task, with the field names of its document."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    id: Annotated[str, Field(alias="_id")]
    name: str
    key: str
    tenant: str | None = None
    queue: str
    params: Any
    task_option: dict[str, Any]
    lookup: dict[str, list[Any]] | None = None
    task_state: dict[str, Any]


class ListedTask(BaseModel):
    """A task of a list, with the fields that were asked for."""

    model_config = ConfigDict(populate_by_name=True)

    id: Annotated[str, Field(alias="_id")]
    name: str
    key: str
    fields: dict[str, Any]


class TaskList(BaseModel):
    """A page of tasks. next_cursor: pass it as `cursor` for the next page; null: there is none.

    looked_to: the instant up to which the search has come, if it stopped before the page was full.
    """

    tasks: list[ListedTask]
    next_cursor: str | None
    looked_to: str | None = None


class TaskCount(BaseModel):
    """A number of tasks. is_more: the count stopped there, and there may be more."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"count": 10000, "is_more": True}]})

    count: int
    is_more: bool


class ReasonEntry(OpenAnswer):
    """A reason why a task waits."""

    code: str
    message: str
    until: str | None


class PositionEntry(OpenAnswer):
    """The place of a task among the due tasks of its queue. is_more: there may be more tasks before it.

    tenants_ahead: where the tenants of the queue take turns, the number of those that have their turn first. ahead is
    then the number of tasks of its own tenant. A token of a tenant is told of its own tasks alone, and of no rate and
    start_estimate where the tenants take no turns.
    """

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "task_id": "send_email:welcome/42",
                    "status": "INIT",
                    "ahead": 12,
                    "is_more": False,
                    "due_time": "2030-12-31T23:59:00.000Z",
                    "start_estimate": "2030-12-31T23:59:30.000Z",
                    "rate": 0.4,
                    "reasons": [],
                    "now": "2030-12-31T23:59:10.000Z",
                    "tenants_ahead": None,
                }
            ]
        },
    )

    task_id: str
    status: str
    ahead: int | None
    is_more: bool
    due_time: str | None
    start_estimate: str | None
    rate: float | None
    reasons: list[ReasonEntry]
    now: str
    tenants_ahead: int | None
