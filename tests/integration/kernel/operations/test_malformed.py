"""A document that got in past the validator is marked FAIL with a reason, and disturbs nothing else."""

from __future__ import annotations

import copy
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS
from bson.regex import Regex
from pydantic import ValidationError

from mtask.errors import OperationFailed
from mtask.kernel.document.task import Task
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.operations import find_due as finding
from tests import build
from tests.integration.stores import claim, parsed, publish

Document = dict[str, Any]
_MISSING = build.MISSING
_AGO = datetime(2020, 1, 1, tzinfo=UTC)
_RUN = build.run("RUNNING", _AGO, run_id="r", worker_id="w")


@pytest.fixture
def store(module_store: SyncStore) -> SyncStore:
    """The module's store, emptied."""
    module_store.tasks.delete_many({})
    return module_store


def malformed(**changes: Any) -> Document:
    """Return a due task "task:bad" with fields changed, `a__b` standing for a.b; _MISSING leaves one out."""
    return build.changed(build.task("task:bad", time=_AGO), changes)


def insert(store: SyncStore, document: Document) -> None:
    """Insert past the validator."""
    store.database.command("insert", "tasks", documents=[document], bypassDocumentValidation=True)


def scanned(store: SyncStore, worker_id: str = "w", horizon_ms: int = 10_000) -> list[Any]:
    found = store.run(finding.scan(["default"], ["task"], worker_id, horizon_ms, 100))
    return sorted(document["_id"] for document in found.documents)


#: A claim takes them: what comes back cannot be read as a task.
TAKEN: dict[str, Document] = {
    "another version": malformed(schema_version="1"),
    "no version": malformed(schema_version=_MISSING),
    "no name": malformed(name=_MISSING),
    "no queue": malformed(queue=None),
    "no key": malformed(key=_MISSING),
    "another key": malformed(key="other"),
    "params missing": malformed(params=_MISSING, key=""),
    "create_time as text": malformed(task_state__create_time="yesterday"),
    "next_preempt_time as text": malformed(task_state__next_preempt_time="soon", key=""),
    "priority as text": malformed(task_option__priority="high"),
    "no places": malformed(task_option__concurrent_worker_cnt=_MISSING, key=""),
    "places below one": malformed(task_option__concurrent_worker_cnt=-7),
    "places as text": malformed(task_option__concurrent_worker_cnt="two"),
    "no lease length": malformed(task_option__worker_timeout_ms=None),
    "lease shorter than ping": malformed(task_option__worker_timeout_ms=1),
    "limit as text": malformed(task_option__max_unexpected_retries="few"),
    "unknown scope": malformed(task_option__retry_scope="host"),
    "runs that are none": malformed(task_state__worker_states=[1, "a", None]),
    "run without an id": malformed(task_state__worker_states=[_RUN | {"run_id": None}], task_state__status="RUNNING"),
    "run without a lease": malformed(task_state__worker_states=[_RUN | {"ping_expire_time": None}]),
    "a date beyond the years of Python": malformed(
        task_state__worker_states=[_RUN | {"status": "FAIL", "claim_time": DatetimeMS(2**52)}]
    ),
}

#: A claim passes over them: what they say would be derived anew, and nobody told.
PASSED_OVER: dict[str, Document] = {
    "unknown status": malformed(task_state__status="DONE"),
    "status missing": malformed(task_state__status=_MISSING),
    "status as a list": malformed(task_state__status=[1]),
    "cancel_requested as text": malformed(task_state__cancel_requested="no"),
    "cancel_requested as a number": malformed(task_state__cancel_requested=1),
    "failed_cnt as text": malformed(task_state__failed_cnt="0"),
    "failed_cnt as an array": malformed(task_state__failed_cnt=[0]),
    "failed_cnt as a date": malformed(task_state__failed_cnt=_RUN["claim_time"]),
    "failed_cnt without end": malformed(task_state__failed_cnt=float("inf")),
    "FAIL, but still due": malformed(task_state__status="FAIL", task_state__failed_cnt="1"),
}

#: What is derived is derived anew by a claim, whatever stood there.
MENDED: dict[str, Document] = {
    "waiting, but of no flow": malformed(task_state__status="WAITING"),
    "finish_time as text": malformed(task_state__finish_time="never"),
    "preemption time before the years of Python": malformed(
        task_state__next_preempt_time=DatetimeMS(-90_000_000_000_000)
    ),
}

