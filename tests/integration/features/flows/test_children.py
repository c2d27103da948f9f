"""Children, step by step: what a parent owes is published once, whoever dies, and only by a run with its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from mtask.errors import DatabaseError, InvalidFlow, LeaseLost, RunCanceled, StepExists
from mtask.features.flows import publish as room
from mtask.features.flows import read
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import MAX_STEPS
from mtask.kernel.driver.operation import Call
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.parts.relays import RELAYS
from tests.clients import claim
from tests.integration import stores
from tests.integration.features.flows.test_settling import Frozen, end, hold, owed, publish, recover, settle, status

Document = dict[str, Any]


def child(step: str, parent: str, *above: str, **flow: Any) -> OwedTask:
    fixed = {
        "_id": f"task:f/{step}",
        "name": "task",
        "key": f"f/{step}",
        "queue": "default",
        "params": {"$literal": step},
        "task_option": TaskOption(max_unexpected_retries=0).stored(),
        "flow": {
            "key": "f",
            "step": step,
            "after": [],
            "on_failed": "cancel",
            "ancestors": [f"task:f/{name}" for name in (*above, parent)],
            **flow,
        },
    }
    return OwedTask(fixed)


def adding(parent: str, run_id: str, *added: OwedTask, is_valid: Callable[[], bool] = lambda: True) -> Any:
    return room.add(f"task:f/{parent}", run_id, added, is_valid, RELAYS)


def add(store: SyncStore, parent: str, run_id: str, *steps: str) -> list[str]:
    made: list[str] = store.run(adding(parent, run_id, *(child(step, parent) for step in steps)))
    return made


def finish(store: SyncStore, step: str, run_id: str, *, settles: bool = True) -> None:
    assert store.run(claims.finish([Outcome(f"task:f/{step}", run_id, RunStatus.SUCCESS)])) == {run_id}
    if settles:
        settle(store, step)


def there(store: SyncStore) -> set[str]:
    return {document["flow"]["step"] for document in store.tasks.find({"flow": {"$exists": True}})}


def test_a_dependent_waits_for_the_children_and_their_children(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    run_id = claim(store, "task:f/d")
    assert add(store, "d", run_id, "c1", "c2") == ["task:f/c1", "task:f/c2"]
    assert owed(store) == set()
    parent = stores.stored(store, "f/d")
    assert "owed_tasks" not in parent
    assert parent["flow"]["has_children"] is True
    made = stores.parsed(store, "f/c1")
    assert made.params == {"$literal": "c1"}
    assert made.flow is not None
    assert made.flow.release_time == made.task_state.create_time == made.task_state.next_preempt_time
    finish(store, "d", run_id)
    assert status(store, "p") == "WAITING"
    own = claim(store, "task:f/c1")
    assert store.run(adding("c1", own, child("g", "c1", "d"))) == ["task:f/g"]
    finish(store, "c1", own)
    end(store, "c2")
    assert status(store, "p") == "WAITING"
    end(store, "g")
    assert status(store, "p") == "INIT"
    assert owed(store) == set()


def test_a_failed_child_is_a_failed_dependency(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    run_id = claim(store, "task:f/d")
    add(store, "d", run_id, "c")
    finish(store, "d", run_id)
    end(store, "c", fails=True)
    assert status(store, "p") == "CANCELED"


def test_the_same_parent_finds_its_children_and_another_parent_does_not(store: SyncStore) -> None:
    publish(store, {"d": [], "e": [], "p": ["d"]})
    first, second = claim(store, "task:f/d"), claim(store, "task:f/e")
    assert add(store, "d", first, "c") == ["task:f/c"]
    before = stores.stored(store, "f/c")
    assert add(store, "d", first, "c", "c2") == ["task:f/c2"]
    assert stores.stored(store, "f/c") == before
    for step in ("c", "p", "d"):
        with pytest.raises(StepExists, match=f"task:f/{step} exists already"):
            add(store, "e", second, "new", step)
    assert there(store) == {"d", "e", "p", "c", "c2"}
    assert owed(store) == set()


def test_two_parents_that_add_one_step_at_once_leave_one_child(store: SyncStore) -> None:
    publish(store, {"d": [], "e": []})
    first, second = claim(store, "task:f/d"), claim(store, "task:f/e")
    slow = Frozen(store, adding("d", first, child("c", "d")), lambda call: call.method == "insert_new")
    assert add(store, "e", second, "c") == ["task:f/c"]
    with pytest.raises(StepExists):
        slow.resume()
    assert stores.stored(store, "f/c")["flow"]["ancestors"] == ["task:f/e"]
    assert owed(store) == set()


def test_a_run_that_has_lost_its_lease_adds_none(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    run_id = claim(store, "task:f/d")
    lapse(store, "d")
    with pytest.raises(LeaseLost):
        add(store, "d", run_id, "c")
    again = claim(store, "task:f/d")
    with pytest.raises(LeaseLost):
        add(store, "d", run_id, "c")
    assert there(store) == {"d", "p"}
    assert add(store, "d", again, "c") == ["task:f/c"]


def lapse(store: SyncStore, step: str) -> None:
    """Let the lease of the step's run be over, and let the step be tried again."""
    store.tasks.update_one({"_id": f"task:f/{step}"}, {"$set": {"task_option.max_unexpected_retries": 3}})
    stores.lapse(store, f"f/{step}")


