"""The handlers of the benchmarks' workers, in a worker that counts the commands it sends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from pymongo import monitoring

from benchmarks.measuring.app import FOLDER_VARIABLE, app, write_whole

__all__ = ["TELL_COMMANDS", "app", "commands_path"]

#: On this signal a worker writes the number of commands that it has sent into a file.
TELL_COMMANDS = signal.SIGUSR2


class Sent(monitoring.CommandListener):
    """Counts the commands of all clients of this process. The driver's own hellos are none."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Count it."""
        self.count += 1

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Do nothing."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Do nothing."""


def commands_path(folder: Path, pid: int) -> Path:
    """Return the file of a worker's number of commands."""
    return folder / f"commands-{pid}.json"


def _attach(folder: Path) -> None:
    sent = Sent()
    monitoring.register(sent)  # for all clients that this process makes from now on

    def tell(_number: int, _frame: FrameType | None) -> None:
        write_whole(commands_path(folder, os.getpid()), {"sent": sent.count})

    signal.signal(TELL_COMMANDS, tell)


if FOLDER_VARIABLE in os.environ:
    _attach(Path(os.environ[FOLDER_VARIABLE]))
