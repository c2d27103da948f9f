"""The parameters of the statements: tasks, outcomes, runs and documents. Nothing here depends on time or chance."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from mtask.features.gathering.statements import SentCall
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.operations.publish import NewTask
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from tests import build
from tests.unit.house.sent.conversation import NOW

Document = dict[str, Any]
ONE, TWO = ["task:k"], ["task:k", "other:l"]
LATER = NOW + timedelta(hours=1)
OPTION = TaskOption(priority=3, limit_key="key", retain_success_ms=60_000)
LOOKUP = [{"k": "order", "v": "42"}]
CALLBACK = {"url": "https://example.org/ends", "on": ["SUCCESS", "FAIL"], "secret": "default", "tenant": "acme"}
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}

PLAIN = NewTask("task:k", "task", "k", "default", {"a": 1}, TaskOption().stored())
DELAYED = NewTask("task:d", "task", "d", "mail", {"a": 1}, TaskOption().stored(), timedelta(minutes=1))
TIMED = NewTask("task:t", "task", "t", "mail", None, OPTION.stored(), LATER)
FULL = NewTask(
    "task:acme:f",
    "task",
    "acme:f",
    "default",
    {"$set": "no operator"},
    OPTION.stored(),
    LATER,
    lookup=LOOKUP,
    callback=CALLBACK,
    trace=TRACE,
    tenant="acme",
    sealed="acme",
)

_FLOW = {"key": "flow", "step": "next", "after": [], "on_failed": "cancel", "ancestors": ["task:k"]}
CHILD = OwedTask({"_id": "task:flow/child", "name": "task", "key": "flow/child", "flow": _FLOW}, delay_ms=5_000)
NEXT_TASK = OwedTask({"_id": "next:n", "name": "next", "key": "n", "chain": {"before": "task:k"}}, LATER)

SUCCESS = Outcome("task:k", "token-0", RunStatus.SUCCESS, returns={"sum": 3})
SUCCESSES = [SUCCESS, Outcome("other:l", "token-1", RunStatus.SUCCESS, progress={"fraction": 0.5})]
VOID = [Outcome("task:k", "token-0", RunStatus.SUCCESS), Outcome("other:l", "token-1", RunStatus.SUCCESS)]
GOING_ON = [SUCCESS, Outcome("other:l", "token-1", RunStatus.SUCCESS, next=NEXT_TASK)]
OWING = [Outcome("task:k", "token-0", RunStatus.SUCCESS, returns_owed_by="incarnation")]
FAILURES = [
    Outcome("task:k", "token-0", RunStatus.FAIL, reason="no luck", jitter=0.25, traceparent=TRACE["traceparent"]),
    Outcome("other:l", "token-1", RunStatus.FAIL, reason="$never", final=True, conflict=True),
    Outcome("task:m", "token-2", RunStatus.CANCELED, reason="handed back", delay_ms=0),
]
RAISED = Outcome("task:k", "token-0", RunStatus.FAIL, reason="no", error={"type": "a.Error", "traceback": "$no"})

RUN = build.run("RUNNING", NOW, NOW, run_id="token-0", worker_id="w")


def stored(task_id: str = "task:k", status: str = "INIT", **fields: Any) -> Document:
    """Return the document of a task."""
    made = build.task(task_id, RUN, time=NOW, params={"a": 1}, state={"status": status})
    return made | {"now": NOW, **fields}


def cursor(*rows: Document, **more: Any) -> Document:
    """Return the reply to a command that reads."""
    return {"cursor": {"id": 0, "firstBatch": list(rows), **more}}


def gathering(**fields: Any) -> SentCall:
    """Return a call that gathers."""
    content: Document = {"params": {"a": 1}, "queue": "default", "task_option": TaskOption().stored()}
    given: Document = {"asked_time": NOW, "call_id": "call", "kind": "latest", "content": content, **fields}
    return SentCall(**given)
