"""Django's `task`, of Django itself or of its back-port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Callable

    # The tasks of mtask's backend have more than the stubs of Django know.
    @overload
    def task(function: Any, /) -> Any: ...
    @overload
    def task(**given: Any) -> Callable[[Any], Any]: ...
    def task(function: Any = None, /, **given: Any) -> Any: ...
else:
    try:
        from django.tasks import task
    except ImportError:
        from django_tasks import task

__all__ = ["task"]
