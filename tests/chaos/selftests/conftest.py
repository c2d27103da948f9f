"""The fixture of the checker's tests: a story that they tell."""

from __future__ import annotations

import pytest

from tests.chaos.selftests.story import Story
from tests.mongo import Client


@pytest.fixture
def story(mongo_session_client: Client, database_name: str) -> Story:
    """Begin a story in the test's database."""
    return Story(mongo_session_client[database_name]["tasks"])
