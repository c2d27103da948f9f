"""Log records. Each record has a constant message and fields. `mtask-worker` prints the fields after the message."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

#: The name of the attribute that holds the fields of a log record.
FIELDS = "mtask_fields"
#: The most characters that are said of a line that could not be logged.
_MAX_UNLOGGED = 4000


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the fields in the form of the argument `extra` of a log call."""
    return {FIELDS: values}


class SureLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that never raises, whatever the app's log handlers and filters do.

    The engine logs amid its steps. An error there would keep a run RUNNING, or end the thread that pings.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Leave the `extra` of the call as it is."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, and say on stderr if that raises."""
        # One frame more lies between the logger and the line that logs.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            super().log(level, msg, *args, **kwargs)
        except KeyboardInterrupt:
            raise  # the user's, and not the logging's
        except BaseException as error:
            _say_unlogged(msg, kwargs.get("extra"), error)


def _say_unlogged(message: object, extra: Any, error: BaseException) -> None:
    with suppress(Exception):
        told = f"{message} {(extra or {}).get(FIELDS, '')} (not logged: the app's logging raised {error!r})"
        sys.stderr.write(f"mtask: {without_passwords(told[:_MAX_UNLOGGED])}\n")


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
