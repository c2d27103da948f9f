"""Task options: settings for the retries, the lease, the workers and the retention of a task.

This module is the only source of the options' names, ranges and defaults. An option has one name in each place: one in
documents and in JSON, where durations are milliseconds, and one in code and in flags, where they are seconds.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self, TypedDict, TypeVar

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

T = TypeVar("T")
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


def _as_milliseconds(value: Any) -> Any:
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
            raise ValueError(_lease_fault(self.worker_timeout_ms, self.ping_interval_ms, _IN_DOCUMENTS))
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
    """The options of a task as keyword arguments. A duration is a timedelta, or a number of seconds."""

    priority: Annotated[int, _says("Tasks with a higher number go first.", "NUMBER")]
    concurrent_worker_cnt: Annotated[
        int, _says("Number of different workers that must succeed, and that may hold it at once.", "NUMBER")
    ]
    ping_interval: Annotated[timedelta | float, _says("Time between the pings of a run.", "DURATION")]
    worker_timeout: Annotated[
        timedelta | float, _says("Length of the lease; longer than the ping interval.", "DURATION")
    ]
    specific_worker_ids: Annotated[list[str], _says("Only these workers may run it; '' = any.", "ID,ID")]
    max_retries: Annotated[int, _says("Number of failed and timed-out runs to tolerate; -1 = no limit.", "NUMBER")]
    retry_delay: Annotated[timedelta | float, _says("Delay of a retry after a failed run.", "DURATION")]
    retry_backoff: Annotated[float, _says("Each further delay is longer by this factor; 1 = constant.", "FACTOR")]
    retry_max_delay: Annotated[
        timedelta | float | None, _says("Longest delay of a retry; 'none' = no limit.", "DURATION")
    ]
    retry_scope: Annotated[RetryScope, _says("Whether the number of retries is for the task or for each worker.")]
    run_timeout: Annotated[
        timedelta | float | None, _says("A longer run is ended and counts as failed; 'none' = no limit.", "DURATION")
    ]
    retain_success: Annotated[
        timedelta | float | None, _says("Time from its SUCCESS to its removal; 'none' = kept.", "DURATION")
    ]
    retain_fail: Annotated[
        timedelta | float | None, _says("Time from its FAIL or CANCELED to its removal; 'none' = kept.", "DURATION")
    ]
    limit_key: Annotated[
        str | None, _says("Key under which the queue's limits for each key count it; 'none' = no key.", "KEY")
    ]


OPTION_NAMES: tuple[str, ...] = tuple(TaskOption.model_fields)
#: The options that every document must hold, because the rules that run on the server know no defaults.
STORED_OPTIONS: tuple[str, ...] = tuple(name for name in OPTION_NAMES if name not in _STORED_WHERE_SET)
DEFAULT_OPTION = TaskOption()


# --- names in code ---------------------------------------------------------------------------------------

#: The options that have another name in code than in documents. Documents outlive the code, so their names stay.
_RENAMED = {
    "ping_interval_ms": "ping_interval",
    "worker_timeout_ms": "worker_timeout",
    "max_unexpected_retries": "max_retries",
    "unexpected_retry_delay_ms": "retry_delay",
    "retry_max_delay_ms": "retry_max_delay",
    "run_timeout_ms": "run_timeout",
    "retain_success_ms": "retain_success",
    "retain_fail_ms": "retain_fail",
}
#: The name in code of each option, by the name in documents.
CODE_NAMES: Mapping[str, str] = {name: _RENAMED.get(name, name) for name in OPTION_NAMES}
#: The name in documents of each option, by the name in code.
STORED_NAMES: Mapping[str, str] = {code: name for name, code in CODE_NAMES.items()}
#: The options in code that are durations: in documents they are milliseconds.
DURATIONS = frozenset(code for code, name in STORED_NAMES.items() if name.endswith("_ms"))
#: The names in code before mtask 0.3, which were those in documents. They go with mtask 1.0.
OLD_NAMES = frozenset(_RENAMED)
_NULLABLE = frozenset(name for name, field in TaskOption.model_fields.items() if field.default is None)
_POSITIVE = frozenset({"ping_interval_ms", "worker_timeout_ms", "run_timeout_ms"})
_MILLISECOND = timedelta(milliseconds=1)
#: What others call an option, or what a publish takes beside its options. The name is that in documents.
_SYNONYMS = {
    synonym: name
    for name, synonyms in {
        "delay": "countdown defer defer_by delay_ms delay_seconds wait",
        "start_time": "eta run_at run_after scheduled_at schedule_time available_at defer_until not_before",
        "key": "id job_id task_id idempotency_key",
        "queue": "queue_name routing_key task_queue",
        "run_timeout_ms": "timeout time_limit soft_time_limit hard_time_limit job_timeout task_timeout max_runtime",
        "worker_timeout_ms": "lease lease_ms lease_time visibility_timeout lock_lifetime",
        "ping_interval_ms": "heartbeat heartbeat_interval",
        "retain_success_ms": "ttl result_ttl result_expires keep_result retention retain",
        "retain_fail_ms": "failure_ttl",
        "max_unexpected_retries": "retries retry max_retry max_attempts max_tries attempts tries retry_limit",
        "unexpected_retry_delay_ms": "retry_delay_ms default_retry_delay retry_after retry_interval min_backoff",
        "retry_max_delay_ms": "retry_backoff_max max_backoff max_retry_delay",
        "retry_backoff": "backoff backoff_factor exponential_backoff",
        "concurrent_worker_cnt": "concurrent_workers worker_cnt",
    }.items()
    for synonym in synonyms.split()
}


class _Place(NamedTuple):
    """How an error writes the names of options, and their durations."""

    name: Callable[[str], str]
    duration: Callable[[int], str]


_IN_DOCUMENTS = _Place(str, str)
_IN_CODE = _Place(CODE_NAMES.__getitem__, lambda length: f"{length / 1000:g} s")


class AsStored(NamedTuple):
    """The value of an option as a document has it: a duration is milliseconds. An error uses the name in documents."""

    value: Any


def as_keywords(options: Mapping[str, Any]) -> Any:
    """Return options of a document, or of JSON, as keyword arguments; raise UnknownOption.

    Whoever takes the arguments checks the values. So no option can be another argument.
    """
    _check_stored_names(options)
    return {CODE_NAMES[name]: AsStored(value) for name, value in options.items()}


def _check_stored_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in CODE_NAMES:
            raise UnknownOption(name, _nearest(name, CODE_NAMES, STORED_NAMES), OPTION_NAMES)


def check_option_names(options: Mapping[str, Any]) -> None:
    """Raise UnknownOption for the first name that is no option in code. The error suggests a name."""
    for name in options:
        if name not in STORED_NAMES and name not in OLD_NAMES:
            raise UnknownOption(name, _nearest(name, STORED_NAMES, CODE_NAMES), tuple(STORED_NAMES))


def _nearest(name: str, here: Mapping[str, str], elsewhere: Mapping[str, str]) -> str | None:
    """Return the name that is meant. `here`: the options of this place, and `elsewhere`: of the other, by their names.

    Each maps its names to those of the other.
    """
    meant = _SYNONYMS.get(name.lower(), name)
    if meant in here:
        return meant
    if meant in elsewhere:
        return elsewhere[meant]
    if meant != name:
        return meant  # no option
    nearest = next(iter(difflib.get_close_matches(name, [*here, *elsewhere], n=1, cutoff=0.5)), None)
    return nearest if nearest is None or nearest in here else elsewhere[nearest]


def warn_of_old_name(old: str, new: str) -> None:
    """Warn of an old name, at the line outside of mtask that gives it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "mtask":
        level, frame = level + 1, frame.f_back
    unit = ", in seconds or as a timedelta" if new in DURATIONS else ""
    message = f"the option {old} is called {new} now{unit}. The old name goes with mtask 1.0."
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def with_new_names(options: T, tell: Callable[[str, str], None] = warn_of_old_name) -> T:
    """Return keyword arguments, in which old names of options are replaced. `tell` gets the old and the new name.

    Raises InvalidOption if an option has both names.
    """
    given: Any = options
    if OLD_NAMES.isdisjoint(given):
        return options
    renamed: dict[str, Any] = {}
    for name, value in given.items():
        new = _RENAMED.get(name)
        if new is None:
            renamed[name] = value
        elif new in given:
            raise InvalidOption(new, f"it is given as {name}, its old name, too: drop {name}", given[new])
        else:
            tell(name, new)
            renamed[new] = AsStored(value) if new in DURATIONS else value
    return renamed  # type: ignore[return-value]


