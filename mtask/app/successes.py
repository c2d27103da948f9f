"""Successes: makes the outcome of a run whose handler has ended, perhaps with the task as which the task goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtask.app.next import Next
from mtask.features.flows.handler import with_handler
from mtask.kernel.document.handlers import Handler
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.bson import stored_size
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.worker.process.log import fields, logger
from mtask.kernel.worker.running.finisher import refusal
from mtask.kernel.worker.running.outcomes import checked, describe, failed
from mtask.kernel.worker.running.run import HeldRun


class Successes:
    """Makes the outcomes of runs whose handlers have ended."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        """`handlers` holds the app's handlers by name: a next task that is given by name gets their defaults."""
        self._handlers = handlers

    def concluded(self, run: HeldRun, returned: Any, raised: BaseException | None) -> tuple[Outcome, int]:
        """Return the outcome of a run whose handler has returned or raised this, and the size of what it stores.

        To read the one or the other runs code of the app. Whatever that raises, a SystemExit even, the run fails.
        """
        try:
            if raised is not None:
                return failed(run, raised), 0
            return self.outcome(run, run.result if run.has_result else returned)
        except BaseException as error:
            logger.exception("outcome could not be made", extra=fields(task=run.task_id, run=run.run_id))
            return refusal(run, f"what the handler returned or raised cannot be read: {describe(error)}"), 0

    def outcome(self, run: HeldRun, returned: Any) -> tuple[Outcome, int]:
        """Return the outcome, and the size of what it stores in bytes.

        It is a SUCCESS, or a final FAIL if the value or the next task cannot be stored.
        """
        next_one = returned if isinstance(returned, Next) else self._next_by_name(run)
        value, size, refused = checked(returned.returns if isinstance(returned, Next) else returned)
        if refused:
            return refusal(run, refused), 0
        owed: OwedTask | None = None
        if next_one is not None:
            try:
                owed = next_one.prepare(
                    run.task, with_handler(next_one.task, self._handlers), run.run_id, run.stored_trace
                )
                size += stored_size(owed.fixed)
            except Exception as error:
                return refusal(run, f"the task cannot go on as {next_one.task!r}: {error}"), 0
        return Outcome(run.task_id, run.run_id, RunStatus.SUCCESS, value, next=owed), size

    @staticmethod
    def _next_by_name(run: HeldRun) -> Next | None:
        """Return the next task that `@app.task(next=...)` asks for. It has the same params."""
        if run.handler.next is None:
            return None
        name = run.handler.next_name(None if run.task.flow is None else run.task.flow.key)
        return None if name is None else Next(name, run.task.params)
