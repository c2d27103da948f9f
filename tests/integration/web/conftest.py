"""A server of the API and of the page for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest

from tests.integration.web.serving import Serve, Serving, serving_on
from tests.loops import in_loop


@pytest.fixture
def serving(mongo_uri: str, database_name: str) -> Serve:
    """Return what serves the test's database: `async with serving(settings) as server`."""
    return partial(serving_on, mongo_uri, database_name)


@pytest.fixture
@in_loop
async def server(serving: Serve) -> AsyncIterator[Serving]:
    """Serve the test's database with the usual settings."""
    async with serving() as made:
        yield made
