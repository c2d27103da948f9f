"""Publishes tasks with middleware around each publish. See `mtask.app.middleware`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mtask.arguments.publish import TaskSpec
from mtask.kernel.document.handlers import Around, Begun, enter, leave
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations.publish import Published

PublishMiddleware = Sequence[Around[TaskSpec]]


def publish(
    spec: TaskSpec, middleware: PublishMiddleware, then: Callable[[TaskSpec], Operation[Published]]
) -> Operation[Published]:
    """Publish one task with the middleware around the publish. Before its `yield`, a middleware may change the spec."""
    begun = enter(middleware, spec)
    try:
        published = yield from then(spec)
    except BaseException as error:
        leave(begun, None, error)
        raise
    leave(begun, published)
    return published


def publish_many(
    specs: Iterable[TaskSpec], middleware: PublishMiddleware, then: Callable[[list[TaskSpec]], Operation[list[Any]]]
) -> Operation[list[Any]]:
    """Publish many tasks, with the middleware around the publish of each task.

    The middleware gets copies of the specs. If a middleware raises an error before its `yield`, no task is published.
    """
    own = [copied(spec) for spec in specs]
    all_begun: list[Begun] = []
    try:
        for spec in own:
            # For an object that is no TaskSpec, `publish_many` raises an error with a clear message.
            all_begun.append(enter(middleware, spec) if isinstance(spec, TaskSpec) else [])  # noqa: PERF401 each as it is
        results = yield from then(own)
    except BaseException as error:
        for begun in all_begun:
            leave(begun, None, error)
        raise
    for begun, result in zip(all_begun, results, strict=True):
        is_error = isinstance(result, Exception)
        leave(begun, None if is_error else result, result if is_error else None)
    return results


def copied(spec: TaskSpec) -> TaskSpec:
    """Return a copy of a spec that a middleware may change."""
    own = copy.copy(spec)
    if isinstance(own, TaskSpec):
        own.options = own.options.copy()
        own.callback = dict(own.callback) if isinstance(own.callback, Mapping) else own.callback
        own.lookup = dict(own.lookup) if isinstance(own.lookup, Mapping) else own.lookup
    return own
