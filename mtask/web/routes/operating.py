"""The routes of queues, workers and schedules, of the statistics, and of the server's health: of the whole database."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import Query

from mtask.errors import DatabaseUnavailable, InvalidInput, ScheduleNotFound
from mtask.features.controls.rules import Control
from mtask.features.schedules.client import When
from mtask.features.schedules.rest import PutSchedule, ScheduleEntry, ScheduleList
from mtask.kernel.document.identity import check_name
from mtask.web import views
from mtask.web.access import Role
from mtask.web.bodies import about
from mtask.web.models.common import ProblemKind, Removed
from mtask.web.models.operating import (
    ActionList,
    ControlEntry,
    ControlList,
    FairBody,
    Health,
    KeepBody,
    LimitBody,
    QueueList,
    RateBody,
    StatList,
    TenantLimitBody,
    WorkerBody,
    WorkerEntry,
    WorkerList,
)
from mtask.web.paths import NameSegment, ScheduleId, Segment, Tenant
from mtask.web.problems import PATH, NotFound, kinds, slug_of, status_of, title_of
from mtask.web.routes.common import (
    UNCONFIRMED,
    TheCaller,
    TheClient,
    TheCounts,
    checked_options,
    given_instant,
    router,
    tenant_of,
)
from mtask.web.schemas import INSTANT, IntentText
from mtask.web.sharing import Statistics

routes = router("operating")

_READ, _OPERATE = about(of_database=True), about(Role.OPERATE, of_database=True)
Several = Annotated[list[str] | None, Query(description="May be given several times.")]
Intents = Annotated[list[IntentText] | None, Query(description="May be given several times.")]
Timeout = Annotated[
    float, Query(ge=0, le=60, description="Wait this long, in seconds, until every live worker confirms; else 202.")
]


def _rate(rate: RateBody | None) -> tuple[int, float] | None:
    return None if rate is None else (rate.starts, rate.window)


def _control(control: Control) -> Any:
    return views.answer(views.plain(control.model_dump(by_alias=True)))


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


@routes.get("/v1/controls", response_model=ControlList, openapi_extra=_READ)
async def controls(client: TheClient) -> Any:
    """List the controls of queues, task names and tenants, including those that are no longer in force."""
    found = await client.controls()
    return views.answer({"controls": [views.plain(control.model_dump(by_alias=True)) for control in found]})


@routes.post("/v1/queues/{queue}:pause", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def pause_queue(queue: Segment, client: TheClient, timeout: Timeout = 5) -> Any:
    """Stop workers from claiming tasks of a queue. Current runs continue."""
    return _control(await client.pause(queue=queue, timeout=timeout))


@routes.post("/v1/queues/{queue}:resume", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def resume_queue(queue: Segment, client: TheClient, timeout: Timeout = 5) -> Any:
    """Let workers claim tasks of a queue again."""
    return _control(await client.resume(queue=queue, timeout=timeout))


@routes.post("/v1/names/{name}:pause", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def pause_name(name: NameSegment, client: TheClient, timeout: Timeout = 5) -> Any:
    """Stop workers from claiming tasks of this name. Current runs continue."""
    return _control(await client.pause(name=name, timeout=timeout))


@routes.post("/v1/names/{name}:resume", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def resume_name(name: NameSegment, client: TheClient, timeout: Timeout = 5) -> Any:
    """Let workers claim tasks of this name again."""
    return _control(await client.resume(name=name, timeout=timeout))


@routes.put("/v1/queues/{queue}/limit", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def limit(queue: Segment, body: LimitBody, client: TheClient, timeout: Timeout = 5) -> Any:
    """Limit the runs of a queue's tasks, over all workers. The body replaces all limits; {} removes them."""
    return _control(
        await client.limit(
            queue,
            concurrency=body.concurrency,
            rate=_rate(body.rate),
            key_concurrency=body.key_concurrency,
            key_rate=_rate(body.key_rate),
            tenant_concurrency=body.tenant_concurrency,
            tenant_rate=_rate(body.tenant_rate),
            timeout=timeout,
        )
    )


