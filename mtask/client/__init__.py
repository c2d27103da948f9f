"""Clients publish, query, cancel and retry tasks. The sync and the asyncio client run the same operations."""

from typing import TYPE_CHECKING

from mtask.lazy import names_of

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
    __getattr__, __dir__ = names_of(__name__, _MODULE_OF)
