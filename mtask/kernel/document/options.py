"""Task options: settings for the retries, the lease, the workers and the retention of a task.

This module is the only source of the options' names, ranges and defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)

from mtask.errors import InvalidOption, UnknownOption, shown
from mtask.kernel.document.identity import check_text
from mtask.says import Says

TASK_OPTIONS = "Task options"
#: The longest duration of an option: ten years, in ms.
MAX_DURATION_MS = 315_360_000_000
#: The shortest interval between two pings, in ms: each ping is a write. If a document asks for a shorter interval, its
#: runs are pinged at this interval.
MIN_PING_INTERVAL_MS = 100
MAX_WORKERS_PER_TASK = 1000
#: The most closed runs that a document keeps, not counting successes. This limit bounds the size of the document.
MAX_COUNTED_RUNS = 1000
MAX_LIMIT_KEY_BYTES = 200
#: The options that a document holds only if they are set. Documents of earlier versions of mtask lack these options.
_STORED_WHERE_SET = ("limit_key",)
#: The largest number that a count can have. Some drivers write all numbers as doubles, and a double is exact for whole
#: numbers up to this limit.
MAX_COUNT = 2**53


def _as_integer(value: object) -> object:
    if type(value) is int:  # nearly always; the checks below take longer
        return value
    # Drivers of other languages write large whole numbers as doubles, so such doubles are accepted. Text and booleans
    # are refused as mistakes.
    if isinstance(value, bool | str | bytes):
        raise ValueError("use a whole number")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _as_milliseconds(value: object) -> object:
    if isinstance(value, timedelta):
        return round(value / timedelta(milliseconds=1))
    return _as_integer(value)


def _as_number(value: object) -> object:
    if isinstance(value, bool | str | bytes):
        raise ValueError("use a number")
    return value


def _unique_worker_ids(worker_ids: list[str]) -> list[str]:
    for worker_id in worker_ids:
        check_text("worker_id", worker_id)
    if len(set(worker_ids)) != len(worker_ids):
        raise ValueError("name each worker once")
    return worker_ids


def _as_limit_key(key: str) -> str:
    check_text("limit_key", key)
    if len(key.encode()) > MAX_LIMIT_KEY_BYTES:
        raise ValueError(f"use at most {MAX_LIMIT_KEY_BYTES} bytes")
    return key


# In an Annotated type, these validators must come last. A range after them would be checked, but it would be missing in
# the JSON Schema.
WHOLE = BeforeValidator(_as_integer)
_MILLISECONDS = BeforeValidator(_as_milliseconds)
_NUMBER = BeforeValidator(_as_number)
Count = Annotated[int, Field(ge=0, le=MAX_COUNT), WHOLE]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE]
Duration = Annotated[int, Field(ge=0, le=MAX_DURATION_MS), _MILLISECONDS]
PositiveDuration = Annotated[int, Field(ge=1, le=MAX_DURATION_MS), _MILLISECONDS]
RetryScope = Literal["task", "worker"]


class TaskOption(BaseModel):
    """The options of a task, under the names that they have in its document. Durations are whole milliseconds."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore")

    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000), WHOLE] = 0
    concurrent_worker_cnt: Annotated[int, Field(ge=1, le=MAX_WORKERS_PER_TASK), WHOLE] = 1
    ping_interval_ms: PositiveDuration = 30_000
    worker_timeout_ms: PositiveDuration = 60_000
    specific_worker_ids: Annotated[
        list[str], Field(max_length=MAX_WORKERS_PER_TASK), AfterValidator(_unique_worker_ids)
    ] = Field(default_factory=list)
    max_unexpected_retries: Annotated[int, Field(ge=-1, le=1_000_000), WHOLE] = 3
    unexpected_retry_delay_ms: Duration = 10_000
    retry_backoff: Annotated[float, Field(ge=1, le=1000), _NUMBER] = 1.0
    retry_max_delay_ms: Duration | None = None
    retry_scope: RetryScope = "task"
    run_timeout_ms: PositiveDuration | None = None
    retain_success_ms: Duration | None = None
    retain_fail_ms: Duration | None = None
    #: The key by which the queue's key_limit counts tasks: the tasks of each limit_key separately. If a task has no
    #: limit_key, its document has no such field.
    limit_key: Annotated[str, Strict(), AfterValidator(_as_limit_key)] | None = None

    @model_validator(mode="after")
    def _lease_outlasts_ping(self) -> Self:
        if self.worker_timeout_ms <= self.ping_interval_ms:
            raise ValueError(
                f"worker_timeout_ms ({self.worker_timeout_ms}) must exceed ping_interval_ms "
                f"({self.ping_interval_ms}), or every lease lapses before its first ping"
            )
        return self

    def stored(self) -> dict[str, Any]:
        """Return the options in the form in which they are stored.

        An option that may be missing in a document is left out if it is None.
        """
        document = self.model_dump()
        for name in _STORED_WHERE_SET:
            if document[name] is None:
                del document[name]
        return document

    @property
    def has_retry_limit(self) -> bool:
        """Whether the number of failed and timed-out runs is limited."""
        return self.max_unexpected_retries >= 0


