"""The shared counts: one process counts for all, a pause follows, and reading them examines no task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from mtask.features.metrics import client
from mtask.features.metrics import operations as tallies
from mtask.features.metrics.rules import COUNTS_ID
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.process.counts import MAX_PAIRS, Pair, Tally
from tests.clients import server_now
from tests.explaining import only
from tests.integration.stores import publish

DAY = timedelta(days=1)


def age(store: SyncStore) -> None:
    """Let the counts not be fresh any more."""
    store.collections["metrics"].update_one({"_id": COUNTS_ID}, {"$unset": {"fresh_until": 1}})


def keep_fresh(store: SyncStore) -> None:
    later = server_now(store) + DAY
    store.collections["metrics"].update_one({"_id": COUNTS_ID}, {"$set": {"fresh_until": later}})


def counted(store: SyncStore) -> dict[str, int]:
    found = store.run(tallies.shared())
    assert found is not None
    return {queue.queue: queue.counts[TaskStatus.INIT].count for queue in found.queues}


@contextmanager
def profiled(store: SyncStore) -> Iterator[list[dict[str, Any]]]:
    """Collect what the server says of the commands on tasks in the block."""
    found: list[dict[str, Any]] = []
    store.database.command("profile", 2)
    try:
        yield found
    finally:
        store.database.command("profile", 0)
        found += store.database["system.profile"].find({"ns": f"{store.database.name}.tasks"})
        store.database.drop_collection("system.profile")


def test_counts_are_shared_until_a_pause_is_over(store: SyncStore) -> None:
    publish(store, "a")
    publish(store, "b", queue="other", start=DAY)
    assert counted(store) == {"default": 1, "other": 1}
    document = store.collections["metrics"].find_one({"_id": COUNTS_ID})
    assert document is not None
    took = document["update_time"] - document["count_time"]
    pause = document["fresh_until"] - document["update_time"]
    assert pause == max(timedelta(seconds=2), 300 * took)
    keep_fresh(store)
    publish(store, "c")
    assert counted(store) == {"default": 1, "other": 1}
    age(store)
    assert counted(store) == {"default": 2, "other": 1}


def test_only_the_holder_of_the_lease_counts_and_others_take_what_is_there(store: SyncStore) -> None:
    assert store.run(tallies.shared()) is not None
    publish(store, "a")
    age(store)
    lease = {"holder": "another", "lease_expire_time": server_now(store) + DAY}
    store.collections["metrics"].update_one({"_id": COUNTS_ID}, {"$set": lease})
    assert counted(store) == {}, "another process counts"
    store.collections["metrics"].update_one({"_id": COUNTS_ID}, {"$set": {"lease_expire_time": server_now(store)}})
    assert counted(store) == {"default": 1}, "it has died"


def test_the_first_counts_of_all_are_made_by_one(store: SyncStore) -> None:
    publish(store, "a")
    first = tallies.shared()
    call = next(first)
    while True:  # up to the lease
        answer = store.run(only(call))
        if call.method == "find_one_and_update":
            break
        call = first.send(answer)
    assert store.run(tallies.shared()) is None
    assert fleet_queues(store) is None
    found = store.run(_rest(first, answer))
    assert found is not None
    assert found.queues[0].queue == "default"


def _rest(operation: Any, answer: Any) -> Any:
    """Go on with an operation that has begun."""
    while True:
        try:
            call = operation.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield call


def fleet_queues(store: SyncStore) -> object:
    return store.run(client.read_fleet()).counts


@pytest.mark.fresh_database  # nobody else sends commands to it
def test_twenty_scrapes_examine_tasks_for_one_count_and_none_within_its_time(store: SyncStore) -> None:
    for number in range(60):
        publish(store, str(number), queue=f"q{number % 3}")
    with profiled(store) as commands:
        store.run(client.read_fleet())
        keep_fresh(store)
        for _ in range(20):
            assert store.run(client.read_fleet()).counts is not None
    examined = sum(command.get("docsExamined", 0) for command in commands)
    once = [command for command in commands if "docsExamined" in command]
    assert examined == 3, "tasks are counted in indexes; the oldest due one of each queue is read"
    assert 0 < len(once) < 40
    with profiled(store) as commands:
        for _ in range(20):
            store.run(client.read_fleet())
    assert commands == []


@pytest.mark.fresh_database  # nobody else sends commands to it
def test_running_tasks_are_read_up_to_a_bound(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtask.search import by_queue

    monkeypatch.setattr(by_queue, "MOST", 5)
    for number in range(20):
        publish(store, str(number))
    store.tasks.update_many({}, {"$set": {"task_state.status": "RUNNING"}})
    with profiled(store) as commands:
        found = store.run(client.read_fleet()).counts
    assert found is not None
    assert str(found.queues[0].counts[TaskStatus.RUNNING]) == "6+"
    examined = [(command.get("command"), command.get("docsExamined", 0)) for command in commands]
    assert sum(count for _, count in examined) == 7, f"six of them, and the oldest due one: {examined}"


def test_pairs_are_admitted_once_and_for_ever(store: SyncStore) -> None:
    def record(name: str, *queues: str) -> None:
        made = Tally()
        for queue in queues:
            made.of(queue, "n").runs["SUCCESS"] = 1
        store.run(tallies.record(name, {**made.document(), "incarnation": name}, is_first=True))

    record("b", "late")
    assert shown(store) == {"late"}
    record("a", "early")
    keep_fresh(store)
    assert shown(store) == {"late"}, "a pair that is not admitted yet is not shown, not even as other"
    age(store)
    assert shown(store) == {"late", "early"}
    full = [["late", "n"], ["early", "n"], *([str(number), "n"] for number in range(MAX_PAIRS - 2))]
    store.collections["metrics"].update_one({"_id": COUNTS_ID}, {"$set": {"admitted": full}})
    record("c", "much later")
    age(store)
    assert shown(store) == {"late", "early", "other"}
    assert len(store.run(tallies.read_admitted())[0]) == MAX_PAIRS
    assert Pair("much later", "n") not in store.run(tallies.read_admitted())[0]


def shown(store: SyncStore) -> set[str]:
    return {pair.queue for pair in store.run(client.read_fleet()).tally.pairs}