def test_a_run_that_is_to_be_canceled_adds_none(store: SyncStore) -> None:
    publish(store, {"d": []})
    run_id = claim(store, "task:f/d")
    store.run(queries.cancel("task:f/d"))
    with pytest.raises(RunCanceled):
        add(store, "d", run_id, "c")
    assert there(store) == {"d"}


@pytest.mark.parametrize("before", ["insert_new", "update_one"])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_death_while_children_are_added_leaves_all_of_them(store: SyncStore, before: str, is_finished: bool) -> None:
    """The worker dies between its statements, or freezes there, so that another run takes over; all children exist."""
    publish(store, {"d": [], "e": [], "p": ["d", "e"]})
    hold(store, "p", "e")
    run_id = claim(store, "task:f/d")
    slow = Frozen(store, adding("d", run_id, child("c1", "d"), child("c2", "d")), lambda call: is_of(call, before))
    assert owed(store) == {"d"}
    if is_finished:
        finish(store, "d", run_id, settles=False)
    end(store, "e")
    assert status(store, "p") == "WAITING"
    recover(store)
    assert there(store) == {"d", "e", "p", "c1", "c2"}
    assert owed(store) == set()
    end(store, "c1")
    made = stores.stored(store, "f/c1")
    slow.resume()  # it was only frozen
    assert stores.stored(store, "f/c1") == made
    assert owed(store) == set()
    end(store, "c2")
    if not is_finished:
        assert status(store, "p") == "WAITING"
        finish(store, "d", run_id)
    assert status(store, "p") == "INIT"


def is_of(call: Call, method: str) -> bool:
    return call.method == method


def test_a_frozen_worker_without_its_lease_leaves_the_publishing_to_others(store: SyncStore) -> None:
    publish(store, {"d": []})
    run_id = claim(store, "task:f/d")
    with pytest.raises(LeaseLost):
        store.run(adding("d", run_id, child("c", "d"), is_valid=lambda: False))
    assert there(store) == {"d"}
    recover(store)
    assert there(store) == {"d", "c"}


