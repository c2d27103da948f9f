"""Log records. Each record has a constant message and fields. `mtask-worker` prints the fields after the message."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mtask.errors import DatabaseUnavailable

#: The name of the attribute that holds the fields of a log record.
FIELDS = "mtask_fields"
#: The most characters that are said of a line that could not be logged.
_MAX_UNLOGGED = 4000


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the fields in the form of the argument `extra` of a log call."""
    return {FIELDS: values}


def told(error: Exception) -> str:
    """Return what a line of the log tells of an error. It may come again and again, so it holds no advice."""
    return error.in_short if isinstance(error, DatabaseUnavailable) else str(error)


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
        sys.stderr.write(f"mtask: {first_of(told, _MAX_UNLOGGED)}\n")


#: No URI and no token is longer.
_MAX_SECRET = 8192
_WORD = re.compile(r"\S+")
#: The most characters of the text of an exception in a traceback.
_MAX_SAID = 8_000
#: A URI with a password. A password in the URI of a database may hold any letter, and it ends at the last "@". No
#: scheme is longer: without a bound, a long text of dots would take minutes.
_PASSWORDS = re.compile(
    r"(mongodb(?:\+srv)?://)([^\s\"']*)|(\b[A-Za-z][A-Za-z0-9+.-]{0,40}://)[^\s\"'/@:]*:[^\s\"'/@]*@"
)
_BEARER = re.compile(r"\b(Bearer )[A-Za-z0-9._~+/=-]+")


def without_passwords(text: str) -> str:
    """Return the text without the users and passwords of URIs, and without tokens after `Bearer`."""
    if "://" in text:
        text = _PASSWORDS.sub(_hidden, text)
    return _BEARER.sub(r"\1***", text) if "Bearer " in text else text


def _hidden(found: re.Match[str]) -> str:
    if found[3]:
        return f"{found[3]}***@"
    _, at, host = found[2].rpartition("@")
    return f"{found[1]}***@{host}" if at else found[0]


def first_of(text: str, most: int) -> str:
    """Return the first characters of a text, at most so many, without passwords. A longer text costs no more time."""
    shown = text[:most]
    if len(text) > most > 0 and not shown[-1].isspace():
        word = shown.rsplit(None, 1)[-1]
        if "://" in word:  # perhaps the first half of a URI: its password cannot be told without the other half
            shown = f"{shown.removesuffix(word)}***"
    return without_passwords(shown)[:most]


def last_of(text: str, most: int) -> str:
    """Return the last characters of a text, at most so many, without passwords. A longer text costs no more time."""
    is_cut = len(text) > most
    text = without_passwords(text[max(0, len(text) - most) :])
    if is_cut:
        # Perhaps the other half of a URI, or of `Bearer` and its token.
        for word in reversed(list(islice(_WORD.finditer(text), 2))):
            if len(word[0]) <= _MAX_SECRET:
                text = f"{text[: word.start()]}***{text[word.end() :]}"
    return text[max(0, len(text) - most) :]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception. Long texts of exceptions are cut: else a traceback could take seconds."""
    told = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    each = [told]
    for one in each:
        texts = vars(one)  # the text itself has no public name
        if isinstance(texts.get("_str"), str):
            texts["_str"] = first_of(texts["_str"], _MAX_SAID)
        if isinstance(one.__notes__, list):
            one.__notes__ = [first_of(note, _MAX_SAID) if isinstance(note, str) else note for note in one.__notes__]
        each += filter(None, (one.__cause__, one.__context__, *(one.exceptions or ())))
    return "".join(told.format()).rstrip("\n")


@dataclass(slots=True, eq=False)
class RunMarks:
    """What each log line of a run tells of the run.

    It is small and refers to no task: asyncio tasks that a handler leaves behind keep it.
    """

    task: str  #: the name of the task
    key: str
    run_id: str
    attempt: int
    queue: str = ""
    sealed: str | None = None  #: the data key that encrypts the task
    tenant: str | None = None  #: the task's tenant
    trace_id: str | None = None
    #: What keeps the lines of this run, if they are kept, and its lines, once there is one.
    keeper: Any = None
    log: Any = None


#: The run whose handler runs here: in this asyncio task, or in this thread.
RUN: ContextVar[RunMarks | None] = ContextVar("mtask_run", default=None)
