"""Where mtask connects to, and how long calls wait, if nothing says otherwise."""

from __future__ import annotations

from datetime import timedelta

DEFAULT_DATABASE = "mtask"
DEFAULT_URI = "mongodb://127.0.0.1:27017/?directConnection=false"

#: The time limit of a wait for confirmations. It is longer than the time for which a dead worker counts as live.
CONFIRMATION = timedelta(seconds=60)
#: The longest time that a due task may wait. A longer wait is a problem.
OVERDUE = timedelta(minutes=5)
