"""The rules of flows and their server-side twins say the same; the changes of steps are what the pure rules make."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask.features.flows import read, rules
from mtask.features.flows import statements as flows
from mtask.features.flows.rules import Awaited, Verdict
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.statements import derive
from tests.parity import changes
from tests.parity.cases import NOW, SCALE, Document, made, many, numbered, run, task
from tests.parity.stored import inserted, stored_after

_properties = settings(max_examples=10 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
_CULPRIT = "task:$culprit"


def step(random: Random, **flow: Any) -> Document:
    """Make a task that is a step of a flow."""
    while "flow" not in (document := task(random, max_runs=2)):
        pass
    document["flow"] |= flow
    return document


def waiting(random: Random) -> Document:
    document = step(random)
    document["flow"].pop("release_time", None)
    document["flow"].setdefault("held_by", "task:a")
    state = document["task_state"]
    state |= {"status": "WAITING", "worker_states": [], "cancel_requested": False, "failed_cnt": 0}
    for field in ("next_preempt_time", "finish_time", "reason", "not_after"):  # steps do not expire
        state.pop(field, None)
    document.pop("expire_time", None)
    return document


def family(random: Random) -> list[Document]:
    """Make a WAITING step, the last, with its dependencies and their children; some dependencies are missing.

    In half of the families nearly all have succeeded: then one that is otherwise, or owes something, decides alone.
    """
    chance = random.choice([0.57, 0.95])
    names = [f"task:d{number}" for number in range(random.randint(0, 4))]
    found: list[Document] = []
    for name in names:
        if random.random() < 0.15:
            continue
        children = [f"{name}.{number}" for number in range(random.choice([0, 0, 1, 2]))]
        found.append(awaited(random, name, chance, has_children=bool(children)))
        found += [awaited(random, child, chance, ancestors=[name]) for child in children]
    found.append(awaited(random, "task:stranger", chance, ancestors=["task:elsewhere"]))
    found.append(awaited(random, "task:plain", chance))
    on_failed = random.choice(["cancel", "run", "fail"])
    last = waiting(random) | {"_id": "task:last", "key": "last"}
    last["flow"] = {"key": "f", "step": "last", "after": names, "on_failed": on_failed}
    last["flow"]["held_by"] = random.choice([*names, "task:nobody"])
    return [*found, last]


def awaited(random: Random, task_id: str, chance: float, **flow: Any) -> Document:
    """Make a step that others wait for, with this chance that it has succeeded."""
    document = task(random, max_runs=0) | {"_id": task_id, "key": task_id.removeprefix("task:")}
    others = [status for status in TaskStatus if status is not TaskStatus.SUCCESS]
    status = TaskStatus.SUCCESS if random.random() < chance else random.choice([*others, TaskStatus.FAIL])
    document["task_state"]["status"] = status.value
    document["task_state"]["next_preempt_time"] = NOW
    document["flow"] = {"key": "f", "step": "s", "after": [], "on_failed": "cancel", **flow}
    if random.random() < 0.1:
        document["owed_tasks"] = [{"_id": "task:more"}]
    return document


def seen(document: Document) -> Awaited:
    status = TaskStatus(document["task_state"]["status"])
    return Awaited(document["_id"], status, bool(document.get("owed_tasks")))


@settings(_properties, max_examples=60 * SCALE)
@given(made(family))
def test_what_a_look_reads_decides_as_the_rules_do(store: SyncStore, documents: list[Document]) -> None:
    last = documents[-1]
    after, there = last["flow"]["after"], {document["_id"] for document in documents}
    group = [
        seen(document)
        for document in documents
        if document["_id"] in after or set(document["flow"].get("ancestors", ())) & set(after)
    ]
    group += [Awaited(task_id, None) for task_id in after if task_id not in there]
    with inserted(store, documents) as ids:
        rows = {row["_id"]: row for row in store.run(read.look(ids))}
    row = rows[last["_id"]]
    expected = rules.verdict(last["flow"]["on_failed"], group)
    assert row["verdict"] == expected
    assert row["held_by"] == last["flow"]["held_by"]
    assert row.get("owed_since") == last.get("owed_since")
    if expected is Verdict.WAIT:
        is_held = last["flow"]["held_by"] in rules.holders(group)
        assert row["other"] in ([last["flow"]["held_by"]] if is_held else rules.holders(group))
    elif expected is not Verdict.RELEASE:
        assert row["other"] in rules.culprits(group)


def check(store: SyncStore, documents: list[Document], pipeline: derive.Pipeline, change: changes.Change) -> None:
    stored = stored_after(store, documents, pipeline)
    for before, after in zip(documents, stored, strict=True):
        assert after == changes.changed(before, change, NOW, closes_lapsed=False)


@_properties
@given(many(waiting, 40).map(numbered))
def test_a_release_lets_the_step_start_after_its_delay(store: SyncStore, documents: list[Document]) -> None:
    check(store, documents, flows.release(NOW), changes.release)
    for after in stored_after(store, documents, flows.release(NOW)):
        assert after["task_state"]["status"] == "INIT"
        assert after["task_state"]["next_preempt_time"] >= NOW
        assert "held_by" not in after["flow"]


def nearly_unbegun(random: Random) -> Document:
    """Make a WAITING step that has never begun, but for one thing at most."""
    document = waiting(random)
    state = document["task_state"]
    spoil: dict[str, Any] = {
        "nothing": lambda: None,
        "a run": lambda: state.update(worker_states=[run(random, 0)]),
        "failures": lambda: state.update(failed_cnt=1),
        "to be canceled": lambda: state.update(cancel_requested=True),
        "finished": lambda: state.update(finish_time=NOW),
        "stray": lambda: (state.update(reason="why", next_preempt_time=NOW), document.update(expire_time=NOW)),
        "created later": lambda: state.update(create_time=NOW + timedelta(seconds=1)),
    }
    spoil[random.choice(["nothing", *spoil])]()
    return document


@_properties
@given(many(nearly_unbegun, 40).map(numbered))
def test_the_short_release_is_the_release(store: SyncStore, documents: list[Document]) -> None:
    guard = {"_id": {"$in": [document["_id"] for document in documents]}, **flows.never_begun()}
    with inserted(store, documents):
        matched = {document["_id"] for document in store.tasks.find(guard, {"_id": 1})}
    for before, after in zip(documents, stored_after(store, documents, flows.release_unbegun(NOW), guard), strict=True):
        state = before["task_state"]
        is_unbegun = (state["worker_states"], state["failed_cnt"], state["cancel_requested"]) == ([], 0, False)
        assert (before["_id"] in matched) == (is_unbegun and "finish_time" not in state)
        released = changes.changed(before, changes.release, NOW, closes_lapsed=False)
        assert after == (released if before["_id"] in matched else before)


def test_steps_that_their_holders_no_longer_hold_are_left_alone(store: SyncStore) -> None:
    documents = numbered([waiting(Random(seed)) for seed in range(12)])
    for place, document in enumerate(documents):
        document["flow"] |= {"held_by": f"task:{place % 3}"}
    documents[0]["flow"].pop("held_by")
    as_before = {document["_id"]: document["flow"].get("held_by") for document in documents}
    with inserted(store, documents) as ids:
        assert store.tasks.count_documents(flows.waiting(as_before)) == len(ids)
        for task_id in ids:
            others = {**as_before, task_id: "task:$other"}
            found = {document["_id"] for document in store.tasks.find(flows.waiting(others), {"_id": 1})}
            assert found == {*ids} - {task_id}
            assert store.tasks.count_documents(flows.waiting({task_id: as_before[task_id]})) == 1
            assert store.tasks.count_documents(flows.waiting({task_id: "task:$other"})) == 0


@pytest.mark.parametrize("outcome", [Verdict.CANCEL, Verdict.FAIL])
def test_an_end_names_the_culprit_and_is_owed(store: SyncStore, outcome: Verdict) -> None:
    @_properties
    @given(many(waiting, 40).map(numbered), st.booleans())
    def run(documents: list[Document], is_one: bool) -> None:
        culprits = {
            document["_id"]: _CULPRIT if is_one else f"{_CULPRIT}/{place % 3}"
            for place, document in enumerate(documents)
        }
        stored = stored_after(store, documents, flows.end(outcome, culprits, NOW))
        for before, after in zip(documents, stored, strict=True):
            change = changes.end(outcome, culprits[before["_id"]])
            assert after == changes.changed(before, change, NOW, closes_lapsed=False)
            assert after["owed_since"] >= NOW
            assert after["owed_since"] != before.get("owed_since")
            assert "expire_time" not in after

    run()


@_properties
@given(many(step, 40).map(numbered))
def test_a_fail_fast_ends_what_nobody_holds(store: SyncStore, documents: list[Document]) -> None:
    is_open = [d for d in documents if d["task_state"]["status"] not in ("SUCCESS", "FAIL", "CANCELED")]
    if is_open:
        stored = stored_after(store, is_open, flows.fail_fast(_CULPRIT, NOW))
        for before, after in zip(is_open, stored, strict=True):
            assert after == changes.changed(before, changes.fail_fast(_CULPRIT), NOW)


@_properties
@given(many(waiting, 40).map(numbered), st.sampled_from([["task:b"], ["task:b", "$name"]]))
def test_a_move_is_marked(store: SyncStore, documents: list[Document], chosen: list[str]) -> None:
    holders = {document["_id"]: chosen[place % len(chosen)] for place, document in enumerate(documents)}
    for before, after in zip(documents, stored_after(store, documents, flows.move(holders, NOW)), strict=True):
        expected = before["flow"] | {"held_by": holders[before["_id"]]}
        mark: datetime = after["owed_since"]
        assert after == {**before, "flow": expected, "owed_since": mark, "quiet_time": NOW}
        assert mark >= NOW
        assert mark != before.get("owed_since")
