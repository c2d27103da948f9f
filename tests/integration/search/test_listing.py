"""Lists of many tasks: each page holds what a list of all of them would, and examines a bounded number of documents."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS

from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.statements import filters
from mtask.search import by_queue, due, walks
from mtask.search import counts as counting
from mtask.search import lists as listing
from mtask.search.counts import Count
from mtask.search.order import Order, Place
from mtask.search.walks import Asked
from tests.explaining import Examined, examined_by
from tests.spread import NOW, QUEUES, TASKS, TIE, tasks_of_all_kinds

PAGE = 25
Document = dict[str, Any]


@pytest.fixture(scope="module")
def everything() -> list[Document]:
    return tasks_of_all_kinds()


@pytest.fixture(scope="module")
def store(module_store: SyncStore, everything: list[Document]) -> SyncStore:
    module_store.tasks.insert_many(everything, ordered=False, bypass_document_validation=True)
    return module_store


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all bounds as small as this database is, in comparison with one of millions of tasks."""
    monkeypatch.setattr(listing, "STEPS", (400, 3_600))
    monkeypatch.setattr(due, "SORTED", 1_000)
    monkeypatch.setattr(due, "TIED", 200)
    monkeypatch.setattr(counting, "DOCUMENTS", 3_000)


CRITERIA: dict[str, Mapping[str, Any]] = {
    "all": {},
    "one queue": {"queue": "q03"},
    "a name": {"name": "n2"},
    "names": {"name": ["n2", "n4"], "status": ["INIT", "SUCCESS"]},
    "a name and queues": {"name": "n2", "queue": ["q03", "q04", "q05"]},
    "a worker that has run nothing": {"worker_id": "nobody"},
    "params": {"params": {"user.id": 7}},
    "mixed statuses": {"status": ["FAIL", "INIT"]},
    "waiting": {"status": "WAITING"},
    "failed": {"status": "FAIL"},
    "final": {"status": ["SUCCESS", "FAIL", "CANCELED"]},
    "failed of a queue": {"status": "FAIL", "queue": "q07"},
    "final of queues": {"status": ["SUCCESS", "FAIL"], "queue": ["q07", "q08"]},
    "failed of a name": {"status": "FAIL", "name": "n3"},
    "failed of a name and a queue": {"status": ["FAIL", "CANCELED"], "name": "n3", "queue": "q01"},
    "failed by params": {"status": "FAIL", "params": {"user.id": 7}},
    "initial": {"status": "INIT"},
    "open": {"status": ["INIT", "RUNNING"]},
    "open of a name": {"status": "INIT", "name": "n5"},
    "running of a queue": {"status": "RUNNING", "queue": "q11"},
    "a tenant": {"key_prefix": "t1:"},
    "a small tenant": {"key_prefix": "rare:"},
    "a tenant and a name": {"key_prefix": "t2:", "name": "n1"},
    "a tenant, failed": {"key_prefix": "t2:", "status": "FAIL"},
    "a tenant, open": {"key_prefix": "t0:", "status": ["INIT", "RUNNING"]},
    "a lookup": {"lookup": {"order": [3]}},
    "a lookup and more": {"lookup": {"order": [3, 4]}, "status": "FAIL", "name": "n1", "key_prefix": "t1:"},
    "nothing": {"queue": "q99", "status": "FAIL"},
}
each = pytest.mark.parametrize("criteria", CRITERIA.values(), ids=CRITERIA.keys())


def expected(everything: list[Document], asked: Asked) -> list[str]:
    """Return the ids of the list, found without the database."""
    order = asked.order
    field = order.path.removeprefix("task_state.")

    def is_wanted(task: Document) -> bool:
        state, criteria = task["task_state"], asked.criteria
        lookup = {entry["k"]: entry["v"] for entry in task["lookup"]}
        return (
            all(
                not asked.several(name) or value in asked.several(name)
                for name, value in (("status", state["status"]), ("name", task["name"]), ("queue", task["queue"]))
            )
            and "worker_id" not in criteria
            and task["key"].startswith(criteria.get("key_prefix", ""))
            and all(lookup[name] in values for name, values in criteria.get("lookup", {}).items())
            and ("params" not in criteria or task["params"]["user"]["id"] == criteria["params"]["user.id"])
            and (asked.since is None or state[field] >= asked.since)
            and (asked.until is None or state[field] < asked.until)
        )

    found = sorted(
        filter(is_wanted, everything), key=lambda task: (task["task_state"][field], task["_id"]), reverse=True
    )
    if order is Order.DUE:
        found.sort(key=lambda task: task["task_state"]["create_time"], reverse=True)
        found.sort(key=lambda task: (task["task_state"][field], task["name"]))
    return [task["_id"] for task in found]


