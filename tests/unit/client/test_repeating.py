"""A publish without an answer: its error tells the keys that were made, so that a repeat publishes the same tasks."""

from __future__ import annotations

from typing import Any

import pytest

from mtask import TaskSpec
from mtask.arguments import publish as publication
from mtask.errors import DatabaseBusy, DatabaseTimeout, DatabaseUnavailable
from mtask.kernel.driver.codec import Codec
from mtask.kernel.operations.publish import Policy

TWICE = "nothing is done twice"


def raised(operation: Any, error: DatabaseUnavailable) -> DatabaseUnavailable:
    """Let the first call of an operation fail."""
    next(operation)
    with pytest.raises(DatabaseUnavailable) as caught:
        operation.throw(error)
    assert caught.value is error
    return error


@pytest.mark.parametrize("kind", [DatabaseUnavailable, DatabaseTimeout])
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_publish_without_a_key_tells_the_key_that_it_made(kind: type[DatabaseUnavailable], tenant: str | None) -> None:
    operation = publication.publish(TaskSpec("mail"), Policy(), tenant=tenant)
    assert next(operation).target == "codec"
    sent = operation.send(Codec())
    stored = sent.args[0]["_id"].partition(":")[2]
    with pytest.raises(DatabaseUnavailable) as caught:
        operation.throw(kind("timed out"))
    key = caught.value.keys[0]
    assert stored == (key if tenant is None else f"{tenant}:{key}")
    assert f"then repeat with key={key!r}: with other keys, tasks may exist twice." in str(caught.value)
    assert TWICE not in str(caught.value)


def test_publish_with_a_key_may_be_repeated_as_it_is() -> None:
    error = raised(publication.publish(TaskSpec("mail", key="k"), Policy()), DatabaseUnavailable("timed out"))
    assert not error.keys
    assert TWICE in str(error)


def test_publish_that_was_not_carried_out_is_repeated_as_it_is() -> None:
    error = raised(publication.publish(TaskSpec("mail"), Policy()), DatabaseBusy("no room"))
    assert not error.keys


def test_publish_of_many_tells_the_keys_by_place() -> None:
    specs = [TaskSpec("mail", key="own"), *(TaskSpec("mail") for _ in range(4))]
    error = raised(publication.publish_many(specs, Policy(), in_session=False), DatabaseUnavailable("timed out"))
    assert [*error.keys] == [1, 2, 3, 4]
    assert f"key={error.keys[1]!r} for task 1" in str(error)
    assert "..." in str(error)
    assert error.keys[4] not in str(error)
