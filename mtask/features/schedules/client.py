"""Checks the schedules that a caller adds or changes, and puts them into the form that the store takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias, TypedDict, Unpack

from pydantic import ValidationError

from mtask.arguments.criteria import LookupCriteria
from mtask.arguments.publish import Call, Declarations, TaskRef, spec_of
from mtask.errors import InvalidInput, SchemaMismatch, shown
from mtask.features.schedules import operations as schedules
from mtask.features.schedules import triggers
from mtask.features.schedules.rules import MAX_ID_BYTES, MAX_JITTER_MS, CatchUp, Overlap, Source
from mtask.features.schedules.rules import Schedule as Schedule
from mtask.features.schedules.triggers import Cron, Every, Once
from mtask.kernel.document.identity import check_text, stored_key
from mtask.kernel.document.lookup import LookupEntry
from mtask.kernel.document.options import TaskOptions, with_new_names
from mtask.kernel.document.task import SCHEMA_VERSION, describe_validation, read_as
from mtask.kernel.driver.bson import stored_value
from mtask.kernel.driver.codec import GET_CODEC, Codec, Owner
from mtask.kernel.driver.operation import Operation, apart
from mtask.kernel.operations.publish import IfExists, NewTask, milliseconds
from mtask.says import Says

#: The times of a schedule: a crontab of five fields, the interval between firings, the time of the only firing, or an
#: object that holds one of these.
When: TypeAlias = str | timedelta | datetime | Cron | Every | Once
TIMES = "When"
#: A time that is earlier than the firings of any likely schedule.
_LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
#: No schedule begins, ends or fires earlier.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The names of time zones that mean what is set on a machine.
_OF_THE_MACHINE = ("localtime", "posixrules")
MILLISECOND = timedelta(milliseconds=1)
logger = logging.getLogger("mtask.client")


def trigger_of(when: When, timezone: str | None = None) -> Cron | Every | Once:
    """Return the trigger that `when` describes; raise InvalidInput."""
    if timezone is not None and not isinstance(when, str):
        raise InvalidInput("timezone belongs to a crontab such as '30 2 * * *'; a Cron has its own.", field="timezone")
    try:
        if isinstance(when, Cron | Every | Once):
            return when
        if isinstance(when, str):
            return Cron.parse(when, "UTC" if timezone is None else timezone)
        if isinstance(when, timedelta):
            return _every(when)
        if isinstance(when, datetime):
            return Once(time=whole(when, "when"))
    except ValidationError as error:
        # An error of a crontab's text or time zone belongs to no single field, and says itself what is wrong.
        what = describe_validation(error).removeprefix("document: ")
        raise InvalidInput(f"when {shown(when)}: {what}.", field="when") from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"when {shown(when)}: {error}.", field="when") from None
    raise InvalidInput(
        f"when {shown(when)}: use a crontab such as '*/5 * * * *', a timedelta, an aware datetime, or Cron(...).",
        field="when",
    )


def _every(interval: timedelta) -> Every:
    try:
        return Every(interval_ms=round(interval / MILLISECOND))
    except ValidationError:
        seconds = interval.total_seconds()
        raise InvalidInput(f"an interval of {seconds:g} s: use 1 s to 3,660 days.", field="when") from None


def whole(moment: object, field: str) -> datetime:
    """Convert an aware datetime to UTC, without fractions of a millisecond; raise InvalidInput."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidInput(f"{field} {shown(moment)}: give an aware datetime, such as datetime.now(UTC).", field=field)
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(f"{field} {moment} lies, in UTC, outside of the years 1 to 9999.", field=field) from None
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def check_schedule_id(schedule_id: object) -> str:
    """Return the schedule id if it is valid; raise InvalidInput if it is not."""
    checked = check_text("schedule id", schedule_id)
    if len(checked.encode()) > MAX_ID_BYTES:
        raise InvalidInput(f"schedule id {shown(checked, 40)}: at most {MAX_ID_BYTES} bytes.", field="schedule id")
    return checked


