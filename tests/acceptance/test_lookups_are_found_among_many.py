"""Tasks are found by their lookups among many: the server examines at most twice what it returns.

MTASK_LOOKUP_TASKS=1000000 gives the long form.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from mtask import Client, TaskSpec
from mtask.kernel.document.options import TaskOption
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from tests.acceptance.conftest import Report
from tests.explaining import Examined, examined_by

pytestmark = pytest.mark.timeout(1_200)  # for the long form

TASKS = int(os.environ.get("MTASK_LOOKUP_TASKS", "5000"))
USERS, OF_ONE = TASKS // 100, 100
PAGE = 20
_NUMBER = {"$toInt": "$number"}


def _modulo(count: int) -> Any:
    return {"$mod": [_NUMBER, count]}


def _one_of(values: list[str], index: Any) -> Any:
    return {"$arrayElemAt": [{"$literal": values}, index]}


@pytest.fixture(scope="module")
def store(module_store: SyncStore) -> SyncStore:
    """The module's database, with tasks of many users: a hundred of each, of all statuses, names and queues."""
    # Each user's tasks are spread over all statuses: the user changes with each task, the status with each hundredth.
    round_ = {"$floor": {"$divide": [_NUMBER, USERS]}}
    status = _one_of(["SUCCESS", "INIT", "FAIL", "RUNNING", "SUCCESS"], {"$toInt": {"$mod": [round_, 5]}})
    key = {"$toString": "$number"}
    tag = {"$concat": ["tag-", {"$toString": _modulo(USERS)}]}
    document = {
        "_id": {"$concat": ["send:", key]},
        "name": {"$cond": [{"$eq": [{"$mod": [round_, 2]}, 0]}, "send", "index"]},
        "key": key,
        "queue": {"$cond": [{"$eq": [{"$mod": [round_, 4]}, 0]}, "mail", "default"]},
        "params": {"to": "somebody@example.com"},
        "task_option": {"$literal": TaskOption().stored()},
        "lookup": [
            {"k": "user_id", "v": _modulo(USERS)},
            {"k": "everybody", "v": True},
            {"k": "tags", "v": tag},
            {"k": "tags", "v": {"$concat": ["round-", {"$toString": {"$toInt": round_}}]}},
        ],
        "task_state": {
            "status": status,
            "create_time": {"$subtract": ["$$NOW", {"$multiply": [{"$toInt": {"$divide": [_NUMBER, 50]}}, 1]}]},
            "next_preempt_time": {"$cond": [{"$in": [status, ["INIT", "RUNNING"]]}, "$$NOW", "$$REMOVE"]},
            "failed_cnt": 0,
            "cancel_requested": False,
            "worker_states": [],
        },
        "schema_version": 1,
    }
    for start in range(0, TASKS, 100_000):
        pipeline: list[dict[str, Any]] = [
            {"$documents": [{}]},
            {"$set": {"number": {"$range": [start, min(start + 100_000, TASKS)]}}},
            {"$unwind": "$number"},
            {"$replaceWith": document},
            {"$merge": {"into": "tasks", "whenMatched": "fail"}},
        ]
        module_store.database.command("aggregate", 1, pipeline=pipeline, cursor={}, bypassDocumentValidation=True)
    return module_store


def assert_hardly_more_than_it_returns(found: list[Examined]) -> None:
    for each in found:
        assert each.documents <= 2 * each.returned, each
        assert "SORT" not in each.stages
        assert "COLLSCAN" not in each.stages


USER = {"user_id": [7]}
CRITERIA: list[tuple[str, Mapping[str, Any], int]] = [
    ("one user", {"lookup": USER}, OF_ONE),
    ("several users", {"lookup": {"user_id": [7, 8, 9]}}, 3 * OF_ONE),
    ("two values of a list", {"lookup": {"tags": ["tag-7", "tag-8"]}}, 2 * OF_ONE),
    ("with a status", {"lookup": USER, "status": "FAIL"}, OF_ONE // 5),
    ("with two statuses", {"lookup": USER, "status": ["FAIL", "INIT"]}, 2 * OF_ONE // 5),
    ("with a name and a queue", {"lookup": USER, "name": "send", "queue": "mail"}, OF_ONE // 4),
    ("with all three", {"lookup": USER, "name": "send", "queue": "default", "status": "SUCCESS"}, 10),
    ("with a second lookup that all have", {"lookup": {"user_id": [7], "everybody": [True]}}, OF_ONE),
    ("with a second lookup that all have, named first", {"lookup": {"everybody": [True], "user_id": [7]}}, OF_ONE),
    ("everybody's", {"lookup": {"everybody": [True]}}, TASKS),
    ("nobody's", {"lookup": {"user_id": [-1]}}, 0),
]


@pytest.mark.parametrize(("criteria", "count"), [c[1:] for c in CRITERIA], ids=[c[0] for c in CRITERIA])
def test_lookup_examines_at_most_twice_what_it_returns(
    store: SyncStore, criteria: Mapping[str, Any], count: int, report: Report, request: pytest.FixtureRequest
) -> None:
    first, examined = examined_by(store, queries.find(criteria, PAGE))
    assert len(first) == min(PAGE, count)
    assert_hardly_more_than_it_returns(examined)
    if count <= 1000:
        whole, examined = examined_by(store, queries.find(criteria, 0))
        assert len(whole) == count
        assert_hardly_more_than_it_returns(examined)
        order = [(document["task_state"]["create_time"], document["_id"]) for document in whole]
        assert order == sorted(order, reverse=True)
        counted, examined = examined_by(store, queries.count(criteria))
        assert counted == count
        assert sum(each.documents for each in examined) <= 2 * count
    report(f"documents examined for {count:,} of {TASKS:,}", sum(each.documents for each in examined))


def test_each_page_examines_hardly_more_than_it_returns(store: SyncStore) -> None:
    for criteria in ({"lookup": USER}, {"lookup": {"everybody": [True]}}, {"lookup": USER, "status": "SUCCESS"}):
        seen: list[str] = []
        page = store.run(queries.find(criteria, PAGE))
        for _ in range(5):
            if not page:
                break
            seen += [document["_id"] for document in page]
            last = page[-1]
            after = (last["task_state"]["create_time"], last["_id"])
            page, examined = examined_by(store, queries.find(criteria, PAGE, None, after))
            assert_hardly_more_than_it_returns(examined)
        assert seen == [document["_id"] for document in store.run(queries.find(criteria, len(seen)))]


def test_only_tasks_with_lookups_are_in_the_index(client: Client) -> None:
    client.publish_many([TaskSpec("send", key=f"plain/{n}") for n in range(50)])
    client.publish("send", key="found", lookup={"user_id": 7, "tags": ["a", "b"]})
    keys = client.tasks.database.command("validate", "tasks")["keysPerIndex"]
    assert (keys["_id_"], keys["mtask_lookup"]) == (51, 3)
