"""The database of the properties."""

from __future__ import annotations

import pytest

from mtask.kernel.driver.stores import SyncStore


@pytest.fixture(scope="module")
def store(module_store: SyncStore) -> SyncStore:
    """Share one database among all examples: each takes away what it has inserted."""
    return module_store
