"""Public names and rarely used modules are imported at their first use: a process needs few, and all take long."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any


def names_of(
    package: str, module_of: Mapping[str, str], packages: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package with these names, by module, and these packages below it."""
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = namespace[name] = getattr(import_module(module_of[name]), name)
        return found

    def names() -> list[str]:
        return sorted({*namespace, *module_of, *packages})

    return get, names


class LazyModule:
    """Stands for a module that is imported when the first of its names is used. Threads may use it at once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)
