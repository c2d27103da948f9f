"""Limits of retries that a document can keep count of."""

from __future__ import annotations

import pytest

from mtask.errors import InvalidOption
from mtask.kernel.document.options import MAX_COUNTED_RUNS, build_option

SEVERAL = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("worker_ids", "limit"), [(["a"], MAX_COUNTED_RUNS), (["a"], 1500), (SEVERAL, MAX_COUNTED_RUNS // 4)]
)
def test_with_each_workers_own_limit_more_tries_than_the_document_holds_are_refused(
    worker_ids: list[str], limit: int
) -> None:
    with pytest.raises(InvalidOption, match=str(MAX_COUNTED_RUNS)):
        build_option({"retry_scope": "worker", "specific_worker_ids": worker_ids, "max_unexpected_retries": limit})


@pytest.mark.parametrize(("worker_ids", "limit"), [(["a"], MAX_COUNTED_RUNS - 1), (SEVERAL, MAX_COUNTED_RUNS // 4 - 1)])
def test_with_each_workers_own_limit_as_many_tries_as_the_document_holds_are_fine(
    worker_ids: list[str], limit: int
) -> None:
    options = {"retry_scope": "worker", "specific_worker_ids": worker_ids, "max_unexpected_retries": limit}
    assert build_option(options).max_unexpected_retries == limit


def test_with_the_tasks_limit_any_number_of_tries_is_fine() -> None:
    assert build_option({"max_unexpected_retries": 100_000}).max_unexpected_retries == 100_000
