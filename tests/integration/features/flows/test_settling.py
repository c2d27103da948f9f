"""Settling, step by step: what dies or stands still between two statements loses nothing and does nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import bson
import pytest
from bson.binary import Binary
from bson.timestamp import Timestamp
from pymongo.errors import WriteError

from mtask.errors import InvalidParams, OperationFailed
from mtask.features.flows import change as operating
from mtask.features.flows import publish as publishing
from mtask.features.flows import read as looking
from mtask.features.flows import retention
from mtask.features.flows import settle as settling
from mtask.features.flows import statements as flows
from mtask.features.flows.next import Next
from mtask.features.flows.publish import NewFlow, NewStep
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.indexes import FLOW_INDEX, HEAD_INDEX
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import transactions
from mtask.kernel.operations.publish import NewTask
from mtask.kernel.statements.finish import Outcome
from mtask.parts.relays import RELAYS
from tests.clients import claim
from tests.explaining import only
from tests.integration import stores
from tests.mongo import eventually

Document = dict[str, Any]


def publish(store: SyncStore, steps: dict[str, Sequence[str]], *, fail_fast: bool = False, **on_failed: Any) -> None:
    """Publish the flow "f" of these steps, each with the names of its dependencies."""
    option = TaskOption(max_unexpected_retries=0).stored()
    made = [
        NewStep(
            NewTask(_id(name), "task", f"f/{name}", "default", None, option),
            name,
            [_id(other) for other in after],
            on_failed.get(name, "cancel"),
        )
        for name, after in steps.items()
    ]
    flow = NewFlow("f", made, fail_fast)
    assert transactions.transact(store, lambda: publishing.publish(flow)).created


def _id(step: str) -> str:
    return f"task:f/{step}"


def status(store: SyncStore, step: str) -> str:
    return str(stores.stored(store, f"f/{step}")["task_state"]["status"])


def statuses(store: SyncStore) -> dict[str, str]:
    found = store.tasks.find({"flow.key": "f"})
    return {document["flow"]["step"]: document["task_state"]["status"] for document in found}


def end(store: SyncStore, step: str, *, fails: bool = False, settles: bool = True) -> None:
    """Let a worker run the step to its end; without `settles`, the worker dies right after its finish."""
    run_id = claim(store, _id(step))
    outcome = Outcome(
        _id(step), run_id, RunStatus.FAIL if fails else RunStatus.SUCCESS, reason="no luck" if fails else None
    )
    assert store.run(claims.finish([outcome])) == {run_id}
    if settles:
        settle(store, step)


def settle(store: SyncStore, *steps: str) -> None:
    store.run(settling.settle_all([_id(step) for step in steps]))


def recover(store: SyncStore) -> None:
    """Do what the scans of any worker do."""
    for _ in range(5):
        task_ids = store.run(looking.owed(timedelta(0)))
        if not task_ids:
            return
        store.run(settling.settle_all(task_ids))
    raise AssertionError(f"owed for ever: {owed(store)}")


def hold(store: SyncStore, step: str, by: str) -> None:
    """Let the step watch this dependency, whatever the publisher's choice was."""
    before = store.tasks.find_one_and_update({"_id": _id(step)}, {"$set": {"flow.held_by": _id(by)}})
    assert before is not None
    if not store.tasks.count_documents({"flow.held_by": before["flow"]["held_by"]}):
        store.tasks.update_one({"_id": before["flow"]["held_by"]}, {"$set": {"flow.unwatched": True}})
    store.tasks.update_one({"_id": _id(by)}, {"$unset": {"flow.unwatched": ""}})


def owed(store: SyncStore) -> set[str]:
    return {document["flow"]["step"] for document in store.tasks.find({"owed_since": {"$exists": True}})}


class Frozen:
    """An operation that stands still before its first call of a kind; it can go on, or never does."""

    def __init__(self, store: SyncStore, operation: Operation[Any], before: Callable[[Call], bool]) -> None:
        self._store = store
        self._operation: Generator[Call, Any, Any] = operation
        self._call = next(operation)
        while not before(self._call):
            self._call = operation.send(store.run(only(self._call)))

    def step(self) -> None:
        """Make the call before which the operation stands."""
        self._call = self._operation.send(self._store.run(only(self._call)))

    def resume(self) -> Any:
        try:
            while True:
                self.step()
        except StopIteration as stop:
            return stop.value


def is_write(call: Call) -> bool:
    return call.method == "update_many"


def before_crossing_off(store: SyncStore, step: str) -> Frozen:
    """Settle a step up to the write that removes its mark."""

    def is_crossing(call: Call) -> bool:
        return is_write(call) and call.args[1] == flows.cross_off() and _id(step) in _named(call)

    return Frozen(store, settling.settle_all([_id(step)]), is_crossing)


