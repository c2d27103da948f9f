"""A task goes on as another one: by what its handler returns, or by `@app.task(next=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtask.arguments.publish import Declarations
from mtask.features.flows import publish
from mtask.features.flows.handler import with_handler
from mtask.features.flows.next import Next
from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.bson import stored_size
from mtask.kernel.driver.operation import Operation
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.worker.running.outcomes import Judged, refusal, succeeded
from mtask.kernel.worker.running.run import HeldRun

_TOO_LATE = "Next came after the transaction had committed: call context.set_result(Next(...)) in the block"


class Chains:
    """Lets tasks go on as others, by what handlers return or by `@app.task(next=...)`: the `Chaining` of a worker."""

    kind = Next

    def __init__(self, handlers: Mapping[str, Handler], known: Declarations | None = None) -> None:
        """`handlers` holds the app's handlers by name: a next task that is given by name gets their defaults.

        `known` tells those of other apps' handlers.
        """
        self._handlers = handlers
        self._known = known

    def returned(self, run: HeldRun, value: Any) -> Judged | None:
        """Return the outcome of a run that goes on, or that cannot. None: it does not go on."""
        given = value if isinstance(value, Next) else None
        if run.succeeded_in_transaction:
            return None if given is None else (refusal(run, _TOO_LATE), 0)
        next_one = self._next_by_name(run) if given is None else given
        if next_one is None:
            return None
        outcome, size = succeeded(run, value if given is None else given.returns)
        if outcome.status is not RunStatus.SUCCESS:
            return outcome, size
        try:
            task = with_handler(next_one.task, self._handlers)
            owed = next_one.prepare(run.task, task, run.run_id, run.stored_trace, self._known)
            return replace(outcome, next=owed), size + stored_size(owed.fixed)
        except Exception as error:
            return refusal(run, f"the task cannot go on as {next_one.task!r}: {error}"), 0

    def next_name(self, run: HeldRun, value: Any) -> str | None:
        """Return the name by which a next task is given. None: the run does not go on, or a handler is given."""
        next_one = value if issubclass(type(value), Next) else self._next_by_name(run)
        return next_one.task if next_one is not None and isinstance(next_one.task, str) else None

    @staticmethod
    def _next_by_name(run: HeldRun) -> Next | None:
        """Return the next task that `@app.task(next=...)` asks for. It has the same params."""
        if run.handler.next is None:
            return None
        name = run.handler.next_name(None if run.task.flow is None else run.task.flow.key)
        return None if name is None else Next(name, run.task.params)

    def room_of(self, next_one: OwedTask) -> str | None:
        """Return the key of the flow that must have room for this next task. None: it is of no flow."""
        part = next_one.fixed.get("flow")
        return None if part is None else str(part["key"])

    def take_room(self, key: str, count: int) -> Operation[None]:
        """Count so many next tasks of a flow; raise InvalidFlow if it has no room for them."""
        return publish.take(key, count)
