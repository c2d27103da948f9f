"""The clients' requests about flows that exist: read, list, cancel, retry, and wait for the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from mtask.client import views
from mtask.client.requests import WaitPolicy, wait_policy
from mtask.errors import FlowWaitTimeout, InvalidInput
from mtask.features.events.task_events import EventKind, TaskEvent
from mtask.features.flows import change as operating
from mtask.features.flows import read as reading
from mtask.features.flows import views as states
from mtask.features.flows.change import ChangedFlow
from mtask.features.flows.views import FlowRow, FlowState
from mtask.kernel.document.identity import check_key, is_text, prefix_of
from mtask.kernel.document.status import FINAL
from mtask.kernel.driver.operation import Operation
from mtask.parts.relays import RELAYS

#: While the flow's events are followed, the flow is also looked at again after this many seconds.
_LOOK_EVERY = 30.0


def state(key: str) -> Operation[FlowState]:
    """Return a flow with all its steps."""
    checked = check_key(key)

    def operation() -> Operation[FlowState]:
        return states.state_of(checked, (yield from reading.steps(checked)))

    return operation()


def every(prefix: str | None, limit: int, tenant: str | None = None) -> Operation[list[FlowRow]]:
    """Return flows, the newest first."""
    most = views.check_limit(limit)
    if prefix is not None and (not isinstance(prefix, str) or not is_text(prefix)):
        raise InvalidInput("prefix is the beginning of a flow's key: give text.", field="prefix")
    stored = prefix if tenant is None else prefix_of(tenant) + (prefix or "")

    def operation() -> Operation[list[FlowRow]]:
        found = yield from reading.heads(stored, most)
        # A malformed document may hold something other than text there: it begins no flow.
        heads = {key: head for head in found if (key := reading.text_of(head, "head")) is not None}
        counted = yield from reading.counts([*heads])
        return [states.row_of(key, head, counted[key]) for key, head in heads.items()]

    return operation()


def cancel(key: str, *, everything: bool) -> Operation[ChangedFlow]:
    """Cancel the open steps of a flow."""
    return _sorted(operating.cancel(check_key(key), RELAYS, everything=everything))


def retry(key: str) -> Operation[ChangedFlow]:
    """Open the FAIL and CANCELED steps of a flow again."""
    return _sorted(operating.retry(check_key(key), RELAYS))


def _sorted(operation: Operation[ChangedFlow]) -> Operation[ChangedFlow]:
    changed = yield from operation
    return replace(changed, counts=states.counted(changed.counts))


@dataclass(slots=True)
class WaitForFlow:
    """How a client waits for the end of a flow: it looks for one open step, and waits for the end of that step.

    One stream of events serves the whole wait. It tells the ends of all steps, but only the end of the step that is
    watched makes the client look again. So a wait for many steps reads few of them.
    """

    key: str
    timing: WaitPolicy
    #: An open step, and its status. None: it was not looked for yet.
    watched: tuple[str, str] | None = None
    #: Whether the client must look for an open step.
    is_to_look: bool = True
    looked_at: float = 0.0

    def look(self, elapsed: float) -> Operation[bool]:
        """Look for an open step; return whether the flow has ended. Raises FlowNotFound."""
        self.is_to_look, self.looked_at = False, elapsed
        found = yield from reading.first_open(self.key)
        self.watched = None if found is None else (str(found["_id"]), str(reading.status_of(found)))
        return found is None

    def look_again(self) -> None:
        """Let the client look for an open step next."""
        self.is_to_look = True

    def patience(self, elapsed: float) -> float | None:
        """Return the seconds to wait for an event. None: look again after a pause."""
        # A step that has ended has no further event: somebody is about to tell the others.
        is_open = self.watched is not None and self.watched[1] not in FINAL
        return self.timing.patience(elapsed) if is_open else None

    def note(self, event: TaskEvent | None, elapsed: float) -> None:
        """Let the client look again if the watched step has ended, or if no event came for long."""
        is_watched = event is not None and self.watched is not None and event.task_id == self.watched[0]
        has_ended = is_watched and event is not None and (event.is_end or event.kind is EventKind.REMOVED)
        if event is None or has_ended or elapsed - self.looked_at > _LOOK_EVERY:
            self.look_again()

    def give_up(self) -> FlowWaitTimeout:
        """Return the error for a wait whose time is up."""
        task_id, status = self.watched or ("", "")
        return FlowWaitTimeout(self.key, task_id, status, self.timing.timeout or timedelta(0))


def wait(key: str, timeout: timedelta | float | None) -> WaitForFlow:
    """Check the arguments of a wait; raise InvalidInput."""
    return WaitForFlow(check_key(key), wait_policy("", timeout))
