"""Requests to pause a queue or a task name, to limit the runs of a queue, and to keep only its newest tasks.

The module also finds the workers that have not yet confirmed a control.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from pydantic import ValidationError

from mtask.arguments.criteria import TaskCriteria, checked
from mtask.client import requests, views
from mtask.errors import MAX_DELAY, ControlUnconfirmed, InvalidInput, SchemaMismatch, WorkersTooOld, shown
from mtask.features.audit_log import client as actions
from mtask.features.audit_log.client import said
from mtask.features.audit_log.rules import Intent
from mtask.features.controls import operations as controls
from mtask.features.controls.rules import MAX_KEPT, MAX_PERMITS, MENDING, Kind, Limit, check_target
from mtask.features.controls.rules import Control as Control
from mtask.kernel.document.status import FINAL, TaskStatus
from mtask.kernel.document.task import ENDING_PAUSES_REVISION, read_as
from mtask.kernel.driver.operation import Operation
from mtask.kernel.operations import change, workers
from mtask.kernel.operations.publish import milliseconds

#: A limit of starts: the most starts in any window of time, and the window's length (a timedelta or seconds).
Rate: TypeAlias = tuple[int, timedelta | float]
#: The end of a pause: an instant, or so long from now (a timedelta or seconds), by the server's clock.
Until: TypeAlias = datetime | timedelta | float
#: The most workers that an error names.
_EXAMPLES = 5


def control_of(document: Mapping[str, Any]) -> Control:
    """Return the document as a Control; raise SchemaMismatch."""
    return read_as(Control, document, "control", "controls", f"{MENDING[0].upper()}{MENDING[1:]}.")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the control of a queue or a task name, and how to wait until every live worker confirms it."""

    kind: Kind
    target: str
    fields: Mapping[str, Any]
    done: str  #: the target's state after the change, in words
    waiting: requests.WaitPolicy
    intent: Intent
    said: str = ""  #: the change in words, for the action log

    def write(self) -> Operation[Control]:
        """Store the control. From then on, it is in force, and workers are informed of it."""
        if self.kind == "tenant" or self.fields.get("fair") or self.fields.get("tenant_limit"):
            old = yield from workers.without_tenants(_EXAMPLES)
            if old:
                raise WorkersTooOld(old, what="limits and turns of tenants", is_control=True)
        if self.fields.get("until") is not None:
            old = yield from workers.older(ENDING_PAUSES_REVISION, _EXAMPLES)
            if old:
                raise WorkersTooOld(old, what="pauses that end", is_control=True)
        if any(self.fields.get(field) is not None for field in ("keep_success", "keep_fail")):
            yield from change.prepare_keep()
        return control_of((yield from controls.put(self.kind, self.target, self.fields)))

    def unconfirmed(self, control: Control) -> Operation[list[str]]:
        """Return the live workers that serve the target and have not confirmed the control."""
        live = yield from workers.live()
        return [str(worker["_id"]) for worker in live if self._concerns(worker) and not _confirms(worker, control)]

    def _concerns(self, worker: Mapping[str, Any]) -> bool:
        if self.kind == "tenant":
            return True
        served = worker.get("queues" if self.kind == "queue" else "names")
        return isinstance(served, list) and self.target in served

    def give_up(self, control: Control, unconfirmed: list[str]) -> ControlUnconfirmed:
        """Return the error for workers that have not confirmed in time."""
        return ControlUnconfirmed(control.kind, control.target, self.done, unconfirmed)


def _confirms(worker: Mapping[str, Any], control: Control) -> bool:
    seen = worker.get("controls_seen")
    return isinstance(seen, list) and any(
        isinstance(entry, Mapping)
        and entry.get("_id") == control.id
        and isinstance(entry.get("revision"), int)
        and entry["revision"] >= control.revision
        for entry in seen
    )


def pause(
    queue: str | None,
    name: str | None,
    tenant: str | None,
    *,
    paused: bool,
    timeout: timedelta | float | None,
    until: Until | None = None,
) -> Change:
    """Return the checked request to pause or resume; raise InvalidInput."""
    kind, target = check_target(queue, name, tenant)
    waiting = requests.wait_policy(f"{kind}:{target}", timeout)
    intent: Intent = "pause" if paused else "resume"
    end = None if until is None else _end(until)
    fields = {"paused": paused, "until": end}
    if not paused:
        fields |= {"limited_until": None, "opened": None, **({"limited_keys": None} if kind == "queue" else {})}
    said = "" if end is None else actions.said({"until" if isinstance(end, datetime) else "for": end})
    return Change(kind, target, fields, "paused" if paused else "resumed", waiting, intent, said)


