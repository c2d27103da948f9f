"""The list of open tasks while very many are due at one instant, in large batches amid ids of other tasks."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.search import due
from mtask.search import lists as listing
from mtask.search.order import Order, Place, cursor_of, place_of
from mtask.search.walks import Asked
from tests.explaining import examined_by
from tests.spread import NOW, document

PAGE = 50
#: Of three batches, two thirds wait. So 2,000 tasks are due at one instant.
BATCH = 1_000
#: Batches by name and time of creation. The two of the name `mail` differ by that alone.
BATCHES = [("mail", NOW), ("mail", NOW - timedelta(seconds=1)), ("report", NOW)]
Document = dict[str, Any]


def task(name: str, number: int, created: Any, status: TaskStatus) -> Document:
    task = document(number)
    key = f"{created:%S}/{number:06}"
    times: Document = {"finish_time": NOW} if status.is_final else {"next_preempt_time": NOW}
    state = {**task["task_state"], "status": status.value, "create_time": created}
    state = {field: value for field, value in state.items() if field not in {"finish_time", "next_preempt_time"}}
    return {**task, "_id": f"{name}:{key}", "name": name, "key": key, "task_state": {**state, **times}}


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all bounds as small as this database is, in comparison with one of millions of tasks."""
    monkeypatch.setattr(listing, "STEPS", (250, 250))
    monkeypatch.setattr(due, "SORTED", 1_500)
    monkeypatch.setattr(due, "TIED", 500)


