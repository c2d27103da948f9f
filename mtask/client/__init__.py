"""Clients publish, query, cancel and retry tasks. The sync and the asyncio client run the same operations."""

from typing import TYPE_CHECKING

from mtask.lazy import names_of

if TYPE_CHECKING:
    from mtask.arguments.publish import TaskSpec
    from mtask.client.aio import AsyncClient
    from mtask.client.sync import Client
    from mtask.features.flows.client import Flow

__all__ = ["AsyncClient", "Client", "Flow", "TaskSpec"]

#: A name is imported at its first use, as in `mtask/__init__.py`: the parts of a client import no other client.
_MODULE_OF = {
    "AsyncClient": "mtask.client.aio",
    "Client": "mtask.client.sync",
    "Flow": "mtask.features.flows.client",
    "TaskSpec": "mtask.arguments.publish",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(__name__, _MODULE_OF)
