"""The bodies of operation: queues, controls, workers, statistics, the action log, health."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from mtask.web.models.common import Body, OpenAnswer
from mtask.web.schemas import Kept, Permits, Slots, Window


class RateBody(Body):
    """The most starts in any window of time."""

    starts: Permits
    window: Window


class LimitBody(Body):
    """The body of `PUT /v1/queues/{queue}/limit`. A limit that is not given is removed."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"concurrency": 10, "rate": {"starts": 100, "window": 1}}]}
    )

    concurrency: Permits | None = None
    rate: RateBody | None = None
    key_concurrency: Permits | None = None
    key_rate: RateBody | None = None
    tenant_concurrency: Permits | None = None
    tenant_rate: RateBody | None = None


class TenantLimitBody(Body):
    """The body of `PUT /v1/tenants/{tenant}/limit`. A limit that is not given is removed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"concurrency": 5}]})

    concurrency: Permits | None = None
    rate: RateBody | None = None


class FairBody(Body):
    """The body of `PUT /v1/queues/{queue}/fair`: whether the tenants of the queue take turns."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"fair": True}]})

    fair: StrictBool


class KeepBody(Body):
    """The body of `PUT /v1/queues/{queue}/keep`. A number that is not given keeps all."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"success": 1000, "fail": 1000}]})

    success: Kept | None = None
    fail: Kept | None = None


class WorkerBody(Body):
    """The body of `PATCH /v1/workers/{worker_id}`. null: the number with which the worker started."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"concurrency": 20}]})

    concurrency: Slots | None


class ActionEntry(BaseModel):
    """One entry of the action log."""

    id: str
    time: str
    actor: str
    via: str
    intent: str
    target: str
    detail: str
    result: str | None
    end_time: str | None


class ActionList(BaseModel):
    """A page of the action log, the newest first. next_cursor: as in a list of tasks."""

    actions: list[ActionEntry]
    next_cursor: str | None


class StatEntry(OpenAnswer):
    """The number of tasks with one queue, name and status. is_more: it is incomplete."""

    queue: str
    name: str
    status: str
    count: int
    oldest_preempt_time: str | None
    stuck: str | None
    is_more: bool


class StatList(BaseModel):
    """The statistics."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "stats": [
                        {
                            "queue": "mail",
                            "name": "send_email",
                            "status": "INIT",
                            "count": 7,
                            "oldest_preempt_time": "2030-12-31T23:59:00.000Z",
                            "stuck": "no worker is live",
                            "is_more": False,
                        }
                    ]
                }
            ]
        }
    )

    stats: list[StatEntry]


class ControlEntry(OpenAnswer):
    """A control of a queue, a task name or a tenant."""

    id: Annotated[str, Field(alias="_id")]
    kind: str
    target: str
    paused: bool
    revision: int
    update_time: str


class ControlList(BaseModel):
    """The controls."""

    controls: list[ControlEntry]


class QueueEntry(OpenAnswer):
    """A queue. more: the statuses that may have more tasks than were counted."""

    queue: str
    counts: dict[str, int]
    more: list[str]
    oldest_preempt_time: str | None
    stuck: list[str]
    control: ControlEntry | None


class QueueList(BaseModel):
    """The queues."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "queues": [
                        {
                            "queue": "mail",
                            "counts": {"INIT": 7, "SUCCESS": 10000},
                            "more": ["SUCCESS"],
                            "oldest_preempt_time": "2030-12-31T23:59:00.000Z",
                            "stuck": [],
                            "control": None,
                        }
                    ]
                }
            ]
        }
    )

    queues: list[QueueEntry]


class WorkerEntry(OpenAnswer):
    """A worker."""

    id: Annotated[str, Field(alias="_id")]
    host: str
    pid: int
    status: str
    started_time: str
    heartbeat_time: str
    queues: list[str]
    names: list[str]
    concurrency: int
    running_cnt: int
    version: str
    is_live: bool


class WorkerList(BaseModel):
    """The workers."""

    workers: list[WorkerEntry]


class Health(OpenAnswer):
    """Whether the server can work."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"status": "ok"}]})

    status: str