@pytest.fixture(scope="module")
def store(module_store: SyncStore) -> SyncStore:
    chosen = random.Random(7)
    tasks = [task("a", number, NOW, TaskStatus.SUCCESS) for number in range(BATCH)]
    for name, created in BATCHES:
        # The first ids are done, as in a batch that workers drain. A few of the others run.
        for number in range(BATCH):
            open_status = TaskStatus.RUNNING if chosen.random() < 0.1 else TaskStatus.INIT
            tasks.append(task(name, number, created, TaskStatus.SUCCESS if number < BATCH // 3 else open_status))
    tasks += [task("a-b", number, NOW - timedelta(seconds=number), TaskStatus.INIT) for number in range(BATCH)]
    chosen.shuffle(tasks)
    module_store.tasks.insert_many(tasks, ordered=False, bypass_document_validation=True)
    return module_store


def _expected(store: SyncStore, statuses: list[str]) -> list[str]:
    found = list(store.tasks.find({"task_state.status": {"$in": statuses}}, {"name": 1, "task_state.create_time": 1}))
    found.sort(key=lambda task: task["_id"], reverse=True)
    found.sort(key=lambda task: task["task_state"]["create_time"], reverse=True)
    return [task["_id"] for task in sorted(found, key=lambda task: str(task["name"]))]


@pytest.mark.parametrize("statuses", [["INIT"], ["INIT", "RUNNING"], ["RUNNING"]])
@pytest.mark.parametrize("tied", [0, 125, 100_000])
def test_pages_are_full_and_together_the_list(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch, statuses: list[str], tied: int
) -> None:
    monkeypatch.setattr(due, "TIED", tied)
    asked, wanted = Asked({"status": statuses}), _expected(store, statuses)
    read: list[str] = []
    after: Place | None = None
    while True:
        found = store.run(listing.page(asked, 175, after, ["status"]))
        read += [row["_id"] for row in found.documents]
        assert found.next is None or found.documents, "a page with tasks behind it is not empty"
        if found.next is None:
            break
        after = found.next
    assert read == wanted


@pytest.mark.parametrize("statuses", [["INIT"], ["INIT", "RUNNING"]])
def test_a_page_after_any_task_is_bounded_and_goes_on_there(store: SyncStore, statuses: list[str]) -> None:
    asked, wanted = Asked({"status": statuses}), _expected(store, statuses)
    created = {
        row["_id"]: row["task_state"]["create_time"] for row in store.tasks.find({}, {"task_state.create_time": 1})
    }
    places = {task_id: Place(NOW, task_id, created[task_id]) for task_id in wanted}
    for index in (None, *range(0, len(wanted), len(wanted) // 20)):
        after = None if index is None else places[wanted[index]]
        found, examined = examined_by(store, listing.page(asked, PAGE, after, ["status"]))
        begin = 0 if index is None else index + 1
        assert [row["_id"] for row in found.documents] == wanted[begin : begin + PAGE]
        assert sum(each.documents for each in examined) <= sum(listing.STEPS) + due.TIED
        assert all(each.keys <= sum(listing.STEPS) + due.TIED for each in examined)


def test_what_the_walk_tests_is_found_by_short_steps(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "TIED", 100)
    monkeypatch.setattr(listing, "STEPS", (70, 150))
    asked = Asked({"status": ["INIT", "RUNNING"], "params": {"user.id": 7}})
    users = {row["_id"]: row["params"]["user"]["id"] for row in store.tasks.find({}, {"params": 1})}
    read: list[str] = []
    after: Place | None = None
    for _ in range(1_000):
        found, examined = examined_by(store, listing.page(asked, PAGE, after, ["status"]))
        assert sum(each.documents for each in examined) <= 2 * sum(listing.STEPS)
        read += [row["_id"] for row in found.documents]
        after = found.next
        if after is None:
            break
    assert read == [task_id for task_id in _expected(store, ["INIT", "RUNNING"]) if users[task_id] == 7]


def test_only_tasks_that_leave_meanwhile_are_missed(store: SyncStore) -> None:
    asked, wanted = Asked({"status": ["INIT"]}), _expected(store, ["INIT"])
    chosen = random.Random(3)
    left: set[str] = set()
    read: list[str] = []
    after: Place | None = None
    while True:
        found = store.run(listing.page(asked, 100, after, ["status"]))
        read += [row["_id"] for row in found.documents]
        after = found.next
        if after is None:
            break
        some = chosen.sample(wanted, 25)
        left |= set(some)
        finish = {"$set": {"task_state.status": "SUCCESS"}, "$unset": {"task_state.next_preempt_time": 1}}
        store.tasks.with_options().update_many({"_id": {"$in": some}}, finish)
    told = set(read)
    assert len(told) == len(read)
    assert set(wanted) - told <= left
    assert [task_id for task_id in wanted if task_id in told] == read


@pytest.mark.parametrize("tied", [0, 5, 1_000])
def test_each_page_goes_on_behind_its_cursor_whatever_task_that_is(
    mongo_session_client: Any, database_name: str, monkeypatch: pytest.MonkeyPatch, tied: int
) -> None:
    few = SyncStore(mongo_session_client, database_name)
    monkeypatch.setattr(due, "TIED", tied)
    monkeypatch.setattr(listing, "STEPS", (7, 13))
    kinds = [(name, NOW - timedelta(seconds=earlier)) for name in ("a", "a-b", "b") for earlier in range(3)]
    statuses = (TaskStatus.INIT, TaskStatus.RUNNING)
    made = [
        task(name, number, created, statuses[number % 3 == 0])
        for number in range(100)
        for name, created in [kinds[number % 7 % 5]]
    ]
    made += [task("other", number, NOW, TaskStatus.SUCCESS) for number in range(100)]
    few.tasks.insert_many(made, bypass_document_validation=True)
    asked, wanted = Asked({"status": ["INIT", "RUNNING"]}), _expected(few, ["INIT", "RUNNING"])
    created = {task["_id"]: task["task_state"]["create_time"] for task in made}
    for index, task_id in enumerate(wanted):
        place = place_of(cursor_of(Order.DUE, Place(NOW, task_id, created[task_id])), Order.DUE)
        found = few.run(listing.page(asked, 4, place, ["status"]))
        assert [row["_id"] for row in found.documents] == wanted[index + 1 : index + 5]


def test_a_document_whose_id_does_not_begin_with_its_name_never_leads_back(store: SyncStore) -> None:
    lost = {**task("a", 999_999, NOW, TaskStatus.INIT), "name": "zz"}
    store.tasks.insert_many([lost], bypass_document_validation=True)
    asked = Asked({"status": ["INIT"]})
    after: Place | None = None
    for _ in range(100):
        found = store.run(listing.page(asked, 250, after, None))
        assert found.next is None or after is None or found.next != after
        after = found.next
        if after is None:
            return
    raise AssertionError(f"the list of {Order.DUE} tasks has no end")
