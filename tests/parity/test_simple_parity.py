"""What the short statements make of a simple task is what the rules make of it; what is not simple they leave alone."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask.kernel.document import rules
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements.finish import Outcome
from tests import build
from tests.parity import changes
from tests.parity.cases import (
    NOW,
    PROGRESS,
    SCALE,
    WORKERS,
    Document,
    callback,
    earlier,
    flow,
    following,
    made,
    many,
    numbered,
    parsed,
    randoms,
    task,
)
from tests.parity.stored import inserted, stored_after

_properties = settings(max_examples=20 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
_VALUES: list[Any] = [None, 1, "$name", {"$add": [1, 2]}, ["$key", {"a": {"$literal": 1}}]]
#: What is no run, and has no run_id to be told by.
_JUNK: list[Any] = [None, {}, {"status": "FAIL"}, 5, "x", [], {"status": "RUNNING", "ping_expire_time": NOW}]
LATER = NOW + timedelta(days=1)
_randoms = randoms()


_SPOILED = (
    "nothing",
    "stray dates",
    "wants two",
    "names workers",
    "has failed",
    "to be canceled",
    "another status",
    "final",
    "not due",
    "has expired",
    "starts later",
    "an earlier run",
    "an earlier round",
    "of an earlier round",
    "no lease",
    "junk before",
    "junk behind",
    "lapsed",
    "of a flow",
    "waiting",
    "owed",
    "finished",
    "owes",
    "published again",
    "tells its end",
)


def nearly_simple(
    random: Random, *, is_held: bool, spoiled: str | None = None, is_step: bool | None = None
) -> Document:
    """Make a task that is simple, but for one thing at most (None: any); with a run, if it is held."""
    document = task(random, max_runs=0)
    option, state = document["task_option"], document["task_state"]
    option |= {"concurrent_worker_cnt": 1, "specific_worker_ids": []}
    state |= {"status": "RUNNING" if is_held else "INIT", "failed_cnt": 0, "cancel_requested": False}
    state |= {"next_preempt_time": NOW - timedelta(seconds=1), "start_time": None}
    state.pop("finish_time", None)
    for field in ("flow", "owed_since", "owed_tasks", "expire_time", "again", "callback", "callback_owed"):
        document.pop(field, None)
    state.pop("reason", None)
    state["not_after"] = random.choice([None, LATER])
    if random.random() < 0.5 if is_step is None else is_step:
        document["flow"] = flow(random) | {"release_time": earlier(random)}
    if is_held:
        state["worker_states"] = [held_run("own")]
    spoil: dict[str, Any] = {
        "nothing": lambda: None,
        "stray dates": lambda: (state.update(finish_time=NOW), document.update(expire_time=NOW, quiet_time=NOW)),
        "wants two": lambda: option.update(concurrent_worker_cnt=2),
        "names workers": lambda: option.update(specific_worker_ids=["w1"]),
        "has failed": lambda: state.update(failed_cnt=1),
        "to be canceled": lambda: state.update(cancel_requested=True),
        "another status": lambda: state.update(status="INIT" if is_held else "RUNNING"),
        "final": lambda: state.update(status="CANCELED"),
        "not due": lambda: state.update(next_preempt_time=NOW + timedelta(seconds=1)),
        "has expired": lambda: state.update(not_after=NOW),
        "starts later": lambda: state.update(start_time=NOW + timedelta(seconds=1)),
        "an earlier run": lambda: state["worker_states"].insert(0, {**held_run("earlier"), "status": "FAIL"}),
        "an earlier round": lambda: state["worker_states"].insert(0, {**held_run("earlier"), "past": True}),
        "of an earlier round": lambda: state.update(worker_states=[{**held_run("own"), "past": True}]),
        "no lease": lambda: is_held or option.update(worker_timeout_ms=0),
        "junk before": lambda: state["worker_states"].insert(0, copy.copy(random.choice(_JUNK))),
        "junk behind": lambda: state["worker_states"].append(copy.copy(random.choice(_JUNK))),
        "lapsed": lambda: state.update(worker_states=[{**held_run("own"), "ping_expire_time": NOW}]),
        "of a flow": lambda: document.update(flow=flow(random) | {"release_time": earlier(random)}),
        "waiting": lambda: document.get("flow", {}).pop("release_time", None),
        "owed": lambda: document.update(owed_since=NOW),
        "finished": lambda: state.update(finish_time=NOW),
        "owes": lambda: document.update(owed_tasks=[{"_id": "task:more"}]),
        "published again": lambda: document.update(again=following(random)),
        "tells its end": lambda: document.update(callback(random)),
    }
    assert tuple(spoil) == _SPOILED
    spoil[spoiled or random.choice(["nothing", "nothing", *_SPOILED])]()
    return document


def held_run(run_id: str) -> Document:
    return build.run("RUNNING", NOW - timedelta(seconds=2), NOW + timedelta(seconds=60), run_id=run_id)


def matched(store: SyncStore, documents: list[Document], criteria: dict[str, Any]) -> list[Document]:
    """Return those of the documents that the filter matches."""
    with inserted(store, documents):
        found = {document["_id"] for document in store.tasks.find(criteria, {"_id": 1})}
    return [document for document in documents if document["_id"] in found]


def plain_or_not(random: Random) -> Document:
    return nearly_simple(random, is_held=False) if random.random() < 0.5 else task(random)


@_properties
@given(many(plain_or_not, 40).map(numbered), st.sampled_from(WORKERS))
def test_short_claim_is_the_claim(store: SyncStore, documents: list[Document], worker: str) -> None:
    ids = [document["_id"] for document in documents]
    run_ids = {task_id: f"token-{place}" for place, task_id in enumerate(ids)}
    guard = pipelines.unbegun(ids, NOW)
    plain_ids = [document["_id"] for document in matched(store, documents, guard)]
    stored = stored_after(
        store, documents, pipelines.claim_unbegun(worker, pipelines.run_id_in_group("token", ids), NOW), guard
    )
    for document, after in zip(documents, stored, strict=True):
        if document["_id"] in plain_ids:
            assert rules.may_take(parsed(document), worker, NOW)
            assert after == changes.changed(document, changes.claim(worker, run_ids), NOW)
        else:
            assert after == document


def test_short_claim_takes_away_the_reason_that_an_open_task_has_in_vain(store: SyncStore) -> None:
    documents = numbered([nearly_simple(Random(seed), is_held=False) for seed in range(40)])
    for document in documents:
        document["task_state"]["reason"] = "of an earlier end"
    guard = pipelines.unbegun([document["_id"] for document in documents], NOW)
    taken = matched(store, documents, guard)
    assert taken
    stored = stored_after(
        store, taken, pipelines.claim_unbegun("w1", pipelines.run_id_in_group("token", ["x"]), NOW), guard
    )
    assert not any("reason" in document["task_state"] for document in stored)


@_properties
@given(many(partial(nearly_simple, is_held=True), 40).map(numbered), _randoms, st.booleans())
def test_short_success_is_the_success(
    store: SyncStore, documents: list[Document], random: Random, has_steps: bool
) -> None:
    ends = []
    values: list[Any] = random.choice([_VALUES, [None]])  # a group without any value has a statement of its own
    for place, document in enumerate(documents):
        for run in document["task_state"]["worker_states"]:
            if isinstance(run, dict) and "run_id" in run:
                run["run_id"] += f"-{place}"
        returns, told = random.choice(values), random.choice(PROGRESS)
        ends.append(Outcome(document["_id"], f"own-{place}", RunStatus.SUCCESS, returns=returns, progress=told))
    guard = pipelines.held_alone(ends, NOW, has_steps=has_steps)
    plain_ids = [document["_id"] for document in matched(store, documents, guard)]
    stored = stored_after(store, documents, pipelines.succeed(ends, NOW, has_steps=has_steps), guard)
    for document, after, end in zip(documents, stored, ends, strict=True):
        if document["_id"] in plain_ids:
            assert after == changes.changed(document, changes.finish({end.task_id: end}), NOW)
            assert after["task_state"]["status"] == "SUCCESS"
            is_unwatched = document.get("flow", {}).get("unwatched", False)
            assert ("owed_since" in after) == ("owed_since" in document or ("flow" in document and not is_unwatched))
        else:
            assert after == document


@_properties
@given(
    made(
        lambda random: numbered(
            [nearly_simple(random, is_held=True, spoiled="nothing", is_step=False) for _ in range(10)]
        )
    )
)
def test_success_under_the_name_of_another_task_finishes_neither(store: SyncStore, documents: list[Document]) -> None:
    ids = [document["_id"] for document in documents]
    for place, document in enumerate(documents):
        document["task_state"]["worker_states"] = [held_run(f"own-{place}")]
    ends = [Outcome(task_id, f"own-{place}", RunStatus.SUCCESS) for place, task_id in enumerate(ids)]
    swapped = [Outcome(task_id, f"own-{place ^ 1}", RunStatus.SUCCESS) for place, task_id in enumerate(ids)]
    assert matched(store, documents, pipelines.held_alone(ends, NOW)) == documents
    assert matched(store, documents, pipelines.held_alone(swapped, NOW)) == []


@pytest.mark.parametrize("spoiled", _SPOILED)
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("has_steps", [False, True])
def test_simple_task_is_taken_as_one(store: SyncStore, is_held: bool, spoiled: str, has_steps: bool) -> None:
    """The two properties above would hold of guards that match nothing, too."""

    @settings(_properties, max_examples=3 * SCALE)
    @given(many(partial(nearly_simple, is_held=is_held, spoiled=spoiled), 15).map(numbered))
    def check(documents: list[Document]) -> None:
        for place, document in enumerate(documents):
            for run in document["task_state"]["worker_states"]:
                if isinstance(run, dict) and "run_id" in run:
                    run["run_id"] += f"-{place}"
        ids = [document["_id"] for document in documents]
        ends = [Outcome(task_id, f"own-{place}", RunStatus.SUCCESS) for place, task_id in enumerate(ids)]
        guard = pipelines.held_alone(ends, NOW, has_steps=has_steps) if is_held else pipelines.unbegun(ids, NOW)
        expected = [
            document
            for place, document in enumerate(documents)
            if is_simple(document, held_run(f"own-{place}") if is_held else None, has_steps=has_steps)
        ]
        assert matched(store, documents, guard) == expected

    check()


def is_simple(document: Document, held: Document | None, *, has_steps: bool) -> bool:
    """Whether it is due or held by this one run, and needs none of the rules that the short statements leave out."""
    option, state = document["task_option"], document["task_state"]
    is_open = held is not None or (state["not_after"] or LATER) > NOW
    is_due = held is not None or (state["next_preempt_time"] <= NOW and (state["start_time"] or NOW) <= NOW)
    is_as_is = (state["status"], state["worker_states"]) == (("RUNNING", [held]) if held else ("INIT", []))
    wants_one = option["concurrent_worker_cnt"] == 1 and (held is not None or option["specific_worker_ids"] == [])
    has_lease = held is not None or option["worker_timeout_ms"] > 0
    is_calm = state["failed_cnt"] == 0 and (held is not None or not state["cancel_requested"])
    part = document.get("flow")
    if part is not None:
        is_sound = part.get("release_time", LATER) <= NOW and "finish_time" not in state
        is_sound = is_sound and (held is None or (has_steps and "owed_tasks" not in document))
    else:
        is_sound = held is None or "owed_since" not in document
    is_sound = is_sound and "again" not in document and (held is None or "callback" not in document)
    return is_open and is_sound and is_due and is_as_is and wants_one and has_lease and is_calm