def _end(until: Until) -> datetime | timedelta:
    """Check the end of a pause; raise InvalidInput."""
    if isinstance(until, datetime):
        if until.utcoffset() is None:
            raise InvalidInput("until has no time zone: give an aware datetime, or a timedelta.", field="until")
        return until
    try:
        if isinstance(until, bool):
            raise TypeError
        wait = until if isinstance(until, timedelta) else timedelta(seconds=until)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"until {shown(until)}: give a datetime, a timedelta or seconds.", field="until") from None
    if not timedelta(0) < wait <= MAX_DELAY:
        raise InvalidInput(f"until {wait.total_seconds():g} s: use more than 0 and at most 10 years.", field="until")
    return wait


def limit(
    queue: str | None,
    concurrency: int | None,
    rate: Rate | None,
    key_concurrency: int | None,
    key_rate: Rate | None,
    timeout: timedelta | float | None,
    *,
    tenant_concurrency: int | None = None,
    tenant_rate: Rate | None = None,
    tenant: str | None = None,
) -> Change:
    """Return the checked request to limit a queue, each limit_key and tenant of it, or a tenant; raise InvalidInput."""
    if (queue is None) == (tenant is None):
        raise InvalidInput("a limit is of a queue or of a tenant: give one of the two.", field="queue")
    kind, target = check_target(queue, None, tenant)
    fields = {"limit": _limit("", concurrency, rate)}
    narrower = {
        "key_limit": _limit("key_", key_concurrency, key_rate),
        "tenant_limit": _limit("tenant_", tenant_concurrency, tenant_rate),
    }
    if kind == "queue":
        fields |= narrower
    elif any(narrower.values()):
        raise InvalidInput("a tenant has a concurrency and a rate; the other limits are of queues.", field="tenant")
    done = "limited" if any(fields.values()) else "no longer limited"
    waiting = requests.wait_policy(f"{kind}:{target}", timeout)
    given = {"concurrency": concurrency, "rate": rate, "key_concurrency": key_concurrency, "key_rate": key_rate}
    given |= {"tenant_concurrency": tenant_concurrency, "tenant_rate": tenant_rate}
    return Change(kind, target, fields, done, waiting, "limit", actions.said(given) or "none")


def fair(queue: str, *, is_fair: bool, timeout: timedelta | float | None) -> Change:
    """Return the checked request to let the tenants of a queue take turns, or not; raise InvalidInput."""
    kind, target = check_target(queue, None)
    if not isinstance(is_fair, bool):
        raise InvalidInput(f"fair {shown(is_fair)}: use True or False.", field="fair")
    waiting = requests.wait_policy(f"{kind}:{target}", timeout)
    done = "fair to its tenants" if is_fair else "no longer fair to its tenants"
    return Change(kind, target, {"fair": is_fair}, done, waiting, "fair", "on" if is_fair else "off")


