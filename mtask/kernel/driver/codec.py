"""The codec of a store: the form in which the values of tasks are stored. `Codec` stores them as they are.

A feature may bring another codec. It encodes what is about to be stored, and decodes what was read. First an operation
loads what this takes. All else is computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mtask.errors import InvalidInput
from mtask.kernel.document.parts import NO_KEYS, Sealed, is_encrypted
from mtask.kernel.driver.operation import Call, Operation

if TYPE_CHECKING:
    from mtask.kernel.document.task import StoredTask, Task

T = TypeVar("T")
Document = dict[str, Any]
#: Asks the store that runs an operation for its codec.
GET_CODEC = Call("codec", "get")


class Unreadable(Exception):
    """A claimed task cannot be decoded here. Another worker may be able to."""


class Owner(NamedTuple):
    """Whose a value is: that of a task, or that of a schedule, whose tasks get it."""

    name: str
    key: str  #: of a schedule: the beginning of the keys of its tasks
    queues: Sequence[str]  #: the queue, and those in which the task was before; empty: it is not known
    sealed: str | None = None  #: what the document says of the form of its values
    schedule: str | None = None  #: the id of the schedule, with its tenant

    @property
    def task_id(self) -> str:
        """The task's `_id`."""
        return f"{self.name}:{self.key}"

    @property
    def queue(self) -> str:
        """The queue; empty: it is not known."""
        return self.queues[0] if self.queues else ""


def owner_of(task: Task) -> Owner:
    """Return the task as the owner of its values."""
    queues = [task.queue, *task.task_state.former_queues]
    if task.again is not None:
        queues.append(task.again.queue)
    return Owner(task.name, task.key, queues, task.sealed)


def params_of(task: Task) -> list[Any]:
    """Return the params of a task, or of each call that it has collected."""
    calls = task.params.get("calls") if type(task.params) is dict else None
    return calls if isinstance(calls, list) else [task.params]


def _is_closed(task: Task) -> bool:
    return task.sealed is not None or any(isinstance(each, Sealed) for each in params_of(task))


class Codec:
    """Stores values as they are."""

    is_plain = True
    #: The reason of a run whose outcome cannot be encoded.
    refusal = ""
    #: Hears of claimed tasks that cannot be decoded here, and why.
    on_unreadable: Callable[[StoredTask, str], None] | None = None

    def ask(self, method: str, *args: Any) -> Any:
        """Answer a call of an operation. This may block. Raises InvalidInput if this codec answers none."""
        raise InvalidInput(NO_KEYS, field="encryption")

    def close(self) -> None:
        """Close its connections. This may block."""

    # --- what is about to be stored -------------------------------------------------------------------------

    def load(self, owners: Iterable[Owner], *, to_publish: bool = False) -> Operation[None]:
        """Load what it takes to encode values of these owners. `to_publish`: workers will read them."""
        return done(None)

    def value(self, owner: Owner, field: str, value: Any) -> Any:
        """Encode a value, with what is loaded."""
        return value

    def content(self, owner: Owner, params: Any, lookup: Sequence[Mapping[str, Any]] | None) -> Document:
        """Return the fields that encoded params and lookups change: both and `sealed`; none: they stay as they are."""
        return {}

    def criteria(self, criteria: Mapping[str, Any], *, encoded_only: bool = False) -> Operation[Document]:
        """Return criteria that find encoded lookups, too. With `encoded_only`, they find no others."""
        return done(dict(criteria))

    def stored_criteria(self, bulk_id: str, criteria: Mapping[str, Any]) -> Operation[Document]:
        """Encode the params by which a bulk change finds its tasks, as its criteria are stored for days."""
        return done(dict(criteria))

    # --- what was read --------------------------------------------------------------------------------------
    #
    # What this reader cannot decode, or must not believe, is a Sealed, which says why.

    def is_readable_refused(self, owner: Owner) -> bool:
        """Whether values of this owner that are stored as they are must not be believed."""
        return owner.sealed is not None

    def open_values(self, values: Sequence[tuple[Owner, str, Sealed]]) -> Operation[list[Any]]:
        """Return these values decoded, each with its owner and its field."""
        return done([value for _, _, value in values])

    def open_tasks(self, tasks: Sequence[Task]) -> Operation[None]:
        """Decode the values of tasks in place."""
        return done(None)

    def open_parts(self, parts: Sequence[tuple[Owner, Any]]) -> Operation[None]:
        """Decode in place the params and lookups of what publishes tasks, such as a schedule."""
        return done(None)

    def open_part(self, owner: Owner, part: Any) -> None:
        """Do the same with what is loaded."""

    def open_criteria(self, bulk_id: str, params: Sealed) -> Operation[Any]:
        """Return the params by which a bulk change finds its tasks."""
        return done(params)

    def extra_fields(self, fields: Sequence[str]) -> list[str]:
        """Return the fields that a partial read needs besides, so that it can decode the fields that are asked for."""
        return []

    def open_fields(self, task_id: str, values: Document, fields: Sequence[str]) -> Operation[Document]:
        """Return the values of these fields. `values` holds the extra fields, too."""
        return done(values)

    def is_needed(self, documents: Sequence[Mapping[str, Any]]) -> bool:
        """Whether one of these claimed tasks must be decoded, or what its run writes must be encoded."""
        return any("sealed" in document or is_encrypted(document.get("params")) for document in documents)

    def open_claimed(self, tasks: Sequence[StoredTask]) -> Operation[list[Exception | None]]:
        """Decode claimed tasks in place, and load what it takes to encode what their runs will write.

        Return what is wrong with each: None, Unreadable, or the reason why nobody must believe what it holds.
        """
        return done([self.unreadable(task, NO_KEYS) if _is_closed(task) else None for task in tasks])

    def unreadable(self, task: StoredTask, why: str) -> Unreadable:
        """Return the error of a claimed task that cannot be decoded here, and tell who listens."""
        if self.on_unreadable is not None:
            self.on_unreadable(task, why)
        return Unreadable(why)


def done(result: T) -> Operation[T]:
    """Return a result, and send nothing."""
    yield from ()
    return result


def ask(method: str, *args: Any) -> Operation[Any]:
    """Ask the codec of the store; raise InvalidInput if it answers nothing."""
    return (yield Call("codec", method, args))
