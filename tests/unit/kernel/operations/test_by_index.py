"""Reads by an index that another process is just making."""

from __future__ import annotations

from typing import Any

import pytest

from mtask.errors import OperationFailed, SchemaMismatch
from mtask.kernel.driver.operation import tasks
from mtask.kernel.operations.change import by_index

_CALL = tasks("find", {}, hint="mtask_status")
_LACKING = OperationFailed("planner returned error: hint provided does not correspond to an existing index", 2)


def listed(*names: str) -> dict[str, Any]:
    return {"cursor": {"firstBatch": [{"name": name} for name in names]}}


def test_read_is_sent_again_if_its_index_has_been_made_meanwhile() -> None:
    read = by_index(_CALL)
    assert next(read) == _CALL
    assert read.throw(_LACKING).args[0] == {"listIndexes": "tasks"}
    assert read.send(listed("_id_", "mtask_status")) == _CALL
    with pytest.raises(StopIteration) as ended:
        read.send(["found"])
    assert ended.value.value == ["found"]


def test_index_that_is_still_being_made_is_told_of() -> None:
    read = by_index(_CALL)
    next(read)
    read.throw(_LACKING)
    read.send(listed("mtask_status"))
    with pytest.raises(SchemaMismatch, match="mtask_status is still being made"):
        read.throw(_LACKING)


def test_index_that_nobody_makes_is_told_of() -> None:
    read = by_index(_CALL)
    next(read)
    read.throw(_LACKING)
    with pytest.raises(SchemaMismatch, match="mtask_status is missing"):
        read.send(listed("_id_"))


@pytest.mark.parametrize("error", [OperationFailed("another", 2), OperationFailed("hint provided", 9)], ids=str)
def test_other_refusals_are_told_as_they_are(error: OperationFailed) -> None:
    read = by_index(_CALL)
    next(read)
    with pytest.raises(OperationFailed) as told:
        read.throw(error)
    assert told.value is error