class TimesArguments(TypedDict, total=False):
    """When a schedule fires, beside its crontab or interval."""

    timezone: Annotated[
        str | None, Says("Time zone of the crontab, such as Europe/Berlin. Else UTC.", "NAME", panel=TIMES)
    ]
    start_time: Annotated[datetime | None, Says("No firing before this.", "INSTANT", panel=TIMES)]
    end_time: Annotated[datetime | None, Says("No firing after this.", "INSTANT", panel=TIMES)]
    expires: Annotated[
        timedelta | float | None,
        Says("No task starts later after its firing: 90s, 5m, 1h30m.", "DURATION", panel=TIMES),
    ]
    jitter: Annotated[
        timedelta | float | None, Says("Delay each task by a random time, at most this.", "DURATION", panel=TIMES)
    ]
    catch_up: Annotated[
        CatchUp,
        Says("Which of the firings to make up that were missed while no worker ran.", panel=TIMES, default="last"),
    ]
    catch_up_limit: Annotated[int, Says("With all: make up at most this many, the newest.", panel=TIMES, default=100)]
    overlap: Annotated[
        Overlap,
        Says("skip: do not fire while the task of the last firing has not finished.", panel=TIMES, default="allow"),
    ]


class FiringArguments(TimesArguments, LookupCriteria, TaskOptions, total=False):
    """The keyword arguments of `App.schedule`."""

    queue: Annotated[str | None, Says("Queue of the tasks. Else 'default'.")]


class ScheduleArguments(FiringArguments, total=False):
    """The keyword arguments of a schedule."""

    paused: Annotated[bool | None, Says("Add the schedule paused.")]
    tenant: Annotated[str | None, Says("Whose tasks it publishes.", flag="")]


class ScheduleSpec:
    """The arguments of `add_schedule` for one schedule. `prepare` checks them."""

    def __init__(
        self,
        schedule_id: str,
        task: TaskRef | Call[Any],
        when: When,
        params: Any = None,
        **given: Unpack[ScheduleArguments],
    ) -> None:
        self.schedule_id = schedule_id
        self.task = task
        self.when = when
        self.params = params
        self.timezone = given.pop("timezone", None)
        self.start_time = given.pop("start_time", None)
        self.end_time = given.pop("end_time", None)
        self.jitter = given.pop("jitter", None)
        self.catch_up = given.pop("catch_up", "last")
        self.catch_up_limit = given.pop("catch_up_limit", 100)
        self.overlap = given.pop("overlap", "allow")
        self.paused = given.pop("paused", None)
        self.queue = given.pop("queue", None)
        self.lookup = given.pop("lookup", None)
        self.tenant = given.pop("tenant", None)
        self.expires = given.pop("expires", None)
        self.options: TaskOptions = with_new_names(given)

    def __repr__(self) -> str:
        return f"ScheduleSpec({self.schedule_id!r}, {self.task!r}, {self.when!r})"

    def prepare(self, tenant: str | None = None, known: Declarations | None = None) -> Definition:
        """Check the arguments and return the definition; raise a subclass of InvalidInput.

        `tenant` is the tenant of a schedule that names none. `known` tells what handlers declare that are not at hand.
        """
        tenant = self.tenant if self.tenant is not None else tenant
        task = spec_of(
            self.task,
            self.params,
            key="-",
            queue=self.queue,
            lookup=self.lookup,
            tenant=tenant,
            expires=self.expires,
            **self.options,
        ).prepare(known=known)
        if isinstance(task.expires, datetime):
            raise InvalidInput("expires counts from each firing: give a timedelta or seconds.", field="expires")
        trigger = _checked_trigger(trigger_of(self.when, self.timezone))
        fields: dict[str, Any] = {
            "name": task.name,
            "queue": task.queue,
            "params": task.params,
            "task_option": dict(task.task_option),
            "lookup": task.lookup,
            "version": task.version,
            "trigger": trigger.model_dump(exclude_none=True),
            "start_time": _bound(self.start_time, "start_time"),
            "end_time": _bound(self.end_time, "end_time"),
            "jitter_ms": _jitter_ms(self.jitter, trigger),
            "catch_up": self.catch_up,
            "catch_up_limit": self.catch_up_limit,
            "overlap": self.overlap,
            "tenant": task.tenant,
            "expires_ms": None if task.expires is None else milliseconds(task.expires),
        }
        definition = Definition(check_schedule_id(self.schedule_id), fields, paused=self.paused)
        _checked(definition)
        return definition


