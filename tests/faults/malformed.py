"""Documents that no validator would let in, each wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128

from tests import build
from tests.mongo import Document

#: 1 January of the year 12000: beyond what Python's dates hold.
BEYOND = DatetimeMS(316_516_550_400_000)
BEFORE_CHRIST = DatetimeMS(-99_999_999_999_999)
_MISSING = object()
_PAST = datetime(2024, 1, 1, tzinfo=UTC)
_FUTURE = datetime(2099, 1, 1, tzinfo=UTC)

Change = Callable[[Document], None]


def good(key: str, *, name: str = "noop", queue: str = "default", params: Any = None) -> Document:
    """Return a task that is due, as any driver could write it."""
    return build.task(f"{name}:{key}", time=_PAST, queue=queue, params=params)


@dataclass(frozen=True, slots=True)
class Malformation:
    """One way to be wrong, and what the reason has to name."""

    field: str
    change: Change


def _with(path: str, value: Any, field: str | None = None) -> Malformation:
    def change(document: Document) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            document = document[parent]
        if value is _MISSING:
            del document[last]
        else:
            document[last] = value

    return Malformation(field or path, change)


def _run(**fields: Any) -> Document:
    run = build.run("RUNNING", _PAST, _FUTURE, run_id="garbage", worker_id="another") | fields
    return {name: value for name, value in run.items() if value is not _MISSING}


_OPTION = "task_option"
_STATE = "task_state"
_RUNS = f"{_STATE}.worker_states"

MALFORMED: Mapping[str, Malformation] = {
    "no-task-option": _with(_OPTION, _MISSING),
    "task-option-text": _with(_OPTION, "high"),
    "task-option-null": _with(_OPTION, None),
    "task-option-empty": _with(_OPTION, {}),
    "no-retry-limit": _with(f"{_OPTION}.max_unexpected_retries", _MISSING),
    "no-lease": _with(f"{_OPTION}.worker_timeout_ms", _MISSING),
    "no-worker-ids": _with(f"{_OPTION}.specific_worker_ids", _MISSING),
    "priority-text": _with(f"{_OPTION}.priority", "high"),
    "priority-digits": _with(f"{_OPTION}.priority", "5"),
    "priority-half": _with(f"{_OPTION}.priority", 0.5),
    "worker-ids-text": _with(f"{_OPTION}.specific_worker_ids", "A"),
    "worker-ids-holding-null": _with(f"{_OPTION}.specific_worker_ids", [None, "A"]),
    "worker-cnt-zero": _with(f"{_OPTION}.concurrent_worker_cnt", 0),
    "worker-cnt-text": _with(f"{_OPTION}.concurrent_worker_cnt", "two"),
    "lease-zero": _with(f"{_OPTION}.worker_timeout_ms", 0),
    "lease-negative": _with(f"{_OPTION}.worker_timeout_ms", -60_000),
    "lease-text": _with(f"{_OPTION}.worker_timeout_ms", "a minute"),
    "lease-of-ages": _with(f"{_OPTION}.worker_timeout_ms", 10**17),
    "ping-after-the-lease": _with(f"{_OPTION}.ping_interval_ms", 60_001, "ping_interval_ms"),
    "retries-text": _with(f"{_OPTION}.max_unexpected_retries", "3"),
    "retry-delay-text": _with(f"{_OPTION}.unexpected_retry_delay_ms", "soon"),
    "backoff-text": _with(f"{_OPTION}.retry_backoff", "doubled"),
    "retry-scope-unknown": _with(f"{_OPTION}.retry_scope", "galaxy"),
    "run-timeout-text": _with(f"{_OPTION}.run_timeout_ms", "an hour"),
    "retain-success-text": _with(f"{_OPTION}.retain_success_ms", "a day"),
    "retain-fail-text": _with(f"{_OPTION}.retain_fail_ms", "a day"),
    "retain-fail-object": _with(f"{_OPTION}.retain_fail_ms", {"days": 1}),
    "lookup-text": _with("lookup", "user_id"),
    "lookup-of-a-list": _with("lookup", [{"k": "user_id", "v": [7]}]),
    "version-text": _with("version", "two"),
    "version-zero": _with("version", 0),
    "lookup-of-many": _with("lookup", [{"k": "user_id", "v": number} for number in range(33)]),
    "no-task-state": _with(_STATE, _MISSING),
    "task-state-text": _with(_STATE, "INIT"),
    "task-state-array": _with(_STATE, [{"worker_states": []}]),
    "worker-states-missing": _with(_RUNS, _MISSING),
    "worker-states-null": _with(_RUNS, None),
    "worker-states-text": _with(_RUNS, "none yet"),
    "worker-states-object": _with(_RUNS, {"0": _run()}),
    "worker-states-of-text": _with(_RUNS, ["garbage", 5, None]),
    "worker-states-of-arrays": _with(_RUNS, [[_run()]]),
    "run-without-run-id": _with(_RUNS, [_run(run_id=_MISSING)]),
    "run-without-lease": _with(_RUNS, [_run(ping_expire_time=_MISSING)]),
    "run-with-lease-text": _with(_RUNS, [_run(ping_expire_time="2099-01-01T00:00:00Z")]),
    "run-with-lease-beyond": _with(_RUNS, [_run(ping_expire_time=BEYOND)]),
    "run-of-unknown-status": _with(_RUNS, [_run(status="WALKING")]),
    "run-past-text": _with(_RUNS, [_run(status="FAIL", fail_time=_PAST, past="yes")]),
    "next-time-missing": _with(f"{_STATE}.next_preempt_time", _MISSING),
    "next-time-null": _with(f"{_STATE}.next_preempt_time", None),
    "next-time-text": _with(f"{_STATE}.next_preempt_time", "soon"),
    "next-time-iso-text": _with(f"{_STATE}.next_preempt_time", "2024-01-01T00:00:00Z"),
    "next-time-number": _with(f"{_STATE}.next_preempt_time", 1_700_000_000_000),
    "next-time-boolean": _with(f"{_STATE}.next_preempt_time", True),
    "next-time-timestamp": _with(f"{_STATE}.next_preempt_time", Timestamp(1_700_000_000, 1)),
    "next-time-beyond": _with(f"{_STATE}.next_preempt_time", BEYOND),
    "next-time-before-christ": _with(f"{_STATE}.next_preempt_time", BEFORE_CHRIST),
    "status-unknown": _with(f"{_STATE}.status", "SLEEPING"),
    "status-lower-case": _with(f"{_STATE}.status", "init"),
    "status-missing": _with(f"{_STATE}.status", _MISSING),
    "status-number": _with(f"{_STATE}.status", 0),
    "failed-cnt-missing": _with(f"{_STATE}.failed_cnt", _MISSING),
    "failed-cnt-text": _with(f"{_STATE}.failed_cnt", "none"),
    "failed-cnt-negative": _with(f"{_STATE}.failed_cnt", -1),
    "create-time-missing": _with(f"{_STATE}.create_time", _MISSING),
    "create-time-iso-text": _with(f"{_STATE}.create_time", "2024-01-01T00:00:00Z"),
    "create-time-beyond": _with(f"{_STATE}.create_time", BEYOND),
    "create-time-before-christ": _with(f"{_STATE}.create_time", BEFORE_CHRIST),
    "start-time-iso-text": _with(f"{_STATE}.start_time", "2099-01-01T00:00:00Z"),
    "start-time-number": _with(f"{_STATE}.start_time", 4_000_000_000_000),
    "start-time-beyond": _with(f"{_STATE}.start_time", BEYOND),
    "cancel-requested-text": _with(f"{_STATE}.cancel_requested", "no"),
    "id-of-another-key": _with("_id", "noop:another", "_id"),
    "id-without-colon": _with("_id", "noop", "_id"),
    "id-of-another-name": _with("_id", "add:id-of-another-name", "_id"),
    "id-object-id": _with("_id", ObjectId("5f5e0c5e5f5e0c5e5f5e0c5e")),
    "id-number": _with("_id", 42),
    "id-fraction": _with("_id", 42.5),
    "id-decimal": _with("_id", Decimal128("4.2")),
    "id-object": _with("_id", {"name": "noop", "key": "id-object"}),
    "id-date": _with("_id", _PAST + timedelta(days=1)),
    "id-boolean": _with("_id", True),
    "id-bytes": _with("_id", b"noop:id-bytes"),
    "id-null": _with("_id", None),
    "key-missing": _with("key", _MISSING),
    "key-empty": _with("key", ""),
    "key-number": _with("key", 7),
    "name-missing": _with("name", _MISSING),
    "name-null": _with("name", None),
    "queue-missing": _with("queue", _MISSING),
    "queue-null": _with("queue", None),
    "schema-version-missing": _with("schema_version", _MISSING),
    "schema-version-text": _with("schema_version", "1"),
}


def malformed() -> dict[str, tuple[Document, str]]:
    """Return a document of each kind, and the field that the reason has to name."""
    made = {}
    for kind, malformation in MALFORMED.items():
        document = good(kind)
        malformation.change(document)
        made[kind] = (document, malformation.field)
    return made
