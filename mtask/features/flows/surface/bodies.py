"""The bodies of flows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtask.web.models.common import Body, OpenAnswer
from mtask.web.models.publishing import WorkBody
from mtask.web.schemas import Key, Name, Options, Tenant, Text, says


class FlowStepBody(WorkBody):
    """One step of a flow."""

    step: Annotated[str, says("Name of the step: text without a slash.", minLength=1, maxLength=500, pattern="^[^/]+$")]
    name: Name
    after: list[str] = Field(default_factory=list, description="The steps that must end before this one begins.")
    on_failed: Literal["cancel", "run", "fail"] = "cancel"


class PublishFlow(Body):
    """The body of `POST /v1/flows`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "key": "order-7",
                    "steps": [
                        {"step": "charge", "name": "charge_card", "params": {"order": 7}},
                        {"step": "ship", "name": "ship", "after": ["charge"]},
                    ],
                }
            ]
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
