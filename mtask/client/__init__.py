"""Clients: publish, query, cancel, retry. A thin sync and a thin async shell over the same store functions."""

from mtask.client.aio import AsyncClient
from mtask.client.asking.publication import TaskSpec
from mtask.client.sync import Client

__all__ = ["AsyncClient", "Client", "TaskSpec"]
