"""mtask: a task queue on MongoDB. This package offers the names that its users import."""

from mtask.app.app import App
from mtask.app.context import Context
from mtask.app.family import Child
from mtask.app.next import Next
from mtask.client import AsyncClient, Client, Flow, TaskSpec
from mtask.client.diagnosis.position import Position
from mtask.client.reading.flows import FlowRow, FlowState, StepState
from mtask.client.reading.partial import FoundTasks, TaskFields
from mtask.errors import (
    Fail,
    LeaseLost,
    MtaskError,
    Retry,
    TaskCanceled,
    TaskExists,
    TaskFailed,
    TaskNotFound,
    TaskRunning,
    WaitTimeout,
)
from mtask.model.documents import Task
from mtask.model.options import TaskOption
from mtask.model.schedules import Schedule
from mtask.model.status import RunStatus, TaskStatus
from mtask.model.triggers import Cron
from mtask.store.flows.operating import ChangedFlow
from mtask.store.flows.publishing import PublishedFlow
from mtask.store.tasks.publishing import Published
from mtask.version import __version__

__all__ = [
    "App",
    "AsyncClient",
    "ChangedFlow",
    "Child",
    "Client",
    "Context",
    "Cron",
    "Fail",
    "Flow",
    "FlowRow",
    "FlowState",
    "FoundTasks",
    "LeaseLost",
    "MtaskError",
    "Next",
    "Position",
    "Published",
    "PublishedFlow",
    "Retry",
    "RunStatus",
    "Schedule",
    "StepState",
    "Task",
    "TaskCanceled",
    "TaskExists",
    "TaskFailed",
    "TaskFields",
    "TaskNotFound",
    "TaskOption",
    "TaskRunning",
    "TaskSpec",
    "TaskStatus",
    "WaitTimeout",
    "__version__",
]