@routes.put("/v1/queues/{queue}/fair", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def fair(queue: Segment, body: FairBody, client: TheClient, timeout: Timeout = 5) -> Any:
    """Let the tenants of a queue take turns, or let them no longer."""
    return _control(await client.set_fair(queue, body.fair, timeout=timeout))


@routes.put("/v1/tenants/{tenant}/limit", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def limit_tenant(tenant: Tenant, body: TenantLimitBody, client: TheClient, timeout: Timeout = 5) -> Any:
    """Limit the runs of a tenant's tasks in all queues. The body replaces the limits; {} removes them."""
    changing = client.limit(tenant=tenant, concurrency=body.concurrency, rate=_rate(body.rate), timeout=timeout)
    return _control(await changing)


@routes.post("/v1/tenants/{tenant}:pause", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def pause_tenant(tenant: Tenant, client: TheClient, timeout: Timeout = 5) -> Any:
    """Stop workers from claiming tasks of a tenant. Current runs continue."""
    return _control(await client.pause(tenant=tenant, timeout=timeout))


@routes.post("/v1/tenants/{tenant}:resume", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def resume_tenant(tenant: Tenant, client: TheClient, timeout: Timeout = 5) -> Any:
    """Let workers claim tasks of a tenant again."""
    return _control(await client.resume(tenant=tenant, timeout=timeout))


@routes.put("/v1/queues/{queue}/keep", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def keep(queue: Segment, body: KeepBody, client: TheClient, timeout: Timeout = 5) -> Any:
    """Keep only the newest finished tasks of a queue. The body replaces both numbers; {} keeps all."""
    return _control(await client.keep(queue, success=body.success, fail=body.fail, timeout=timeout))


# --- the action log ---------------------------------------------------------------------------------------


@routes.get("/v1/actions", response_model=ActionList, openapi_extra=_READ)
async def actions(
    client: TheClient,
    actor: Several = None,
    intent: Intents = None,
    target: Several = None,
    since: Annotated[
        str | None, Query(description="The instant of the oldest action.", json_schema_extra=INSTANT)
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before.")] = None,
) -> Any:
    """List who changed what, the newest first: `task:NAME:KEY`, `queue:mail`, `worker:ID`, `schedule:ID`, `flow:KEY`.

    The log keeps 90 days. `result` is `done`, or the name of the error that refused the action. It is null while the
    action is under way, and if its process ended before it.
    """
    found = await client.actions(
        actor=actor, intent=intent, target=target, since=given_instant(since, "since"), limit=limit, after=cursor
    )
    next_cursor = found[-1].id if len(found) == limit else None
    return views.answer({"actions": [views.record(one) for one in found], "next_cursor": next_cursor})


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


# --- schedules --------------------------------------------------------------------------------------------


@routes.get("/v1/schedules", response_model=ScheduleList, openapi_extra=_READ)
async def schedules(client: TheClient) -> Any:
    """List the schedules."""
    return views.answer({"schedules": [views.schedule(one) for one in await client.schedules()]})


@routes.get("/v1/schedules/{schedule_id}", response_model=ScheduleEntry, openapi_extra=_READ)
async def get_schedule(
    schedule_id: ScheduleId,
    client: TheClient,
    firings: Annotated[int, Query(ge=0, le=100, description="The number of next firings to add.")] = 0,
) -> Any:
    """Return a schedule."""
    made = views.schedule(await client.get_schedule(schedule_id))
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
    return views.answer(views.schedule(made))


def _when(body: PutSchedule) -> When:
    every = None if body.every is None else timedelta(seconds=body.every)
    given: list[When] = [when for when in (body.cron, every, body.at) if when is not None]
    if len(given) != 1:
        raise InvalidInput("give one of cron, every and at.", field="cron")
    return given[0]


@routes.post("/v1/schedules/{schedule_id}:pause", response_model=ScheduleEntry, openapi_extra=_OPERATE)
async def pause_schedule(schedule_id: ScheduleId, client: TheClient) -> Any:
    """Stop firing a schedule until it is resumed."""
    return views.answer(views.schedule(await client.pause_schedule(schedule_id)))


@routes.post("/v1/schedules/{schedule_id}:resume", response_model=ScheduleEntry, openapi_extra=_OPERATE)
async def resume_schedule(schedule_id: ScheduleId, client: TheClient) -> Any:
    """Let a schedule fire again."""
    return views.answer(views.schedule(await client.resume_schedule(schedule_id)))


@routes.delete("/v1/schedules/{schedule_id}", response_model=Removed, openapi_extra=_OPERATE)
async def remove_schedule(schedule_id: ScheduleId, client: TheClient) -> Any:
    """Remove a schedule. The tasks that it has published stay."""
    if not await client.remove_schedule(schedule_id):
        raise ScheduleNotFound(schedule_id)
    return views.answer({"removed": True})


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
