"""Encodes what operations are about to store, with the codec of the store that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtask.kernel.document.parts import Sealed
from mtask.kernel.document.task import Task
from mtask.kernel.driver.codec import GET_CODEC, Codec, Owner, owner_of
from mtask.kernel.driver.operation import Operation
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.statements.publish import NewParams

#: The names under which the values of a task are encoded.
PARAMS, RETURNS, REASON, MESSAGE, TRACEBACK = "params", "returns", "reason", "message", "traceback"


def owed(batch: Sequence[OwedTask]) -> Operation[list[OwedTask]]:
    """Encode params and lookups of tasks that another task is to publish."""
    codec: Codec = yield GET_CODEC
    yield from codec.load(map(_owner_of_owed, batch))
    return [_owed(codec, one) for one in batch]


def _owner_of_owed(one: OwedTask) -> Owner:
    return Owner(one.fixed["name"], one.fixed["key"], [one.fixed["queue"]])


def _owed(codec: Codec, one: OwedTask) -> OwedTask:
    changed = codec.content(_owner_of_owed(one), one.fixed["params"], one.fixed.get("lookup"))
    return replace(one, fixed={**one.fixed, **changed}) if changed else one


def params(task: Task, new: Any) -> Operation[NewParams]:
    """Encode new params of a task that exists, and its lookups with them. The task is decoded.

    Raises DecryptionFailed if its lookups are refused: the new params would say that they belong to the task.
    """
    codec: Codec = yield GET_CODEC
    owner = Owner(task.name, task.key, [task.queue])
    yield from codec.load([owner], to_publish=True)
    lookup = None if task.lookup is None else [{"k": entry.k, "v": entry.v} for entry in task.lookup]
    changed = codec.content(owner, new, lookup)
    for entry in task.lookup or () if changed else ():
        if isinstance(entry.v, Sealed):
            raise entry.v.error
    return NewParams(**{"params": new, **changed})


def outcome(task: Task, end: Outcome) -> Operation[Outcome]:
    """Encode what the end of a run stores: returns, reason, traceback, progress and the next task."""
    codec: Codec = yield GET_CODEC
    if codec.is_plain:
        return end
    owner = owner_of(task)
    yield from codec.load([owner] if end.next is None else [owner, _owner_of_owed(end.next)])
    return replace(
        end,
        returns=codec.value(owner, RETURNS, end.returns),
        reason=codec.value(owner, REASON, end.reason),
        error=None if end.error is None else error(codec, owner, end.error),
        progress=None if end.progress is None else progress(codec, owner, end.progress),
        next=None if end.next is None else _owed(codec, end.next),
    )


def progress(codec: Codec, owner: Owner, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Encode the message of a progress, with what is loaded. Its fraction stays as it is."""
    message = told.get("message")
    return {**told, "message": codec.value(owner, MESSAGE, message)} if type(message) is str else told


def error(codec: Codec, owner: Owner, raised: Mapping[str, Any]) -> Mapping[str, Any]:
    """Encode the traceback of what a handler raised, with what is loaded. The path of its class stays as it is."""
    return {**raised, "traceback": codec.value(owner, TRACEBACK, raised["traceback"])}


def value(task: Task, field: str, given: Any) -> Operation[Any]:
    """Encode one value of a task."""
    codec: Codec = yield GET_CODEC
    owner = owner_of(task)
    yield from codec.load([owner])
    return codec.value(owner, field, given)


def criteria(given: Mapping[str, Any]) -> Operation[dict[str, Any]]:
    """Return criteria that find encoded lookups, too. Raises InvalidInput and subclasses of DatabaseError."""
    codec: Codec = yield GET_CODEC
    return (yield from codec.criteria(given))
