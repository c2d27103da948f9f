"""Log records. Each record has a constant message and fields. `mtask-worker` prints the fields after the message."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any

#: The name of the attribute that holds the fields of a log record.
FIELDS = "mtask_fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the fields in the form of the argument `extra` of a log call."""
    return {FIELDS: values}


#: A URI with a password. A password in the URI of a database may hold any letter, and it ends at the last "@".
_PASSWORDS = re.compile(r"(mongodb(?:\+srv)?://)[^\s\"']*@|(\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'/@:]*:[^\s\"'/@]*@")
_BEARER = re.compile(r"\b(Bearer )[A-Za-z0-9._~+/=-]+")


def without_passwords(text: str) -> str:
    """Return the text without the users and passwords of URIs, and without tokens after `Bearer`."""
    if "://" in text:
        text = _PASSWORDS.sub(lambda found: f"{found[1] or found[2]}***@", text)
    return _BEARER.sub(r"\1***", text) if "Bearer " in text else text


class RunMarks:
    """What each log line of a run tells of the run.

    It is small and refers to no task: asyncio tasks that a handler leaves behind keep it.
    """

    __slots__ = ("attempt", "keeper", "key", "log", "queue", "run_id", "task", "trace_id")

    def __init__(self, task: str, key: str, run_id: str, attempt: int, queue: str = "") -> None:
        self.task = task  #: the name of the task
        self.key = key
        self.run_id = run_id
        self.attempt = attempt
        self.queue = queue
        self.trace_id: str | None = None
        #: What keeps the lines of this run, if they are kept, and its lines, once there is one.
        self.keeper: Any = None
        self.log: Any = None


#: The run whose handler runs here: in this asyncio task, or in this thread.
RUN: ContextVar[RunMarks | None] = ContextVar("mtask_run", default=None)