def places_of(everything: list[Document], order: Order) -> dict[str, Place]:
    """Return the places of all tasks that have the instant of the order."""
    field = order.path.removeprefix("task_state.")
    return {
        task["_id"]: Place(
            task["task_state"][field],
            task["_id"],
            task["task_state"]["create_time"] if order is Order.DUE else None,
        )
        for task in everything
        if field in task["task_state"]
    }


def assert_bounded(found: list[Examined]) -> None:
    documents = sum(each.documents for each in found)
    assert documents <= sum(listing.STEPS) + 4 * PAGE, found
    assert not any("COLLSCAN" in each.stages for each in found)
    assert all(each.keys <= sum(listing.STEPS) + 3 * listing.PAIRS + 1 for each in found), found


def pages(store: SyncStore, asked: Asked, limit: int, fields: list[str] | None = None) -> list[list[str]]:
    """Return the ids of all pages. A page that stopped early is joined with the next one."""
    read: list[list[str]] = []
    after: Place | None = None
    for _ in range(10_000):
        found = store.run(listing.page(asked, limit, after, fields))
        assert len(found.documents) <= limit
        assert (found.looked_to is None) or len(found.documents) < limit
        read.append([row["_id"] for row in found.documents])
        after = found.next
        if after is None:
            return read
        prefix = asked.criteria.get("key_prefix", "")
        assert not after.task_id or not after.task_id.partition(":")[2] or prefix[:-1] in after.task_id
    raise AssertionError("the list has no end")