def _milliseconds(code: str, value: Any) -> int | None:
    """Return a duration as documents have it; raise InvalidOption."""
    name = STORED_NAMES[code]
    if value is None and name in _NULLABLE:
        return None
    length = -1
    if isinstance(value, timedelta):
        length = round(value / _MILLISECOND)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError, ValueError):  # infinite, or no number
            length = round(value * 1000)
    if (name in _POSITIVE) <= length <= MAX_DURATION_MS:
        return length
    least = "1 ms" if name in _POSITIVE else "0 s"
    reason = f"use {least} to 10 years, as a timedelta or in seconds (got {shown(value)})"
    raise InvalidOption(code, reason, value)


def option_of(declared: Mapping[str, Any], given: Mapping[str, Any]) -> TaskOption:
    """Return the options of a task: those of a call in code, and for the others those declared, as documents have them.

    Raises UnknownOption or InvalidOption.
    """
    if not given:
        return build_option(declared)
    own, place = _in_documents(given)
    return _built((declared, own), place)


def _in_documents(given: Mapping[str, Any]) -> tuple[dict[str, Any], _Place]:
    """Return options of a call under their names in documents, and how to name them."""
    check_option_names(given)
    own: dict[str, Any] = {}
    place = _IN_CODE
    for code, value in with_new_names(given).items():
        if isinstance(value, AsStored):
            own[STORED_NAMES[code]], place = value.value, _IN_DOCUMENTS
        else:
            own[STORED_NAMES[code]] = _milliseconds(code, value) if code in DURATIONS else value
    return own, place


