"""The routes of flows: publish, read, list, cancel and retry."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Body as body_of
from fastapi import Query
from pydantic import BaseModel, Field

from mtask.arguments.publish import WorkArguments
from mtask.client import Flow
from mtask.errors import DatabaseError
from mtask.features.flows.change import ChangedFlow
from mtask.features.flows.views import FlowRow, FlowState
from mtask.kernel.document.identity import check_name
from mtask.web import views
from mtask.web.access import Caller, Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, OpenAnswer, example, taken
from mtask.web.models.publishing import WorkBody
from mtask.web.paths import FlowKey
from mtask.web.problems import response_of
from mtask.web.routes.common import TheCaller, TheClient, checked_options, router, tenant_of
from mtask.web.schemas import Key, Name, Options, Tenant, Text, says


class FlowStepBody(WorkBody):
    """One step of a flow."""

    step: Annotated[str, says("Name of the step: text without a slash.", minLength=1, maxLength=500, pattern="^[^/]+$")]
    name: Name
    after: list[str] = Field(default_factory=list, description="The steps that must end before this one begins.")
    on_failed: Literal["cancel", "run", "fail"] = "cancel"


class PublishFlow(Body):
    """The body of `POST /v1/flows`."""

    model_config = example(
        {
            "key": "order-7",
            "steps": [
                {"step": "charge", "name": "charge_card", "params": {"order": 7}},
                {"step": "ship", "name": "ship", "after": ["charge"]},
            ],
        }
    )

    key: Key
    queue: Text | None = None
    fail_fast: bool = False
    #: Only for a token without a tenant: another token publishes for its own tenant.
    tenant: Tenant | None = None
    options: Options = Field(default_factory=dict)
    steps: Annotated[list[FlowStepBody], Field(min_length=1, max_length=10_000)]


class CancelFlow(Body):
    """The body of `POST /v1/flows/{key}:cancel`."""

    everything: bool = Field(default=False, description='Cancel the steps with on_failed="run" as well.')


class PublishedFlowEntry(BaseModel):
    """The result of publishing a flow. differs: the flow of this key that existed before has other steps."""

    key: str
    task_ids: list[str]
    created: bool
    differs: bool


class ChangedFlowEntry(BaseModel):
    """A flow that was changed: the tasks that were changed, and the numbers of its steps by status."""

    key: str
    task_ids: list[str]
    counts: dict[str, int]


class FlowStepEntry(OpenAnswer):
    """A step of a flow."""

    task_id: str
    step: str
    status: str
    after: list[str]


class FlowEntry(OpenAnswer):
    """A flow with its steps."""

    key: str
    head: str | None
    steps: list[FlowStepEntry]
    progress: float | None


class FlowSummary(OpenAnswer):
    """A flow of a list."""

    key: str
    head: str
    counts: dict[str, int]
    is_ended: bool


class FlowList(BaseModel):
    """The flows."""

    flows: list[FlowSummary]


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
            **{**taken(step, WorkArguments), "callback": step.callback and step.callback.checked(tenant)},
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
    return views.answer({"flows": [_row(row, caller) for row in found]})


@routes.get("/v1/flows/{flow_key}", response_model=FlowEntry, openapi_extra=about())
async def get(flow_key: FlowKey, client: TheClient, caller: TheCaller) -> Any:
    """Return a flow with all its steps: the whole graph."""
    return views.answer(_flow(await client.flow(caller.stored_key(flow_key)), caller))


@routes.post("/v1/flows/{flow_key}:cancel", response_model=ChangedFlowEntry, openapi_extra=about(Role.PUBLISH))
async def cancel(
    flow_key: FlowKey,
    client: TheClient,
    caller: TheCaller,
    body: Annotated[CancelFlow, body_of()] = CancelFlow(),  # noqa: B008 it is never changed
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


def _flow(found: FlowState, caller: Caller) -> Any:
    """Return a flow with its steps."""
    made: Any = views.plain(asdict(found))
    made["key"] = caller.shown_key(found.key)
    made["head"] = None if found.head is None else caller.shown_id(found.head)
    for step in made["steps"]:
        step["after"] = [caller.shown_id(one) for one in step["after"]]
        for field in ("task_id", "parent", "held_by"):
            step[field] = None if step[field] is None else caller.shown_id(step[field])
        step["reason"] = None if step["reason"] is None else caller.shown_text(step["reason"])
    made["progress"] = found.progress
    return made


def _row(found: FlowRow, caller: Caller) -> Any:
    """Return a flow of a list."""
    return {
        "key": caller.shown_key(found.key),
        "head": caller.shown_id(found.head),
        "create_time": views.plain(found.create_time),
        "counts": dict(found.counts),
        "is_ended": found.is_ended,
    }
