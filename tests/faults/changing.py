"""Whole documents, changed: a task in any state with some of its fields replaced, added, doubled or gone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

from bson import DBRef, MaxKey, MinKey, ObjectId, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.regex import Regex

from mtask.kernel.document.status import FINAL_STATUSES
from tests.faults.malformed import good
from tests.mongo import Document

T = TypeVar("T")
AGO = datetime(2024, 1, 1, tzinfo=UTC)
AHEAD = datetime(2099, 1, 1, tzinfo=UTC)


class Choice(Protocol):
    """Who chooses what is changed, and to what."""

    def of(self, options: Sequence[T]) -> T:
        """Return one of these."""

    def value(self) -> Any:
        """Return any value of BSON."""

    def name(self) -> str:
        """Return the name of a field."""


def run(number: int, status: str, **fields: Any) -> Document:
    """Return a run of a task."""
    made = {
        "run_id": f"run-{number}",
        "worker_id": f"other-{number}",
        "attempt": number + 1,
        "status": status,
        "claim_time": AGO,
        "ping_expire_time": AGO + timedelta(minutes=1),
    }
    return {**made, **fields}


_closed = {"fail_time": AGO, "fail_reason": "no luck", "retry_time": AGO, "final": False, "past": False}
#: The runs that a document has before it is changed, and its status.
STATES: list[tuple[str, list[Document]]] = [
    ("INIT", []),
    ("INIT", []),
    ("INIT", [run(0, "FAIL", **_closed), run(1, "CANCELED", **_closed)]),
    ("RUNNING", [run(0, "RUNNING")]),
    ("RUNNING", [run(0, "TIMEOUT", **_closed), run(1, "RUNNING", ping_expire_time=AHEAD)]),
    ("SUCCESS", [run(0, "SUCCESS", success_time=AGO, returns={"a": 1})]),
    ("FAIL", [run(0, "FAIL", **{**_closed, "final": True})]),
]


def in_state(key: str, status: str, runs: Sequence[Document]) -> Document:
    """Return a sound task in this state."""
    document = good(key)
    state = document["task_state"]
    state["status"], state["worker_states"] = status, copy.deepcopy(list(runs))
    if status in FINAL_STATUSES:
        del state["next_preempt_time"]
        state["finish_time"] = AGO
    return document


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Name every field at every depth."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in entries:
        yield (*path, name)
        yield from places(value, (*path, name))


def change(choice: Choice, document: Document, *kept: str) -> str:
    """Change one field at any depth, but for those to be kept; return what was done."""
    found = [path for path in places(document) if path[0] not in kept]
    if not found:
        return "nothing is left to be changed"
    path = choice.of(found)
    node: Any = document
    for part in path[:-1]:
        node = node[part]
    how = choice.of(["replace", "replace", "replace", "drop", "double", "wrap", "add"])
    last = path[-1]
    told = f"{how} {'.'.join(map(str, path))}"
    if how == "drop":
        del node[last]
    elif how == "double" and isinstance(node, list):
        node.append(copy.deepcopy(node[last]))
    elif how == "add" and isinstance(node, dict):
        node[choice.name()] = choice.value()
    else:
        wrapped: list[Any] = [
            [node[last]],
            [[node[last]]],
            {"a": node[last]},
            [node[last], node[last]],
            str(node[last]),
        ]
        node[last] = choice.of(wrapped) if how == "wrap" else choice.value()
        told += f": {node[last]!r:.200}"
    return told


def anything(choice: Choice, key: str) -> Document:
    """Return a document of which next to nothing is as it should be: fields by their names, and any values."""
    document: Document = {"_id": choice.of([f"noop:{key}", key, f":{key}", f"noop:{key}:{key}"])}
    of_task, of_state = good(key), good(key)["task_state"]
    for name in [*of_task, choice.name()]:
        if name != "_id" and choice.of([True, True, False]):
            document[name] = choice.of([of_task.get(name), choice.value(), choice.value()])
    for field, whole in (("task_state", of_state), ("task_option", of_task["task_option"])):
        if choice.of([True, True, False]):
            inner = {name: choice.of([value, value, choice.value()]) for name, value in whole.items()}
            document[field] = choice.of([inner, inner, inner, [inner]])
    return document


class Chance:
    """A choice by chance that a seed repeats, quick enough for ten thousand documents."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, options: Sequence[T]) -> T:
        """Return one of these."""
        return self._random.choice(options)

    def name(self) -> str:
        """Return the name of a field."""
        return self.of(["", "a", "a.b", "$a", "$ref", "$id", "_id", "0", "status", "name", "task_state", "run_id"])

    def value(self) -> Any:
        """Return any value of BSON, also nested."""
        makers: list[Callable[[], Any]] = [self._scalar] * 8 + [self._list, self._object, self._deep]
        return self.of(makers)()

    def _scalar(self) -> Any:
        return self.of(_SCALARS)()

    def _list(self) -> Any:
        return [self.value() for _ in range(self._random.randrange(3))]

    def _object(self) -> Any:
        return {self.name(): self.value() for _ in range(self._random.randrange(3))}

    def _deep(self) -> Any:
        made: Any = self._scalar()
        for level in range(self.of([3, 20, 90])):
            made = [made] if level % 2 else {"a": made}
        return made


#: Each type of BSON, and what is odd of it.
_SCALARS: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: -1, lambda: 2**31,
    lambda: Int64(2**63 - 1), lambda: Int64(-(2**63)), lambda: 0.5, lambda: 3.0, lambda: 1e19, lambda: -1e300,
    lambda: float("nan"),
    lambda: float("inf"), lambda: float("-inf"), lambda: Decimal128("1"), lambda: Decimal128("NaN"),
    lambda: Decimal128("1E+6144"), lambda: "", lambda: "noop", lambda: "default", lambda: "INIT", lambda: "$$ROOT",
    lambda: "x" * 3000, lambda: "a\0b", lambda: "\x1b[2J", lambda: "w1", lambda: b"bytes", lambda: Binary(b"short", 4),
    lambda: Binary(b"short", 3), lambda: Binary(b"x", 128), lambda: Code("noop"), lambda: Code("x", {"a": 1}),
    lambda: Regex("noop"), lambda: Regex("", 2), lambda: DBRef("tasks", 1), lambda: {"$ref": 5, "$id": 1},
    lambda: ObjectId("5f5e0c5e5f5e0c5e5f5e0c5e"), lambda: Timestamp(1, 1), lambda: MinKey(), lambda: MaxKey(),
    lambda: AGO, lambda: AHEAD, lambda: datetime(1, 1, 1, tzinfo=UTC),
    lambda: datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC), lambda: DatetimeMS(2**62),
    lambda: DatetimeMS(-(2**62)), dict, list, lambda: [[]], lambda: ["noop"], lambda: [None],
    lambda: [{"next_preempt_time": AGO}], lambda: {"next_preempt_time": AGO},
]  # fmt: skip
