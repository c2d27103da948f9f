"""How long calls of the client wait, and what they tolerate, if their caller names no other time."""

from datetime import timedelta

#: The time limit of a wait for confirmations. It is longer than the time for which a dead worker counts as live.
CONFIRMATION = timedelta(seconds=60)
#: The longest time that a due task may wait. A longer wait is a problem.
OVERDUE = timedelta(minutes=5)