def in_documents(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a call under their names in documents, with durations in ms. Other values are not checked.

    Raises UnknownOption or InvalidOption.
    """
    return _in_documents(given)[0]


def stored_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call in code as documents have them, without others.

    Raises UnknownOption or InvalidOption.
    """
    given = with_new_names(given)
    option = option_of({}, given)
    return {STORED_NAMES[code]: getattr(option, STORED_NAMES[code]) for code in given}


def said_name(name: str, given: Mapping[str, Any]) -> str:
    """Return the name of an option, by its name in documents, in the words of those who gave these options."""
    return name if any(isinstance(value, AsStored) for value in given.values()) else CODE_NAMES[name]


# --- building --------------------------------------------------------------------------------------------


def build_option(*layers: Mapping[str, Any]) -> TaskOption:
    """Merge the layers and return the options. If two layers hold the same option, the later layer wins.

    The names are those in documents. Raises UnknownOption or InvalidOption.
    """
    for layer in layers:
        _check_stored_names(layer)
    return _built(layers, _IN_DOCUMENTS)


def _lease_fault(lease: int, ping: int, place: _Place) -> str:
    names = place.name("worker_timeout_ms"), place.name("ping_interval_ms")
    return (
        f"{names[0]} ({place.duration(lease)}) must exceed {names[1]} ({place.duration(ping)}), "
        "or every lease lapses before its first ping"
    )


def _built(layers: tuple[Mapping[str, Any], ...], place: _Place) -> TaskOption:
    """Build the options of known names. `place`: how errors write them."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    if not merged:
        return DEFAULT_OPTION
    try:
        option = TaskOption.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"]:
            name = str(first["loc"][0])
            reason = f"{first['msg'].removeprefix('Value error, ')} (got {shown(first['input'])})"
        else:
            name = "worker_timeout_ms"
            lengths = (merged.get(each, getattr(DEFAULT_OPTION, each)) for each in (name, "ping_interval_ms"))
            lease, ping = (int(_as_milliseconds(length)) for length in lengths)
            reason = _lease_fault(lease, ping, place)
        raise InvalidOption(place.name(name), reason, first["input"]) from None
    # The lower bound is checked only for an interval in the last layer. Earlier layers may hold a shorter interval that
    # an older version of mtask stored. That must not prevent a change of another option.
    if option.ping_interval_ms < MIN_PING_INTERVAL_MS and "ping_interval_ms" in layers[-1]:
        least, got = place.duration(MIN_PING_INTERVAL_MS), place.duration(option.ping_interval_ms)
        raise InvalidOption(
            place.name("ping_interval_ms"),
            f"use at least {least} (got {got}): each ping is a write",
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
            place.name("max_unexpected_retries"),
            f'with retry_scope "worker" every failed run stays in the document, and {tries} are more than the '
            f"{MAX_COUNTED_RUNS} that fit; use a lower limit, fewer workers or -1",
            option.max_unexpected_retries,
        )
    return option
