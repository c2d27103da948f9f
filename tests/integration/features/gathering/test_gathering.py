"""Between the read and the call: the task is claimed, removed or published by somebody else."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import pytest

from mtask.features.gathering import publish as gathering
from mtask.features.gathering.publish import GatherPolicy
from mtask.kernel.document.options import TaskOption
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations.publish import NewTask, Published
from tests.clients import claim, fail, succeed

ID = "work:k"
POLICY = GatherPolicy("latest", timedelta(hours=1))


def new(params: Any) -> NewTask:
    return NewTask(ID, "work", "k", "default", params, TaskOption().stored())


def publish(store: SyncStore, params: Any, policy: GatherPolicy = POLICY, amid: Callable[[], Any] | None = None) -> Any:
    """Publish a call, and act between its read and its write."""

    def operation() -> Generator[Any, Any, Any]:
        calls = gathering.publish([new(params)], policy, in_session=False)
        answer = yield next(calls)
        if amid is not None:
            amid()
        while True:
            try:
                answer = yield calls.send(answer)
            except StopIteration as stop:
                return stop.value

    (result,) = store.run(operation())
    assert isinstance(result, Published)
    return result


def document(store: SyncStore) -> dict[str, Any]:
    found = store.tasks.find_one({"_id": ID})
    assert found is not None
    return found


def test_a_claim_between_makes_the_call_the_next_round(store: SyncStore) -> None:
    publish(store, 1, GatherPolicy("latest"))
    assert publish(store, 2, amid=lambda: claim(store, ID)).updated
    found = document(store)
    assert (found["params"], found["again"]["params"], found["task_state"]["status"]) == (1, 2, "RUNNING")


def test_a_failure_between_leaves_the_list_as_it_is(store: SyncStore) -> None:
    publish(store, 1, GatherPolicy("calls"))
    assert publish(store, 2, GatherPolicy("calls"), amid=lambda: fail(store, ID, claim(store, ID))).updated
    found = document(store)
    assert (found["params"], found["again"]["params"]) == ({"calls": [1]}, {"calls": [2]})


def test_a_whole_run_between_makes_the_call_a_new_round(store: SyncStore) -> None:
    publish(store, 1, GatherPolicy("latest"))
    assert publish(store, 2, amid=lambda: succeed(store, ID, claim(store, ID))).updated
    found = document(store)
    assert (found["params"], found["task_state"]["status"]) == (2, "INIT")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_removal_or_a_faster_publisher_between_leaves_one_task(store: SyncStore, is_there: bool) -> None:
    if is_there:
        publish(store, 1)
        assert publish(store, 2, amid=lambda: store.tasks.delete_one({"_id": ID})).created
    else:
        assert publish(store, 2, amid=lambda: publish(store, 1)).updated
    assert store.tasks.count_documents({}) == 1
    assert document(store)["params"] == 2


def test_a_faster_call_that_was_asked_later_stays(store: SyncStore) -> None:
    publish(store, 1)
    late = publish(store, 2, amid=lambda: (publish(store, 3), publish(store, 4)))
    assert document(store)["params"] == 4
    assert late.updated is False
