"""A collection of Agenda, on the server of mtask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pymongo.collection import Collection

from tests.integration.contrib.agenda.jobs import Document
from tests.mongo import Client as Mongo


@pytest.fixture
def agenda(mongo: Mongo, database_name: str) -> Iterator[Collection[Document]]:
    """Return the collection of Agenda, in a database of its own."""
    name = f"{database_name}_js"
    yield mongo[name]["agendaJobs"]
    mongo.drop_database(name)
