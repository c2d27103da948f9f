"""Partial reads: the fields that a caller may ask for, and the tasks of which only these fields were sent."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.identity import is_text
from mtask.kernel.document.options import OPTION_NAMES
from mtask.kernel.document.parts import Sealed, is_sealed
from mtask.kernel.document.task import Task, TaskState
from mtask.kernel.driver.codec import GET_CODEC, Codec
from mtask.kernel.driver.operation import Operation
from mtask.kernel.statements.views import ASKED, CREATED, DERIVED_FIELDS

T = TypeVar("T")
logger = logging.getLogger("mtask.client")

#: The most fields that one read may ask for, and the most parts of a path.
MAX_FIELDS, MAX_PARTS = 100, 100
_STORED = ("_id", *(name for name in Task.model_fields if name != "id"))
_KNOWN = (
    *DERIVED_FIELDS,
    *_STORED,
    *(f"task_option.{name}" for name in OPTION_NAMES),
    *(f"task_state.{name}" for name in TaskState.model_fields),
)

#: The fields that callers mostly ask for, as examples.
_USUAL = (
    "status",
    "returns",
    "fail_reason",
    "queue",
    "params.user_id",
    "task_state.finish_time",
    "task_option.priority",
)


class TaskFields(Mapping[str, Any]):
    """Some fields of a task: a mapping from each field that was asked for to its value.

    The value of a field that the task lacks is None. `id` and `create_time` are always there. The document was not
    checked: of a malformed task, the values are whatever the document holds.
    """

    __slots__ = ("_values", "create_time", "id")

    def __init__(self, task_id: str, create_time: datetime | None, values: Mapping[str, Any]) -> None:
        self.id = task_id
        self.create_time = create_time
        self._values = values

    @property
    def name(self) -> str:
        """The task's name."""
        return self.id.partition(":")[0]

    @property
    def key(self) -> str:
        """The task's key."""
        return self.id.partition(":")[2]

    def __getitem__(self, field: str) -> Any:
        """Return the value of a field; raise KeyError if the read did not ask for this field."""
        return self._values[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Any]:
        """Return the fields with their values."""
        return self._values.items()

    def __repr__(self) -> str:
        return f"TaskFields({self.id!r}, {dict(self._values)!r})"


@dataclass(frozen=True, slots=True)
class FoundTasks(Generic[T]):
    """The result of `get_many`: the tasks that were found, by id, and the ids of the others."""

    #: In the order of the ids that were asked for.
    tasks: dict[str, T]
    #: The ids under which there is no task, in the order in which they were asked for.
    missing: list[str] = field(default_factory=list)
    #: The faults of documents that cannot be read as tasks, by id.
    malformed: dict[str, str] = field(default_factory=dict)


def check_fields(fields: object) -> list[str]:
    """Return the fields of a partial read, each once; raise InvalidInput."""
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise InvalidInput('fields is a list of fields, such as ["returns", "params.user_id"].', field="fields")
    checked = list(dict.fromkeys(_checked(name) for name in fields))
    if not 0 < len(checked) <= MAX_FIELDS:
        raise InvalidInput(f"fields: ask for 1 to {MAX_FIELDS} fields, not {len(checked)}.", field="fields")
    return checked


def _checked(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidInput(f"fields: a field is text, not {type(name).__name__}.", field="fields")
    parts = name.split(".")
    if len(parts) > MAX_PARTS or any(not part or part.startswith("$") for part in parts) or "\0" in name:
        raise InvalidInput(f"field {shown(name)}: write a path such as params.user_id.", field="fields")
    if not is_text(name):
        raise InvalidInput(f"field {shown(name)} holds a lone surrogate, which is not text.", field="fields")
    if parts[0] not in _STORED and parts[0] not in DERIVED_FIELDS:
        raise InvalidInput(f"a task has no field {shown(name)}: {_advice(name, parts[-1])}", field="fields")
    return str(name)


def _advice(name: str, last: str) -> str:
    """Name the nearest fields, or those that callers mostly ask for."""
    usual = [known for known in _USUAL if known.endswith(f"_{last}")]
    inner = usual or [known for known in _KNOWN if known.rpartition(".")[2] == last]
    if inner:
        return f"did you mean {inner[0]!r}?"
    param = f"A param is params.{shown(name, 40)[1:-1]}."
    near = difflib.get_close_matches(name, _KNOWN, n=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}? {param}"
    return f"use {', '.join(_USUAL)}, or another field of the document (docs/design/document.md). {param}"


#: The types of most values. None of these can be an encrypted value.
_UNSEALED = frozenset({str, int, bool, float, datetime, type(None)})


def fields_of(documents: Iterable[Mapping[str, Any]], fields: Sequence[str]) -> list[TaskFields]:
    """Return the replies of a partial read. A document whose `_id` is no text is left out, and the log warns of it."""
    found = []
    for document in documents:
        task_id, created = document["_id"], document.get(CREATED)
        if type(task_id) is not str:
            logger.warning("malformed task left out: its _id %s is no text", shown(task_id))
            continue
        values = document[ASKED]
        if not _UNSEALED.issuperset(map(type, values)):
            values = [Sealed(value) if is_sealed(value) else value for value in values]
        asked = dict(zip(fields, values, strict=True))
        found.append(TaskFields(task_id, created if isinstance(created, datetime) else None, asked))
    return found


def read_fields(
    read: Callable[[list[str]], Operation[list[dict[str, Any]]]], asked: Sequence[str]
) -> Operation[list[TaskFields]]:
    """Read these fields of tasks with the query `read`, and decode them."""
    codec: Codec = yield GET_CODEC
    wanted = [*asked, *codec.extra_fields(asked)]
    rows = fields_of((yield from read(wanted)), wanted)
    if codec.is_plain:
        return rows
    found = []
    for row in rows:
        values = yield from codec.open_fields(row.id, dict(row), asked)
        found.append(TaskFields(row.id, row.create_time, values))
    return found
