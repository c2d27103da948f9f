"""mtask: a task queue on MongoDB. This package offers the names that its users import."""

from mtask.lazy import names_of

#: True for type checkers. The module `typing`, whose name this is, takes longer to import than all of the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mtask.app.app import App
    from mtask.app.context import Context
    from mtask.app.family import Child
    from mtask.app.next import Next
    from mtask.client.aio import AsyncClient
    from mtask.client.asking.flows import Flow
    from mtask.client.asking.publication import TaskSpec
    from mtask.client.diagnosis.position import Position
    from mtask.client.operating.actions import Action
    from mtask.client.operating.bulk import Bulk, BulkPlan
    from mtask.client.reading.flows import FlowRow, FlowState, StepState
    from mtask.client.reading.pages import TaskPage
    from mtask.client.reading.partial import FoundTasks, TaskFields
    from mtask.client.sync import Client
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
    from mtask.model.encryption.encryption import Encryption
    from mtask.model.options import TaskOption
    from mtask.model.scheduling.schedules import Schedule
    from mtask.model.scheduling.triggers import Cron
    from mtask.model.status import RunStatus, TaskStatus
    from mtask.store.flows.operating import ChangedFlow
    from mtask.store.flows.publishing import PublishedFlow
    from mtask.store.lists.by_queue import QueueCounts
    from mtask.store.lists.counting import Count
    from mtask.store.tasks.publishing import Published
    from mtask.version import __version__

__all__ = [
    "Action",
    "App",
    "AsyncClient",
    "Bulk",
    "BulkPlan",
    "ChangedFlow",
    "Child",
    "Client",
    "Context",
    "Count",
    "Cron",
    "Encryption",
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
    "QueueCounts",
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
    "TaskPage",
    "TaskRunning",
    "TaskSpec",
    "TaskStatus",
    "WaitTimeout",
    "__version__",
]

#: The public names by module. The block for type checkers above says the same, and a test compares the two.
_MODULES = {
    "mtask.app.app": ("App",),
    "mtask.app.context": ("Context",),
    "mtask.app.family": ("Child",),
    "mtask.app.next": ("Next",),
    "mtask.client.aio": ("AsyncClient",),
    "mtask.client.asking.flows": ("Flow",),
    "mtask.client.asking.publication": ("TaskSpec",),
    "mtask.client.diagnosis.position": ("Position",),
    "mtask.client.operating.actions": ("Action",),
    "mtask.client.operating.bulk": ("Bulk", "BulkPlan"),
    "mtask.client.reading.flows": ("FlowRow", "FlowState", "StepState"),
    "mtask.client.reading.pages": ("TaskPage",),
    "mtask.client.reading.partial": ("FoundTasks", "TaskFields"),
    "mtask.client.sync": ("Client",),
    "mtask.errors": (
        "Fail",
        "LeaseLost",
        "MtaskError",
        "Retry",
        "TaskCanceled",
        "TaskExists",
        "TaskFailed",
        "TaskNotFound",
        "TaskRunning",
        "WaitTimeout",
    ),
    "mtask.model.documents": ("Task",),
    "mtask.model.encryption.encryption": ("Encryption",),
    "mtask.model.options": ("TaskOption",),
    "mtask.model.scheduling.schedules": ("Schedule",),
    "mtask.model.status": ("RunStatus", "TaskStatus"),
    "mtask.model.scheduling.triggers": ("Cron",),
    "mtask.store.flows.operating": ("ChangedFlow",),
    "mtask.store.flows.publishing": ("PublishedFlow",),
    "mtask.store.lists.counting": ("Count",),
    "mtask.store.lists.by_queue": ("QueueCounts",),
    "mtask.store.tasks.publishing": ("Published",),
    "mtask.version": ("__version__",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
#: `import mtask` alone is enough to reach these, too: `mtask.errors.InvalidInput`, for example.
_PACKAGES = frozenset({"app", "client", "errors", "logs", "model", "settings", "store", "version"})

if not TYPE_CHECKING:  # else type checkers would take every name for a public one
    __getattr__, __dir__ = names_of(__name__, _MODULE_OF, _PACKAGES)
