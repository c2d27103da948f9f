"""What a worker takes from a claimed document without the checks of its model is what the model says."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import bson
import pytest
from bson import Code, DBRef, Decimal128, Int64
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from hypothesis import given
from hypothesis import strategies as st

from mtask.kernel.document import rules
from mtask.kernel.document.parts import SUBTYPE, Sealed
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.stores import CODEC, NAIVE
from mtask.kernel.operations.claim import claimed_params, claimed_task, facts_of, fresh_token, simple_facts
from mtask.kernel.worker.process.counts import due_since
from mtask.kernel.worker.running.run import HeldRun
from tests import build
from tests.faults.malformed import MALFORMED, good

Document = dict[str, Any]
PAST = datetime(2024, 1, 1, tzinfo=UTC)
NAMES = {"noop", "another"}
MISSING = object()
#: The values that fields get, beside the values of other fields.
STRANGE: list[Any] = [
    *(MISSING, None, True, False, 0, 1, 2, -1, 1.0, 0.5, "", "1", "noop", "RUNNING", "SUCCESS", "é" * 300, b"noop"),
    *([], {}, [1], [[]], [{}], {"a": 1}, PAST, Int64(1), Int64(0), Code("RUNNING"), Code("noop"), Code("w1")),
    *(
        Decimal128("1"),
        DatetimeMS(316_516_550_400_000),
        DBRef("a", "b"),
        "run-0",
        "w1",
        "noop:k",
        "a:b",
        PAST.isoformat(),
    ),
    *(Binary(b"x" * 20, SUBTYPE), {"calls": [Binary(b"x" * 20, SUBTYPE)]}, [{"fraction": 0.5}], "x" * 2_000),
]
#: Fields that a task may have beside those that a simple one has.
FURTHER = (
    "flow",
    "chain",
    "callback",
    "lookup",
    "tenant",
    "sealed",
    "declared",
    "expire_time",
    "again",
    "trace",
    "owed_since",
    "x",
)
OF_STATE = (
    "start_time",
    "not_after",
    "finish_time",
    "clean_cnt",
    "next_id",
    "reason",
    "queue_time",
    "former_queues",
    "x",
)
OF_RUN = ("past", "progress", "retry_time", "session_id", "conflict", "final", "success_time", "returns", "x")
RUN = build.run("RUNNING", PAST + timedelta(seconds=70), run_id="run-0")


def held(document: Document) -> Document:
    """Return the document as a short claim leaves it."""
    made = copy.deepcopy(document)
    if isinstance(made.get("task_state"), dict):
        made["task_state"] |= {"status": "RUNNING", "worker_states": [dict(RUN)]}
    return made | {"quiet_time": PAST}


def read(document: Document) -> Document:
    """Return the document as `find_naive` reads it."""
    return bson.decode(bson.encode(document, codec_options=CODEC), NAIVE)


def _places(document: Document) -> list[tuple[str, ...]]:
    """Return the paths of all fields of a document, of its options, its state and its run."""
    paths: list[tuple[str, ...]] = [(name,) for name in (*document, *FURTHER)]
    paths += [("task_option", name) for name in (*document["task_option"], "limit_key", "x")]
    paths += [("task_state", name) for name in (*document["task_state"], *OF_STATE)]
    return paths + [("task_state", "worker_states", "0", name) for name in (*RUN, *OF_RUN)]


GOOD = held(good("k", params={"at": PAST, "of": [PAST]}))
CHANGES = st.lists(st.tuples(st.sampled_from(_places(GOOD)), st.sampled_from(STRANGE)), max_size=3)


def _changed(changes: list[tuple[tuple[str, ...], Any]]) -> Document:
    made = copy.deepcopy(GOOD)
    for (*parents, last), value in changes:
        place: Any = made
        for parent in parents:
            place = place[0] if parent == "0" and isinstance(place, list) and place else place
            place = place.get(parent) if parent != "0" and isinstance(place, dict) else place
        if isinstance(place, dict):
            if value is MISSING:
                place.pop(last, None)
            else:
                place[last] = copy.deepcopy(value)
    return made


def _aware(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC)


def is_simple(document: Document) -> bool:
    """Whether no model was needed. If so, check that the model says the same."""
    facts = simple_facts(document, "run-0", "w1", NAMES)
    if facts is None:
        return False
    params = claimed_params(copy.deepcopy(document))
    task = claimed_task(document)
    facts = facts._replace(
        claim_time=_aware(facts.claim_time), ping_expire_time=_aware(facts.ping_expire_time), due=_aware(facts.due)
    )
    assert facts == facts_of(task, task.runs[-1])
    assert facts.due == due_since(task)
    assert repr(params) == repr(task.params)
    assert not isinstance(params, Sealed)
    assert task.task_state.status is TaskStatus.RUNNING
    assert (task.sealed, task.tenant, task.again) == (None, None, None)
    assert rules.is_admitted(task, "w1")
    assert not task.task_state.cancel_requested
    assert len(task.runs) == 1
    return True


@given(CHANGES)
def test_whatever_needs_no_model_is_what_its_model_says(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    is_simple(read(_changed(changes)))


@pytest.mark.parametrize("path", _places(GOOD), ids=".".join)
def test_no_value_of_any_field_is_taken_for_a_simple_task_that_is_none(path: tuple[str, ...]) -> None:
    for value in STRANGE:
        is_simple(read(_changed([(path, value)])))


@pytest.mark.parametrize("kind", MALFORMED)
def test_no_malformed_document_is_simple_not_even_once_it_is_claimed(kind: str) -> None:
    document = good(kind)
    MALFORMED[kind].change(document)
    for made in (document, held(document)):
        is_simple(read(made))


@pytest.mark.parametrize(
    "document",
    [
        held(good("k")),
        held(good("k", params={"text": "x", "at": PAST, "tags": [PAST]})),
        held(good("k", params=[1, DBRef("a", "b")])),
        {name: value for name, value in held(good("é" * 100)).items() if name not in ("params", "quiet_time")},
        held({**good("k"), "task_state": {**good("k")["task_state"], "start_time": PAST + timedelta(seconds=9)}}),
        held({**good("k"), "task_option": {**good("k")["task_option"], "run_timeout_ms": 5, "limit_key": "a"}}),
    ],
    ids=["no params", "params", "a list", "no params field", "start_time", "options"],
)
def test_documents_of_the_usual_shapes_need_no_model(document: Document) -> None:
    assert is_simple(read(document))


@pytest.mark.parametrize(
    "wrong",
    [
        (("task_state", "worker_states", "0", "run_id"), "run-1"),
        (("task_state", "worker_states", "0", "worker_id"), "w2"),
        (("task_state", "worker_states", "0", "status"), "TIMEOUT"),
        (("task_state", "cancel_requested"), True),
        (("task_state", "status"), "FAIL"),
        (("task_option", "specific_worker_ids"), ["w2"]),
        (("task_option", "concurrent_worker_cnt"), 2),
        (("task_state", "failed_cnt"), 1),
        (("name",), "unknown"),
        (("sealed",), "queue:q"),
        (("params",), Binary(b"x" * 20, SUBTYPE)),
    ],
    ids=lambda wrong: ".".join(wrong[0]),
)
def test_what_a_worker_must_look_at_is_no_simple_task(wrong: tuple[tuple[str, ...], Any]) -> None:
    assert not is_simple(read(_changed([wrong])))


def _run(number: int, status: str, claim: int, end: int, **given: Any) -> Document:
    """Return a closed run. All times are seconds; the lease lasts 30."""
    at = {name: PAST + timedelta(seconds=seconds) for name, seconds in given.items()}
    times = {"claim_time": claim, "ping_expire_time": claim + 30, "fail_time": end}
    former = {name: PAST + timedelta(seconds=seconds) for name, seconds in times.items()}
    return {**RUN, "run_id": f"former-{number}", "worker_id": "w2", "status": status, **former, **at}


#: The run of `RUN` was claimed 70 s after PAST.
@pytest.mark.parametrize(
    ("former", "is_interrupted", "due"),
    [
        pytest.param([], False, 0, id="new"),
        pytest.param([_run(1, "FAIL", 10, 20, retry_time=60)], False, 60, id="failed"),
        pytest.param([_run(1, "CANCELED", 10, 20, retry_time=60)], False, 60, id="Retry"),
        pytest.param([_run(1, "CANCELED", 10, 20)], True, 0, id="handed back"),
        pytest.param([_run(1, "TIMEOUT", 10, 50)], True, 0, id="closed before"),
        pytest.param([_run(1, "TIMEOUT", 10, 70)], True, 40, id="closed by this claim"),
        pytest.param(
            [_run(1, "CANCELED", 10, 20), _run(2, "FAIL", 30, 31, retry_time=31)], False, 31, id="had its turn since"
        ),
        pytest.param([_run(1, "FAIL", 5, 6, retry_time=50), _run(2, "TIMEOUT", 52, 70)], True, 82, id="failed, lapsed"),
        pytest.param([_run(1, "CANCELED", 10, 20) | {"past": True}], False, 0, id="of an earlier round"),
        pytest.param([_run(1, "TIMEOUT", 10, 70), _run(2, "SUCCESS", 80, 90)], True, 40, id="another came later"),
    ],
)
def test_the_order_of_a_run_is_that_of_its_task_before_the_claim(
    former: list[Document], is_interrupted: bool, due: int
) -> None:
    document = copy.deepcopy(GOOD)
    document["task_state"]["worker_states"] = [*former, dict(RUN)]
    document["task_option"]["priority"] = 7
    task = claimed_task(read(document))
    facts = facts_of(task, task.runs[-1])
    created = task.task_state.create_time
    assert facts.is_interrupted is is_interrupted
    assert facts.due == (PAST + timedelta(seconds=due) if due else created)
    assert HeldRun(facts, task, ANY, 0.0).order == (not is_interrupted, -7, facts.due.replace(tzinfo=None))


def test_the_order_of_a_simple_task_needs_no_time_zone() -> None:
    document = held({**good("k"), "task_state": {**good("k")["task_state"], "start_time": PAST}})
    for made in (read(document), document):
        facts = simple_facts(made, "run-0", "w1", NAMES)
        assert facts is not None
        assert HeldRun(facts, made, ANY, 0.0).order == (True, 0, PAST.replace(tzinfo=None))


def test_fresh_tokens_differ() -> None:
    assert len({fresh_token() for _ in range(100)}) == 100
