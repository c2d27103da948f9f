"""mtask: a task queue on MongoDB. This package offers the names that its users import."""

from mtask.lazy import names_of

#: True for type checkers. The module `typing`, whose name this is, takes longer to import than all of the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mtask.app.app import App
    from mtask.app.calls import call
    from mtask.app.context import Context
    from mtask.arguments.publish import TaskSpec
    from mtask.client.aio import AsyncClient
    from mtask.client.flow_handles_aio import AsyncFlowHandle
    from mtask.client.flow_handles_sync import FlowHandle
    from mtask.client.handles_aio import AsyncTaskHandle
    from mtask.client.handles_sync import TaskHandle
    from mtask.client.sync import Client
    from mtask.doctor.position import Position
    from mtask.errors import (
        Fail,
        LeaseLost,
        MtaskError,
        RateLimited,
        Retry,
        TaskCanceled,
        TaskExists,
        TaskFailed,
        TaskNotFound,
        TaskRunning,
        WaitTimeout,
    )
    from mtask.features.audit_log.client import Action
    from mtask.features.bulk.client import Bulk, BulkPlan
    from mtask.features.calls.call import Call
    from mtask.features.encryption.settings import Encryption
    from mtask.features.flows.change import ChangedFlow
    from mtask.features.flows.client import Flow
    from mtask.features.flows.handler import Child
    from mtask.features.flows.next import Next
    from mtask.features.flows.publish import PublishedFlow
    from mtask.features.flows.views import FlowRow, FlowState, StepState
    from mtask.features.schedules.rules import Schedule
    from mtask.features.schedules.triggers import Cron
    from mtask.kernel.document.handlers import Breaker
    from mtask.kernel.document.options import TaskOption
    from mtask.kernel.document.status import RunStatus, TaskStatus
    from mtask.kernel.document.task import Task
    from mtask.kernel.operations.publish import Published
    from mtask.search.by_queue import QueueCounts
    from mtask.search.counts import Count
    from mtask.search.pages import TaskPage
    from mtask.search.partial import FoundTasks, TaskFields
    from mtask.version import __version__

__all__ = [
    "Action",
    "App",
    "AsyncClient",
    "AsyncFlowHandle",
    "AsyncTaskHandle",
    "Breaker",
    "Bulk",
    "BulkPlan",
    "Call",
    "ChangedFlow",
    "Child",
    "Client",
    "Context",
    "Count",
    "Cron",
    "Encryption",
    "Fail",
    "Flow",
    "FlowHandle",
    "FlowRow",
    "FlowState",
    "FoundTasks",
    "LeaseLost",
    "MtaskError",
    "Next",
    "Position",
    "Published",
    "PublishedFlow",
    "QueueCounts",
    "RateLimited",
    "Retry",
    "RunStatus",
    "Schedule",
    "StepState",
    "Task",
    "TaskCanceled",
    "TaskExists",
    "TaskFailed",
    "TaskFields",
    "TaskHandle",
    "TaskNotFound",
    "TaskOption",
    "TaskPage",
    "TaskRunning",
    "TaskSpec",
    "TaskStatus",
    "WaitTimeout",
    "__version__",
    "call",
]

#: The public names by module. The block for type checkers above says the same, and a test compares the two.
_MODULES = {
    "mtask.app.app": ("App",),
    "mtask.app.calls": ("call",),
    "mtask.app.context": ("Context",),
    "mtask.features.calls.call": ("Call",),
    "mtask.features.flows.handler": ("Child",),
    "mtask.features.flows.next": ("Next",),
    "mtask.client.aio": ("AsyncClient",),
    "mtask.client.flow_handles_aio": ("AsyncFlowHandle",),
    "mtask.client.flow_handles_sync": ("FlowHandle",),
    "mtask.client.handles_aio": ("AsyncTaskHandle",),
    "mtask.client.handles_sync": ("TaskHandle",),
    "mtask.features.flows.client": ("Flow",),
    "mtask.arguments.publish": ("TaskSpec",),
    "mtask.doctor.position": ("Position",),
    "mtask.features.audit_log.client": ("Action",),
    "mtask.features.bulk.client": ("Bulk", "BulkPlan"),
    "mtask.features.flows.views": ("FlowRow", "FlowState", "StepState"),
    "mtask.search.pages": ("TaskPage",),
    "mtask.search.partial": ("FoundTasks", "TaskFields"),
    "mtask.client.sync": ("Client",),
    "mtask.errors": (
        "Fail",
        "LeaseLost",
        "MtaskError",
        "RateLimited",
        "Retry",
        "TaskCanceled",
        "TaskExists",
        "TaskFailed",
        "TaskNotFound",
        "TaskRunning",
        "WaitTimeout",
    ),
    "mtask.kernel.document.handlers": ("Breaker",),
    "mtask.kernel.document.task": ("Task",),
    "mtask.features.encryption.settings": ("Encryption",),
    "mtask.kernel.document.options": ("TaskOption",),
    "mtask.features.schedules.rules": ("Schedule",),
    "mtask.kernel.document.status": ("RunStatus", "TaskStatus"),
    "mtask.features.schedules.triggers": ("Cron",),
    "mtask.features.flows.change": ("ChangedFlow",),
    "mtask.features.flows.publish": ("PublishedFlow",),
    "mtask.search.counts": ("Count",),
    "mtask.search.by_queue": ("QueueCounts",),
    "mtask.kernel.operations.publish": ("Published",),
    "mtask.version": ("__version__",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
#: `import mtask` alone is enough to reach these, too: `mtask.errors.InvalidInput`, for example.
_PACKAGES = frozenset({"app", "client", "errors", "kernel", "logs", "settings", "version"})

if not TYPE_CHECKING:  # else type checkers would take every name for a public one
    __getattr__, __dir__ = names_of(__name__, _MODULE_OF, _PACKAGES)
