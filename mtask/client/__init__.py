"""Clients publish, query, cancel and retry tasks. The sync and the asyncio client run the same operations."""

from mtask.client.aio import AsyncClient
from mtask.client.asking.flows import Flow
from mtask.client.asking.publication import TaskSpec
from mtask.client.sync import Client

__all__ = ["AsyncClient", "Client", "Flow", "TaskSpec"]