#: What the server says of a sum with a text: 14 since 6.0.27.
_NO_SUM = (16554, 14)
#: A claim of them, or of any group with one of them, is refused by the server, with one of these codes.
REFUSED: dict[str, tuple[Document, tuple[int, ...]]] = {
    "lease length as text": (malformed(task_option__worker_timeout_ms="1m"), _NO_SUM),
    "attempt as text": (malformed(task_state__worker_states=[_RUN | {"attempt": "1"}]), _NO_SUM),
    "no runs": (malformed(task_state__worker_states=_MISSING), (17124,)),
    "runs null": (malformed(task_state__worker_states=None), (17124,)),
    "RUNNING without runs": (malformed(task_state__worker_states=_MISSING, task_state__status="RUNNING"), (17124,)),
    "runs as text": (malformed(task_state__worker_states="none"), (16883,)),
    "RUNNING with runs as text": (malformed(task_state__worker_states="none", task_state__status="RUNNING"), (16883,)),
    "runs as an object": (malformed(task_state__worker_states={"w": 1}), (16883,)),
    "no list of workers": (malformed(task_option__specific_worker_ids=_MISSING), (17124,)),
    "list of workers null": (malformed(task_option__specific_worker_ids=None), (17124,)),
    "no options": (malformed(task_option=_MISSING), (17124,)),
    "options as text": (malformed(task_option="fast"), (17124,)),
    "worker scope without runs": (
        malformed(task_state__worker_states=_MISSING, task_option__retry_scope="worker"),
        (17124,),
    ),
    "one worker instead of a list": (
        malformed(task_option__specific_worker_ids="w", task_state__worker_states=[_RUN]),
        (17124,),
    ),
}

ALL = {**TAKEN, **PASSED_OVER, **MENDED, **{name: document for name, (document, _) in REFUSED.items()}}
#: Neither final nor with a next_preempt_time: no batch query finds them.
LOST = {
    "next_preempt_time missing": malformed(task_state__next_preempt_time=_MISSING),
    "next_preempt_time null": malformed(task_state__next_preempt_time=None),
    "next_preempt_time beyond the years": malformed(task_state__next_preempt_time=DatetimeMS(2**52)),
    "next_preempt_time that sorts behind every date": malformed(task_state__next_preempt_time=Regex("soon")),
    "no state": malformed(task_state=_MISSING),
    "state null": malformed(task_state=None),
    "state as text": malformed(task_state="INIT"),
    "state empty": malformed(task_state={}),
}


@pytest.mark.parametrize("name", ALL)
def test_the_batch_query_finds_it_and_what_is_beside_it(store: SyncStore, name: str) -> None:
    publish(store, "a")
    insert(store, ALL[name])
    publish(store, "z")
    assert scanned(store) == ["task:a", "task:bad", "task:z"]


@pytest.mark.parametrize("name", ALL)
def test_looking_for_lapsed_runs_and_lost_tasks_goes_on_beside_it(store: SyncStore, name: str) -> None:
    insert(store, ALL[name])
    assert store.run(claims.settle_lapsed(0, 100)) in (0, 1)
    assert store.run(finding.undiscoverable(100)) == []


@pytest.mark.parametrize("name", TAKEN)
def test_a_claim_brings_it_back_and_it_cannot_be_read(store: SyncStore, name: str) -> None:
    publish(store, "a")
    insert(store, TAKEN[name])
    taken = store.run(claims.claim(["task:a", "task:bad"], "w", "token"))
    assert sorted(document["_id"] for document in taken) == ["task:a", "task:bad"]
    bad = next(document for document in taken if document["_id"] == "task:bad")
    with pytest.raises(ValidationError):
        Task.model_validate(bad)


@pytest.mark.parametrize("name", PASSED_OVER)
def test_a_claim_passes_over_it_and_takes_what_is_beside_it(store: SyncStore, name: str) -> None:
    publish(store, "a")
    insert(store, PASSED_OVER[name])
    before = store.tasks.find_one({"_id": "task:bad"})
    assert claim(store, "w", "a", "bad") == ["a"]
    assert store.tasks.find_one({"_id": "task:bad"}) == before


@pytest.mark.parametrize("name", MENDED)
def test_a_claim_mends_what_is_derived(store: SyncStore, name: str) -> None:
    insert(store, MENDED[name])
    assert claim(store, "w", "bad") == ["bad"]
    assert parsed(store, "bad").status == "RUNNING"


@pytest.mark.parametrize("name", REFUSED)
def test_a_claim_of_it_is_refused_and_the_rest_of_its_group_can_be_claimed(store: SyncStore, name: str) -> None:
    document, codes = REFUSED[name]
    publish(store, "a")
    insert(store, document)
    publish(store, "z")
    ids = ["task:a", "task:bad", "task:z"]
    for group in (["task:bad"], ids):
        with pytest.raises(OperationFailed) as caught:
            store.run(claims.claim(group, "w", "group"))
        assert caught.value.code in codes
    # What the server reached before the malformed one is claimed: told by the read-back, and not lost.
    before = sorted(found["key"] for found in store.run(claims.claimed(ids, "group")))
    rest = claim(store, "w", *sorted({"a", "z"} - set(before)), token="rest") if len(before) < 2 else []
    assert sorted([*before, *rest]) == ["a", "z"]


