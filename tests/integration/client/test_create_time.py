"""A publish tells when its task was created, if a middleware asks for it; and a client reads in a transaction."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Generator
from typing import Any

import pytest

from mtask import Client, TaskNotFound, TaskSpec
from mtask.kernel.operations.publish import Published
from tests.mongo import Client as Mongo


def ask(spec: TaskSpec) -> Generator[None, Any, None]:
    """Ask for the create_time, around the publish."""
    spec.tells_time = True
    yield


def test_time_of_a_fresh_task_is_told_where_it_is_asked_for(mongo: Mongo, database_name: str) -> None:
    with (
        Client(mongo, database=database_name) as plain,
        Client(mongo, database=database_name, middleware=[ask]) as client,
    ):
        published = client.publish("a", {"n": 1}, delay=60)
        stored = client.get("a", published.key)
        assert published.created
        assert published.create_time == stored.task_state.create_time
        assert pickle.loads(pickle.dumps(published)).create_time == published.create_time
        assert copy.copy(published) == Published(published.task_id, created=True, updated=False)
        # With a key the caller may meet a task that exists, and reads it.
        assert client.publish("a", key="k").create_time is None
        assert plain.publish("a").create_time is None


def test_transaction_sees_its_own_task_and_its_rollback_leaves_none(mongo: Mongo, database_name: str) -> None:
    with Client(mongo, database=database_name, middleware=[ask]) as client:
        client.init()
        with mongo.start_session() as session, session.start_transaction():
            published = client.publish("a", session=session)
            inside = client.get("a", published.key, session=session)
            assert inside.task_state.create_time == published.create_time
            with pytest.raises(TaskNotFound):
                client.get("a", published.key)
            session.abort_transaction()
        with pytest.raises(TaskNotFound):
            client.get("a", published.key)
