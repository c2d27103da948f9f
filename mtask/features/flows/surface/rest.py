"""The routes of flows: publish, read, list, cancel and retry."""

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Body, Query

from mtask.arguments.publish import WorkArguments
from mtask.client import Flow
from mtask.errors import DatabaseError
from mtask.features.flows.change import ChangedFlow
from mtask.features.flows.surface.bodies import (
    CancelFlow,
    ChangedFlowEntry,
    FlowEntry,
    FlowList,
    PublishedFlowEntry,
    PublishFlow,
)
from mtask.kernel.document.identity import check_name
from mtask.web import views
from mtask.web.access import Caller, Role
from mtask.web.bodies import about
from mtask.web.models.common import taken
from mtask.web.paths import FlowKey
from mtask.web.problems import response_of
from mtask.web.routes.common import TheCaller, TheClient, checked_callback, checked_options, router, tenant_of

routes = router("flows")


@routes.post(
    "/v1/flows",
    status_code=201,
    response_model=PublishedFlowEntry,
    responses={200: {"model": PublishedFlowEntry, "description": "The flow existed before."}},
    openapi_extra=about(Role.PUBLISH, batch=True),
)
async def publish(body: PublishFlow, client: TheClient, caller: TheCaller) -> Any:
    """Publish all steps of a flow, or none, once for each key."""
    tenant = tenant_of(body.tenant, caller)
    flow = Flow(
        body.key,
        queue=body.queue,
        fail_fast=body.fail_fast,
        tenant=tenant,
        **checked_options(body.options),
    )
    for step in body.steps:
        flow.add(
            step.step,
            check_name(step.name),
            step.params,
            after=step.after,
            on_failed=step.on_failed,
            **{**taken(step, WorkArguments), "callback": checked_callback(step.callback, tenant)},
            **checked_options(step.options),
        )
    try:
        made = await client.publish_flow(flow)
    except DatabaseError as error:
        return response_of(error, caller, {"key": body.key})
    key = caller.shown_key(made.key)
    document = {
        "key": key,
        "task_ids": [caller.shown_id(task_id) for task_id in made.task_ids],
        "created": made.created,
        "differs": made.differs,
    }
    return views.answer(document, 201 if made.created else 200, {"Location": f"/v1/flows/{quote(key, safe='')}"})


@routes.get("/v1/flows", response_model=FlowList, openapi_extra=about())
async def find(
    client: TheClient,
    caller: TheCaller,
    prefix: Annotated[str | None, Query(description="The beginning of the flows' keys.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Any:
    """List flows, the newest first, with the numbers of their steps by status."""
    found = await client.flows(prefix=caller.stored_prefix(prefix), limit=limit)
    return views.answer({"flows": [views.flow_row(row, caller) for row in found]})


@routes.get("/v1/flows/{flow_key}", response_model=FlowEntry, openapi_extra=about())
async def get(flow_key: FlowKey, client: TheClient, caller: TheCaller) -> Any:
    """Return a flow with all its steps: the whole graph."""
    return views.answer(views.flow(await client.flow(caller.stored_key(flow_key)), caller))


@routes.post("/v1/flows/{flow_key}:cancel", response_model=ChangedFlowEntry, openapi_extra=about(Role.PUBLISH))
async def cancel(
    flow_key: FlowKey,
    client: TheClient,
    caller: TheCaller,
    body: Annotated[CancelFlow, Body()] = CancelFlow(),  # noqa: B008 it is never changed
) -> Any:
    """Cancel the open steps of a flow."""
    return _changed(await client.cancel_flow(caller.stored_key(flow_key), everything=body.everything), caller)


@routes.post("/v1/flows/{flow_key}:retry", response_model=ChangedFlowEntry, openapi_extra=about(Role.PUBLISH))
async def retry(flow_key: FlowKey, client: TheClient, caller: TheCaller) -> Any:
    """Let all FAIL and CANCELED steps of a flow run again."""
    return _changed(await client.retry_flow(caller.stored_key(flow_key)), caller)


def _changed(made: ChangedFlow, caller: Caller) -> Any:
    ids = [caller.shown_id(task_id) for task_id in made.task_ids]
    return views.answer({"key": caller.shown_key(made.key), "task_ids": ids, "counts": made.counts})
