"""The options of a worker's log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from mtask.errors import InvalidInput
from mtask.features.logs.rules import MAX_LINES

#: The shortest and the longest time for which lines are kept, in days.
MIN_DAYS, MAX_DAYS = 0.001, 3650


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Which lines of the log are kept in the database, and in which format executors log."""

    log_format: str = "text"
    keep: int = 0  #: the most lines of each run that are kept; 0: none
    kept_for: timedelta = timedelta(days=7)

    def check(self) -> None:
        """Raise InvalidInput for an option that is out of range."""
        if not 0 <= self.keep <= MAX_LINES:
            raise InvalidInput(f"--keep-logs {self.keep}: use 1 to {MAX_LINES}, or 0 for none.", field="keep_logs")


def read_options(log_format: str, keep: int, days: float) -> LogOptions:
    """Return the options of a command line; raise InvalidInput."""
    if not MIN_DAYS <= days <= MAX_DAYS:  # also true for a NaN
        raise InvalidInput(f"--keep-logs-days {days:g}: use {MIN_DAYS} to {MAX_DAYS}.", field="keep_logs_days")
    return LogOptions(log_format, keep, timedelta(days=days))