def ping_seconds(interval_ms: float, lease_ms: float) -> float:
    """Return a run's ping interval, in seconds: the interval that the task's options ask for, or a longer one.

    The interval is at least MIN_PING_INTERVAL_MS or at least a third of the lease, whichever is shorter.
    """
    return max(interval_ms, min(MIN_PING_INTERVAL_MS, lease_ms / 3)) / 1000


def _says(text: str, metavar: str | None = None) -> Says:
    return Says(text, metavar, panel=TASK_OPTIONS)


class TaskOptions(TypedDict, total=False):
    """The options of a task as keyword arguments. A duration is a whole number of milliseconds, or a timedelta."""

    priority: Annotated[int, _says("Tasks with a higher number go first.", "NUMBER")]
    concurrent_worker_cnt: Annotated[
        int, _says("Number of different workers that must succeed, and that may hold it at once.", "NUMBER")
    ]
    ping_interval_ms: Annotated[int | timedelta, _says("Time between the pings of a run.", "DURATION")]
    worker_timeout_ms: Annotated[
        int | timedelta, _says("Length of the lease; longer than the ping interval.", "DURATION")
    ]
    specific_worker_ids: Annotated[list[str], _says("Only these workers may run it; '' = any.", "ID,ID")]
    max_unexpected_retries: Annotated[
        int, _says("Number of failed and timed-out runs to tolerate; -1 = no limit.", "NUMBER")
    ]
    unexpected_retry_delay_ms: Annotated[int | timedelta, _says("Delay of a retry after a failed run.", "DURATION")]
    retry_backoff: Annotated[float, _says("Each further delay is longer by this factor; 1 = constant.", "FACTOR")]
    retry_max_delay_ms: Annotated[
        int | timedelta | None, _says("Longest delay of a retry; 'none' = no limit.", "DURATION")
    ]
    retry_scope: Annotated[RetryScope, _says("Whether the number of retries is for the task or for each worker.")]
    run_timeout_ms: Annotated[
        int | timedelta | None, _says("A longer run is ended and counts as failed; 'none' = no limit.", "DURATION")
    ]
    retain_success_ms: Annotated[
        int | timedelta | None, _says("Time from its SUCCESS to its removal; 'none' = kept.", "DURATION")
    ]
    retain_fail_ms: Annotated[
        int | timedelta | None, _says("Time from its FAIL or CANCELED to its removal; 'none' = kept.", "DURATION")
    ]
    limit_key: Annotated[
        str | None, _says("Key under which the queue's limits for each key count it; 'none' = no key.", "KEY")
    ]


OPTION_NAMES: tuple[str, ...] = tuple(TaskOption.model_fields)
#: The options that every document must hold, because the rules that run on the server know no defaults.
STORED_OPTIONS: tuple[str, ...] = tuple(name for name in OPTION_NAMES if name not in _STORED_WHERE_SET)
DEFAULT_OPTION = TaskOption()


def check_option_names(options: Mapping[str, Any]) -> None:
    """Raise UnknownOption for the first name that is no option. The error suggests the option with the nearest name."""
    for name in options:
        if name not in TaskOption.model_fields:
            nearest = difflib.get_close_matches(name, OPTION_NAMES, n=1, cutoff=0.5)
            raise UnknownOption(name, nearest[0] if nearest else None, OPTION_NAMES)


def build_option(*layers: Mapping[str, Any]) -> TaskOption:
    """Merge the layers and return the options. If two layers hold the same option, the later layer wins.

    Raises UnknownOption or InvalidOption.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer:
            check_option_names(layer)
            merged.update(layer)
    if not merged:
        return DEFAULT_OPTION
    try:
        option = TaskOption.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "worker_timeout_ms"
        reason = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            reason += f" (got {shown(first['input'])})"
        raise InvalidOption(name, reason, first["input"]) from None
    # The lower bound is checked only for an interval in the last layer. Earlier layers may hold a shorter interval that
    # an older version of mtask stored. That must not prevent a change of another option.
    if option.ping_interval_ms < MIN_PING_INTERVAL_MS and "ping_interval_ms" in layers[-1]:
        raise InvalidOption(
            "ping_interval_ms",
            f"use at least {MIN_PING_INTERVAL_MS} (got {option.ping_interval_ms}): each ping is a write",
            option.ping_interval_ms,
        )
    named = len(option.specific_worker_ids)
    if 0 < named < option.concurrent_worker_cnt:
        raise InvalidOption(
            "concurrent_worker_cnt",
            f"{option.concurrent_worker_cnt} workers must succeed, but specific_worker_ids allows only {named}",
            option.concurrent_worker_cnt,
        )
    tries = (option.max_unexpected_retries + 1) * max(named, 1)
    if option.retry_scope == "worker" and tries > MAX_COUNTED_RUNS:
        raise InvalidOption(
            "max_unexpected_retries",
            f'with retry_scope "worker" every failed run stays in the document, and {tries} are more than the '
            f"{MAX_COUNTED_RUNS} that fit; use a lower limit, fewer workers or -1",
            option.max_unexpected_retries,
        )
    return option