# --- what settling does ---------------------------------------------------------------------------------------


def test_a_diamond_runs_in_order_and_each_step_is_released_once(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    assert statuses(store) == {"a": "INIT", "b": "WAITING", "c": "WAITING", "d": "WAITING"}
    end(store, "a")
    assert statuses(store) == {"a": "SUCCESS", "b": "INIT", "c": "INIT", "d": "WAITING"}
    end(store, "b")
    assert status(store, "d") == "WAITING"
    end(store, "c")
    assert status(store, "d") == "INIT"
    assert owed(store) == set()
    end(store, "d")
    assert set(statuses(store).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("on_failed", "expected"), [("cancel", "CANCELED"), ("fail", "FAIL"), ("run", "INIT")])
def test_a_failure_does_what_the_dependent_says_on_and_on(store: SyncStore, on_failed: str, expected: str) -> None:
    publish(store, {"a": [], "b": ["a"], "c": ["b"]}, b=on_failed, c="cancel")
    end(store, "a", fails=True)
    assert status(store, "b") == expected
    assert status(store, "c") == ("WAITING" if on_failed == "run" else "CANCELED")
    if on_failed != "run":
        document = stores.parsed(store, "f/b")
        assert document.flow is not None
        assert document.flow.held_by == _id("a")
        assert _id("a") in (document.fail_reason or "")
    assert owed(store) == set()


def test_a_failure_is_told_when_all_dependencies_have_ended(store: SyncStore) -> None:
    publish(store, {"a": [], "b": [], "c": ["a", "b"]})
    end(store, "a", fails=True)
    assert status(store, "c") == "WAITING"
    end(store, "b")
    assert status(store, "c") == "CANCELED"


def test_a_retry_opens_exactly_what_the_failure_canceled(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"], "c": ["b"], "d": ["a"], "e": []})
    store.run(queries.cancel(_id("d")))
    store.run(queries.cancel(_id("e")))
    settle(store, "d", "e")
    end(store, "a", fails=True)
    assert statuses(store) == {"a": "FAIL", "b": "CANCELED", "c": "CANCELED", "d": "CANCELED", "e": "CANCELED"}
    store.run(queries.run_again(_id("a"), everything=False))
    settle(store, "a")
    assert statuses(store) == {"a": "INIT", "b": "WAITING", "c": "WAITING", "d": "CANCELED", "e": "CANCELED"}
    assert owed(store) == set()
    for step in "abc":
        end(store, step)
    assert [status(store, step) for step in "abcde"] == ["SUCCESS"] * 3 + ["CANCELED"] * 2


def test_fail_fast_cancels_the_open_tasks_but_those_that_run_after_failures(store: SyncStore) -> None:
    publish(store, {"a": [], "b": [], "c": ["b"], "clean": ["b", "c"], "r": []}, fail_fast=True, clean="run")
    held = claim(store, _id("r"))
    end(store, "a", fails=True)
    assert statuses(store) == {"a": "FAIL", "b": "CANCELED", "c": "CANCELED", "clean": "INIT", "r": "RUNNING"}
    assert stores.stored(store, "f/r")["task_state"]["cancel_requested"] is True
    store.run(claims.finish([Outcome(_id("r"), held, RunStatus.CANCELED, reason="canceled")]))
    settle(store, "r")
    assert status(store, "r") == "CANCELED"
    store.run(queries.run_again(_id("a"), everything=False))
    settle(store, "a")
    assert statuses(store) == {"a": "INIT", "b": "INIT", "c": "WAITING", "clean": "INIT", "r": "INIT"}
    assert owed(store) == set()


def test_a_removed_dependency_counts_as_canceled(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"], "c": ["b"]}, c="run")
    store.tasks.delete_one({"_id": _id("a")})
    orphans = store.run(looking.orphans())
    assert orphans == [_id("b")]
    store.run(settling.settle_all(store.run(settling.decide(orphans)).further))
    assert statuses(store) == {"b": "CANCELED", "c": "INIT"}


def test_a_delay_counts_from_the_release(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"]})
    store.tasks.update_one({"_id": _id("b")}, {"$set": {"flow.delay_ms": 60_000}})
    end(store, "a")
    document = stores.parsed(store, "f/b")
    assert document.flow is not None
    assert document.flow.release_time is not None
    assert document.task_state.next_preempt_time == document.flow.release_time + timedelta(minutes=1)


def test_a_chain_of_cancels_is_settled_at_once(store: SyncStore) -> None:
    names = [f"s{number}" for number in range(40)]
    publish(store, {name: names[place - 1 : place] if place else [] for place, name in enumerate(names)})
    end(store, "s0", fails=True)
    assert set(statuses(store).values()) == {"FAIL", "CANCELED"}
    assert owed(store) == set()


# --- retention ------------------------------------------------------------------------------------------------


def expiring(store: SyncStore) -> set[str]:
    return {document["flow"]["step"] for document in store.tasks.find({"expire_time": {"$exists": True}})}


def retain(store: SyncStore) -> None:
    store.tasks.update_many({}, {"$set": {"task_option.retain_success_ms": 60_000_000}})


def test_the_retention_of_a_step_begins_at_the_end_of_its_flow(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"]})
    retain(store)
    end(store, "a")
    assert store.run(retention.end_flows()) == 0
    assert expiring(store) == set()
    end(store, "b")
    assert store.run(retention.end_flows()) == 1
    assert expiring(store) == {"a", "b"}
    assert stores.stored(store, "f/a")["flow"]["end_time"] is not None
    assert store.run(retention.end_flows()) == 0
    store.run(queries.run_again(_id("b"), everything=True))
    settle(store, "b")
    assert expiring(store) == set()
    assert stores.stored(store, "f/a")["flow"]["end_time"] is None
    end(store, "b")
    assert store.run(retention.end_flows()) == 1
    assert expiring(store) == {"a", "b"}


@pytest.mark.parametrize("is_settled", [False, True])
def test_a_step_that_is_opened_again_amid_the_end_of_its_flow_takes_it_back(store: SyncStore, is_settled: bool) -> None:
    publish(store, {"a": [], "b": ["a"]})
    retain(store)
    end(store, "a")
    end(store, "b")
    upkeep = Frozen(store, retention.end_flows(), lambda call: call.method == "update_one")
    store.run(queries.run_again(_id("b"), everything=True))
    if is_settled:
        settle(store, "b")
    upkeep.resume()
    recover(store)
    assert expiring(store) == set()
    assert stores.stored(store, "f/a")["flow"]["end_time"] is None


def test_a_step_that_is_opened_again_after_whoever_ended_its_flow_died_takes_the_retention_back(
    store: SyncStore,
) -> None:
    publish(store, {"a": [], "b": ["a"]})
    retain(store)
    end(store, "a")
    end(store, "b")
    Frozen(store, retention.end_flows(), lambda call: call.method == "update_one")  # it dies there
    assert expiring(store) == {"a", "b"}
    store.run(queries.run_again(_id("b"), everything=True))
    settle(store, "b")
    assert expiring(store) == set()


def test_a_step_is_opened_again_where_the_index_of_heads_cannot_be_made(store: SyncStore) -> None:
    store.tasks.drop_index(HEAD_INDEX)
    publish(store, {"a": [], "b": ["a"]})
    end(store, "a")
    settle(store, "a")
    end(store, "b")
    assert store.run(retention.end_flows()) == 1
    store.run(queries.run_again(_id("b"), everything=True))
    settle(store, "b")
    assert stores.stored(store, "f/a")["flow"]["end_time"] is None


# --- what interleaves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True])
def test_moved_watch(store: SyncStore, is_killed: bool) -> None:
    """D1's settler stands still between its look and the move to D2, or dies right after it; D2 ends meanwhile."""
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d1")
    end(store, "d1", settles=False)
    settler = Frozen(store, settling.settle_all([_id("d1")]), is_write)
    end(store, "d2")
    assert status(store, "p") == "WAITING", "d2 did not hold it"
    if is_killed:
        settler.step()  # the move, and nothing after it
        assert stores.stored(store, "f/p")["flow"]["held_by"] == _id("d2")
        assert owed(store) == {"d1", "p"}
        recover(store)
    else:
        settler.resume()
    assert status(store, "p") == "INIT"
    assert owed(store) == set()


def is_of_watch(call: Call) -> bool:
    return is_write(call) and call.args[1] == flows.watch()


def test_a_success_that_nobody_watches_is_not_marked(store: SyncStore) -> None:
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d1")
    end(store, "d2", settles=False)
    assert owed(store) == set()
    end(store, "d1", settles=False)
    assert owed(store) == {"d1"}
    settle(store, "d1")
    assert status(store, "p") == "INIT"


@pytest.mark.parametrize("had_a_run", [False, True])
def test_a_success_renews_the_mark_of_an_earlier_change(store: SyncStore, had_a_run: bool) -> None:
    """Nobody watches D, but its earlier change is not settled: whoever is about to remove that mark must notice."""
    publish(store, {"d": []})
    if had_a_run:
        end(store, "d", fails=True)
        store.run(queries.run_again(_id("d"), everything=False))
    else:
        store.tasks.update_one({"_id": _id("d")}, [{"$set": {"owed_since": "$$NOW"}}])
    before = stores.stored(store, "f/d")["owed_since"]
    end(store, "d", settles=False)
    assert stores.stored(store, "f/d")["owed_since"] > before


@pytest.mark.parametrize("ends", ["SUCCESS", "FAIL", "CANCELED"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_watch_that_comes_after_the_end_counts_for_nothing(store: SyncStore, ends: str, dies: bool) -> None:
    """D2 ends between the move to it and the watch. Its end was not to be marked, so only P's own mark is left."""
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]}, p="run")
    hold(store, "p", "d1")
    end(store, "d1", settles=False)
    settler = Frozen(store, settling.settle_all([_id("d1")]), is_of_watch)
    assert "p" in owed(store)
    if ends == "CANCELED":
        store.run(queries.cancel(_id("d2")))
    else:
        end(store, "d2", fails=ends == "FAIL", settles=False)
    if dies:
        recover(store)
    else:
        settler.resume()
    assert status(store, "p") == "INIT"
    recover(store)
    assert owed(store) == set()


def test_a_settler_that_dies_before_the_watch_leaves_it_to_the_next(store: SyncStore) -> None:
    """P is moved to D2, and is marked. Whoever finds the mark must watch D2 before it removes the mark."""
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d1")
    end(store, "d1", settles=False)
    Frozen(store, settling.settle_all([_id("d1")]), is_of_watch)
    recover(store)
    assert (status(store, "p"), owed(store)) == ("WAITING", set())
    end(store, "d2", settles=False)
    assert owed(store) == {"d2"}
    settle(store, "d2")
    assert status(store, "p") == "INIT"


def test_a_watch_marks_the_end_that_comes_right_after_it(store: SyncStore) -> None:
    """D2 ends marked between the watch and the removal of P's mark. Others release P."""
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d1")
    end(store, "d1", settles=False)
    settler = Frozen(store, settling.settle_all([_id("d1")]), is_of_watch)
    settler.step()
    end(store, "d2", settles=False)
    assert "d2" in owed(store)
    settler.resume()  # it removes the mark of P
    recover(store)
    assert status(store, "p") == "INIT"


def test_a_step_that_is_open_again_watches_what_it_waits_for(store: SyncStore) -> None:
    """P was canceled because of D1, which it had never watched. D1 is retried: P must be marked until it watches D1."""
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d2")
    end(store, "d1", fails=True)
    end(store, "d2")
    assert status(store, "p") == "CANCELED"
    store.run(queries.run_again(_id("d1"), everything=False))
    settle(store, "d1")
    assert (status(store, "p"), owed(store)) == ("WAITING", set())
    end(store, "d1", settles=False)
    assert owed(store) == {"d1"}
    settle(store, "d1")
    assert status(store, "p") == "INIT"


def test_a_step_that_two_settlers_release_at_once_starts_once(store: SyncStore) -> None:
    publish(store, {"a": [], "p": ["a"], "q": ["p"]})
    end(store, "a", settles=False)
    slow = Frozen(store, settling.settle_all([_id("a")]), is_write)
    settle(store, "a")
    released = stores.stored(store, "f/p")
    end(store, "p")
    slow.resume()
    assert stores.stored(store, "f/p")["flow"]["release_time"] == released["flow"]["release_time"]
    assert statuses(store) == {"a": "SUCCESS", "p": "SUCCESS", "q": "INIT"}


def test_outbox_gap(store: SyncStore) -> None:
    """D1 owes a child as it ends, and its worker dies; D2 ends: P starts only after both and the child."""
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d2")
    child = stores.stored(store, "f/d1") | {"_id": _id("child"), "key": "f/child"}
    child["flow"] = {**child["flow"], "step": "child", "ancestors": [_id("d1")]}
    child["flow"].pop("head", None)
    store.tasks.update_one({"_id": _id("d1")}, {"$set": {"owed_tasks": [child], "flow.has_children": True}})
    end(store, "d1", settles=False)
    end(store, "d2")
    assert status(store, "p") == "WAITING", "the child is still owed"
    recover(store)
    assert status(store, "p") == "WAITING", "the child has not ended"
    assert status(store, "child") == "INIT"
    end(store, "child")
    assert status(store, "p") == "INIT"
    assert owed(store) == set()
    assert not stores.stored(store, "f/d1").get("owed_tasks")


def test_a_task_that_owed_a_child_tells_its_dependents_of_its_end(store: SyncStore) -> None:
    """The child ended while it was still owed: only the end of its parent can release the dependent."""
    publish(store, {"d": [], "p": ["d"]})
    child = stores.stored(store, "f/d") | {"_id": _id("child"), "key": "f/child"}
    child["flow"] = {**child["flow"], "step": "child", "ancestors": [_id("d")]}
    child["flow"].pop("head", None)
    store.tasks.update_one({"_id": _id("d")}, {"$set": {"owed_tasks": [child], "flow.has_children": True}})
    end(store, "d", settles=False)
    store.tasks.insert_one(child)
    end(store, "child")
    recover(store)
    assert status(store, "p") == "INIT"
    assert owed(store) == set()


def test_stale_verdict(store: SyncStore) -> None:
    """A settler that is about to cancel P stands still while D is retried to SUCCESS; a user's cancel stays."""
    publish(store, {"d": [], "p": ["d"], "sibling": ["d"]})
    store.run(queries.cancel(_id("sibling")))
    settle(store, "sibling")
    end(store, "d", fails=True, settles=False)
    settler = Frozen(store, settling.settle_all([_id("d")]), is_write)
    store.run(queries.run_again(_id("d"), everything=False))
    settle(store, "d")
    end(store, "d")
    settler.resume()
    assert statuses(store) == {"d": "SUCCESS", "p": "INIT", "sibling": "CANCELED"}
    assert owed(store) == set()


@pytest.mark.parametrize("is_killed", [False, True])
def test_stale_verdict_while_the_dependency_runs_again_is_taken_back(store: SyncStore, is_killed: bool) -> None:
    publish(store, {"d": [], "p": ["d"]})
    end(store, "d", fails=True, settles=False)
    settler = Frozen(store, settling.settle_all([_id("d")]), is_write)
    store.run(queries.run_again(_id("d"), everything=False))
    settle(store, "d")
    if is_killed:
        settler.step()  # the cancel, and nothing after it
        assert statuses(store) == {"d": "INIT", "p": "CANCELED"}
        recover(store)
    else:
        settler.resume()
    assert statuses(store) == {"d": "INIT", "p": "WAITING"}
    end(store, "d")
    assert statuses(store) == {"d": "SUCCESS", "p": "INIT"}


def test_a_mark_that_a_new_change_has_renewed_stays(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    end(store, "d", fails=True, settles=False)
    crossing = before_crossing_off(store, "d")
    store.run(queries.run_again(_id("d"), everything=False))
    crossing.step()
    assert "d" in owed(store)
    recover(store)
    assert statuses(store) == {"d": "INIT", "p": "WAITING"}


def test_a_mark_of_the_same_status_stays_if_it_is_another_mark(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    end(store, "d", fails=True, settles=False)
    crossing = before_crossing_off(store, "d")
    store.run(queries.run_again(_id("d"), everything=False))
    end(store, "d", fails=True, settles=False)
    crossing.step()
    assert "d" in owed(store)


def test_a_release_by_one_who_read_before_the_watch_moved_is_none(store: SyncStore) -> None:
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d1")
    end(store, "d2")
    end(store, "d1", settles=False)
    slow = Frozen(store, settling.settle_all([_id("d1")]), is_write)
    store.run(queries.run_again(_id("d2"), everything=True))
    settle(store, "d2", "d1")
    assert stores.stored(store, "f/p")["flow"]["held_by"] == _id("d2")
    slow.resume()
    assert statuses(store) == {"d1": "SUCCESS", "d2": "INIT", "p": "WAITING"}
    end(store, "d2")
    assert status(store, "p") == "INIT"


def test_a_cancel_by_a_user_is_not_undone_by_a_slow_settler(store: SyncStore) -> None:
    publish(store, {"d": [], "p": ["d"]})
    end(store, "d", fails=True)
    store.run(queries.run_again(_id("d"), everything=False))
    slow = Frozen(store, settling.settle_all([_id("d")]), is_write)  # about to open p again
    settle(store, "d")
    store.run(queries.cancel(_id("p")))
    settle(store, "p")
    slow.resume()
    recover(store)
    assert statuses(store) == {"d": "INIT", "p": "CANCELED"}


def is_look_of_fail_fast(call: Call) -> bool:
    return call.method == "command" and call.args[0].get("hint") == FLOW_INDEX


@pytest.mark.parametrize("is_retried_to_its_end", [False, True])
def test_a_slow_fail_fast_does_not_cancel_the_retry(store: SyncStore, is_retried_to_its_end: bool) -> None:
    publish(store, {"a": [], "b": []}, fail_fast=True)
    end(store, "a", fails=True, settles=False)
    settler = Frozen(store, settling.settle_all([_id("a")]), is_look_of_fail_fast)
    store.run(queries.run_again(_id("a"), everything=False))
    settle(store, "a")
    if is_retried_to_its_end:
        end(store, "a")
    settler.resume()
    recover(store)
    assert statuses(store) == {"a": "SUCCESS" if is_retried_to_its_end else "INIT", "b": "INIT"}


class Doctored:
    """Runs an operation whose deciding reads are changed on their way there, or whose answers on their way back."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        #: The reads show how things were at this time of the cluster.
        self.as_of: Timestamp | None = None
        #: The read took place this long ago, and this happens after it. Both hold for the first read.
        self.age = timedelta(0)
        self.after: Callable[[], None] = lambda: None

    def run(self, operation: Operation[Any]) -> None:
        call = next(operation)
        with suppress(StopIteration):
            while True:
                concern = call.args[0].get("readConcern", {}) if call.method == "command" else {}
                is_deciding = concern.get("level") == "snapshot"
                if is_deciding and self.as_of is not None:
                    concern["atClusterTime"] = self.as_of
                answer = self._store.run(only(call))
                if is_deciding:
                    for row in answer["cursor"]["firstBatch"]:
                        if "now" in row:
                            row["now"] -= self.age
                    self.age, (after, self.after) = timedelta(0), (self.after, lambda: None)
                    after()
                call = operation.send(answer)


def cluster_time(store: SyncStore) -> Timestamp:
    time: Timestamp = store.database.command("ping")["operationTime"]
    return time


def test_a_mark_stays_if_the_deciding_read_does_not_show_the_end_yet(store: SyncStore) -> None:
    """Right after a failover, a majority read may lag behind what the former primary acknowledged."""
    publish(store, {"d": [], "p": ["d"]})
    lagging = Doctored(store)
    lagging.as_of = cluster_time(store)
    end(store, "d", settles=False)
    lagging.run(settling.settle_all([_id("d")]))
    assert status(store, "p") == "WAITING"
    assert owed(store) == {"d"}
    recover(store)
    assert status(store, "p") == "INIT"
    assert owed(store) == set()


def test_a_moved_watch_stays_marked_if_the_deciding_read_does_not_show_the_move_yet(store: SyncStore) -> None:
    publish(store, {"d1": [], "d2": [], "p": ["d1", "d2"]})
    hold(store, "p", "d1")
    lagging = Doctored(store)
    lagging.as_of = cluster_time(store)
    end(store, "d1", settles=False)
    settler = Frozen(store, settling.settle_all([_id("d1")]), is_write)
    end(store, "d2")
    settler.step()  # the move to d2, which has ended and told all that it held; the settler dies
    assert owed(store) == {"d1", "p"}
    lagging.run(settling.settle_all([_id("p")]))
    assert owed(store) == {"d1", "p"}
    settle(store, "p")
    assert status(store, "p") == "INIT"


def test_a_release_does_not_follow_from_a_read_of_long_ago(store: SyncStore) -> None:
    """A release cannot be taken back. So a settler that stood still reads again."""
    publish(store, {"d": [], "p": ["d"]})
    end(store, "d", settles=False)
    slow = Doctored(store)
    slow.age = timedelta(minutes=1)

    def rerun() -> None:
        store.run(queries.run_again(_id("d"), everything=True))

    slow.after = rerun
    slow.run(settling.settle_all([_id("d")]))
    recover(store)
    assert statuses(store) == {"d": "INIT", "p": "WAITING"}
    end(store, "d")
    assert statuses(store) == {"d": "SUCCESS", "p": "INIT"}


def test_a_look_shows_one_moment(store: SyncStore) -> None:
    """A dependency that ends amid a look is still open in it."""
    publish(store, {"d": [], "p": ["d"]})
    read = Frozen(store, looking.look([_id("p")]), lambda call: _id("d") in str(call.args[0]["filter"]))
    end(store, "d", settles=False)
    rows = read.resume()
    assert [(row["verdict"], row["other"]) for row in rows] == [("wait", _id("d"))]
    assert [row["verdict"] for row in store.run(looking.look([_id("p")]))] == ["release"]


def test_what_does_not_fit_into_one_reply_is_read_in_parts(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MANY", 2)
    names = [f"s{number}" for number in range(7)]
    publish(store, {name: [] for name in names} | {"p": names, "q": names, "r": names})
    for name in names[:-1]:
        end(store, name)
    assert {row["other"] for row in store.run(looking.look([_id("p"), _id("q"), _id("r")]))} == {_id("s6")}
    end(store, "s6")
    assert [status(store, step) for step in "pqr"] == ["INIT"] * 3


def test_a_group_of_verdicts_takes_a_few_statements(store: SyncStore) -> None:
    """The number of statements does not grow with the number of holders."""
    names = [f"{letter}{number}" for number in range(20) for letter in "ab"]
    publish(store, {name: [f"a{name[1:]}"] if name[0] == "b" else [] for name in names})
    heads = [name for name in names if name[0] == "a"]
    for name in heads:
        end(store, name, settles=False, fails=name in heads[:5])
    writes = 0
    operation = settling.settle_all([_id(name) for name in heads])
    call = next(operation)
    with suppress(StopIteration):
        while True:
            writes += is_write(call)
            call = operation.send(store.run(only(call)))
    assert writes <= 4, "a release, a cancel, and two times the removal of marks"
    assert [status(store, name) for name in names if name[0] == "b"] == ["CANCELED"] * 5 + ["INIT"] * 15
    assert owed(store) == set()


def _named(call: Call) -> list[str]:
    wanted = call.args[0]["_id"]
    return [wanted] if isinstance(wanted, str) else wanted["$in"]


def test_idle_recovery_examines_nothing(store: SyncStore) -> None:
    publish(store, {f"s{number}": [] for number in range(50)})
    end(store, "s0")
    explained = store.database.command(
        "explain",
        {
            "find": "tasks",
            "filter": {"owed_since": {"$exists": True}, "$expr": {"$lte": ["$owed_since", "$$NOW"]}},
            "hint": "mtask_owed",
        },
        verbosity="executionStats",
    )
    assert explained["executionStats"]["totalKeysExamined"] == 0


# --- documents that cannot be changed -------------------------------------------------------------------------


def damage(store: SyncStore, task_id: str, change: Document) -> None:
    """Change a document as no writer of mtask does, past the collection's validator."""
    updates = [{"q": {"_id": task_id}, "u": change}]
    assert store.database.command("update", "tasks", updates=updates, bypassDocumentValidation=True)["n"] == 1


@pytest.mark.parametrize(
    "part",
    [[], [{"key": "f"}], {"fail_fast": True}, {"key": ["f"], "fail_fast": True}, {"key": "f", "held_by": {"x": 1}}],
)
def test_a_step_with_a_malformed_part_is_settled_like_others(store: SyncStore, part: Any) -> None:
    publish(store, {"a": [], "bad": [], "p": ["a"], "q": ["bad"]})
    end(store, "a", settles=False)
    damage(store, _id("bad"), {"$set": {"flow": part}})
    assert store.run(claims.quarantine(_id("bad"), "w", "malformed"))
    recover(store)
    assert (status(store, "p"), status(store, "q")) == ("INIT", "CANCELED")
    assert store.tasks.count_documents({"owed_since": {"$exists": True}}) == 0


def test_a_malformed_holder_list_is_left_alone(store: SyncStore) -> None:
    publish(store, {"a": [], "bad": ["a"], "p": ["a"]})
    damage(store, _id("bad"), {"$set": {"flow.held_by": [_id("a")]}})
    end(store, "a")
    assert (status(store, "p"), status(store, "bad")) == ("INIT", "WAITING")
    assert owed(store) == set()


def test_a_step_that_cannot_be_changed_does_not_hold_up_its_siblings(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"], "c": ["a"], "d": ["a"], "e": ["c"]})
    damage(store, _id("c"), {"$unset": {"task_state.worker_states": 1}})
    end(store, "a")
    recover(store)
    assert [status(store, name) for name in "bcde"] == ["INIT", "FAIL", "INIT", "CANCELED"]
    assert "worker_states" in stores.stored(store, "f/c")["task_state"]["worker_states"][-1]["fail_reason"]
    assert owed(store) == set()


def test_a_step_without_room_for_its_end_does_not_hold_up_its_siblings(store: SyncStore) -> None:
    publish(store, {"a": [], "b": ["a"], "c": ["a"], "d": ["a"]})
    size = len(bson.encode(stores.stored(store, "f/c") | {"params": b""}))
    full = b"x" * (16 * 1024 * 1024 - size - 30)

    def is_full() -> bool:
        try:
            store.tasks.update_one({"_id": _id("c")}, {"$set": {"params": full}})
        except WriteError as error:
            if error.code != 388:  # the server's cache is full of what other tests write
                raise
            return False
        return True

    eventually(is_full, message="the document of c is full")
    end(store, "a", fails=True)
    recover(store)
    found = store.tasks.find({"flow.key": "f"}, {"params": 0})
    assert {one["flow"]["step"]: one["task_state"]["status"] for one in found} == {
        "a": "FAIL",
        "b": "CANCELED",
        "c": "FAIL",
        "d": "CANCELED",
    }


def test_fail_fast_and_a_cancel_go_past_a_step_that_cannot_be_changed(store: SyncStore) -> None:
    publish(store, {"a": [], "b": [], "c": ["b"], "d": []}, fail_fast=True)
    damage(store, _id("c"), {"$unset": {"task_state.worker_states": 1}})
    end(store, "a", fails=True)
    assert statuses(store) == {"a": "FAIL", "b": "CANCELED", "c": "FAIL", "d": "CANCELED"}


def test_a_cancel_goes_past_a_step_that_cannot_be_changed(store: SyncStore) -> None:
    publish(store, {"a": [], "b": [], "c": ["b"], "d": []})
    damage(store, _id("c"), {"$unset": {"task_state.worker_states": 1}})
    store.run(operating.cancel("f", RELAYS, everything=True))
    assert statuses(store) == {"a": "CANCELED", "b": "CANCELED", "c": "FAIL", "d": "CANCELED"}


def test_an_error_that_no_document_explains_is_raised_after_the_others_are_changed(store: SyncStore) -> None:
    publish(store, {"a": [], "b": [], "c": [], "d": []})
    divided = {"$divide": [1, {"$cond": [{"$eq": ["$_id", _id("b")]}, 0, 1]}]}
    guard = {"_id": {"$in": [_id(name) for name in "abcd"]}}
    with pytest.raises(OperationFailed):
        store.run(settling.change(guard, [{"$set": {"params": divided}}]))
    changed = {one["flow"]["step"] for one in store.tasks.find({"params": 1})}
    assert (changed, status(store, "b")) == ({"a", "c", "d"}, "INIT")


def test_a_flow_that_cannot_be_ended_does_not_hold_up_the_others(store: SyncStore) -> None:
    option = TaskOption(retain_success_ms=3_600_000).stored()
    for key in ("e", "f", "g", "h"):
        task = NewTask(f"task:{key}/a", "task", f"{key}/a", "default", None, option)
        flow = NewFlow(key, [NewStep(task, "a", [], "cancel")])
        assert transactions.transact(store, lambda flow=flow: publishing.publish(flow)).created  # type: ignore[misc]
        run_id = claim(store, f"task:{key}/a")
        store.run(claims.finish([Outcome(f"task:{key}/a", run_id, RunStatus.SUCCESS)]))
        store.run(settling.settle_all([f"task:{key}/a"]))
    damage(store, "task:g/a", {"$set": {"task_option.retain_success_ms": "1h"}})
    with pytest.raises(OperationFailed):
        store.run(retention.end_flows())
    kept = {one["flow"]["key"] for one in store.tasks.find({"expire_time": {"$exists": False}})}
    assert kept == {"g"}


# --- a cancel meets a task that goes on -----------------------------------------------------------------------


def finish_with_next(store: SyncStore, run_id: str) -> None:
    before = StoredTask.model_validate(stores.stored(store, "f/a"))
    outcome = Outcome(_id("a"), run_id, RunStatus.SUCCESS, next=Next("store", {}).prepare(before))
    assert store.run(claims.finish([outcome])) == {run_id}


def test_a_cancel_of_the_flow_cancels_a_next_task_that_is_still_owed(store: SyncStore) -> None:
    publish(store, {"a": [], "p": ["a"]})
    finish_with_next(store, claim(store, _id("a")))
    canceled = store.run(operating.cancel("f", RELAYS, everything=False))
    assert canceled.counts == {"SUCCESS": 1, "CANCELED": 2}
    assert statuses(store) == {"a": "SUCCESS", "a/next-1": "CANCELED", "p": "CANCELED"}


def test_a_task_that_was_to_be_canceled_does_not_go_on(store: SyncStore) -> None:
    publish(store, {"a": [], "p": ["a"]})
    run_id = claim(store, _id("a"))
    store.run(operating.cancel("f", RELAYS, everything=False))
    finish_with_next(store, run_id)
    recover(store)
    assert statuses(store) == {"a": "SUCCESS", "p": "CANCELED"}
    assert not {"next_id", "_asked"} & {*stores.stored(store, "f/a"), *stores.stored(store, "f/a")["task_state"]}


def test_params_that_cannot_be_read_again_are_refused_before_they_are_owed(store: SyncStore) -> None:
    publish(store, {"a": []})
    before = StoredTask.model_validate(stores.stored(store, "f/a"))
    with pytest.raises(InvalidParams, match="cannot be read again"):
        Next("store", {"v": Binary(b"12345", 4)}).prepare(before)
    Next("store", {"v": uuid4()}).prepare(before)