def keep(queue: str, success: int | None, fail: int | None, timeout: timedelta | float | None) -> Change:
    """Return the checked request to keep the newest finished tasks of a queue; raise InvalidInput."""
    kind, target = check_target(queue, None)
    for field, value in (("success", success), ("fail", fail)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_KEPT
        if value is not None and not is_count:
            raise InvalidInput(
                f"{field} {shown(value)}: use 0 to {MAX_KEPT:,}; a number that is not given keeps all.", field=field
            )
    fields = {"keep_success": success, "keep_fail": fail}
    done = "keeping all" if success is None and fail is None else "keeping only its newest"
    waiting = requests.wait_policy(f"{kind}:{target}", timeout)
    detail = actions.said({"success": success, "fail": fail}) or "all"
    return Change(kind, target, fields, done, waiting, "keep", detail)


def known(now: datetime | None = None) -> Operation[list[Control]]:
    """Return the controls, without malformed ones, sorted by id. Use them for explanations, not for decisions.

    What is over at `now`, the server's time, is left out of them. None: nothing is left out.
    """
    found = []
    for document in (yield from controls.every()):
        with suppress(SchemaMismatch):
            control = control_of(document)
            found.append(control if now is None else control.at(now))
    return found


def _limit(prefix: str, concurrency: int | None, rate: Rate | None) -> dict[str, Any] | None:
    if concurrency is None and rate is None:
        return None
    starts, window_ms = None, None
    if rate is not None:
        try:
            starts, per = rate
            window_ms = milliseconds(per if isinstance(per, timedelta) else timedelta(seconds=per))
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(
                f"{prefix}rate {shown(rate)}: give (starts, window), such as (100, timedelta(seconds=1)).",
                field=f"{prefix}rate",
            ) from None
    try:
        return Limit(concurrency=concurrency, starts=starts, window_ms=window_ms).model_dump()
    except ValidationError as error:
        if error.errors()[0]["loc"][:1] == ("concurrency",):
            field = f"{prefix}concurrency"
            raise InvalidInput(f"{field} {shown(concurrency)}: use 1 to {MAX_PERMITS:,}.", field=field) from None
        field = f"{prefix}rate"
        raise InvalidInput(f"{field}: use 1 to {MAX_PERMITS:,} starts in 100 ms to a day.", field=field) from None


def every() -> Operation[list[Control]]:
    """Return all controls, sorted by id. If a control is malformed, raise SchemaMismatch."""
    return [control_of(document) for document in (yield from controls.every())]


# --- purging ---------------------------------------------------------------------------------------------

# Purging: chooses the tasks to remove, and pauses between the batches.

_ALLOWED = [*FINAL, TaskStatus.INIT.value]
#: The pause after a batch, as a multiple of the batch's time: 1 leaves half of the time to others.
_PAUSE = 1.0


@dataclass(slots=True)
class Purging:
    """A purge. It removes batch after batch, until no more tasks match or the limit is reached."""

    criteria: Mapping[str, Any]
    older_than_ms: int | None
    limit: int
    removed: int = 0
    has_more: bool = True

    @property
    def said(self) -> str:
        """The tasks that it removes, for the action log."""
        age = None if self.older_than_ms is None else f"{self.older_than_ms}ms"
        return said({**self.criteria, "older_than": age, "limit": self.limit or None})

    def count(self) -> Operation[int]:
        """Return the number of tasks that a purge would remove now."""
        found = yield from change.count_matched(change.purgeable(self.criteria, self.older_than_ms))
        return min(found, self.limit) if self.limit else found

    def batch(self) -> Operation[None]:
        """Remove the next batch."""
        left = self.limit - self.removed if self.limit else change.BATCH
        matched = change.purgeable(self.criteria, self.older_than_ms)
        removed, self.has_more = yield from change.remove_batch(matched, left)
        self.removed += removed
        if self.limit and self.removed >= self.limit:
            self.has_more = False

    def pause(self, took: float) -> float:
        """Return the pause after a batch, in seconds. `took`: the time that the batch took, in seconds."""
        return took * _PAUSE if self.has_more else 0.0


def prepare(
    given: Mapping[str, Any],
    older_than: timedelta | float | None,
    limit: int,
    tenant: str | None = None,
) -> Purging:
    """Check the arguments and return the purge; raise InvalidInput."""
    criteria = checked(TaskCriteria, given, tenant)
    wanted = criteria["status"]
    statuses = [wanted] if isinstance(wanted, str) else wanted
    if statuses is None:
        criteria["status"] = list(FINAL)
    elif not set(statuses) <= set(_ALLOWED):
        raise InvalidInput(f"a purge takes {', '.join(_ALLOWED)}; cancel running tasks first.", field="status")
    return Purging(criteria, _older_than_ms(older_than), views.check_limit(limit))


def _older_than_ms(older_than: timedelta | float | None) -> int | None:
    if older_than is None:
        return None
    try:
        age = older_than if isinstance(older_than, timedelta) else timedelta(seconds=older_than)
        milliseconds = age // timedelta(milliseconds=1)
    except (TypeError, ValueError, OverflowError):
        milliseconds = -1
    if isinstance(older_than, bool) or milliseconds < 0:
        raise InvalidInput(f"older_than {shown(older_than)} is no length of time.", field="older_than")
    return milliseconds