@pytest.mark.parametrize("name", [*ALL, *LOST])
def test_it_is_marked_fail_with_the_reason_once_and_met_no_more(store: SyncStore, name: str) -> None:
    document = (ALL | LOST)[name]
    insert(store, document)
    assert store.run(claims.quarantine("task:bad", "$w", "it has no $key")) is True
    assert store.run(claims.quarantine("task:bad", "other", "another reason")) is False
    made = store.tasks.find_one({"_id": "task:bad"})
    assert made is not None
    state = made["task_state"]
    last = state["worker_states"][-1]
    assert (state["status"], last["fail_reason"], last["worker_id"]) == ("FAIL", "it has no $key", "$w")
    assert "next_preempt_time" not in state
    assert scanned(store) == []
    assert store.run(finding.undiscoverable(10)) == []
    assert claim(store, "w", "bad") == []


@pytest.mark.parametrize("name", ALL)
def test_a_scan_of_what_is_due_finds_it_unless_fields_are_absent(store: SyncStore, name: str) -> None:
    insert(store, ALL[name])
    option = ALL[name].get("task_option")
    named = option.get("specific_worker_ids") if isinstance(option, dict) else None
    is_absent = None in (ALL[name].get("queue"), ALL[name].get("name"), named)
    assert scanned(store) == ["task:bad"]
    assert scanned(store, horizon_ms=0) == ([] if is_absent else ["task:bad"])


@pytest.mark.parametrize("name", ALL)
def test_scan_of_many_queues_has_a_place_for_it(store: SyncStore, name: str) -> None:
    publish(store, "a")
    insert(store, ALL[name])
    insert(store, ALL[name] | {"_id": "task:worse"})
    queues = [*(f"q{number}" for number in range(50)), "default"]
    found = store.run(finding.scan(queues, ["task"], "w", 10_000, 100))
    assert {document["_id"] for document in found.documents} == {"task:a", "task:bad", "task:worse"}


@pytest.mark.parametrize("name", LOST)
def test_what_no_batch_query_finds_is_looked_for_apart(store: SyncStore, name: str) -> None:
    publish(store, "a")
    insert(store, LOST[name])
    assert store.run(finding.undiscoverable(10)) == [{"_id": "task:bad"}]


def broken_while_it_ran(name: str) -> Document:
    """Return a document that has run and is marked with quiet_time. The validator takes it, whatever else it holds."""
    document = copy.deepcopy(ALL[name]) | {"quiet_time": _AGO}
    state = document["task_state"]
    has_run = isinstance(state.get("worker_states"), list) and any(
        isinstance(run, dict) for run in state["worker_states"]
    )
    state |= {"status": "RUNNING", "worker_states": state["worker_states"] if has_run else [_RUN]}
    return document


@pytest.mark.parametrize("name", ALL)
def test_what_was_broken_while_it_ran_passes_the_validator_and_is_marked_fail(store: SyncStore, name: str) -> None:
    publish(store, "a")
    store.tasks.insert_one(broken_while_it_ran(name))
    with suppress(OperationFailed):  # some are refused, and their group with them
        store.run(claims.claim(["task:a", "task:bad"], "w", "token"))
    taken = store.run(claims.claimed(["task:a", "task:bad"], "token"))
    if "task:a" not in [document["_id"] for document in taken]:
        taken = store.run(claims.claim(["task:a"], "w", "rest"))
    assert "task:a" in [document["_id"] for document in taken]
    assert store.run(claims.quarantine("task:bad", "w", "it is malformed")) is True
    assert scanned(store) == [], "it is met no more"


def test_an_id_of_another_type_is_marked_too(store: SyncStore) -> None:
    insert(store, malformed(_id=7))
    assert scanned(store) == [7]
    assert store.run(claims.quarantine(7, "w", "its _id is no text")) is True
    assert scanned(store) == []


def test_it_is_marked_by_one_worker_of_several(store: SyncStore) -> None:
    insert(store, malformed(task_state__failed_cnt="0"))
    assert [store.run(claims.quarantine("task:bad", f"w{number}", "bad")) for number in range(3)] == [
        True,
        False,
        False,
    ]


def test_well_formed_tasks_are_never_taken_for_lost(store: SyncStore) -> None:
    publish(store, "waiting", start=timedelta(days=1))
    publish(store, "running")
    publish(store, "done")
    claim(store, "w", "running", "done")
    store.run(queries.cancel("task:waiting"))
    assert store.run(finding.undiscoverable(10)) == []
    assert parsed(store, "waiting").status == "CANCELED"
