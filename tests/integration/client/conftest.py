"""A fixture of the tests of clients: each kind of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import KINDS, AnyClient, open_client


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    """Give a client of each kind, on the test's database."""
    with open_client(request.param, mongo_uri, database_name) as opened:
        yield opened
