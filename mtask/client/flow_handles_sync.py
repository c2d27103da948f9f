# Generated from mtask/client/flow_handles_aio.py: edit that one, then run `make generate`.
"""The handle of a flow for sync code: what `publish_flow` returns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, TypeVar, overload

from mtask.client.handles_sync import TaskHandle, TasksClient
from mtask.errors import InvalidFlow, shown
from mtask.features.flows.change import ChangedFlow
from mtask.features.flows.client import Flow, Step
from mtask.features.flows.publish import PublishedFlow
from mtask.features.flows.views import FlowState
from mtask.kernel.document.identity import own_key

R = TypeVar("R")


class FlowsClient(TasksClient, Protocol):
    """The part of a client that the handle of a flow uses."""

    def flow(self, key: str) -> FlowState:
        """Return a flow with all its steps."""

    def wait_flow(self, key: str, *, timeout: timedelta | float | None = None) -> FlowState:
        """Wait until a flow has ended."""

    def cancel_flow(self, key: str, *, everything: bool = False) -> ChangedFlow:
        """Cancel the open steps of a flow."""


class FlowHandle(PublishedFlow):
    """What `publish_flow` returns: whether the flow is new, the handles of its steps, and how the flow goes on.

    A copy of it, also one of `pickle`, is a plain `PublishedFlow`, without the client.
    """

    __slots__ = ("_client", "_steps")

    _client: FlowsClient
    _steps: dict[str, TaskHandle[Any]]

    def __init__(self, published: PublishedFlow, flow: Flow, client: FlowsClient) -> None:
        super().__init__(*_parts(published))
        steps: dict[str, TaskHandle[Any]] = {}
        for spec, task_id in zip(flow.specs, published.task_ids, strict=True):
            handle: TaskHandle[Any] = TaskHandle(task_id, published.created, updated=False)
            _set(handle, _client=client, _call=spec.call)
            steps[str(spec.key).removeprefix(f"{flow.key}/")] = handle
        _set(self, _client=client, _steps=steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublishedFlow) and _parts(self) == _parts(other)

    __hash__ = PublishedFlow.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return PublishedFlow, _parts(self)

    @overload
    def step(self, step: Step[R], /) -> TaskHandle[R]: ...

    @overload
    def step(self, step: str, /) -> TaskHandle[Any]: ...

    def step(self, step: Step[Any] | str, /) -> TaskHandle[Any]:
        """Return the handle of a step that `Flow.add` returned, or of the step with this name; raise InvalidFlow."""
        name = step.name if isinstance(step, Step) else step
        if name not in self._steps or (isinstance(step, Step) and step.flow_key != self._flow_key):
            raise InvalidFlow(self._flow_key, f"{shown(step)} is no step of it: give what add returned, or its name")
        return self._steps[name]

    def state(self) -> FlowState:
        """Return the flow with all its steps, their statuses and times; raise FlowNotFound."""
        return self._client.flow(self._flow_key)

    def wait(self, *, timeout: timedelta | float | None = None) -> FlowState:
        """Wait until the flow has ended; return it. `timeout`: a timedelta or seconds.

        A flow ends even if steps fail: see `FlowState.failed`. Raises FlowWaitTimeout or FlowNotFound.
        """
        return self._client.wait_flow(self._flow_key, timeout=timeout)

    def cancel(self, *, everything: bool = False) -> ChangedFlow:
        """Cancel the open steps, and ask the workers of running steps to stop; raise FlowNotFound.

        The clean-up stays, unless `everything` is to be canceled. See `cancel_flow` of the client.
        """
        return self._client.cancel_flow(self._flow_key, everything=everything)

    @property
    def _flow_key(self) -> str:
        """The key of the flow, as the client takes it."""
        return own_key(self._client.tenant, self.key)


def _parts(published: PublishedFlow) -> tuple[Any, ...]:
    return published.key, published.task_ids, published.created, published.differs


def _set(handle: PublishedFlow | TaskHandle[Any], **values: Any) -> None:
    """Set what a handle holds beside what was published, which is frozen."""
    for name, value in values.items():
        object.__setattr__(handle, name, value)
