"""Relays: who is told what the outbox of a task holds.

A change of a task writes, with itself, what the task owes. Whoever has made the change then settles it by the relays.
If that process dies, the mark is still there, and any worker finds it. So no place that ends tasks names a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mtask.errors import DatabaseError
from mtask.kernel.driver.operation import Operation


class Ended(Protocol):
    """What a relay knows of a run that has ended."""

    owes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Relay:
    """Tells others what tasks owe them, and crosses it off."""

    #: The field that a task has while it owes something.
    mark: str
    #: Settles what these tasks owe. Tasks that owe nothing are left out. Returns the tasks whose ends follow from it.
    settle: Callable[[Sequence[str]], Operation[Sequence[str]]]
    #: Whether the end of a run may make its task owe something. The second argument: whether the task goes on.
    concerns: Callable[[Ended, bool], bool]


def settle(relays: Sequence[Relay], task_ids: Sequence[str]) -> Operation[None]:
    """Settle what these tasks owe by the first of these relays, and by the others what the ends owe that follow."""
    first, *others = relays
    following = yield from first.settle(task_ids)
    if following:
        yield from settle_all(others, following)


def settle_all(relays: Sequence[Relay], task_ids: Sequence[str]) -> Operation[None]:
    """Settle all that these tasks owe, and all that follows from it."""
    for place in range(len(relays)):
        yield from settle(relays[place:], task_ids)


def settle_marked(relays: Sequence[Relay], document: Mapping[str, Any]) -> Operation[None]:
    """Settle what a task owes, as its document says. If the database fails, any worker does it within seconds."""
    for place, relay in enumerate(relays):
        if document.get(relay.mark) is not None:
            with suppress(DatabaseError):
                yield from settle(relays[place:], [document["_id"]])
