"""What handlers note in the run's history, so that the judges know of what they did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from mtask import Context
from tests.chaos.history import Event, History, Ledger, Note

#: Names the history's folder in a worker's environment.
HISTORY_VARIABLE = "MTASK_TEST_HISTORY"


@cache
def _ledger() -> Ledger:
    return Ledger(History(Path(os.environ[HISTORY_VARIABLE])).notes_path(os.getpid()))


def note(context: Context, event: Event, detail: Sequence[str] = ()) -> None:
    """Write down what a handler does, before it goes on."""
    run = (context.task.id, context.run_id, context.worker_id, context.attempt)
    _ledger().write(Note(event, *run, os.getpid(), time.monotonic(), list(detail)))


@contextmanager
def noted(context: Context, detail: Sequence[str] = ()) -> Iterator[None]:
    """Note the start and the end of a handler; no end if its process died."""
    note(context, "start", detail)
    try:
        yield
    except asyncio.CancelledError:
        note(context, "cancelled")
        raise
    except BaseException:
        note(context, "raised")
        raise
    note(context, "end")
