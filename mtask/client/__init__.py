"""Clients: publish, query, cancel, retry. Two thin shells, sync and async, over the same operations."""

from mtask.client.aio import AsyncClient
from mtask.client.asking.publication import TaskSpec
from mtask.client.sync import Client

__all__ = ["AsyncClient", "Client", "TaskSpec"]
