"""What workers read of each other: each time what may change, and what they serve once for each registration."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from mtask.kernel.driver.operation import Call
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import workers
from tests.clients import server_now
from tests.explaining import only
from tests.integration.stores import register

Document = dict[str, Any]


def read(store: SyncStore, former: Sequence[Document] = ()) -> tuple[dict[str, Document], list[Call]]:
    """Return what a worker of the queue "default" reads of the others, by their ids, and the calls for it."""
    calls: list[Call] = []

    def noted() -> Any:
        operation = workers.peers("me", ["default"], former)
        try:
            call = next(operation)
            while True:
                calls.append(call)
                call = operation.send((yield call))
        except StopIteration as stop:
            return stop.value

    return {found["_id"]: found for found in store.run(noted())}, calls


def test_what_a_worker_serves_is_read_once(store: SyncStore) -> None:
    register(store, "one", ["work", "mail"])
    register(store, "two", ["work", "mail"], queues=["more", "default"])
    before, calls = read(store)
    assert [call.method for call in calls] == ["rows", "find"]
    assert before["one"]["names"] == ("work", "mail")
    assert before["two"]["names"] is before["one"]["names"]
    assert before["two"]["queues"] == ("more", "default")
    register(store, "three", ["work", "mail"])
    store.database["workers"].update_one({"_id": "two"}, {"$set": {"status": "stopping", "concurrency": 3}})
    after, calls = read(store, list(before.values()))
    assert calls[1].args[0] == {"_id": {"$in": ["three"]}}
    assert after["three"]["names"] is before["one"]["names"]
    changed = {"status": "stopping", "concurrency": 3}
    assert {**after["two"], "now": 0} == {**before["two"], **changed, "now": 0}
    again, calls = read(store, list(after.values()))
    assert [call.method for call in calls] == ["rows"]
    assert again.keys() == {"one", "two", "three"}


def test_what_a_worker_serves_is_read_again_when_it_has_registered_again(store: SyncStore) -> None:
    register(store, "one", ["work"], incarnation="first")
    before, _ = read(store)
    store.database["workers"].update_one({"_id": "one"}, {"$set": {"status": "stopped"}})
    register(store, "one", ["mail"], incarnation="second")
    after, _ = read(store, list(before.values()))
    assert after["one"]["names"] == ("mail",)


def test_only_live_workers_of_these_queues_are_read(store: SyncStore) -> None:
    for worker_id in ("here", "stopped", "silent", "odd"):
        register(store, worker_id, ["work"])
    register(store, "elsewhere", ["work"], queues=["other"])
    past = server_now(store) - timedelta(minutes=1)
    for worker_id, fields in (
        ("stopped", {"status": "stopped"}),
        ("silent", {"heartbeat_expire_time": past}),
        ("odd", {"heartbeat_expire_time": "soon"}),
    ):
        store.database["workers"].update_one({"_id": worker_id}, {"$set": fields}, bypass_document_validation=True)
    found, _ = read(store)
    assert found.keys() == {"here"}
    assert abs(found["here"]["now"] - server_now(store)) < timedelta(minutes=1)


@pytest.mark.parametrize("names", ["work", 5, None, [["work"], {"a": 1}, 7]], ids=repr)
def test_malformed_names_of_a_worker_are_read(store: SyncStore, names: Any) -> None:
    register(store, "one", ["work"])
    change = {"$set": {"names": names}, "$unset": {"incarnation": ""}}
    store.database["workers"].update_one({"_id": "one"}, change, bypass_document_validation=True)
    found, _ = read(store)
    assert all(type(name) is str for name in found["one"]["names"])


def test_worker_reads_not_what_it_serves_itself(store: SyncStore) -> None:
    register(store, "me", ["work"])
    found, calls = read(store)
    assert [call.method for call in calls] == ["rows"]
    assert "names" not in found["me"]
    register(store, "one", ["work"])
    found, calls = read(store, list(found.values()))
    assert calls[1].args[0] == {"_id": {"$in": ["one"]}}


def test_worker_that_goes_between_the_two_reads_serves_nothing_until_it_comes_back(store: SyncStore) -> None:
    register(store, "one", ["work"])
    operation = workers.peers("me", ["default"])
    found = store.run(only(next(operation)))
    store.database["workers"].delete_one({"_id": "one"})
    served = store.run(only(operation.send(found)))
    with pytest.raises(StopIteration) as stop:
        operation.send(served)
    [gone] = stop.value.value
    assert "names" not in gone
    register(store, "one", ["work"])  # with the same incarnation
    assert read(store, [gone])[0]["one"]["names"] == ("work",)
