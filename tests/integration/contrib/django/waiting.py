"""Waiting for the results of Django's tasks."""

from __future__ import annotations

from typing import Any

from tests.mongo import PATIENCE, eventually


def finished(result: Any) -> Any:
    """Wait until a task has finished; return its result, read anew."""

    def is_finished() -> bool:
        result.refresh()
        return bool(result.is_finished)

    eventually(is_finished, PATIENCE, f"{result.id} finished: {result.status}")
    return result
