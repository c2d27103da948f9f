"""Kept logs: the last lines that a run has written, as they are stored and read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from mtask.kernel.document.options import Count, PositiveCount
from mtask.kernel.document.parts import SealedAny
from mtask.kernel.document.task import Instant, Text
from mtask.kernel.document.values import Stored

#: The most lines of a run that may be kept, and the number for a worker that does not say one.
MAX_LINES = 10_000
#: The most bytes of a run's lines that are kept, and the most characters of a line's message and traceback.
MAX_BYTES = 256 * 1024
MAX_TEXT, MAX_TRACEBACK = 4_000, 16_000


class LogLine(Stored):
    """One line of the log of a run."""

    time: Instant  #: by the clock of the worker's machine
    level: Text
    logger: Text
    message: Text
    exception: Text | None = None  #: the traceback


class RunLog(Stored):
    """The last lines of a run: one document in the collection `logs`. Its `_id` is the run's."""

    id: Annotated[Text, Field(alias="_id")]
    task_id: Text
    worker_id: Text
    attempt: PositiveCount
    first: Count  #: the number of lines before the first one that is kept
    line_cnt: Count = 0  #: the number of all lines that the run has written
    lines: list[LogLine]
    #: The lines, if they are encrypted, and the queue of the task then.
    sealed_lines: SealedAny = None
    queue: Text | None = None
    #: Whether the run has ended. A run whose worker was killed never says so.
    is_over: StrictBool = False
    trace_id: Text | None = None
    begin_time: Instant  #: when the first lines were stored
    update_time: Instant
    expire_time: Instant
    schema_version: Literal[1]

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.id

    def after(self, number: int) -> list[LogLine]:
        """Return the kept lines without the first `number` ones that the run has written."""
        return self.lines[max(0, number - self.first) :]
