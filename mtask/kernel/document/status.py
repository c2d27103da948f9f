"""The status of a task, of a run and of a worker."""

from __future__ import annotations

from enum import StrEnum


class TaskStatus(StrEnum):
    """The status of a task as a whole."""

    WAITING = "WAITING"  #: a task of the same flow must end before this task may start
    INIT = "INIT"  #: no run holds the task, and a worker may still take it
    RUNNING = "RUNNING"  #: at least one run holds a live lease
    SUCCESS = "SUCCESS"  #: concurrent_worker_cnt workers have succeeded
    FAIL = "FAIL"  #: the limit of failures is used up, or a run ended in a final failure
    CANCELED = "CANCELED"  #: a client canceled the task

    @property
    def is_final(self) -> bool:
        """Whether the status is final.

        A task with a final status changes only by a retry, a rerun, a publish that drops its runs, or a removal.
        """
        return self in FINAL_STATUSES


FINAL_STATUSES = frozenset({TaskStatus.SUCCESS, TaskStatus.FAIL, TaskStatus.CANCELED})
#: The statuses as documents hold them: the final ones, the others, and the final ones without success.
FINAL = tuple(sorted(status.value for status in FINAL_STATUSES))
OPEN = tuple(sorted(status.value for status in TaskStatus if status not in FINAL_STATUSES))
FAILED = tuple(status for status in FINAL if status != TaskStatus.SUCCESS)


class RunStatus(StrEnum):
    """The status of one worker's attempt at a task."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAIL = "FAIL"  #: the handler failed or ran too long; the run counts as a failure
    TIMEOUT = "TIMEOUT"  #: the lease lapsed; the run counts as a failure
    CANCELED = "CANCELED"  #: the run was handed back, ended by Retry, or canceled; it does not count as a failure


class WorkerStatus(StrEnum):
    """The status of a worker process."""

    READY = "ready"  #: the worker is registered and has not opened its change stream yet
    RUNNING = "running"  #: the worker claims and runs tasks
    STOPPING = "stopping"  #: the worker claims no more tasks and finishes its current runs
    STOPPED = "stopped"  #: the worker has ended normally