@dataclass(frozen=True, slots=True)
class Definition:
    """A checked schedule, without the times that depend on the server's clock."""

    schedule_id: str
    fields: Mapping[str, Any]
    #: Whether the schedule is paused. None: an existing schedule stays as it is, and a new one is not paused.
    paused: bool | None = None

    @property
    def said(self) -> str:
        """The task that it publishes, for the action log."""
        return f"{self.fields['name']} in queue {self.fields['queue']}"

    def document(self, now: datetime, source: Source, former: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the document to store. `former`: the stored document that it replaces, or None for a new schedule.

        The next firing stays the same, unless the times of the schedule change or the schedule is resumed. What
        a resumed one missed during its pause is not made up, also the firing of a `Once`.
        """
        made: dict[str, Any] = {
            "_id": self.schedule_id,
            **self.fields,
            "paused": self._is_paused(former),
            "source": source,
            "create_time": now if former is None else former["create_time"],
            "update_time": now,
            "schedule_state": {"next_fire_time": None, "fired_cnt": 0, "skipped_cnt": 0, "pending": []}
            if former is None
            else dict(former["schedule_state"]),
            "revision": 1,
            "schema_version": SCHEMA_VERSION,
        }
        for name in ("lookup", "version", "tenant", "expires_ms"):
            if made[name] is None:
                del made[name]  # as in a task without them
        is_resumed = former is not None and former.get("paused") is True and not made["paused"]
        times = ("trigger", "start_time", "end_time")
        if former is None or any(made[name] != former.get(name) for name in times):
            made["schedule_state"]["next_fire_time"] = Schedule.model_validate(made).first_firing(now)
        elif is_resumed:
            made["schedule_state"]["next_fire_time"] = Schedule.model_validate(made).next_firing(now)
        return made

    def _is_paused(self, former: Mapping[str, Any] | None) -> bool:
        if self.paused is not None:
            return self.paused
        return former is not None and bool(former.get("paused"))


def _checked_trigger(trigger: Cron | Every | Once) -> Cron | Every | Once:
    """Return the trigger if a new schedule may have it; raise InvalidInput. Stored ones are read as they are."""
    if isinstance(trigger, Once):
        _after_1970(trigger.time, "when")
    if isinstance(trigger, Cron) and trigger.timezone in _OF_THE_MACHINE:
        raise InvalidInput(
            f"timezone {trigger.timezone!r} differs from machine to machine: use a name such as 'Europe/Berlin'.",
            field="timezone",
        )
    return trigger


def _bound(moment: datetime | None, field: str) -> datetime | None:
    return None if moment is None else _after_1970(whole(moment, field), field)


def _after_1970(moment: datetime, field: str) -> datetime:
    if moment < _EPOCH:
        raise InvalidInput(f"{field} {moment} lies before 1970: give a later instant.", field=field)
    return moment


def _checked(definition: Definition) -> None:
    """Raise InvalidInput if the document would be malformed, or if the schedule could never fire."""
    now = datetime.now(UTC)  # only for this check: later, the server's clock counts
    try:
        schedule = Schedule.model_validate(definition.document(now, "client"))
    except ValidationError as error:
        raise InvalidInput(f"schedule {definition.schedule_id!r}: {describe_validation(error)}.") from None
    if isinstance(schedule.trigger, Cron) and triggers.next_firing(schedule.trigger, _LONG_AGO, now) is None:
        raise InvalidInput(f"schedule {definition.schedule_id!r} would never fire: {schedule.trigger}.", field="when")


def _jitter_ms(jitter: timedelta | float | None, trigger: Cron | Every | Once) -> int:
    if jitter is None:
        return 0
    if isinstance(trigger, Once):
        raise InvalidInput("jitter applies to schedules that fire again and again.", field="jitter")
    try:
        length = jitter if isinstance(jitter, timedelta) else timedelta(seconds=jitter)
        milliseconds = round(length / MILLISECOND)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"jitter {shown(jitter)} is no length of time.", field="jitter") from None
    if isinstance(jitter, bool) or not 0 <= milliseconds <= MAX_JITTER_MS:
        raise InvalidInput(f"jitter of {length.total_seconds():g} s: use 0 s to a day.", field="jitter")
    return milliseconds


def schedule_of(document: Mapping[str, Any]) -> Schedule:
    """Return the document as a Schedule; raise SchemaMismatch."""
    return read_as(Schedule, document, "schedule", "schedules", "Mend it by hand, or remove it and add it again.")


def put(definition: Definition, if_exists: IfExists, source: Source = "client") -> Operation[Schedule]:
    """Store a schedule and return the stored one. With if_exists="reject", raise ScheduleExists if the id is taken."""
    if if_exists not in ("keep", "update", "reject"):
        raise InvalidInput(f'if_exists is "keep", "update" or "reject", not {shown(if_exists)}', field="if_exists")

    return _put(definition, if_exists, source)


def _put(definition: Definition, if_exists: IfExists, source: Source) -> Operation[Schedule]:
    if source == "client" and definition.fields["tenant"] is None:  # who names no tenant leaves the stored one
        # Apart from the caller's transaction: a read in it would hold up whoever makes the collection.
        tenant = yield from apart(schedules.tenant_of(definition.schedule_id))
        definition = replace(definition, fields={**definition.fields, "tenant": tenant})
    fields = definition.fields
    owner = _owner(definition.schedule_id, fields["name"], fields["queue"], fields["tenant"])
    codec: Codec = yield GET_CODEC
    yield from codec.load([owner], to_publish=True)
    content = codec.content(owner, fields["params"], fields["lookup"])
    encoded = replace(definition, fields={**fields, **content})

    def changed(now: datetime, former: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if former is not None and if_exists == "keep":
            return None
        if former is not None:
            stored = schedule_of(former)
            readable = former
            if stored.sealed is not None:
                # Encoded values differ each time, so the values themselves are compared.
                codec.open_part(_owner_of(stored), stored)
                lookup = None if stored.lookup is None else [{"k": entry.k, "v": entry.v} for entry in stored.lookup]
                readable = {**former, "params": stored.params, "lookup": lookup}
            is_same = all(readable.get(name) == value for name, value in definition.fields.items())
            is_same &= definition.paused is None or definition.paused == former.get("paused")
            is_same &= former.get("sealed") == content.get("sealed")
            if is_same and former.get("source") == source:
                return None
        if source == "client":  # what an app declares may have ended since: that must not keep it from starting
            _check_end(definition, now, former)
        return encoded.document(now, source, former)

    stored = yield from schedules.put(definition.schedule_id, changed, must_be_new=if_exists == "reject")
    return (yield from _opened(stored))


def _owner(schedule_id: str, name: str, queue: str, tenant: str | None, sealed: str | None = None) -> Owner:
    """Return the owner of the values of a schedule: its key begins like those of all tasks that it publishes."""
    base = stored_key(tenant, schedule_id)
    return Owner(name, f"{base}/", [queue], sealed, base)


def _owner_of(schedule: Schedule) -> Owner:
    return _owner(schedule.id, schedule.name, schedule.queue, schedule.tenant, schedule.sealed)


def _opened(document: Mapping[str, Any]) -> Operation[Schedule]:
    """Return the document as a Schedule, decoded; raise SchemaMismatch."""
    found = schedule_of(document)
    yield from _open([found])
    return found


def _open(found: Sequence[Schedule]) -> Operation[None]:
    """Decode schedules in place."""
    codec: Codec = yield GET_CODEC
    if not codec.is_plain:
        yield from codec.open_parts([(_owner_of(schedule), schedule) for schedule in found])


def _check_end(definition: Definition, now: datetime, former: Mapping[str, Any] | None) -> None:
    end = definition.fields["end_time"]
    if end is not None and end < now and (former is None or former.get("end_time") != end):
        raise InvalidInput(
            f"end_time {end} is past, so the schedule would never fire: give a later one.", field="end_time"
        )


def set_paused(schedule_id: str, *, paused: bool) -> Operation[Schedule]:
    """Pause or resume a schedule; raise ScheduleNotFound. Firings missed during the pause are not made up."""
    checked = check_schedule_id(schedule_id)

    def changed(now: datetime, former: Mapping[str, Any]) -> dict[str, Any] | None:
        schedule = schedule_of(former)
        if schedule.paused == paused:
            return None
        made = {**former, "paused": paused, "update_time": now}
        if not paused:
            made["schedule_state"] = {**former["schedule_state"], "next_fire_time": schedule.next_firing(now)}
        return made

    return _changed(checked, changed)


def _changed(schedule_id: str, changed: schedules.ChangedExisting) -> Operation[Schedule]:
    return (yield from _opened((yield from schedules.change(schedule_id, changed))))


def get(schedule_id: str) -> Operation[Schedule]:
    """Return a schedule; raise ScheduleNotFound or SchemaMismatch."""
    return (yield from _opened((yield from schedules.get(check_schedule_id(schedule_id)))))


def every() -> Operation[list[Schedule]]:
    """Return all schedules, sorted by id. Malformed schedules are left out, and the log warns of them."""
    found = []
    for document in (yield from schedules.every()):
        try:
            found.append(schedule_of(document))
        except SchemaMismatch as error:
            logger.warning("malformed schedule left out: %s", error)
    yield from _open(found)
    return found


def remove(schedule_id: str) -> Operation[bool]:
    """Remove a schedule; return whether it existed."""
    return schedules.remove(check_schedule_id(schedule_id))


def check_count(count: object) -> None:
    """Raise InvalidInput if the number of firings is not a whole number from 1 to 10,000."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
        raise InvalidInput(f"count {shown(count)}: use 1 to 10000.", field="count")


def firings_of(schedule: Schedule, count: int) -> list[datetime]:
    """Return the next firings of a schedule. Thousands of them take a second or more to compute."""
    first = schedule.schedule_state.next_fire_time
    if schedule.paused or first is None:
        return []
    return [first, *schedule.next_firings(first, count - 1)]


def new_task(schedule: Schedule, firing: datetime, start: datetime) -> NewTask:
    """Return the task that a firing publishes. The key names the schedule and the firing. `start`: its start_time."""
    key = schedule.key_of(firing)
    return NewTask(
        f"{schedule.name}:{key}",
        schedule.name,
        key,
        schedule.queue,
        stored_value(schedule.params),
        schedule.task_option.stored(),
        start,
        None if schedule.lookup is None else [_stored(entry) for entry in schedule.lookup],
        tenant=schedule.tenant,
        sealed=schedule.sealed,
        expires=None if schedule.expires_ms is None else firing + timedelta(milliseconds=schedule.expires_ms),
        version=schedule.version,
    )


def _stored(entry: LookupEntry) -> dict[str, Any]:
    return {"k": entry.k, "v": stored_value(entry.v)}