def test_a_child_that_two_runs_of_its_parent_owe_is_no_other_task(store: SyncStore) -> None:
    """The second run looks before the first run's child is published, owes it once more, and loses its lease, too."""
    publish(store, {"d": []})
    first = claim(store, "task:f/d")
    Frozen(store, adding("d", first, child("c", "d")), lambda call: is_of(call, "insert_new"))
    lapse(store, "d")
    second = claim(store, "task:f/d")
    late = Frozen(store, adding("d", second, child("c", "d")), lambda call: is_of(call, "find_one_and_update"))
    recover(store)
    made = stores.stored(store, "f/c")
    late.step()
    recover(store)
    assert stores.stored(store, "f/c") == made
    assert owed(store) == set()
    assert "unpublished" not in stores.stored(store, "f/d")["task_state"]


def test_a_change_that_is_still_to_be_settled_is_settled_first(store: SyncStore) -> None:
    """The parent was run again: what its failure canceled must be opened, and its mark must not be lost."""
    publish(store, {"d": [], "p": ["d"]})
    end(store, "d", fails=True)
    assert status(store, "p") == "CANCELED"
    store.run(queries.run_again("task:f/d", everything=False))
    run_id = claim(store, "task:f/d")
    assert add(store, "d", run_id, "c") == ["task:f/c"]
    assert status(store, "p") == "WAITING"
    assert owed(store) == set()


def inserts(call: Call, step: str) -> bool:
    return call.method == "insert_new" and call.args[0][0]["_id"] == f"task:f/{step}"


def test_children_added_at_once_lose_no_mark(store: SyncStore) -> None:
    publish(store, {"d": []})
    run_id = claim(store, "task:f/d")
    slow = Frozen(store, adding("d", run_id, child("c1", "d")), lambda call: call.method == "insert_new")
    second = Frozen(store, adding("d", run_id, child("c2", "d")), lambda call: inserts(call, "c2"))
    slow.resume()
    assert "d" in owed(store), "the second child is still owed"
    second.resume()
    assert owed(store) == set()
    assert there(store) == {"d", "c1", "c2"}


def test_a_child_that_is_published_after_the_failure_of_its_flow_is_canceled(store: SyncStore) -> None:
    publish(store, {"d": [], "bad": []}, fail_fast=True)
    run_id = claim(store, "task:f/d")
    operation = adding("d", run_id, child("c", "d", fail_fast=True))
    Frozen(store, operation, lambda call: call.method == "insert_new")
    finish(store, "d", run_id, settles=False)
    end(store, "bad", fails=True)
    recover(store)
    assert status(store, "c") == "CANCELED"
    assert owed(store) == set()


_TO = {"url": "https://hooks.example.com/", "on": ["SUCCESS", "FAIL", "CANCELED"]}


def told(store: SyncStore) -> set[str]:
    """Return the tasks whose ends are being told to their addresses."""
    deliveries = store.tasks.find({"name": "mtask/callback"})
    return {entry["v"] for document in deliveries for entry in document["lookup"] if entry["k"] == "callback_of"}


def test_ends_that_follow_while_children_are_added_are_told_at_once(store: SyncStore) -> None:
    """Who settles the task of the handler cancels the flow, that task too. The failure itself is settled later."""
    publish(store, {"d": [], "bad": [], "k": []}, fail_fast=True)
    store.tasks.update_one({"_id": "task:f/k"}, {"$set": {"callback": _TO}})
    first = claim(store, "task:f/d")
    owing = OwedTask({**child("c", "d", fail_fast=True).fixed, "callback": _TO})
    Frozen(store, adding("d", first, owing), lambda call: call.method == "insert_new")
    lapse(store, "d")
    second = claim(store, "task:f/d")
    end(store, "bad", fails=True, settles=False)
    with pytest.raises(RunCanceled):
        add(store, "d", second, "c2")
    assert [status(store, step) for step in ("c", "k")] == ["CANCELED"] * 2
    assert told(store) == {"task:f/c", "task:f/k"}
    settle(store, "bad")
    assert owed(store) == set()
    assert "c2" not in there(store)


