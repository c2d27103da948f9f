"""The states of a task, of a run and of a worker."""

from __future__ import annotations

from enum import StrEnum


class TaskStatus(StrEnum):
    """What a task is, as a whole."""

    INIT = "INIT"  #: nobody holds it now, someone may still take it
    RUNNING = "RUNNING"  #: at least one run holds a live lease
    SUCCESS = "SUCCESS"  #: enough workers succeeded
    FAIL = "FAIL"  #: the limit is used up, or a run ended in a final failure
    CANCELED = "CANCELED"  #: a client canceled it

    @property
    def is_final(self) -> bool:
        """Whether nothing but an explicit retry, rerun or removal touches the task."""
        return self in FINAL_STATUSES


FINAL_STATUSES = frozenset({TaskStatus.SUCCESS, TaskStatus.FAIL, TaskStatus.CANCELED})


class RunStatus(StrEnum):
    """What one worker's one try at a task is."""

    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    FAIL = "FAIL"  #: the handler failed, or ran too long; counted
    TIMEOUT = "TIMEOUT"  #: its lease lapsed; counted
    CANCELED = "CANCELED"  #: ended without a verdict: handed back, asked to retry, or canceled; not counted


class WorkerStatus(StrEnum):
    """What a worker process is doing."""

    READY = "ready"  #: registered, about to open its stream
    RUNNING = "running"  #: claims and runs tasks
    STOPPING = "stopping"  #: claims nothing more, finishes what it holds
    STOPPED = "stopped"  #: ended in order
