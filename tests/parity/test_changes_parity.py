"""Every update pipeline makes of a stored document exactly what the pure rules make of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtask.database import setup
from mtask.features.flows import statements
from mtask.kernel.document import rules
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import FINAL_STATUSES, RunStatus
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import find_due as finding
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import derive
from mtask.kernel.statements import publish as requests
from mtask.kernel.statements.finish import Outcome, finish
from mtask.kernel.statements.outbox import OwedTask
from tests.oracles import gathering
from tests.parity import changes
from tests.parity.cases import (
    NOW,
    PROGRESS,
    SCALE,
    WORKERS,
    Document,
    bare,
    instant,
    made,
    many,
    numbered,
    option,
    options,
    parsed,
    randoms,
    task,
)
from tests.parity.stored import stored_after

_properties = settings(max_examples=8 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
_batches = many(task, 40).map(numbered)
_randoms = randoms()
#: Read as expressions, these would be something else.
_VALUES = [None, 1, "$name", "$$NOW", {"$add": [1, 2]}, ["$key", {"a": {"$literal": 1}}], {}]


def check(
    store: SyncStore,
    documents: list[Document],
    pipeline: derive.Pipeline,
    change: changes.Change,
    *,
    closes_lapsed: bool = True,
    reopens: bool = False,
) -> list[Document]:
    """Apply the change on both sides, compare, and check what holds after every change."""
    if not documents:
        return []
    stored = stored_after(store, documents, pipeline)
    for before, after in zip(documents, stored, strict=True):
        expected = changes.changed(before, change, NOW, closes_lapsed=closes_lapsed)
        assert bare(after) == bare(expected)
        state = after["task_state"]
        is_final = state["status"] in FINAL_STATUSES
        assert rules.status(parsed(after), NOW) == state["status"]
        assert ("next_preempt_time" in state) is not (is_final or state["status"] == "WAITING")
        assert ("finish_time" in state) is is_final
        assert not (is_final and state["cancel_requested"])
        if before["task_state"]["status"] in FINAL_STATUSES and not reopens and "again" not in before:
            assert state["status"] == before["task_state"]["status"]
    return stored


def crowded(documents: list[Document]) -> list[Document]:
    """Return the documents with many times their runs, closed ones of any round."""
    for document in documents:
        runs = document["task_state"]["worker_states"]
        closed = [run for run in runs if run["status"] != "RUNNING"]
        again = [run | {"run_id": f"{run['run_id']}-{number}"} for number in range(12) for run in closed]
        document["task_state"]["worker_states"] = [*again, *runs]
    return documents


def live_runs(document: Document) -> list[str]:
    return [run.run_id for run in rules.live_runs(parsed(document), NOW)]


@_properties
@given(_batches)
def test_settling_closes_lapsed_runs_and_derives_the_rest(store: SyncStore, documents: list[Document]) -> None:
    check(store, documents, pipelines.settle(NOW), changes.nothing)


@_properties
@given(st.one_of(_batches, _batches.map(crowded)), st.sampled_from([*WORKERS, "stranger"]))
def test_a_claim_appends_a_run_exactly_if_the_worker_may_take_the_task(
    store: SyncStore, documents: list[Document], worker: str
) -> None:
    ids = [document["_id"] for document in documents]
    run_ids = {task_id: f"token-{place}" for place, task_id in enumerate(ids)}
    pipeline = pipelines.claim(worker, pipelines.run_id_in_group("token", ids), NOW)
    stored = check(store, documents, pipeline, changes.claim(worker, run_ids))
    for before, after in zip(documents, stored, strict=True):
        has_run = any(run["run_id"] == run_ids[after["_id"]] for run in after["task_state"]["worker_states"])
        task = parsed(before)
        assert has_run is (rules.may_take(task, worker, NOW) and not gathering.is_ready(task, NOW))


@_properties
@given(_batches, st.sampled_from([1, 1000, 70_000]), st.integers(0, 3), _randoms)
def test_a_ping_moves_live_leases_and_never_back(
    store: SyncStore, documents: list[Document], lease_ms: int, skipped: int, random: Random
) -> None:
    run_ids = sorted({run_id for document in documents for run_id in live_runs(document)})[skipped:] or ["none"]
    told = {run_id: value for run_id in run_ids if (value := random.choice(PROGRESS)) is not None}
    session_id = random.choice([None, "$name", "6a3f"])
    pipeline = pipelines.ping(run_ids, lease_ms, NOW, told, session_id)
    check(store, documents, pipeline, changes.ping(run_ids, lease_ms, told, session_id), closes_lapsed=False)


def owed_task(random: Random) -> OwedTask:
    """Make a task that another one is to publish: of a flow or not, with any start."""
    fixed: Document = {"_id": "$task:n", "params": random.choice(_VALUES), "task_option": option(random)}
    if random.random() < 0.5:
        fixed["flow"] = {"key": "$f", "step": "$s", "after": [], "on_failed": "run", "ancestors": ["$a"]}
    start = random.choice([None, None, instant(random)])
    delay = random.choice([None, 0, 70_000]) if start is None else None
    return OwedTask(fixed, start, delay)


@_properties
@given(_batches, _randoms)
def test_children_that_are_added_are_owed(store: SyncStore, documents: list[Document], random: Random) -> None:
    steps = [document for document in documents if "flow" in document]
    if steps:
        added = [owed_task(random) for _ in range(random.choice([1, 3]))]
        for before, after in zip(steps, stored_after(store, steps, statements.add(added, NOW)), strict=True):
            assert after == changes.add_children(before, added, NOW)


def outcomes(random: Random, documents: list[Document]) -> list[Outcome]:
    """Make how a run of each document ends: all of them as successes, or none."""
    is_success = random.random() < 0.5
    ends = []
    told: dict[str, Any] = {}  # no two runs have one run_id, but for those made here
    for document in documents:
        run_id = random.choice(live_runs(document))
        progress = told.setdefault(run_id, random.choice(PROGRESS))
        if is_success:
            end = Outcome(document["_id"], run_id, RunStatus.SUCCESS, returns=random.choice(_VALUES), progress=progress)
            has_gone_on = "next_id" in document["task_state"]  # it does not go on again
            goes_on = random.random() < (0.9 if has_gone_on else 0.3)
            ends.append(replace(end, next=owed_task(random) if goes_on else None))
            continue
        status = random.choice([RunStatus.FAIL, RunStatus.FAIL, RunStatus.CANCELED])
        ends.append(
            Outcome(
                document["_id"],
                run_id,
                RunStatus.FAIL if status is RunStatus.FAIL else RunStatus.CANCELED,
                reason=random.choice(["broken", "$name"]),
                final=status is RunStatus.FAIL and random.random() < 0.5,
                delay_ms=random.choice([None, None, 0, 5000]),
                jitter=random.choice([0.0, 0.3, 1.0]),
                progress=progress,
            )
        )
    return ends


@settings(_properties, max_examples=25 * SCALE)
@given(_batches, _randoms)
def test_a_finish_closes_its_own_run_with_its_own_outcome(
    store: SyncStore, documents: list[Document], random: Random
) -> None:
    held = [document for document in documents if live_runs(document)]
    if not held:
        return
    ends = outcomes(random, held)
    check(store, held, finish(ends, NOW), changes.finish({end.task_id: end for end in ends}))


@_properties
@given(_batches)
def test_a_cancel_ends_what_nobody_holds_and_asks_the_holders_of_the_rest(
    store: SyncStore, documents: list[Document]
) -> None:
    check(store, documents, requests.cancel(NOW), changes.cancel)


@_properties
@given(st.one_of(_batches, _batches.map(crowded)), st.booleans())
def test_running_again_opens_a_finished_task_for_a_new_round(
    store: SyncStore, documents: list[Document], everything: bool
) -> None:
    final = [document for document in documents if document["task_state"]["status"] in FINAL_STATUSES]
    pipeline = requests.run_again(everything=everything, now=NOW)
    check(store, final, pipeline, changes.run_again(everything=everything), reopens=True)


@_properties
@given(_batches, options())
def test_changed_options_take_effect_on_all_that_is_derived(
    store: SyncStore, documents: list[Document], option: Document
) -> None:
    parsed_option = TaskOption.model_validate(option)
    check(store, documents, requests.update_option(parsed_option, NOW), changes.update_option(parsed_option))


@settings(_properties, max_examples=15 * SCALE)
@given(
    _batches,
    st.booleans(),
    options(),
    st.sampled_from(_VALUES),
    st.one_of(st.none(), made(instant)),
    st.booleans(),
    st.booleans(),
)
def test_publishing_again_replaces_and_drops_what_was_asked_and_derives(
    store: SyncStore,
    documents: list[Document],
    replaces: bool,
    option: Document,
    params: Any,
    start: datetime | None,
    clean_failed: bool,
    clean_success: bool,
) -> None:
    replacement = {"queue": "$other", "params": params, "task_option": option} if replaces else None
    pipeline = requests.republish(
        replacement=replacement, start=start, clean_failed=clean_failed, clean_success=clean_success, now=NOW
    )
    change = changes.republish(replacement, start, clean_failed=clean_failed, clean_success=clean_success)
    check(store, documents, pipeline, change, reopens=clean_failed or clean_success)


@_properties
@given(_batches, st.sampled_from([*WORKERS, "stranger"]), st.integers(0, 200_000))
def test_after_any_change_the_stored_preemption_time_is_no_later_than_a_worker_could_take_the_task(
    store: SyncStore, documents: list[Document], worker: str, wait_ms: int
) -> None:
    later = NOW + timedelta(milliseconds=wait_ms)
    for after in stored_after(store, documents, pipelines.settle(NOW)):
        if rules.may_take(parsed(after), worker, later):
            assert after["task_state"]["next_preempt_time"] <= later


def around(document: Document, now: datetime) -> Document:
    """Return the document with its instants around another now, a thousand times as far from it."""

    def moved(value: Any) -> Any:
        if isinstance(value, datetime):
            return now + 1000 * (value - NOW)
        if isinstance(value, dict):
            return {name: moved(item) for name, item in value.items()}
        return [moved(item) for item in value] if isinstance(value, list) else value

    around_now: Document = moved(document)
    return around_now


@settings(_properties, max_examples=12 * SCALE)
@given(_batches, st.sampled_from([*WORKERS, "stranger"]), st.sampled_from([0, 10_000, 90_000_000]))
def test_the_batch_query_misses_nothing_that_the_worker_may_take_within_the_horizon(
    store: SyncStore, documents: list[Document], worker: str, horizon_ms: int
) -> None:
    now = store.run(setup.check_server())
    moved = [around(document, now) for document in documents]
    store.tasks.insert_many(moved)
    try:
        store.tasks.update_many({}, pipelines.settle())
        settled = [parsed(document) for document in store.tasks.find()]
        found = store.run(finding.scan(["default", "$other", "third"], ["task"], worker, horizon_ms, 1000))
    finally:
        store.tasks.delete_many({})
    until = now + timedelta(milliseconds=horizon_ms)
    first = {task.id: rules.preemptable_at(task, worker, now) for task in settled}
    expected = {task_id for task_id, moment in first.items() if moment is not None and moment <= until}
    assert expected <= {document["_id"] for document in found.documents}
