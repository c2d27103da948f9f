"""The routes of queues and workers, of the statistics, and of the server's health. They concern the whole database."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from mtask.errors import DatabaseUnavailable
from mtask.features.controls.rest import ControlEntry
from mtask.web import views
from mtask.web.access import Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, OpenAnswer, ProblemKind, example
from mtask.web.paths import Segment
from mtask.web.problems import PATH, NotFound, kinds, slug_of, status_of, title_of
from mtask.web.routes.common import TheClient, TheCounts, router
from mtask.web.schemas import Slots
from mtask.web.sharing import Statistics


class WorkerBody(Body):
    """The body of `PATCH /v1/workers/{worker_id}`. null: the number with which the worker started."""

    model_config = example({"concurrency": 20})

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

    model_config = example(
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

    model_config = example(
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

    model_config = example({"status": "ok"})

    status: str


routes = router("operating")

_READ, _OPERATE = about(of_database=True), about(Role.OPERATE, of_database=True)


# --- queues and task names --------------------------------------------------------------------------------


@routes.get("/v1/stats", response_model=StatList, openapi_extra=_READ)
async def stats(counts: TheCounts) -> Any:
    """Count tasks by queue, name and status. In a large database, the counts may be some minutes old.

    At most 2,000 tasks of each status are counted. `is_more`: the status has more tasks, so the counts are incomplete.
    """
    return views.answer_of(_text_of(await counts.stats.get()))


@lru_cache(1)
def _text_of(counted: Statistics) -> bytes:
    """Return statistics as JSON: the same text until they are counted anew."""
    return views.text_of({"stats": [views.record(row) for row in counted.rows]})


@routes.get("/v1/queues", response_model=QueueList, openapi_extra=_READ)
async def queues(counts: TheCounts, client: TheClient) -> Any:
    """List queues with the numbers of their tasks by status and with their controls.

    In a large database, the numbers may be some minutes old. Each is at most 10,000; `more` names the statuses that may
    have more tasks. `oldest_preempt_time` is that of the tasks that any worker may take.
    """
    found: dict[str, dict[str, Any]] = {}
    for counted in (await counts.queues.get()).queues:
        queue = found.setdefault(counted.queue, _queue(counted.queue))
        queue["counts"] = {status.value: count.count for status, count in counted.counts.items() if count.count}
        queue["more"] = [status.value for status, count in counted.counts.items() if count.is_more]
        queue["oldest_preempt_time"] = views.plain(counted.oldest_preempt_time)
    for row in (await counts.stats.get()).rows:
        queue = found.setdefault(row.queue, _queue(row.queue))
        if row.stuck is not None and row.stuck not in queue["stuck"]:
            queue["stuck"].append(row.stuck)
    for control in await client.controls():
        if control.kind == "queue":
            queue = found.setdefault(control.target, _queue(control.target))
            queue["control"] = views.plain(control.model_dump(by_alias=True))
    return views.answer({"queues": [found[name] for name in sorted(found)]})


def _queue(name: str) -> dict[str, Any]:
    return {"queue": name, "counts": {}, "more": [], "oldest_preempt_time": None, "stuck": [], "control": None}


# --- workers ----------------------------------------------------------------------------------------------


@routes.get("/v1/workers", response_model=WorkerList, openapi_extra=_READ)
async def workers(
    client: TheClient,
    gone: Annotated[Literal["true", "false"], Query(description="List also those that are gone.")] = "false",
) -> Any:
    """List the live workers."""
    found = await client.workers(live_only=gone == "false")
    now = await client.server_time()
    return views.answer({"workers": [views.worker(one, now) for one in found]})


@routes.post("/v1/workers/{worker_id}:stop", response_model=WorkerEntry, openapi_extra=_OPERATE)
async def stop_worker(worker_id: Segment, client: TheClient) -> Any:
    """Ask a worker to stop gracefully."""
    return views.answer(views.worker(await client.stop_worker(worker_id), await client.server_time()))


@routes.patch("/v1/workers/{worker_id}", response_model=WorkerEntry, openapi_extra=_OPERATE)
async def set_worker(worker_id: Segment, body: WorkerBody, client: TheClient) -> Any:
    """Change the number of handlers that a worker may run at once. 0 pauses it."""
    found = await client.set_worker(worker_id, concurrency=body.concurrency)
    return views.answer(views.worker(found, await client.server_time()))


# --- health ----------------------------------------------------------------------------------------------

# The routes that say whether the server lives, whether it can work, and what its errors mean.

health_routes = router("health")

#: The longest wait of `/readyz` for the database, in seconds.
_DATABASE_PATIENCE = 2.0


@health_routes.get("/healthz", response_model=Health, openapi_extra=about(is_open=True))
async def healthz() -> Any:
    """Say that the process lives. This asks no database."""
    return views.answer({"status": "ok"})


@health_routes.get("/readyz", response_model=Health, openapi_extra=about(is_open=True))
async def readyz(client: TheClient) -> Any:
    """Say whether the database answers: 200, or 503."""
    try:
        async with asyncio.timeout(_DATABASE_PATIENCE):
            now = await client.server_time()
    except TimeoutError:
        raise DatabaseUnavailable("it did not answer in time") from None
    return views.answer({"status": "ok", "server_time": views.plain(now)})


@health_routes.get(PATH + "{kind}", response_model=ProblemKind, openapi_extra=about())
async def problem(kind: Segment) -> Any:
    """Say what a kind of problem means. Its `type` is this address."""
    for known in kinds():
        if slug_of(known) == kind:
            made = {"type": PATH + kind, "title": title_of(known), "status": status_of(known)}
            return views.answer(made)
    raise NotFound("There is no such kind of problem.")
