"""Schedules: their documents, and the plan of firings that are due now. The server's time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from mtask.features.schedules import triggers
from mtask.features.schedules.triggers import Once, Trigger
from mtask.kernel.document.identity import NAME_PATTERN, TENANT_PATTERN, stored_key
from mtask.kernel.document.lookup import MAX_LOOKUPS, LookupEntry
from mtask.kernel.document.options import WHOLE, Count, PositiveCount, PositiveDuration, TaskOption
from mtask.kernel.document.parts import SealedAny
from mtask.kernel.document.task import HandlerVersionNumber, Instant, Text
from mtask.kernel.document.values import Stored

#: The longest delay with which a firing is still on time. A firing with a longer delay is missed, and catch_up decides
#: whether it is made nevertheless. With catch_up "none", a firing is also missed once the next firing is due.
GRACE = timedelta(seconds=10)
MAX_CATCH_UP = 1_000
MAX_JITTER_MS = 86_400_000
MAX_ID_BYTES = 200
CatchUp = Literal["none", "last", "all"]
Overlap = Literal["allow", "skip"]
#: The origin of a schedule. "app": a handler of an app declares the schedule. "client": a client made it.
Source = Literal["app", "client"]

_MILLISECOND = timedelta(milliseconds=1)
#: The most firings that can lie within GRACE.
_MAX_RECENT = GRACE // (triggers.MIN_INTERVAL_MS * _MILLISECOND) + 1


class Pending(Stored):
    """A firing that the schedule has recorded. The task of the firing may not be published yet."""

    fire_time: Instant
    start_time: Instant  #: the start_time of the task; jitter may make it later than fire_time


class ScheduleState(Stored):
    """The state of a schedule."""

    next_fire_time: Instant | None = None  #: None if the schedule will not fire again
    last_fire_time: Instant | None = None
    last_task_id: Text | None = None
    fired_cnt: Count = 0
    skipped_cnt: Count = 0  #: firings that were skipped because the task of the last firing had not finished
    pending: list[Pending] = Field(default_factory=list)


class Schedule(Stored):
    """A schedule: one document in the collection `schedules`.

    A field that the schedule passes on to its tasks has the same name as in a task's document.
    """

    id: Annotated[Text, Field(alias="_id", min_length=1, max_length=MAX_ID_BYTES)]
    name: Annotated[Text, Field(pattern=NAME_PATTERN)]
    tenant: Annotated[Text, Field(pattern=TENANT_PATTERN)] | None = None
    queue: Annotated[Text, Field(min_length=1)]
    params: SealedAny = None
    #: The name of the data key that encrypts the params, as in a task.
    sealed: Text | None = None
    #: The version of the handler for which the params were made, as in a task.
    version: HandlerVersionNumber | None = None
    task_option: TaskOption
    lookup: Annotated[list[LookupEntry], Field(max_length=MAX_LOOKUPS)] | None = None
    trigger: Trigger
    start_time: Instant | None = None
    end_time: Instant | None = None
    jitter_ms: Annotated[int, Field(ge=0, le=MAX_JITTER_MS), WHOLE] = 0
    catch_up: CatchUp = "last"
    catch_up_limit: Annotated[int, Field(ge=1, le=MAX_CATCH_UP), WHOLE] = 100
    overlap: Overlap = "allow"
    expires_ms: PositiveDuration | None = None  #: the time after a firing in which its task must start
    paused: StrictBool = False
    source: Source = "client"
    create_time: Instant
    update_time: Instant
    revision: PositiveCount  #: each change adds 1; each firing adds 1, too
    schedule_state: ScheduleState
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _begins_before_it_ends(self) -> Self:
        if self.start_time is not None and self.end_time is not None and self.start_time > self.end_time:
            raise ValueError("start_time lies after end_time")
        return self

    @property
    def anchor(self) -> datetime:
        """The time from which intervals are counted."""
        return self.start_time or self.create_time

    def next_firing(self, after: datetime) -> datetime | None:
        """Return the first firing that is later than `after`; None: the schedule does not fire again.

        No firing lies before start_time or after end_time.
        """
        earliest = after
        if self.start_time is not None and self.start_time > after:
            earliest = self.start_time - _MILLISECOND
        found = triggers.next_firing(self.trigger, earliest, self.anchor)
        return None if found is None or (self.end_time is not None and found > self.end_time) else found

    def next_firings(self, after: datetime, count: int) -> list[datetime]:
        """Return the next `count` firings later than `after`. Return fewer firings if the schedule ends earlier."""
        found: list[datetime] = []
        while len(found) < count and (firing := self.next_firing(found[-1] if found else after)) is not None:
            found.append(firing)
        return found

    def first_firing(self, now: datetime) -> datetime | None:
        """Return the first firing of a schedule that is created at `now`, or whose times are changed then.

        The firing of a `Once` may lie before `now`.
        """
        if isinstance(self.trigger, Once) and self.schedule_state.last_fire_time != self.trigger.time:
            return self.trigger.time
        return self.next_firing(now)

    def key_of(self, firing: datetime) -> str:
        """Return the key of the task that a firing publishes. All processes compute the same key for a firing."""
        moment = firing.astimezone(UTC).replace(tzinfo=None)
        own = f"{self.id}/{moment.isoformat(timespec='milliseconds' if moment.microsecond else 'seconds')}Z"
        return stored_key(self.tenant, own)


@dataclass(frozen=True, slots=True)
class Plan:
    """The firings that a due schedule makes now, and the time of its next firing."""

    firings: tuple[datetime, ...]  #: the oldest first
    next_fire_time: datetime | None
    #: Whether some missed firings are not made, because catch_up leaves them out.
    has_missed: bool


def plan(schedule: Schedule, now: datetime) -> Plan | None:
    """Return the firings to make now; None if the schedule is not due.

    Firings that became due within the last GRACE are made. Earlier firings are missed, and catch_up decides about them:

    - "none": the missed firings are not made. A firing is also missed if a later firing is due. So the grace is at most
      one interval.
    - "last": of all firings that are due, only the newest is made.
    - "all": the newest of the missed firings are made, at most catch_up_limit of them.
    """
    first = schedule.schedule_state.next_fire_time
    if schedule.paused or first is None or first > now:
        return None
    begin = now - GRACE
    most = 1 if schedule.catch_up == "none" else _MAX_RECENT
    recent = _between(schedule, max(first, begin), now + _MILLISECOND, most)
    missed: list[datetime] = []
    if first < begin and schedule.catch_up != "none":
        missed = _between(schedule, first, begin, schedule.catch_up_limit if schedule.catch_up == "all" else 1)
    made = [*missed, *recent]
    if first < begin and schedule.catch_up == "last":
        made = made[-1:]
    is_late = first < begin or schedule.catch_up == "none"
    has_missed = is_late and not (schedule.catch_up != "last" and made and made[0] == first)
    return Plan(tuple(made), schedule.next_firing(now), has_missed)


def _between(schedule: Schedule, start: datetime, end: datetime, count: int) -> list[datetime]:
    """Return the newest firings at or after `start` and before `end`, at most `count`, the earliest first.

    The stored next_fire_time counts as a firing, too.
    """
    if schedule.end_time is not None and schedule.end_time < end:
        end = schedule.end_time + _MILLISECOND
    first = schedule.schedule_state.next_fire_time
    found = triggers.last_firings(schedule.trigger, start, end, schedule.anchor, count) if start < end else []
    if first is not None and start <= first < end and len(found) < count and first not in found:
        found.insert(0, first)  # a user requested this firing, or it is left from a former trigger
    return found
