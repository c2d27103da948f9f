"""A fixture of the tests of upkeep: a database that is set up."""

from __future__ import annotations

import pytest

from mtask.kernel.driver.stores import SyncStore
from tests.integration.stores import ready_store
from tests.mongo import Client


@pytest.fixture
def store(mongo: Client, database_name: str) -> SyncStore:
    """Set up the test's database, and work on it as the engine does."""
    return ready_store(mongo, database_name)
