"""Bulk changes: many tasks are canceled, retried or removed by a plan that was made, counted and signed before."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from mtask.errors import InvalidInput, shown
from mtask.kernel.document.options import Count
from mtask.kernel.document.status import FINAL_STATUSES, TaskStatus
from mtask.kernel.document.task import Instant, Text
from mtask.kernel.document.values import Stored
from mtask.search.order import Order

Action = Literal["cancel", "retry", "remove"]
ACTIONS: tuple[Action, ...] = get_args(Action)
#: The time for which a plan can be run.
PLAN_LASTS = timedelta(minutes=10)
#: The `_id` of the document that holds the secret by which plans are signed.
SECRET_ID = "secret"
_EPOCH, _MS = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)
_ALLOWED: Mapping[Action, frozenset[TaskStatus]] = {
    "cancel": frozenset(set(TaskStatus) - FINAL_STATUSES),
    "retry": frozenset(FINAL_STATUSES - {TaskStatus.SUCCESS}),
    "remove": frozenset(TaskStatus),
}


def check_action(action: object) -> Action:
    """Return the action of a bulk change; raise InvalidInput."""
    for known in ACTIONS:
        if action == known:
            return known
    raise InvalidInput(f"action {shown(action)}: use {', '.join(ACTIONS)}.", field="action")


def checked_criteria(action: Action, criteria: Mapping[str, Any]) -> dict[str, Any]:
    """Return the criteria of a bulk change, with the statuses that the action takes; raise InvalidInput."""
    given = {name: wanted for name, wanted in criteria.items() if wanted is not None and wanted != []}
    if not given:
        raise InvalidInput(
            "a bulk change of all tasks is refused: give a status, name, queue, key, key_prefix, lookup, worker_id or "
            "params.",
            field="filter",
        )
    wanted = given.get("status")
    statuses = {TaskStatus(one) for one in ([wanted] if isinstance(wanted, str) else wanted or ())}
    if not statuses <= _ALLOWED[action]:
        takes = ", ".join(status for status in TaskStatus if status in _ALLOWED[action])
        raise InvalidInput(f"a bulk {action} takes tasks that are {takes}.", field="status")
    if action != "remove" or statuses:
        given["status"] = [status.value for status in TaskStatus if status in (statuses or _ALLOWED[action])]
    return given


def order_of(criteria: Mapping[str, Any]) -> Order:
    """Return the order in which a bulk change goes through its tasks. Its instant does not move while tasks wait.

    A bulk change takes the tasks with an instant up to its cutoff. So what ends again after it is not taken again.
    """
    statuses = {TaskStatus(one) for one in criteria.get("status") or ()}
    has_ended = bool(statuses) and statuses <= FINAL_STATUSES and criteria.get("lookup") is None
    return Order.FINISHED if has_ended else Order.CREATED


@dataclass(frozen=True, slots=True)
class Plan:
    """What a bulk change is to do."""

    bulk_id: str
    action: Action
    criteria: str  #: in extended JSON
    #: The beginning of the keys that whoever planned it may change. None: any key.
    within: str | None
    cutoff: datetime
    expires: datetime


def signed(plan: Plan, secret: bytes) -> str:
    """Return the text of a plan, with its signature."""
    body = [
        plan.bulk_id,
        plan.action,
        plan.criteria,
        plan.within,
        (plan.cutoff - _EPOCH) // _MS,
        (plan.expires - _EPOCH) // _MS,
    ]
    text = _text_of(json.dumps(body, ensure_ascii=False).encode("utf-8"))
    return f"{text}.{_signature(text, secret)}"


def plan_of(text: object, secret: bytes, within: str | None, now: datetime) -> Plan:
    """Return the plan that a text holds.

    Raises InvalidInput if the plan was not made here, or not for keys with this beginning, or is too old.
    """
    body, _, signature = text.partition(".") if isinstance(text, str) else ("", "", "")
    is_signed = hmac.compare_digest(_signature(body, secret).encode(), signature.encode("utf-8", "surrogatepass"))
    if not body or not is_signed:
        raise InvalidInput("plan: this is no plan of this database. Plan the bulk change anew.", field="plan")
    padded = body + "=" * (-len(body) % 4)
    bulk_id, action, criteria, planned_within, cutoff, expires = json.loads(base64.urlsafe_b64decode(padded))
    if planned_within != within:
        raise InvalidInput("plan: it was made by somebody with other rights. Plan the bulk change anew.", field="plan")
    plan = Plan(bulk_id, action, criteria, within, _EPOCH + cutoff * _MS, _EPOCH + expires * _MS)
    if now > plan.expires:
        raise InvalidInput("plan: it is older than ten minutes. Plan the bulk change anew.", field="plan")
    return plan


def _signature(text: str, secret: bytes) -> str:
    return _text_of(hmac.digest(secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256))


def _text_of(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode("ascii").rstrip("=")


class BulkDocument(Stored):
    """A bulk change that was begun: one document in the collection `bulks`."""

    id: Annotated[Text, Field(alias="_id")]
    action: Action
    #: The criteria of the tasks, as `find_page` takes them, in extended JSON.
    criteria: Text
    #: The beginning of the keys that whoever planned it may change. None: any key.
    within: Text | None = None
    #: Only tasks that ended, or were created, at this time or before are changed.
    cutoff: Instant
    begin_time: Instant
    #: The time at which the last task was changed. None: tasks are left.
    end_time: Instant | None = None
    done_cnt: Count = 0  #: the number of tasks that were changed
    #: The number of tasks that were found and could not be changed: they changed meanwhile, or belong to a flow.
    left_cnt: Count = 0
    #: Where the change goes on.
    cursor: Text | None = None
    #: The process that carries out the change, and the end of its lease. After that, another process may go on.
    holder: Text | None = None
    lease_expire_time: Instant | None = None
    expire_time: Instant | None = None  #: the time at which the TTL index removes the document
    secret: Text | None = None  #: only of the document that holds the secret
    schema_version: Literal[1] = 1