@each
def test_pages_together_are_the_list(store: SyncStore, everything: list[Document], criteria: Mapping[str, Any]) -> None:
    asked = Asked(criteria)
    wanted = expected(everything, asked)
    for count, fields in ((3, None), (7, ["status"])):
        read = pages(store, asked, len(wanted) // count + 1, fields)
        assert [task_id for page in read for task_id in page] == wanted


@pytest.mark.parametrize("prefix", ["t0:", "t1:", "rare:"])
def test_an_open_list_of_a_prefix_goes_on_within_an_instant_of_many_tasks(
    store: SyncStore, everything: list[Document], monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    # No instant is sorted as a whole, so each is walked by ids, most of which have another prefix.
    monkeypatch.setattr(listing, "STEPS", (200, 700))
    monkeypatch.setattr(due, "SORTED", 0)
    monkeypatch.setattr(due, "TIED", 0)
    asked = Asked({"key_prefix": prefix, "status": ["INIT", "RUNNING"]})
    read = pages(store, asked, 40)
    assert [task_id for page in read for task_id in page] == expected(everything, asked)


@each
def test_a_small_page_after_any_task_goes_on_with_the_next_one(
    store: SyncStore, everything: list[Document], criteria: Mapping[str, Any]
) -> None:
    asked = Asked(criteria)
    wanted = expected(everything, asked)
    places = places_of(everything, asked.order)
    for index in range(0, len(wanted), max(1, len(wanted) // 5)):
        found = store.run(listing.page(asked, PAGE, places[wanted[index]], []))
        ids = [row["_id"] for row in found.documents]
        assert ids == wanted[index + 1 : index + 1 + PAGE] or (
            found.looked_to and ids == wanted[index + 1 :][: len(ids)]
        )


@each
def test_each_page_examines_a_bounded_number_of_documents(
    store: SyncStore, everything: list[Document], criteria: Mapping[str, Any]
) -> None:
    asked = Asked(criteria)
    wanted = expected(everything, asked)
    places = places_of(everything, asked.order)
    some = [places[wanted[index]] for index in (0, len(wanted) // 2, len(wanted) - 1) if wanted]
    for place in [None, *some]:
        _, examined = examined_by(store, listing.page(asked, PAGE, place, ["status"]))
        assert_bounded(examined)


#: What an index serves from its order: a page examines hardly more than it returns.
BY_INDEX = (
    "all",
    "one queue",
    "a name",
    "failed",
    "final",
    "failed of a queue",
    "final of queues",
    "a lookup",
    "initial",
    "open",
    "nothing",
)


@pytest.mark.parametrize("name", BY_INDEX)
def test_a_page_that_an_index_serves_examines_hardly_more_than_it_returns(
    store: SyncStore, everything: list[Document], name: str
) -> None:
    asked = Asked(CRITERIA[name])
    wanted = expected(everything, asked)
    places = places_of(everything, asked.order)
    middle = [] if not wanted else [places[wanted[len(wanted) // 2]]]
    for place in [None, *middle]:
        found, examined = examined_by(store, listing.page(asked, PAGE, place, ["status"]))
        left = len(wanted) if place is None else len(wanted) - len(wanted) // 2 - 1
        assert len(found.documents) == min(PAGE, left)
        assert not any("SORT" in each.stages for each in examined) or asked.order is Order.DUE
        # Tasks that are due at one instant are not sorted by an index: all of them are.
        ties = 2 * TASKS // (TASKS // TIE) if asked.order is Order.DUE else 0
        assert sum(each.documents for each in examined) <= 3 * PAGE + ties, examined


@pytest.mark.parametrize("name", ["all", "failed of a queue", "a lookup"])
def test_a_page_along_one_range_of_an_index_takes_one_query(
    store: SyncStore, everything: list[Document], name: str
) -> None:
    asked = Asked(CRITERIA[name])
    wanted, places = expected(everything, asked), places_of(everything, asked.order)
    for index in range(0, len(wanted), max(1, len(wanted) // 5)):
        found, examined = examined_by(store, listing.page(asked, PAGE, places[wanted[index]], ["status"]))
        assert [row["_id"] for row in found.documents] == wanted[index + 1 : index + 1 + PAGE]
        assert len(examined) == 1
        assert examined[0].keys <= PAGE + 3


def test_since_and_until_bound_the_instant_of_the_order(store: SyncStore, everything: list[Document]) -> None:
    since, until = NOW - timedelta(milliseconds=30), NOW - timedelta(milliseconds=20)
    for criteria in ({}, {"status": "FAIL"}, {"status": "INIT"}, {"key_prefix": "rare:"}, {"lookup": {"order": [3]}}):
        for bounds in ((since, until), (None, until), (since, None), (until, since)):
            asked = Asked(criteria, *bounds)
            wanted = expected(everything, asked)
            assert [i for page in pages(store, asked, 333) for i in page] == wanted, (criteria, bounds)
            _, examined = examined_by(store, listing.page(asked, PAGE, None, ["status"]))
            assert_bounded(examined)


def test_a_walk_that_meets_nothing_stops_and_says_how_far_it_came(store: SyncStore, everything: list[Document]) -> None:
    asked = Asked({"params": {"user.id": -1}})
    found = store.run(listing.page(asked, PAGE, None, []))
    newest = sorted(((t["task_state"]["create_time"], t["_id"]) for t in everything), reverse=True)
    assert found.documents == []
    assert found.next == Place(*newest[sum(listing.STEPS) - 1])
    assert found.looked_to == newest[sum(listing.STEPS) - 1][0]
    rest = store.run(listing.page(asked, PAGE, found.next, []))
    assert (rest.documents, rest.next, rest.looked_to) == ([], None, None)


def test_a_tie_of_very_many_due_tasks_is_listed_in_bounded_pages(
    store: SyncStore, everything: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tie is large in relation to this bound, as millions of tasks of one batch are to the usual one.
    monkeypatch.setattr(due, "TIED", 20)
    for criteria in ({"status": "INIT"}, {"status": ["INIT", "RUNNING"], "queue": "q03"}):
        asked = Asked(criteria)
        assert [i for page in pages(store, asked, 777) for i in page] == expected(everything, asked)
        _, examined = examined_by(store, listing.page(asked, PAGE, None, ["status"]))
        assert_bounded(examined)


def test_many_queues_are_merged_from_several_queries(
    store: SyncStore, everything: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAIRS", 60)
    for criteria in ({"status": ["FAIL", "CANCELED"]}, {"status": "SUCCESS", "params": {"user.id": 7}}):
        asked = Asked(criteria)
        assert [i for page in pages(store, asked, 777) for i in page] == expected(everything, asked)
    monkeypatch.setattr(listing, "STEPS", (20, 50))
    asked = Asked({"status": "SUCCESS", "params": {"user.id": 7}})
    assert [i for page in pages(store, asked, 50) for i in page] == expected(everything, asked)


@pytest.mark.parametrize("queue", ["q.1", "q|2", "a(b", "q$", "größe 日本語 🚀", "x" * 256, "\\z", "^q"])
def test_the_test_of_a_queue_means_equality(store: SyncStore, queue: str) -> None:
    near = [queue, queue[:-1], f"{queue}x", f"x{queue}", queue.upper() + "!", queue.replace(".", "a"), "q", "2", ""]
    documents = {"$documents": [{"queue": name} for name in dict.fromkeys([*near, f"{queue}\n"])] + [{"queue": 7}, {}]}
    for wanted in ([queue], [queue, "q"], [queue, *(f"{number}-{queue}" for number in range(2_000))]):
        found = list(store.database.aggregate([documents, {"$match": filters.is_of_queues(wanted)}]))
        same = list(store.database.aggregate([documents, {"$match": {"queue": {"$in": wanted}}}]))
        assert found == same


@pytest.mark.parametrize("steps", [(1,), (3, 11), (299, 301)])
def test_any_length_of_steps_gives_the_same_list(
    store: SyncStore, everything: list[Document], monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    monkeypatch.setattr(listing, "STEPS", steps)
    since = NOW - timedelta(milliseconds=1)  # the tasks of two instants: each takes a query if a step is one task
    for criteria in (
        {"queue": "q03"},
        {"status": "INIT", "queue": "q03"},
        {"status": "FAIL", "params": {"user.id": 7}},
    ):
        asked = Asked(criteria, since)
        assert [i for page in pages(store, asked, 5, ["status"]) for i in page] == expected(everything, asked)


def test_a_cursor_of_a_tenant_names_no_key_of_another_one(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "MOST", 1)  # so that the tenant's tasks are looked for among all tasks
    monkeypatch.setattr(listing, "STEPS", (7, 40))
    for status in (None, "FAIL", "INIT"):
        asked = Asked({"key_prefix": "rare:", "status": status})
        after: Place | None = None
        places = []
        for _ in range(20):
            after = store.run(listing.page(asked, PAGE, after, [])).next
            if after is None:
                break
            places.append(after)
        assert places
        assert not any(key.startswith("t") for key in (place.task_id.partition(":")[2] for place in places))


# --- counts -----------------------------------------------------------------------------------------------


@each
def test_counts_are_exact_up_to_their_bound(
    store: SyncStore, everything: list[Document], criteria: Mapping[str, Any]
) -> None:
    wanted = len(expected(everything, Asked(criteria)))
    counted, examined = examined_by(store, counting.count(criteria))
    if any(value is not None for value in criteria.values()):
        assert counted.count <= min(wanted, counting.MOST)
        assert counted == Count(wanted) or counted.is_more, wanted
    assert sum(each.documents for each in examined) <= counting.DOCUMENTS
    few = store.run(counting.count(criteria, 10))
    assert few == counted if not criteria else few == Count(min(wanted, 10), wanted > 10) or few.is_more


COVERED = ("failed", "final", "failed of a queue", "final of queues", "failed of a name", "initial", "a tenant")


@pytest.mark.parametrize("name", [*COVERED, "open of a name", "a tenant and a name", "a small tenant"])
def test_counts_by_index_read_no_document(store: SyncStore, everything: list[Document], name: str) -> None:
    counted, examined = examined_by(store, counting.count(CRITERIA[name]))
    assert sum(each.documents for each in examined) == 0
    assert counted == Count(len(expected(everything, Asked(CRITERIA[name]))))


def test_queues_are_counted_with_the_time_at_which_their_oldest_task_is_due(
    store: SyncStore, everything: list[Document]
) -> None:
    found = {row.queue: row for row in store.run(by_queue.queues())}
    assert len(found) == QUEUES
    for queue, row in found.items():
        mine = [task for task in everything if task["queue"] == queue]
        for status, count in row.counts.items():
            assert count == Count(sum(task["task_state"]["status"] == status for task in mine)), (queue, status)
        due = [t["task_state"]["next_preempt_time"] for t in mine if "next_preempt_time" in t["task_state"]]
        assert (row.oldest_preempt_time, row.is_oldest_rough) == (min(due), False)
    (_, is_rough), examined = examined_by(store, by_queue.oldest_due("q03"))
    assert not is_rough
    assert len(examined) == 4  # one for each priority, and one that finds no further one
    assert all(each.documents <= 1 and each.keys <= 8 for each in examined), examined
    few = store.run(by_queue.queues(5))
    assert all(row.counts[TaskStatus.SUCCESS] == Count(5, True) for row in few)


@pytest.mark.parametrize(("few", "rounds"), [(0, 3), (10**6, 0)])
def test_a_status_of_few_tasks_is_counted_in_all_queues_by_one_query(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch, few: int, rounds: int
) -> None:
    usual = store.run(by_queue.queues(5))
    monkeypatch.setattr(by_queue, "FEW", few)
    counted, examined = examined_by(store, by_queue.queues(5))
    assert counted == usual
    # One query for the open tasks of a queue, and one for each of its three priorities: the first is known already.
    assert len(examined) <= (rounds + 1 + 3 + 1) * QUEUES + 12
    assert not any("COLLSCAN" in each.stages for each in examined)


def test_the_oldest_due_task_of_a_queue_may_stand_behind_tasks_that_name_their_workers(
    mongo_session_client: Any, database_name: str, everything: list[Document]
) -> None:
    own = SyncStore(mongo_session_client, database_name)
    open_ones = [task for task in everything if "next_preempt_time" in task["task_state"]][:300]
    for number, task in enumerate(open_ones):
        option = {**task["task_option"], "specific_worker_ids": [[], ["w1"], ["w1", "w2"]][number % 3]}
        open_ones[number] = {**task, "task_option": option, "queue": f"q{number % 4}"}
    own.tasks.insert_many(open_ones, bypass_document_validation=True)
    for row in own.run(by_queue.queues()):
        mine = [task for task in open_ones if task["queue"] == row.queue]
        free = [task for task in mine if not task["task_option"]["specific_worker_ids"]]
        assert sum(count.count for count in row.counts.values()) == len(mine)
        assert row.oldest_preempt_time == min(task["task_state"]["next_preempt_time"] for task in free)


@pytest.mark.parametrize("far", [2**45 * 1_000, -(2**45) * 1_000], ids=["after", "before"])
@pytest.mark.parametrize(
    "criteria", ["all", "one queue", "a worker that has run nothing", "failed", "failed of a queue"]
)
def test_tasks_of_years_that_python_does_not_know_end_no_list(
    mongo_session_client: Any,
    database_name: str,
    everything: list[Document],
    monkeypatch: pytest.MonkeyPatch,
    criteria: str,
    far: int,
) -> None:
    own = SyncStore(mongo_session_client, database_name)
    failed = [task for task in everything if task["task_state"]["status"] == "FAIL"][:300]
    for number in range(30):  # more than a page holds, and more than a step of a walk passes
        state = {**failed[number]["task_state"], "create_time": DatetimeMS(far), "finish_time": DatetimeMS(far)}
        failed.append({**failed[number], "_id": f"far:{number}", "name": "far", "task_state": state, "queue": "q07"})
    own.tasks.insert_many(failed, bypass_document_validation=True)
    monkeypatch.setattr(listing, "STEPS", (10, 10))
    asked = Asked({**CRITERIA[criteria]})
    ids = {row["_id"] for row in own.tasks.find(filters.search(CRITERIA[criteria])) if not row["_id"].startswith("far")}
    after, read = None, []
    for _ in range(2 * len(failed)):
        found = own.run(listing.page(asked, 5, after, ["status"]))
        read += [row["_id"] for row in found.documents if not row["_id"].startswith("far")]
        after = found.next
        if after is None:
            break
    assert after is None
    assert len(read) == len(set(read))
    assert set(read) == ids


@pytest.mark.parametrize(
    "broken",
    [
        {"task_option": "none"},
        {"task_option": {"specific_worker_ids": []}},
        {"task_option": {"specific_worker_ids": [], "priority": "high"}},
        {"task_option": {"specific_worker_ids": None, "priority": 9}},
    ],
)
def test_a_malformed_task_does_not_keep_its_queue_from_being_counted(
    mongo_session_client: Any, database_name: str, everything: list[Document], broken: Document
) -> None:
    own = SyncStore(mongo_session_client, database_name)
    good = next(task for task in everything if task["task_state"]["status"] == "INIT")
    own.tasks.insert_many([good, {**good, "_id": "broken:1", **broken}], bypass_document_validation=True)
    [row] = own.run(by_queue.queues())
    assert row.counts[TaskStatus.INIT] == Count(2)
    assert row.oldest_preempt_time == good["task_state"]["next_preempt_time"]


def test_statistics_up_to_a_bound_say_which_counts_are_incomplete(store: SyncStore, everything: list[Document]) -> None:
    whole = store.run(counting.statistics(100_000))
    assert sum(row["count"] for row in whole) == len(everything)
    assert not any(row["is_more"] for row in whole)
    rows, examined = examined_by(store, counting.statistics(100))
    assert sum(each.documents for each in examined) <= 101 * len(TaskStatus)
    assert all(row["is_more"] for row in rows)