def test_room_that_another_caller_counts_for_the_first_time_meanwhile_is_room(store: SyncStore) -> None:
    slow = Frozen(store, room.take("f", 1), lambda call: call.method == "find_one")
    store.run(room.take("f", 2))
    slow.resume()
    assert store.database["places"].distinct("task_cnt") == [3]


def test_a_flow_has_room_for_as_many_tasks_as_it_may_have(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    store.run(room.take("f", MAX_STEPS - 4))
    store.run(room.take("f", 1))
    with pytest.raises(InvalidFlow, match=r"2 more tasks do not fit: it has 9999, and 10000 are the most"):
        store.run(room.take("f", 2))
    store.run(room.take("f", 1))
    with pytest.raises(InvalidFlow, match="1 more tasks do not fit"):
        store.run(room.take("f", 1))
    # What was never added, or was removed, does not count for ever.
    store.database["places"].update_one({"_id": "flow f"}, {"$set": {"count_time": datetime(2020, 1, 1, tzinfo=UTC)}})
    store.run(room.take("f", MAX_STEPS - 2))
    with pytest.raises(InvalidFlow):
        store.run(room.take("f", 1))


def test_many_parents_that_add_children_at_once_exceed_no_flow(
    store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MAX_STEPS", 30)
    publish(store, {f"p{number}": [] for number in range(8)})
    refused: list[str] = []

    def add(number: int) -> None:
        added = [child(f"c{number}-{each}", f"p{number}") for each in range(5)]
        try:
            store.run(room.make_room("f", f"task:f/p{number}", added))
        except InvalidFlow:
            refused.append(f"p{number}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 4
    assert (store.database["places"].find_one({"_id": "flow f"}) or {})["task_cnt"] == 28


def test_children_are_added_in_batches_that_fit_into_their_parent() -> None:
    def sizes(count: int, size: int) -> Sequence[int]:
        made = [OwedTask({"_id": f"task:f/{number}", "params": "x" * size}) for number in range(count)]
        return [len(batch) for batch in room.in_batches(made)]

    assert sizes(1200, 1) == [500, 500, 200]
    assert sizes(5, 300_000) == [3, 2]
    assert sizes(2, 5_000_000) == [1, 1]


def test_results_are_those_of_dependencies_and_descendants_that_succeeded(store: SyncStore) -> None:
    publish(store, {"d": [], "e": [], "bad": [], "other": []})
    run_id = claim(store, "task:f/d")
    add(store, "d", run_id, "c", "open")
    assert store.run(claims.finish([Outcome("task:f/d", run_id, RunStatus.SUCCESS, {"n": 1})]))
    end(store, "c")
    end(store, "e")
    end(store, "bad", fails=True)
    after = ["task:f/e", "task:f/bad", "task:f/gone", "task:f/d"]
    rows = store.run(room.results(after))
    assert rows == [
        {"_id": "task:f/e", "step": "e", "queues": ["default"], "returns": None},
        {"_id": "task:f/d", "step": "d", "queues": ["default"], "returns": {"n": 1}},
    ]
    assert store.run(room.parents(after)) == ["task:f/d"]
    assert store.run(room.descendants(["task:f/d"])) == ["task:f/c"]


def test_endless_changes_of_the_parent_are_an_error(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, {"d": []})
    run_id = claim(store, "task:f/d")
    monkeypatch.setattr(room, "ROUNDS", 0)
    with pytest.raises(DatabaseError, match="changed all the time"):
        add(store, "d", run_id, "c")


def test_recovery_publishes_what_many_parents_owe(store: SyncStore) -> None:
    publish(store, {f"d{number}": [] for number in range(5)})
    for number in range(5):
        run_id = claim(store, f"task:f/d{number}")
        operation = adding(f"d{number}", run_id, child(f"c{number}", f"d{number}"))
        Frozen(store, operation, lambda call: call.method == "insert_new")
    recover(store)
    assert there(store) == {f"{kind}{number}" for kind in "cd" for number in range(5)}
    assert owed(store) == set()
    assert store.run(read.is_any())
