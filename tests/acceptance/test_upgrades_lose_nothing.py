"""A fleet is rolled from the version before flows to this one and back, under load: nothing is lost, nothing twice.

`make upgrade` does the same for longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import Binary

from mtask import Client
from tests.faults.upgrade.app import QUEUE
from tests.faults.upgrade.rolling import Fleet
from tests.faults.upgrade.run import Plan, run
from tests.faults.upgrade.versions import NEW, Version, former
from tests.mongo import eventually

#: What later versions may add at each place of a document.
_LATER: dict[str, Any] = {
    "later_text": "acme",
    "later_part": {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
    "later_bytes": Binary(b"\x01\x02", 6),
    "task_option.later_option": 7,
    "task_state.later_state": {"since": datetime(2030, 1, 1, tzinfo=UTC)},
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return former(tmp_path_factory.mktemp("former"))


@pytest.fixture
def fleet(mongo_uri: str, database_name: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(mongo_uri, database_name, tmp_path, 1, 20.0)
    try:
        yield made
    finally:
        made.reap()


def test_fleet_rolls_to_this_version_and_back_under_load(mongo_uri: str, database_name: str, tmp_path: Path) -> None:
    verdict = run(mongo_uri, database_name, Plan(tmp_path, seed=1, rate=8.0))
    print(verdict.describe())
    assert verdict.violations == []
    assert verdict.figures["handlers started by old"] > 0
    assert verdict.figures["handlers started by new"] > 0
    assert verdict.figures["workers killed"] == 2


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_bigger_fleet_rolls_there_and_back_twice(mongo_uri: str, database_name: str, tmp_path: Path, seed: int) -> None:
    verdict = run(mongo_uri, database_name, Plan(tmp_path, seed, workers=4, rate=40.0, seconds=45.0))
    assert verdict.violations == []


@pytest.mark.parametrize("is_old", [True, pytest.param(False, marks=pytest.mark.long)], ids=["old", "new"])
def test_worker_keeps_the_fields_that_it_does_not_know(
    client: Client, fleet: Fleet, old: Version, *, is_old: bool
) -> None:
    client.init()
    short: dict[str, Any] = {"ping_interval": 0.1, "worker_timeout": 20, "retry_delay": 0}
    for name in ("quick", "flaky", "slow", "team", "doomed"):
        params = {"seconds": 1.0} if name == "slow" else {}
        seats = 2 if name == "team" else 1
        client.publish(name, params, key="1", queue=QUEUE, concurrent_worker_cnt=seats, **short)
    client.tasks.update_many({}, {"$set": _LATER})
    for worker in ("w0", "w1"):
        fleet.start_worker(worker, old if is_old else NEW)
    ended = {"name": {"$ne": "tick"}, "task_state.status": {"$in": ["SUCCESS", "FAIL"]}}
    eventually(lambda: client.tasks.count_documents(ended) == 5, message="all have ended")
    for document in client.tasks.find(ended):
        kept = {path: _at(document, path) for path in _LATER}
        assert kept == _LATER, document["_id"]
    flaky = client.tasks.find_one({"name": "flaky"})
    assert flaky is not None
    assert [run["status"] for run in flaky["task_state"]["worker_states"]] == ["FAIL", "SUCCESS"]


def _at(document: dict[str, Any], path: str) -> Any:
    found: Any = document
    for name in path.split("."):
        found = found.get(name)
    return found
