"""Fixtures of the tests of clients: each kind of them, and one to look with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mtask import Client
from tests.clients import AnyClient, open_client


# Motor differs from the driver's own asyncio client only below the store. Tests of connections, transactions and events
# run with all kinds.
@pytest.fixture(params=["sync", "asyncio", pytest.param("motor", marks=pytest.mark.long)])
def client(request: pytest.FixtureRequest, mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    """Give a client of each kind, on the test's database."""
    with open_client(request.param, mongo_uri, database_name) as opened:
        yield opened


@pytest.fixture
def reader(mongo_uri: str, database_name: str) -> Iterator[Client]:
    """Give a sync client of the test's database."""
    with Client(mongo_uri, database=database_name) as made:
        yield made
