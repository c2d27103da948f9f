"""Public names of a package are imported at their first use: a process needs few, and all take long to import."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


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
