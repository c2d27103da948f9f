"""The options of a worker's log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from mtask.errors import InvalidInput
from mtask.model.run_logs import MAX_LINES

MAX_DAYS = 3650


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
        if not timedelta(minutes=1) <= self.kept_for <= timedelta(days=MAX_DAYS):
            days = self.kept_for / timedelta(days=1)
            raise InvalidInput(f"--keep-logs-days {days:g}: use 0.001 to {MAX_DAYS}.", field="keep_logs_days")
