"""The list of open tasks, while others take tasks between its reads, and amid malformed documents."""

from __future__ import annotations

from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.search import due, walks
from mtask.search import lists as listing
from mtask.search.order import Order, Place, cursor_of, place_of
from mtask.search.walks import Asked
from tests.explaining import only
from tests.integration.search.test_due import task
from tests.spread import NOW

Document = dict[str, Any]
OPEN = Asked({"status": ["INIT"]})


def insert(store: SyncStore, *documents: Document) -> list[str]:
    store.tasks.insert_many(documents, bypass_document_validation=True)
    return [document["_id"] for document in documents]


def batch(name: str, count: int) -> list[Document]:
    return [task(name, number, NOW, TaskStatus.INIT) for number in range(count)]


def all_pages(store: SyncStore, asked: Asked, limit: int) -> list[Any]:
    """Return the ids of all pages. Each cursor passes through its text."""
    read: list[Any] = []
    after: Place | None = None
    for _ in range(500):
        found = store.run(listing.page(asked, limit, after, ["status"]))
        read += [row["_id"] for row in found.documents]
        if found.next is None:
            return read
        after = place_of(cursor_of(asked.order, found.next), asked.order)
    raise AssertionError("the list has no end")


def test_a_batch_that_is_taken_before_it_is_read_anew_does_not_end_the_list(store: SyncStore) -> None:
    insert(store, *batch("a", 1), *batch("b", 2))
    behind = insert(store, *batch("c", 50))
    operation = listing.page(OPEN, 2, None, ["status"])
    call = next(operation)
    answer = store.run(only(call))
    store.tasks.update_many({"name": "b"}, {"$set": {"task_state.status": "SUCCESS", "quiet_time": NOW}})
    try:
        while True:
            answer = store.run(only(operation.send(answer)))
    except StopIteration as stop:
        found = stop.value
    assert [row["_id"] for row in found.documents] == ["a:00/000000", behind[-1]]
    assert found.next == Place(NOW, behind[-1], NOW)


@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("tied", [0, 2_000])
@pytest.mark.parametrize("asked", [OPEN, Asked({"status": ["INIT"], "queue": "q"})], ids=["walk", "small set"])
def test_malformed_documents_neither_stop_nor_turn_a_list(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch, limit: int, tied: int, asked: Asked
) -> None:
    monkeypatch.setattr(due, "TIED", tied)
    wanted = insert(store, *({**one, "queue": "q"} for one in [*batch("a", 4), *batch("b", 4)]))
    odd = [{**one, "queue": "q", "_id": f"odd:{number}"} for number, one in enumerate(batch("odd", 5))]
    odd[0]["name"] = 7
    del odd[1]["name"]
    odd[2]["task_state"]["create_time"] = DatetimeMS(10**15)
    del odd[3]["task_state"]["create_time"]
    odd[4]["task_state"]["next_preempt_time"] = DatetimeMS(10**15)
    insert(store, *odd)
    read = [task_id for task_id in all_pages(store, asked, limit) if not str(task_id).startswith("odd")]
    assert sorted(read) == sorted(wanted)


def test_a_walk_that_tests_ends_at_dates_that_no_list_can_name(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "STEPS", (5, 5))
    wanted = insert(store, *batch("a", 30))
    far = batch("far", 30)
    for one in far:
        one["task_state"]["next_preempt_time"] = DatetimeMS(10**15)
    insert(store, *far)
    asked = Asked({"status": ["INIT"], "params": {"user.id": 7}})
    users = {row["_id"]: row["params"]["user"]["id"] for row in store.tasks.find({"name": "a"}, {"params": 1})}
    assert all_pages(store, asked, 3) == [task_id for task_id in reversed(wanted) if users[task_id] == 7]


def test_a_document_with_another_kind_of_id_does_not_end_a_list(store: SyncStore) -> None:
    wanted = insert(store, *batch("a", 12))
    insert(store, {**batch("a", 1)[0], "_id": 7})
    for limit in (2, 5):
        assert set(wanted) <= set(all_pages(store, OPEN, limit))


@pytest.mark.parametrize("status", ["INIT", "FAIL"])
def test_a_cursor_of_a_tenant_tells_no_key_of_another_one(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(walks, "MOST", 1)
    monkeypatch.setattr(due, "SORTED", 0)
    monkeypatch.setattr(listing, "STEPS", (10, 20))
    others = [task("n1", number, NOW, TaskStatus(status)) for number in range(60)]
    insert(store, *({**one, "_id": f"n1:victim:{number}", "tenant": "victim"} for number, one in enumerate(others)))
    insert(store, {**others[0], "_id": "n1:me:1", "key": "me:1", "tenant": "me"}, *batch("n2", 1))
    asked = Asked({"status": [status], "tenant": "me"})
    after: Place | None = None
    told: list[str] = []
    for _ in range(50):
        after = store.run(listing.page(asked, 5, after, [])).next
        if after is None:
            break
        told.append(cursor_text(asked.order, after))
    assert bool(told) == (status == "INIT"), "a list of finished tasks passes an instant as a whole"
    assert not any("victim" in text for text in told)


def cursor_text(order: Order, place: Place) -> str:
    return repr(place_of(cursor_of(order, place), order))


@pytest.mark.parametrize("order", list(Order))
def test_the_longest_cursor_is_taken(order: Order) -> None:
    place = Place(NOW, "n" * 256 + ":" + "\x01" * 512, NOW if order is Order.DUE else None)
    assert place_of(cursor_of(order, place), order) == place
