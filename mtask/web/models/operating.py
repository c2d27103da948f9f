"""The bodies of operation: queues, workers, statistics, health."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mtask.features.controls.rest import ControlEntry
from mtask.web.models.common import Body, OpenAnswer
from mtask.web.schemas import Slots


class WorkerBody(Body):
    """The body of `PATCH /v1/workers/{worker_id}`. null: the number with which the worker started."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"concurrency": 20}]})

    concurrency: Slots | None


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
