"""The engine's recurring queries look only at what they return, however much else the collection holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mtask.kernel.document.options import TaskOption
from mtask.kernel.driver.indexes import DISCOVERY_INDEX, STATUS_INDEX
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements import filters

Document = dict[str, Any]

WORKER, QUEUES, NAMES = "me", ["mail", "default", "bulk"], ["send", "index"]
HORIZON_MS, GRACE_MS = 10_000, 30_000
FINISHED, FAR, OTHERS, DUE, MINE, RUNNING, LAPSED, LOST = 10_000, 3_000, 3_000, 400, 50, 2_000, 60, 3

_NUMBER = {"$toInt": "$number"}


def _some(values: list[Any]) -> Any:
    return {"$arrayElemAt": [{"$literal": values}, {"$mod": [_NUMBER, len(values)]}]}


def _later(milliseconds: Any) -> Any:
    return {"$add": ["$$NOW", milliseconds]}


def _run(status: str, lease: Any) -> Document:
    return {
        "run_id": {"$concat": ["run-", {"$toString": "$number"}]},
        "worker_id": "somebody",
        "attempt": 1,
        "status": status,
        "claim_time": _later(-60_000),
        "ping_expire_time": lease,
    }


def _fill(store: SyncStore, kind: str, count: int, state: Mapping[str, Any], workers: list[str] | None = None) -> None:
    """Make `count` documents on the server, past the validator."""
    key = {"$concat": [kind, "-", {"$toString": "$number"}]}
    option: Document = {"$literal": TaskOption(specific_worker_ids=workers or []).model_dump()}
    document = {
        "_id": {"$concat": ["send:", key]},
        "name": _some(NAMES),
        "key": key,
        "queue": _some(QUEUES),
        "params": {"to": "somebody@example.com", "number": "$number"},
        "task_option": {"$mergeObjects": [option, {"priority": {"$mod": [_NUMBER, 10]}}]},
        "task_state": {
            "create_time": _later(-3_600_000),
            "failed_cnt": 0,
            "cancel_requested": False,
            "worker_states": [],
            **state,
        },
        "schema_version": 1,
    }
    pipeline: list[Document] = [
        {"$documents": [{}]},
        {"$set": {"number": {"$range": [0, count]}}},
        {"$unwind": "$number"},
        {"$replaceWith": document},
        {"$merge": {"into": "tasks", "whenMatched": "fail"}},
    ]
    store.database.command("aggregate", 1, pipeline=pipeline, cursor={}, bypassDocumentValidation=True)


@pytest.fixture(scope="module")
def store(module_store: SyncStore) -> SyncStore:
    """The module's database, filled."""
    made = module_store
    ago = {"$multiply": [_NUMBER, -1]}
    ended = {"status": _some(["SUCCESS", "SUCCESS", "SUCCESS", "FAIL", "CANCELED"]), "finish_time": _later(-60_000)}
    _fill(made, "finished", FINISHED, ended | {"worker_states": [_run("SUCCESS", _later(-60_000))]})
    ahead = _later({"$add": [3_600_000, {"$multiply": [_NUMBER, 1000]}]})
    _fill(made, "far", FAR, {"status": "INIT", "start_time": ahead, "next_preempt_time": ahead})
    _fill(made, "others", OTHERS, {"status": "INIT", "next_preempt_time": _later(ago)}, ["other", "another"])
    _fill(made, "due", DUE, {"status": "INIT", "next_preempt_time": _later(ago)})
    _fill(made, "mine", MINE, {"status": "INIT", "next_preempt_time": _later(ago)}, [WORKER, "other"])
    lease = _later({"$add": [600_000, _NUMBER]})
    held = {"status": "RUNNING", "next_preempt_time": lease, "worker_states": [_run("RUNNING", lease)]}
    _fill(made, "running", RUNNING, held)
    lapse = _later({"$subtract": [-600_000, _NUMBER]})
    lapsed = {"status": "RUNNING", "next_preempt_time": lapse, "worker_states": [_run("RUNNING", lapse)]}
    _fill(made, "lapsed", LAPSED, lapsed, ["gone"])
    _fill(made, "lost", LOST, {"status": "INIT"})
    return made


