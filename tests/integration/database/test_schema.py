"""The validator takes what the engine writes and refuses what it could not read."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Int64
from bson.decimal128 import Decimal128
from pydantic import ValidationError
from pymongo.errors import WriteError

from mtask.database.schema import LAYOUTS, task_schema
from mtask.errors import OperationFailed
from mtask.kernel.document.options import MAX_COUNT, STORED_OPTIONS, TaskOption
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Collection, Operation, tasks
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import publish as publishing
from mtask.kernel.operations.publish import Policy
from tests import build
from tests.integration import stores

Document = dict[str, Any]
_MISSING = build.MISSING
_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def document() -> Document:
    """Return a task as a service in another language would insert it."""
    failed = build.run("FAIL", _NOW, _NOW, run_id="r", worker_id="w")
    return build.task("task:k", failed, time=_NOW, params={"a": 1})


def with_field(path: str, value: Any) -> Document:
    """Return the document with one field changed or, given _MISSING, left out."""
    return build.changed(document(), {path: value})


_STEP: Document = {"key": "f", "step": "s", "after": ["task:a"], "on_failed": "cancel"}
_WRONG_STEPS: list[Document] = [
    {"key": ""},
    {"step": 7},
    {"after": "task:a"},
    {"after": [7]},
    {"after": ["task:a"] * 10_001},
    {"on_failed": "ignore"},
    {"fail_fast": "yes"},
    {"delay_ms": -1},
    {"release_time": 7},
    {"held_by": 7},
    {"ancestors": ["task:a"] * 17},
    {"head": 7},
    {"end_time": "never"},
]
_MARK: Document = {"asked_time": _NOW, "call_id": "c"}
_GATHER: Document = {"kind": "latest", "newest": _MARK}
_NEXT_ROUND: Document = {"params": None, "queue": "default", "task_option": TaskOption().stored(), "gather": _GATHER}
_WRONG_GATHERS: list[Document] = [
    {"kind": "some"},
    {"newest": {"asked_time": _NOW}},
    {"newest": _MARK | {"call_id": "x" * 65}},
    {"consumed": {"call_id": "c"}},
    {"first_time": 7},
    {"debounce_ms": -1},
    {"ids": [7]},
    {"ids": ["c"] * 1001},
    {"full": "yes"},
]
_RUN = "task_state.worker_states.0"
_REQUIRED = [
    "name",
    "key",
    "queue",
    "params",
    "task_option",
    "task_state",
    "schema_version",
    *(f"task_option.{name}" for name in STORED_OPTIONS),
    *(f"task_state.{name}" for name in ("status", "create_time", "failed_cnt", "cancel_requested", "worker_states")),
    *(f"{_RUN}.{name}" for name in ("run_id", "worker_id", "attempt", "status", "claim_time", "ping_expire_time")),
]
_WRONG: list[tuple[str, Any]] = [
    ("version", 0),
    ("version", 1_000_001),
    ("version", "2"),
    ("version", 1.5),
    ("_id", "task:other"),
    ("_id", 7),
    ("_id", "k"),
    ("name", "a b"),
    ("name", ""),
    ("name", 7),
    ("key", ""),
    ("key", 7),
    ("key", None),
    ("queue", ""),
    ("queue", None),
    ("schema_version", 2),
    ("schema_version", "1"),
    ("task_state.status", "DONE"),
    ("task_state.status", None),
    ("task_state.next_preempt_time", _MISSING),
    ("task_state.next_preempt_time", None),
    ("task_state.next_preempt_time", "now"),
    ("task_state.create_time", "now"),
    ("task_state.create_time", 1_700_000_000),
    ("task_state.start_time", "tomorrow"),
    ("task_state.not_after", "tomorrow"),
    ("task_state.failed_cnt", -1),
    ("task_state.failed_cnt", "0"),
    ("task_state.failed_cnt", 0.5),
    ("task_state.cancel_requested", None),
    ("task_state.worker_states", None),
    ("task_state.worker_states", {}),
    ("task_state.worker_states", ["w"]),
    (f"{_RUN}.status", "DONE"),
    (f"{_RUN}.attempt", 0),
    (f"{_RUN}.worker_id", ""),
    (f"{_RUN}.ping_expire_time", None),
    (f"{_RUN}.retry_time", "soon"),
    (f"{_RUN}.final", "yes"),
    ("expire_time", "never"),
    ("lookup", "user_id"),
    ("lookup", {"k": "user_id", "v": 7}),
    ("lookup", [7]),
    ("lookup", [{"k": "user_id"}]),
    ("lookup", [{"v": 7}]),
    ("lookup", [{"k": "user id", "v": 7}]),
    ("lookup", [{"k": 7, "v": 7}]),
    ("lookup", [{"k": "", "v": 7}]),
    ("lookup", [{"k": "a" * 65, "v": 7}]),
    ("lookup", [{"k": "user_id", "v": None}]),
    ("lookup", [{"k": "user_id", "v": [7]}]),
    ("lookup", [{"k": "user_id", "v": {"deep": 7}}]),
    ("lookup", [{"k": "user_id", "v": "a" * 513}]),
    ("lookup", [{"k": "user_id", "v": n} for n in range(33)]),
    ("task_state.status", "WAITING"),
    ("task_state.reason", 7),
    ("owed_since", "now"),
    ("owed_tasks", {}),
    ("owed_tasks", ["task:k"]),
    ("flow", "f"),
    ("flow", []),
    ("flow", {}),
    *(("flow", {name: value for name, value in _STEP.items() if name != missing}) for missing in _STEP),
    *(("flow", _STEP | wrong) for wrong in _WRONG_STEPS),
    ("gather", "latest"),
    *(("gather", _GATHER | wrong) for wrong in _WRONG_GATHERS),
    ("former_params", [{"params": 1}]),
    ("former_params", [{"params": 1, "until": "then"}]),
    ("former_params", {"params": 1}),
    ("again", True),
    *(("again", {name: value for name, value in _NEXT_ROUND.items() if name != missing}) for missing in _NEXT_ROUND),
    ("again", _NEXT_ROUND | {"queue": ""}),
    ("again", _NEXT_ROUND | {"task_option": {"priority": 1}}),
    ("again", _NEXT_ROUND | {"lookup": [{"k": "user_id"}]}),
    ("again", _NEXT_ROUND | {"start_time": "now"}),
    ("again", _NEXT_ROUND | {"gather": {"kind": "latest"}}),
    ("task_option.priority", "high"),
    ("task_option.priority", 1.5),
    ("task_option.priority", 10**10),
    ("task_option.priority", None),
    ("task_option.concurrent_worker_cnt", 0),
    ("task_option.concurrent_worker_cnt", 1001),
    ("task_option.ping_interval_ms", 0),
    ("task_option.ping_interval_ms", 60_000),
    ("task_option.worker_timeout_ms", 30_000),
    ("task_option.worker_timeout_ms", 29_999),
    ("task_option.specific_worker_ids", None),
    ("task_option.specific_worker_ids", "w1"),
    ("task_option.specific_worker_ids", [1]),
    ("task_option.max_unexpected_retries", -2),
    ("task_option.unexpected_retry_delay_ms", -1),
    ("task_option.retry_backoff", 0.5),
    ("task_option.retry_backoff", "2"),
    ("task_option.retry_max_delay_ms", -1),
    ("task_option.retry_scope", "host"),
    ("task_option.run_timeout_ms", 0),
    ("task_option.retain_fail_ms", "1d"),
]
_RIGHT: list[tuple[str, Any]] = [
    ("version", 1),
    ("version", 2.0),
    ("version", Int64(1_000_000)),
    ("lookup", None),
    ("lookup", []),
    ("lookup", [{"k": "user_id", "v": value} for value in (7, 7.5, "a" * 512, True, _NOW, Int64(7), b"7")]),
    ("lookup", [{"k": "user.id-1_", "v": n} for n in range(32)]),
    ("params", None),
    ("params", [1, "two"]),
    ("task_state.start_time", None),
    ("task_state.not_after", None),
    ("task_state.not_after", _NOW),
    ("task_state.start_time", _NOW),
    ("task_state.failed_cnt", 3.0),
    ("task_option.priority", -5.0),
    ("task_option.priority", Int64(5)),
    ("task_option.retry_backoff", 2),
    ("task_option.retry_backoff", Int64(2)),
    ("task_option.run_timeout_ms", 5.0),
    ("task_option.specific_worker_ids", ["$w1"]),
    ("schema_version", 1.0),
    ("flow", None),
    ("flow", _STEP),
    ("flow", _STEP | {"delay_ms": 5.0, "release_time": _NOW, "held_by": None, "of_ours": True}),
    ("owed_since", _NOW),
    ("owed_tasks", []),
    ("gather", None),
    ("gather", {}),
    ("gather", _GATHER | {"consumed": _MARK, "ids": [], "debounce_ms": 5.0, "full": True}),
    ("former_params", []),
    ("former_params", [{"params": None, "until": _NOW}]),
    ("again", None),
    ("again", _NEXT_ROUND),
    ("again", _NEXT_ROUND | {"start_time": None, "lookup": [{"k": "user_id", "v": 7}]}),
    ("of_ours", {"anything": True}),
]


def assert_refused(store: SyncStore, made: Document) -> None:
    with pytest.raises(WriteError) as caught:
        store.tasks.insert_one(made)
    assert caught.value.code == 121


@pytest.mark.parametrize("path", _REQUIRED)
def test_a_document_without_a_required_field_is_refused(store: SyncStore, path: str) -> None:
    assert_refused(store, with_field(path, _MISSING))


@pytest.mark.parametrize(("path", "value"), _WRONG)
def test_a_wrong_value_is_refused(store: SyncStore, path: str, value: Any) -> None:
    assert_refused(store, with_field(path, value))


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, value in _WRONG if path == "lookup"], ids=str)
def test_a_wrong_lookup_is_refused_by_the_model_too(value: Any, path: str) -> None:
    with pytest.raises(ValidationError, match="lookup"):
        Task.model_validate(with_field(path, value))


@pytest.mark.parametrize(("path", "value"), _RIGHT)
def test_what_other_languages_write_is_taken_and_can_be_read(store: SyncStore, path: str, value: Any) -> None:
    store.tasks.insert_one(with_field(path, value))
    assert stores.parsed(store, "k").key == "k"


def test_a_decimal_is_no_option_value(store: SyncStore) -> None:
    assert_refused(store, with_field("task_option.priority", Decimal128("1")))


_Node = Mapping[str, Any]


def _numbers(node: _Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], _Node]]:
    """Yield each place in a schema that takes numbers."""
    if _kinds(node) & {"number", "double", "int", "long", "decimal"}:
        yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from _numbers(inner, (*path, name))
    for inner in (*([node["items"]] if "items" in node else []), *node.get("anyOf", [])):
        yield from _numbers(inner, path)


def _kinds(node: _Node) -> set[str]:
    kinds = node.get("bsonType", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)


@pytest.mark.parametrize("collection", list(LAYOUTS))
def test_every_number_is_bounded_on_both_sides_and_no_decimal(collection: Collection) -> None:
    for path, node in _numbers(LAYOUTS[collection].rules["$jsonSchema"]):
        if path[-1] in ("starts", "window_ms", "concurrency") and _kinds(node) == {"number"}:
            continue  # which of a limit's bounds there are; what they may be is said beside
        if "enum" in node:
            continue  # one number, and no other
        assert {"minimum", "maximum"} <= node.keys(), path
        assert node["maximum"] < 2**63, path
        assert not {"number", "decimal"} & _kinds(node), path


_NUMBERS = [float("nan"), float("inf"), float("-inf"), 1e19, -1e19, 2**63 - 1, Decimal128("1"), True]


@pytest.mark.parametrize("value", _NUMBERS, ids=str)
@pytest.mark.parametrize(
    "path",
    ["task_state.failed_cnt", f"{_RUN}.attempt", *(f"task_option.{name}" for name in ("priority", "retry_backoff"))],
)
def test_number_that_cannot_be_counted_on_is_refused_by_validator_and_model(
    store: SyncStore, path: str, value: Any
) -> None:
    made = with_field(path, value)
    assert_refused(store, made)
    with pytest.raises(ValidationError):
        Task.model_validate(made)


def test_validator_and_model_take_the_largest_number_that_a_double_tells(store: SyncStore) -> None:
    for value in (float(MAX_COUNT), MAX_COUNT):
        made = with_field("task_state.failed_cnt", value) | {"_id": "task:k"}
        store.tasks.delete_many({})
        store.tasks.insert_one(made)
        assert Task.model_validate(store.tasks.find_one({})).task_state.failed_cnt == MAX_COUNT


def test_a_key_is_bounded_by_bytes_not_letters(store: SyncStore) -> None:
    for letters, is_taken in ((256, True), (257, False)):
        key = "é" * letters
        made = document() | {"_id": f"task:{key}", "key": key}
        if is_taken:
            store.tasks.insert_one(made)
        else:
            assert_refused(store, made)


#: What together marks a document as one that only workers write.
_MARKS: dict[str, Any] = {"status": "RUNNING", "quiet_time": _NOW, "runs": True}


@pytest.mark.parametrize("lacking", _MARKS)
@pytest.mark.parametrize("change", ["insert", "update"])
def test_only_what_bears_all_marks_of_a_worker_is_taken_without_a_full_check(
    store: SyncStore, lacking: str, change: str
) -> None:
    sound = document() | {"quiet_time": _NOW}
    sound["task_state"]["status"] = "RUNNING"
    if lacking == "status":
        sound["task_state"]["status"] = "INIT"
    elif lacking == "quiet_time":
        del sound["quiet_time"]
    else:
        sound["task_state"]["worker_states"] = []
    broken = copy.deepcopy(sound)
    broken["task_option"]["priority"] = "high"
    if change == "insert":
        assert_refused(store, broken)
        return
    store.tasks.insert_one(sound)
    with pytest.raises(WriteError):
        store.tasks.update_one({"_id": "task:k"}, {"$set": {"task_option.priority": "high"}})


def test_what_workers_write_is_not_checked_in_full(store: SyncStore) -> None:
    made = with_field("task_option.priority", "high") | {"quiet_time": _NOW}
    made["task_state"]["status"] = "RUNNING"
    store.tasks.insert_one(made)


@pytest.mark.parametrize("status", ["SUCCESS", "FAIL", "CANCELED"])
def test_a_final_task_needs_no_preemption_time(store: SyncStore, status: str) -> None:
    made = with_field("task_state.next_preempt_time", _MISSING)
    made["task_state"]["status"] = status
    store.tasks.insert_one(made)


def test_a_waiting_step_needs_no_preemption_time(store: SyncStore) -> None:
    made = with_field("task_state.next_preempt_time", _MISSING) | {"flow": _STEP}
    made["task_state"]["status"] = "WAITING"
    store.tasks.insert_one(made)
    assert stores.parsed(store, "k").status == "WAITING"


def test_an_update_that_would_break_a_task_is_refused(store: SyncStore) -> None:
    store.tasks.insert_one(document())
    with pytest.raises(WriteError) as caught:
        store.tasks.update_one({"_id": "task:k"}, {"$set": {"task_state.status": "DONE"}})
    assert caught.value.code == 121


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"start": timedelta(minutes=5)},
        {"start": _NOW},
        {"params": {"$where": "$name", "deep": [{"$literal": 1}]}},
        {"queue": "$queue"},
        {"specific_worker_ids": ["$w"], "retry_backoff": 2, "retain_fail": 0, "run_timeout": 0.001},
    ],
)
def test_published_tasks_are_valid_and_read_back_as_given(store: SyncStore, given: Mapping[str, Any]) -> None:
    task = stores.new_task("one", **given)
    store.run(publishing.publish(task, Policy()))
    many = stores.new_task("many", **given)
    store.run(publishing.publish_many([many], Policy(), in_session=False))
    for key in ("one", "many"):
        made = stores.stored(store, key)
        assert {name: made[name] for name in ("queue", "params", "task_option")} == {
            name: task.fixed()[name] for name in ("queue", "params", "task_option")
        }
        assert Task.model_validate(made).status == "INIT"


def test_a_refusal_is_told_as_the_databases_own_error_with_the_rule_that_was_broken(store: SyncStore) -> None:
    broken = copy.deepcopy(document())
    broken["task_state"]["status"] = "DONE"

    def insert() -> Operation[None]:
        yield tasks("insert_one", broken)

    with pytest.raises(OperationFailed, match="Document failed validation") as caught:
        store.run(insert())
    assert caught.value.code == 121
    assert "task_state" in str(caught.value)


def test_the_schema_is_plain_json_that_says_what_it_is() -> None:
    schema = json.loads(json.dumps(task_schema()))
    assert schema["title"].startswith("mtask tasks, schema_version 1")
    assert set(schema["required"]) <= set(schema["properties"])
