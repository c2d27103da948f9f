"""Which misfits are handed on, which tasks a worker may claim, and the upcasts of an app. Pure functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from mtask.errors import HandlerError, InvalidInput, shown
from mtask.kernel.document import rules
from mtask.kernel.document.handlers import Handler, check_version, handler_of, hinted, name_of
from mtask.kernel.document.identity import check_name
from mtask.kernel.document.task import Task
from mtask.kernel.statements.filters import Filter

Upcast = Callable[[Any], Any]
#: The time for which a misfit waits for a worker whose version it fits. After that, it is FAIL.
PATIENCE = timedelta(hours=1)


# --- misfits ---------------------------------------------------------------------------------------------


def may_fit_others(declared: str | None, own: str, started: Sequence[str]) -> bool:
    """Whether params that do not fit this worker may fit a later version of the handler.

    `declared`: the version of which the publisher knew. `own`: this worker's. `started`: the versions of the registry,
    the last started one last. A version that is not there yet is of a deploy whose workers are still to start. If this
    worker's is not there, the worker has just started, so it is the last one.
    """
    if declared is None or declared == own:
        return False
    if declared not in started:
        return True
    return own in started and started.index(declared) > started.index(own)


def misfit_since(task: Task, run_id: str) -> datetime:
    """Return the time since which the params fit no worker: that of the first misfit of this round, or of this run."""
    runs = rules.current_runs(task)
    times = [run.misfit_since for run in runs if run.misfit_since is not None]
    return min([*times, *(run.claim_time for run in runs if run.run_id == run_id)])


def waits_in_vain(task: Task, run_id: str) -> bool:
    """Whether a misfit has waited for too long. Both times are the server's."""
    since = misfit_since(task, run_id)
    return any(run.claim_time - since >= PATIENCE for run in rules.current_runs(task) if run.run_id == run_id)


# --- versions --------------------------------------------------------------------------------------------


def above_one(handlers: Iterable[Handler]) -> dict[str, int]:
    """Return the versions of those handlers that have one above 1, by name."""
    return {handler.name: handler.version for handler in handlers if handler.version > 1}


def of_known_versions(versions: Mapping[str, int]) -> Filter:
    """Match the tasks whose version a worker has. `versions`: those of its handlers that are above 1, by name."""
    if not versions:
        return {"version": {"$not": {"$gt": 1}}}
    others = {"name": {"$nin": sorted(versions)}, "version": {"$gt": 1}}
    return {"$nor": [others, *({"name": name, "version": {"$gt": most}} for name, most in sorted(versions.items()))]}


def is_known_version(document: Mapping[str, Any], versions: Mapping[str, int]) -> bool:
    """Whether a worker has the version of a task, as `of_known_versions` says. The document may be malformed."""
    version = document.get("version")
    if version is None:
        return True
    if isinstance(version, bool) or not isinstance(version, int | float):
        return True
    return not version > versions.get(str(document.get("name")), 1)


# --- upcasts ---------------------------------------------------------------------------------------------


class Upcasts:
    """The functions of an app that turn params of a version into those of the next one."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], Upcast] = {}

    def add(self, task: object, from_version: int, function: Upcast) -> None:
        """Register a function for a handler or its name; raise HandlerError."""
        try:
            handler = handler_of(task)
            name = handler.name if handler is not None else check_name(task)
        except InvalidInput as error:
            raise HandlerError(shown(task), str(error)) from None
        check_version(name, "from_version", from_version)
        if not callable(function) or inspect.isclass(function):
            raise HandlerError(name, f"its upcast from version {from_version} is no function")
        if _is_async(function):
            of = f"{name_of(function)}, its upcast from version {from_version},"
            raise HandlerError(name, f"{of} is async or yields: it only changes params, so use a plain function")
        if (name, from_version) in self._steps:
            raise HandlerError(name, f"it has two upcasts from version {from_version}")
        self._steps[name, from_version] = function

    def include(self, other: Upcasts) -> None:
        """Add those of another app; raise HandlerError if both have one of the same step."""
        for (name, step), function in other._steps.items():
            if self._steps.get((name, step), function) is not function:
                raise HandlerError(name, f"both apps have an upcast from version {step}")
        self._steps.update(other._steps)

    def give(self, handlers: Mapping[str, Handler]) -> None:
        """Give the handlers their upcasts; raise HandlerError if a step is missing, or one leads nowhere."""
        by_name: dict[str, dict[int, Upcast]] = {}
        for (name, step), function in sorted(self._steps.items(), key=lambda item: item[0]):
            by_name.setdefault(name, {})[step] = function
        for name, steps in by_name.items():
            handler = handlers.get(name)
            if handler is None:
                raise HandlerError(name, "it has an upcast and is no task: add @app.task")
            if max(steps) >= handler.version:
                reason = f"it has an upcast from version {max(steps)}, and @app.task says version={handler.version}"
                raise HandlerError(name, f"{reason}: raise the version")
            missing = next((step for step in range(min(steps), handler.version) if step not in steps), None)
            if missing is not None:
                raise HandlerError(name, f"the upcast from version {missing} to {missing + 1} is missing")
            handler.upcasts.update(steps)


def _is_async(function: Upcast) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(hinted(function)) for is_kind in kinds)
