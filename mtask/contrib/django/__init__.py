"""The task framework of Django on mtask: a backend for `django.tasks`. docs/django.md is the page for users."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtask.contrib.django.backend import MtaskBackend
    from mtask.contrib.django.declaring import options, schedule

__all__ = ["MtaskBackend", "options", "schedule"]
_MODULES = {"MtaskBackend": "backend", "options": "declaring", "schedule": "declaring"}


def __getattr__(name: str) -> Any:
    # Django imports this package for its app, before models may be imported.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
