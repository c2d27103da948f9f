"""The exit codes of commands."""

from __future__ import annotations

OK = 0
OTHER = 1
USAGE = 2
NOT_FOUND = 4
CONFLICT = 5
WAIT_TIMEOUT = 6
PROBLEMS = 7
TASK_FAILED = 8
TASK_CANCELED = 9
INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    OK: "done",
    OTHER: "another error",
    USAGE: "bad input",
    3: "the database, or the embedded mongod",
    NOT_FOUND: "not found",
    CONFLICT: "conflict: it exists, is running, is not finished, is in use, or is malformed",
    WAIT_TIMEOUT: "timed out while waiting",
    PROBLEMS: "doctor found something that does not work",
    TASK_FAILED: "wait, result: the task ended as FAIL",
    TASK_CANCELED: "wait, result: the task ended as CANCELED",
    INTERRUPTED: "interrupted",
}