def explained(store: SyncStore, matched: Document, **options: Any) -> Document:
    """Return the execution statistics of a find."""
    found = store.database.command(
        "explain", {"find": "tasks", "filter": matched, **options}, verbosity="executionStats"
    )
    statistics: Document = found["executionStats"]
    assert statistics["executionSuccess"]
    return statistics


def stages_of(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the first stage of a plan, and all stages below it."""
    yield plan
    for stage in [plan["inputStage"]] if "inputStage" in plan else plan.get("inputStages", []):
        yield from stages_of(stage)


def is_sorted_in_memory(plan: Mapping[str, Any]) -> bool:
    return any(stage["stage"] == "SORT" for stage in stages_of(plan))


@pytest.mark.parametrize("queues", [QUEUES[:1], QUEUES])
@pytest.mark.parametrize("limit", [20, 100, 1000])
def test_the_batch_query_examines_hardly_more_than_it_returns(store: SyncStore, queues: list[str], limit: int) -> None:
    statistics = explained(
        store,
        filters.claimable(queues, NAMES, WORKER, HORIZON_MS),
        projection={"name": 1, "task_option.priority": 1, "task_state.next_preempt_time": 1},
        sort={"task_option.priority": -1, "task_state.next_preempt_time": 1},
        limit=limit,
        hint=DISCOVERY_INDEX,
    )
    assert statistics["nReturned"] > 0
    assert statistics["totalDocsExamined"] <= 2 * statistics["nReturned"]
    # Beside what it returns: a few seeks for each priority, queue and kind of specific_worker_ids.
    assert statistics["totalKeysExamined"] <= 2 * statistics["nReturned"] + 40 * 3 * len(queues)
    assert not is_sorted_in_memory(statistics["executionStages"])


def ranges_of(store: SyncStore, horizon_ms: int) -> tuple[set[str], int]:
    """Return the ranges of the queue that a scan reads in the index, and the number of index scans in its plan."""
    sort = {"task_option.priority": -1, "task_state.next_preempt_time": 1}
    matched = filters.claimable(QUEUES[:1], NAMES, WORKER, horizon_ms)
    find = {"find": "tasks", "filter": matched, "sort": sort, "hint": DISCOVERY_INDEX}
    found = store.database.command("explain", find)
    stages = stages_of(found["queryPlanner"]["winningPlan"])
    bounds = [stage["indexBounds"] for stage in stages if "indexBounds" in stage]
    return {interval for each in bounds for interval in each["queue"]}, len(bounds)


def test_only_a_scan_of_the_horizon_looks_for_absent_fields(store: SyncStore) -> None:
    # The server passes the keys that claims have removed once for each range before the first waiting task.
    ranges, scan_cnt = ranges_of(store, 0)
    assert ranges == {'["mail", "mail"]'}
    assert scan_cnt == 3  # for [], which is a key of its own and an array within an array, and for this worker
    ranges, scan_cnt = ranges_of(store, HORIZON_MS)
    assert ranges >= {'["mail", "mail"]', "[null, null]"}


def test_the_batch_query_returns_what_is_due_for_this_worker_highest_priority_first(store: SyncStore) -> None:
    found = store.run(finding.scan(QUEUES, NAMES, WORKER, HORIZON_MS, 1000))
    assert found.is_complete
    kinds = [document["_id"].split(":")[1].split("-")[0] for document in found.documents]
    assert {kind: kinds.count(kind) for kind in kinds} == {"due": DUE, "mine": MINE}
    order = [
        (-document["task_option"]["priority"], document["task_state"]["next_preempt_time"])
        for document in found.documents
    ]
    assert order == sorted(order)


def test_looking_for_lapsed_runs_examines_only_those(store: SyncStore) -> None:
    statistics = explained(store, filters.lapsed(GRACE_MS), projection={"_id": 1}, limit=1000, hint=STATUS_INDEX)
    assert statistics["nReturned"] == LAPSED
    assert statistics["totalDocsExamined"] <= 2 * LAPSED
    assert statistics["totalKeysExamined"] <= 2 * LAPSED


def test_looking_for_undiscoverable_tasks_examines_only_those(store: SyncStore) -> None:
    statistics = explained(store, filters.undiscoverable(), projection={"_id": 1}, limit=1000)
    assert statistics["nReturned"] == LOST
    assert statistics["totalDocsExamined"] <= 2 * LOST
    assert statistics["totalKeysExamined"] <= 20
