"""Clients publish, query, cancel and retry tasks. The sync and the asyncio client run the same operations."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtask.client.aio import AsyncClient
    from mtask.client.asking.flows import Flow
    from mtask.client.asking.publication import TaskSpec
    from mtask.client.sync import Client

__all__ = ["AsyncClient", "Client", "Flow", "TaskSpec"]

#: A name is imported at its first use, as in `mtask/__init__.py`: the parts of a client import no other client.
_MODULE_OF = {
    "AsyncClient": "mtask.client.aio",
    "Client": "mtask.client.sync",
    "Flow": "mtask.client.asking.flows",
    "TaskSpec": "mtask.client.asking.publication",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mtask.client' has no attribute {name!r}")
        found = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """List the public names, whether they are imported or not."""
        return sorted({*globals(), *_MODULE_OF})
