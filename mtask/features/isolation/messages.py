"""The messages between a worker and an executor, as documents.

A worker sends: `hello` (what the executor needs to start), `run`, `lease` (the lease holds until then), `end` (end the
run, for this reason), `paused` (no ping of the run is sent now), `stop`.

An executor sends: `ready`, `unready` (it cannot start), `progress`, `pause` (a transaction is about to begin),
`log` (lines that the handler has logged),
`renewed` (its lease, before a transaction), `committed`, `resume` (the transaction is over), `done`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.worker.running.run import EndReason, HeldRun

Message = dict[str, Any]
_PLAIN = [field.name for field in fields(Outcome) if field.name not in ("status", "progress", "next")]


def run_message(run: HeldRun) -> Message:
    """Return the message that starts a run in an executor."""
    # The params go beside the task and not through pydantic: they arrive exactly as they are stored.
    task = run.task.model_dump(by_alias=True, exclude={"params"}, exclude_unset=True)
    return {
        "kind": "run",
        "run_id": run.run_id,
        "task": task,
        "params": run.task.params,
        "until": run.trusted_until,
        "tells_begin": run.on_begin is not None,
        "trace": trace_message(run),
    }


def trace_message(run: HeldRun) -> Message | None:
    """Return the span of a run as a message. None: it has none."""
    if run.trace is None:
        return None
    return {"trace": dict(run.trace), "is_stored": run.stored_trace is not None}


def follow(run: HeldRun, message: Message | None) -> None:
    """Let a run follow the span that such a message names."""
    if message is not None:
        run.follow(message["trace"], is_stored=message["is_stored"])


def task_in(message: Message) -> StoredTask:
    """Return the task that a `run` message holds."""
    return StoredTask.model_validate({**message["task"], "params": message["params"]})


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a document. Its progress is left out: it has messages of its own."""
    document = {name: getattr(outcome, name) for name in _PLAIN}
    return {**document, "status": outcome.status.value, "next": None if outcome.next is None else outcome.next.parts()}


def outcome_in(document: dict[str, Any]) -> Outcome:
    """Return the outcome that such a document holds."""
    owed = document["next"]
    return Outcome(
        status=RunStatus(document["status"]),  # type: ignore[arg-type]  # an executor makes only these three
        next=None if owed is None else OwedTask(**owed),
        **{name: document[name] for name in _PLAIN},
    )


def reason_in(message: Message) -> EndReason | None:
    """Return the reason for which a message ends a run, if it names one."""
    name = message.get("reason")
    return None if name is None else EndReason[name]


# --- origin ----------------------------------------------------------------------------------------------

# What the executors of a worker get from it at their start.


@dataclass(frozen=True, slots=True)
class Origin:
    """What the executors of one worker get from it."""

    uri: str
    database: str
    worker_id: str
    incarnation: str
    log_format: str = "text"
    keep_logs: int = 0  #: the most lines of a run that are kept
    codec: Message | None = field(default=None, repr=False)  #: what their codec is made from; None: it is plain

    def hello(self) -> dict[str, Any]:
        """Return the first message to an executor. It holds the URI, so it must not be on a command line."""
        root, own = logging.getLogger(), logging.getLogger("mtask")
        levels = {"log_level": root.getEffectiveLevel(), "own_log_level": own.getEffectiveLevel()}
        logs = {"log_format": self.log_format, "keep_logs": self.keep_logs}
        # Handlers publish, and their transactions write results, from the executor: it needs the codec, too.
        codec = {} if self.codec is None else {"codec": self.codec}
        worker = {"worker_id": self.worker_id, "incarnation": self.incarnation}
        return {"uri": self.uri, "database": self.database, **worker, **levels, **logs, **codec}
