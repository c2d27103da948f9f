"""The routes of controls: of queues, task names and tenants. They concern the whole database."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field, StrictBool

from mtask.errors import InvalidInput
from mtask.features.controls.rules import MAX_KEPT, MAX_PERMITS, MAX_WINDOW_MS, MIN_WINDOW_MS, Control
from mtask.kernel.document.options import WHOLE
from mtask.web import views
from mtask.web.access import Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, Instant, OpenAnswer, example
from mtask.web.paths import NameSegment, Segment, Tenant
from mtask.web.routes.common import UNCONFIRMED, TheClient, router
from mtask.web.schemas import says

# WHOLE takes 10.0 for 10: for JSON the two are the same number.
Permits = Annotated[int, says(minimum=1, maximum=MAX_PERMITS), WHOLE]
Kept = Annotated[int, says(minimum=0, maximum=MAX_KEPT), WHOLE]
Window = Annotated[
    float,
    Field(ge=0, allow_inf_nan=False),
    says("Seconds.", minimum=MIN_WINDOW_MS / 1000, maximum=MAX_WINDOW_MS / 1000),
]


class RateBody(Body):
    """The most starts in any window of time."""

    starts: Permits
    window: Window


class LimitBody(Body):
    """The body of `PUT /v1/queues/{queue}/limit`. A limit that is not given is removed."""

    model_config = example({"concurrency": 10, "rate": {"starts": 100, "window": 1}})

    concurrency: Permits | None = None
    rate: RateBody | None = None
    key_concurrency: Permits | None = None
    key_rate: RateBody | None = None
    tenant_concurrency: Permits | None = None
    tenant_rate: RateBody | None = None


class TenantLimitBody(Body):
    """The body of `PUT /v1/tenants/{tenant}/limit`. A limit that is not given is removed."""

    model_config = example({"concurrency": 5})

    concurrency: Permits | None = None
    rate: RateBody | None = None


class FairBody(Body):
    """The body of `PUT /v1/queues/{queue}/fair`: whether the tenants of the queue take turns."""

    model_config = example({"fair": True})

    fair: StrictBool


class KeepBody(Body):
    """The body of `PUT /v1/queues/{queue}/keep`. A number that is not given keeps all."""

    model_config = example({"success": 1000, "fail": 1000})

    success: Kept | None = None
    fail: Kept | None = None


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


routes = router("operating")

_READ, _OPERATE = about(of_database=True), about(Role.OPERATE, of_database=True)
Timeout = Annotated[
    float, Query(ge=0, le=60, description="Wait this long, in seconds, until every live worker confirms; else 202.")
]
For = Annotated[float | None, Query(alias="for", ge=0.001, description="The pause ends by itself after these seconds.")]
Until = Annotated[Instant | None, Query(description="The pause ends by itself at this instant, ISO 8601.")]


def _end(lasts: float | None, until: datetime | None) -> float | datetime | None:
    if lasts is not None and until is not None:
        raise InvalidInput("give for or until, not both.", field="until")
    return until if lasts is None else lasts


def _rate(rate: RateBody | None) -> tuple[int, float] | None:
    return None if rate is None else (rate.starts, rate.window)


def _control(control: Control) -> Any:
    return views.answer(views.plain(control.model_dump(by_alias=True)))


@routes.get("/v1/controls", response_model=ControlList, openapi_extra=_READ)
async def controls(client: TheClient) -> Any:
    """List the controls of queues, task names and tenants, including those that are no longer in force."""
    found = await client.controls()
    return views.answer({"controls": [views.plain(control.model_dump(by_alias=True)) for control in found]})


@routes.post("/v1/queues/{queue}:pause", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def pause_queue(
    queue: Segment, client: TheClient, lasts: For = None, until: Until = None, timeout: Timeout = 5
) -> Any:
    """Stop workers from claiming tasks of a queue. Current runs continue."""
    return _control(await client.pause(queue=queue, until=_end(lasts, until), timeout=timeout))


@routes.post("/v1/queues/{queue}:resume", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def resume_queue(queue: Segment, client: TheClient, timeout: Timeout = 5) -> Any:
    """Let workers claim tasks of a queue again."""
    return _control(await client.resume(queue=queue, timeout=timeout))


@routes.post("/v1/names/{name}:pause", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def pause_name(
    name: NameSegment, client: TheClient, lasts: For = None, until: Until = None, timeout: Timeout = 5
) -> Any:
    """Stop workers from claiming tasks of this name. Current runs continue."""
    return _control(await client.pause(name=name, until=_end(lasts, until), timeout=timeout))


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
async def pause_tenant(
    tenant: Tenant, client: TheClient, lasts: For = None, until: Until = None, timeout: Timeout = 5
) -> Any:
    """Stop workers from claiming tasks of a tenant. Current runs continue."""
    return _control(await client.pause(tenant=tenant, until=_end(lasts, until), timeout=timeout))


@routes.post("/v1/tenants/{tenant}:resume", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def resume_tenant(tenant: Tenant, client: TheClient, timeout: Timeout = 5) -> Any:
    """Let workers claim tasks of a tenant again."""
    return _control(await client.resume(tenant=tenant, timeout=timeout))


@routes.put("/v1/queues/{queue}/keep", response_model=ControlEntry, responses=UNCONFIRMED, openapi_extra=_OPERATE)
async def keep(queue: Segment, body: KeepBody, client: TheClient, timeout: Timeout = 5) -> Any:
    """Keep only the newest finished tasks of a queue. The body replaces both numbers; {} keeps all."""
    return _control(await client.keep(queue, success=body.success, fail=body.fail, timeout=timeout))
