"""A bridge from Celery: programs written for Celery run on mtask, but for their imports.

`from mtask.contrib.celery import Celery, shared_task` stands for `from celery import ...`, and so do the modules
`canvas`, `exceptions`, `result`, `schedules` and `utils.log`. What has no counterpart raises NotMapped, which says what
to write instead, and `python -m mtask.contrib.celery.check src/` finds it beforehand. See docs/from-celery.md.
"""

from __future__ import annotations

from typing import Any

from mtask.contrib.celery import words
from mtask.contrib.celery.app import Celery, current_app, shared_task
from mtask.contrib.celery.canvas import Signature, chain, chord, group, signature
from mtask.contrib.celery.exceptions import MaxRetriesExceededError, NotMapped, Retry
from mtask.contrib.celery.result import AsyncResult, EagerResult, GroupResult
from mtask.contrib.celery.schedules import crontab
from mtask.contrib.celery.tasks import Task

__all__ = [
    "AsyncResult",
    "Celery",
    "EagerResult",
    "GroupResult",
    "MaxRetriesExceededError",
    "NotMapped",
    "Retry",
    "Signature",
    "Task",
    "chain",
    "chord",
    "crontab",
    "current_app",
    "group",
    "shared_task",
    "signature",
]


def __getattr__(name: str) -> Any:
    if name in words.NAMES:
        raise NotMapped(name, words.NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
