"""Bulk changes: plans, and the loop that carries one out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from mtask.errors import InvalidInput
from mtask.features.audit_log.client import said
from mtask.features.audit_log.rules import Intent
from mtask.features.bulk import operations as bulk
from mtask.features.bulk.rules import PLAN_LASTS, Action, BulkDocument, Plan, check_action, checked_criteria, signed
from mtask.kernel.document.identity import prefix_of
from mtask.kernel.document.task import read_as
from mtask.kernel.driver.codec import GET_CODEC, Codec
from mtask.kernel.driver.extended_json import extended_exactly
from mtask.kernel.driver.operation import Operation, server_time
from mtask.parts.relays import RELAYS
from mtask.search import counts as counting
from mtask.search.counts import Count

#: The pause after a batch, as a multiple of the batch's time: 1 leaves half of the time to others.
_PAUSE = 1.0
#: The pause before it is looked whether another process still carries the bulk change out, in seconds. Tests tune it.
LOOK_AGAIN = 1.0
_INTENTS: Mapping[Action, Intent] = {"cancel": "bulk cancel", "retry": "bulk retry", "remove": "bulk remove"}


@dataclass(frozen=True, slots=True)
class BulkPlan:
    """A bulk change that was planned and counted, and not begun."""

    action: Action
    count: Count  #: the number of tasks, exact up to 10,000
    #: The text with which the change is run, within ten minutes.
    plan: str
    cutoff: datetime  #: only tasks that ended, or were created, at this time or before are changed
    expires: datetime


@dataclass(frozen=True, slots=True)
class Bulk:
    """A bulk change that was begun, and how far it has come."""

    bulk_id: str
    action: Action
    criteria: Mapping[str, Any]  #: the criteria of the tasks, as `find_page` takes them
    #: The beginning of the keys to which the change was restricted. None: any key.
    within: str | None
    cutoff: datetime  #: only tasks that ended, or were created, at this time or before are changed
    begin_time: datetime
    end_time: datetime | None  #: None: tasks are left
    #: The number of tasks that were changed, at least: if a process dies, its last batch may not be counted.
    done_cnt: int
    #: The number of tasks that were found and could not be changed: they changed meanwhile, or belong to a flow.
    left_cnt: int
    #: The end of the lease of the process that carries the change out. After it, another process may go on.
    lease_expire_time: datetime | None

    @property
    def is_over(self) -> bool:
        """Whether all tasks were changed."""
        return self.end_time is not None


def plan(
    action: str, criteria: Mapping[str, Any], within: str | None = None, owner: str | None = None
) -> Operation[BulkPlan]:
    """Check a bulk change, and return the operation that counts its tasks and signs its plan; raise InvalidInput.

    `within` is the beginning of the keys that the caller may change at all, and `owner` the tenant whose tasks it may.
    """
    known = check_action(action)
    checked = checked_criteria(known, criteria)
    if within is not None:
        checked["key_prefix"] = within + checked.get("key_prefix", "")
    if owner is not None:  # whoever carries the change out
        checked["tenant"] = owner

    def operation() -> Operation[BulkPlan]:
        secret = yield from bulk.secret()
        now = yield from server_time()
        # The criteria are stored, so they hold no lookup in a readable form if the tasks do not either.
        codec: Codec = yield GET_CODEC
        wanted = yield from codec.criteria(checked, encoded_only=True)
        found = yield from counting.count(wanted)
        bulk_id = secrets.token_hex(12)
        stored = yield from codec.stored_criteria(bulk_id, wanted)
        text = json.dumps(extended_exactly(stored), ensure_ascii=True)
        made = Plan(bulk_id, known, text, within, now, now + PLAN_LASTS)
        return BulkPlan(known, found, signed(made, secret), made.cutoff, made.expires)

    return operation()


def within_of(tenant: str | None, within: str | None) -> str | None:
    """Return the beginning of the stored keys that a client of this tenant may change."""
    return within if tenant is None else prefix_of(tenant) + (within or "")


def begin(text: str, within: str | None, action: str | None) -> Operation[Bulk]:
    """Store the bulk change of a plan. `within`: see `plan`."""
    known = None if action is None else check_action(action)

    def operation() -> Operation[Bulk]:
        now = yield from server_time()
        return (yield from bulk_of((yield from bulk.begin(text, known, within, now))))

    return operation()


def logged_as(begun: Bulk) -> tuple[Intent, str]:
    """Return the intent of a bulk change and the tasks that it changes, for the action log.

    Of params and lookups, the log holds the names alone.
    """
    hidden = {name: begun.criteria[name] for name in ("params", "lookup") if begun.criteria.get(name)}
    hidden = {name: list(value) if isinstance(value, Mapping) else str(value) for name, value in hidden.items()}
    return _INTENTS[begun.action], said({**begun.criteria, **hidden})


def get(bulk_id: str) -> Operation[Bulk]:
    """Return a bulk change."""
    if not isinstance(bulk_id, str):
        raise InvalidInput(f"a bulk change has an id of text, not {type(bulk_id).__name__}.", field="bulk_id")
    return _get(bulk_id)


def _get(bulk_id: str) -> Operation[Bulk]:
    return (yield from bulk_of((yield from bulk.get(bulk_id))))


def every(limit: int, within: str | None) -> Operation[list[Bulk]]:
    """Return the newest bulk changes. With `within`, return only those that were restricted to these keys."""
    found = []
    for document in (yield from bulk.every(limit, within)):
        opened = yield from bulk_of(document)
        found.append(opened)
    return found


def bulk_of(document: Mapping[str, Any]) -> Operation[Bulk]:
    """Return a document as a bulk change, with its criteria decrypted; raise SchemaMismatch."""
    found = read_as(BulkDocument, document, "bulk change", "bulks", "Remove its document.")
    criteria = yield from bulk.criteria_of(found)
    given = found.model_dump(include={field.name for field in fields(Bulk)} - {"criteria"})
    return Bulk(bulk_id=found.id, criteria=criteria, **given)


@dataclass(slots=True)
class Carrying:
    """The work of one process on a bulk change."""

    bulk_id: str
    holder: str = field(default_factory=lambda: secrets.token_hex(12))
    is_ours: bool = False

    def step(self) -> Operation[Bulk]:
        """Carry out the next batch, unless another process does."""
        found = yield from bulk.step(self.bulk_id, self.holder, RELAYS)
        self.is_ours = found.is_ours
        return (yield from bulk_of(found.document))

    def pause(self, took: float) -> float:
        """Return the pause after a batch, in seconds. `took`: the time that the batch took, in seconds."""
        return took * _PAUSE if self.is_ours else LOOK_AGAIN
