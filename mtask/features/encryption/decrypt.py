"""Operations that decrypt what was read, as far as the keys of this reader allow.

What must be encrypted and is not, and what was encrypted for another place, is refused: a Sealed stands for it, which
no key makes readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from mtask.errors import InvalidLookup
from mtask.features.encryption import readable
from mtask.features.encryption.cipher import LOG, LOOKUP, MESSAGE, PARAMS, REASON, RETURNS, Owner, Sealer, canonical
from mtask.features.encryption.encrypt import load, sealer
from mtask.features.events.task_events import TaskEvent, without_readable
from mtask.features.logs.rules import LogLine, RunLog
from mtask.features.schedules.rules import Schedule
from mtask.kernel.document.identity import stored_key
from mtask.kernel.document.lookup import LookupEntry
from mtask.kernel.document.parts import READABLE, Sealed, is_sealed, refused
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Operation, tasks

Document = dict[str, Any]


class Place(NamedTuple):
    """One value to decrypt."""

    owner: Owner
    field: str
    sealed: Sealed
    put: Callable[[Any], None]  #: puts the result in its place
    told: list[Any] | None = None  #: takes what params say of the lookups of their task


#: The lookups in a part of a document, and what its params say of them.
Bound = tuple[Sequence[LookupEntry] | None, list[Any]]
#: The names of fields in documents that hold encrypted values, and the names under which they are encrypted.
_FIELDS: Mapping[str, str] = {
    "params": PARAMS,
    "calls": PARAMS,
    "returns": RETURNS,
    "fail_reason": REASON,
    "reason": REASON,
    "message": MESSAGE,
}
#: The fields without which values of a partial read cannot be checked.
_OWNING = ("queue", "task_state.former_queues", "sealed")
#: The first parts of the fields that hold what must be encrypted.
_HOLDING = frozenset({"params", "lookup", "former_params", "again", "returns", "runs", "task_state"})
_COPIED = "it is not among the lookups with which these params were encrypted: it was copied here"


def open_tasks(found: Sequence[Task]) -> Operation[None]:
    """Decrypt the values of tasks in place, as far as the keys of this reader allow."""
    using = yield from sealer()
    if using is not None:
        yield from load(using, (), (place.sealed.content[1:17] for task in found for place in places_in(task)))
    for task in found:
        open_task(using, task)


def open_task(using: Sealer | None, task: Task) -> None:
    """Decrypt the values of a task in place with keys that are loaded, and refuse what does not belong there."""
    readable.refuse_readable(task, None if using is None else using.prescribes)
    if using is not None:
        places, bound = _places_in(task)
        open_loaded(using, places)
        _check_lookups(task.id, bound)


def must_be_sealed(using: Sealer | None, queue: str, key: str, sealed: Any) -> bool:
    """Whether readable values of a task are refused: it says that it is encrypted, or this process prescribes it."""
    return readable.must_be_sealed(sealed, queue, key, None if using is None else using.prescribes)


def _check_lookups(task_id: str, bound: Sequence[Bound]) -> None:
    """Refuse lookups of which the params say nothing. Params that mtask 0.2 encrypted do not tell the lookups."""
    for lookup, told in bound:
        entries = [entry for entry in lookup or () if not isinstance(entry.v, Sealed)]
        if not entries or not told or None in told:
            continue
        if not any(all(_is_told(entry, texts) for entry in entries) for texts in told):
            for entry in entries:
                entry.v = refused(task_id, f"lookup {entry.k}", _COPIED)


def _is_told(entry: LookupEntry, texts: Any) -> bool:
    try:
        return canonical(entry.k, entry.v) in texts
    except InvalidLookup:  # no such value can have been encrypted
        return False


def open_places(using: Sealer, places: Sequence[Place]) -> Operation[None]:
    """Decrypt these values, and put each in its place."""
    if not places:
        return
    yield from load(using, (), (place.sealed.content[1:17] for place in places))
    open_loaded(using, places)


def open_loaded(using: Sealer, places: Iterable[Place]) -> None:
    """Decrypt these values with keys that are loaded."""
    for owner, field, sealed, put, told in places:
        if field.startswith("lookup "):
            put(using.open_lookup(owner, field.removeprefix("lookup "), sealed))
        else:
            put(using.open(owner, field, sealed, told))


def owner_of(task: Task) -> Owner:
    """Return the task as the owner of its values."""
    queues = [task.queue, *task.task_state.former_queues]
    if task.again is not None:
        queues.append(task.again.queue)
    return Owner(task.name, task.key, queues)


def places_in(task: Task) -> list[Place]:
    """Return the encrypted values of a task."""
    return _places_in(task)[0]


def _places_in(task: Task) -> tuple[list[Place], list[Bound]]:
    """Return the encrypted values of a task, and its parts with lookups."""
    owner = owner_of(task)
    found: list[Place] = []
    bound: list[Bound] = []
    parts: list[Any] = [task] if task.again is None else [task, task.again]
    for part in parts:
        told: list[Any] = []
        bound.append((part.lookup, told))
        found += _content_of(owner, part, told)
    for former in task.former_params:
        found += _params_in(owner, former)
    if _is_closed(task.task_state.reason):
        found.append(Place(owner, REASON, task.task_state.reason, _setter(task.task_state, "reason")))
    for run in task.runs:
        if _is_closed(run.returns):
            found.append(Place(owner, RETURNS, run.returns, _setter(run, "returns")))
        if _is_closed(run.fail_reason):
            found.append(Place(owner, REASON, run.fail_reason, _setter(run, "fail_reason")))
        if run.progress is not None and _is_closed(run.progress.message):
            found.append(Place(owner, MESSAGE, run.progress.message, _setter(run.progress, "message")))
    return found, bound


def _is_closed(value: Any) -> TypeGuard[Sealed]:
    """Whether this value is encrypted, and a key may make it readable."""
    return isinstance(value, Sealed) and not value.is_final


def _content_of(owner: Owner, part: Any, told: list[Any]) -> Iterator[Place]:
    """Return the encrypted params and lookups of a task, of its next round or of a schedule."""
    yield from _params_in(owner, part, told)
    for entry in part.lookup or ():
        if _is_closed(entry.v):
            yield Place(owner, f"lookup {entry.k}", entry.v, _setter(entry, "v"))


def _params_in(owner: Owner, part: Any, told: list[Any] | None = None) -> Iterator[Place]:
    if _is_closed(part.params):
        yield Place(owner, PARAMS, part.params, _setter(part, "params"), told)
    elif type(part.params) is dict and type(calls := part.params.get("calls")) is list:
        for index, call in enumerate(calls):
            if _is_closed(call):
                yield Place(owner, PARAMS, call, _item_setter(calls, index), told)


def _setter(part: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(part, name, value)


def _item_setter(values: Any, index: Any) -> Callable[[Any], None]:
    return lambda value: values.__setitem__(index, value)


def open_schedules(schedules: Sequence[Schedule]) -> Operation[None]:
    """Decrypt the params and lookups of schedules in place."""
    using = yield from sealer()
    if using is not None:
        places = [place for schedule in schedules for place in _content_of(_owner_of_schedule(schedule), schedule, [])]
        yield from load(using, (), (place.sealed.content[1:17] for place in places))
    for schedule in schedules:
        _open_schedule(using, schedule)


def _open_schedule(using: Sealer | None, schedule: Schedule) -> None:
    owner = _owner_of_schedule(schedule)
    if must_be_sealed(using, schedule.queue, owner.key, schedule.sealed):
        readable.refuse_content(owner.task_id, schedule)
    if using is not None:
        told: list[Any] = []
        open_loaded(using, list(_content_of(owner, schedule, told)))
        _check_lookups(owner.task_id, [(schedule.lookup, told)])


def _owner_of_schedule(schedule: Schedule) -> Owner:
    """Return the owner of the values of a schedule: its key begins like those of all tasks that it publishes."""
    base = stored_key(schedule.tenant, schedule.id)
    return Owner(schedule.name, f"{base}/", [schedule.queue], base)


def open_logs(logs: Sequence[RunLog]) -> Operation[None]:
    """Decrypt the lines of runs in place. In place of lines that cannot be decrypted, or are refused, one says why."""
    using = yield from sealer()
    plain = [log for log in logs if log.lines and not isinstance(log.sealed_lines, Sealed)]
    if plain and using is not None:
        task_id = plain[0].task_id  # all logs are of one task
        task = (yield tasks("find_one", {"_id": task_id}, {"queue": 1, "sealed": 1})) or {}
        if must_be_sealed(using, str(task.get("queue")), task_id.partition(":")[2], task.get("sealed")):
            for log in plain:
                log.lines = [_unreadable(log, f"refused: {READABLE}")]
    encrypted = [log for log in logs if isinstance(log.sealed_lines, Sealed)]
    if encrypted and using is not None:
        yield from open_places(using, [_place_in_log(log) for log in encrypted])
    for log in encrypted:
        if isinstance(log.sealed_lines, Sealed):
            log.lines = [_unreadable(log, f"encrypted: {log.sealed_lines.why}")]
        else:
            try:
                log.lines = [LogLine.model_validate(line) for line in log.sealed_lines]
            except (TypeError, ValueError):
                log.lines = [_unreadable(log, "encrypted: what was encrypted is no log of mtask")]


def _place_in_log(log: RunLog) -> Place:
    name, _, key = log.task_id.partition(":")
    return Place(Owner(name, key, [log.queue or ""]), LOG, log.sealed_lines, _setter(log, "sealed_lines"))


def _unreadable(log: RunLog, why: str) -> LogLine:
    log.first = max(0, log.line_cnt - 1)
    return LogLine(time=log.update_time, level="WARNING", logger="mtask", message=f"({why})")


def readable_schedule(using: Sealer, schedule: Schedule, document: Mapping[str, Any]) -> Document:
    """Return the stored document of a schedule with its params and lookups, decrypted with keys that are loaded."""
    _open_schedule(using, schedule)
    lookup = None if schedule.lookup is None else [{"k": entry.k, "v": entry.v} for entry in schedule.lookup]
    return {**document, "params": schedule.params, "lookup": lookup}


def open_rows(rows: Sequence[Document], field: str) -> Operation[None]:
    """Decrypt one field of rows in place. A row holds `_id`, `queues`, `sealed` and the field.

    A value that cannot be decrypted, or is readable and must not be, raises DecryptionFailed.
    """
    using = yield from sealer()
    for row in rows:
        if row.get(field) is not None and not is_sealed(row[field]):
            queue, key = str(row["queues"][0]), row["_id"].partition(":")[2]
            if must_be_sealed(using, queue, key, row.get("sealed")):
                raise refused(row["_id"], field).error
    sealed = [row for row in rows if is_sealed(row.get(field))]
    if not sealed:
        return
    if using is None:
        raise Sealed(sealed[0][field], task_id=sealed[0]["_id"], field=field).error
    places: list[Place] = []
    for row in sealed:
        name, _, key = row["_id"].partition(":")
        queues = [queue for queue in row.get("queues") or () if isinstance(queue, str)]
        places.append(Place(Owner(name, key, queues), field, Sealed(row[field]), _item_setter(row, field)))
    yield from open_places(using, places)
    for row in sealed:
        if isinstance(row[field], Sealed):
            raise row[field].error


def open_criteria(bulk_id: str, criteria: Document) -> Operation[Document]:
    """Return the criteria of a bulk change with its params decrypted, as far as the keys of this reader allow."""
    if not is_sealed(criteria.get("params")):
        return criteria
    using = yield from sealer()
    sealed = Sealed(criteria["params"], field=f"params of the bulk change {bulk_id}")
    if using is None:
        return {**criteria, "params": sealed}
    yield from load(using, (), [sealed.content[1:17]])
    return {**criteria, "params": using.open_criteria(bulk_id, sealed)}


def open_event(event: TaskEvent) -> Operation[TaskEvent]:
    """Return the event with its texts decrypted, if its queue or its tenant is certain."""
    using = yield from sealer()
    if using is None:
        return event
    owner = Owner(event.name, event.key, [] if event.queue is None else [event.queue])
    if must_be_sealed(using, event.queue or "", event.key, None):
        event = without_readable(event)
    texts: Document = {}
    for name, field in (("reason", REASON), ("message", MESSAGE)):
        text = getattr(event, name)
        if _is_closed(text):
            yield from open_places(using, [Place(owner, field, text, _item_setter(texts, name))])
    return replace(event, **texts)


def places_in_values(owner: Owner, values: Any, field: str = PARAMS) -> Iterator[Place]:
    """Return the encrypted values in a part of a document, at any depth."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, dict):
        entries = values.items()
    elif isinstance(values, list):
        entries = enumerate(values)
    for name, value in list(entries):
        inner = _FIELDS.get(str(name).rpartition(".")[2], field)
        if is_sealed(value) or _is_closed(value):
            if name == "v" and isinstance(values, dict) and isinstance(values.get("k"), str):
                inner = f"lookup {values['k']}"
            sealed = value if isinstance(value, Sealed) else Sealed(value)
            yield Place(owner, inner, sealed, _item_setter(values, name))
        elif isinstance(value, dict | list):
            yield from places_in_values(owner, value, inner)


def extra_fields(fields: Sequence[str]) -> Operation[list[str]]:
    """Return the fields that a partial read needs besides, so that it can decrypt the fields that were asked for."""
    using = yield from sealer()
    if using is None:
        return []
    extra = [*_OWNING]
    if any(name.startswith("params.") for name in fields):
        extra.append("params")  # a path below encrypted params leads nowhere on the server
    if any(_first_of(name) == LOOKUP for name in fields):
        extra += [PARAMS, LOOKUP]  # the params tell which lookups are those of the task
    return [name for name in dict.fromkeys(extra) if name not in fields]


def _first_of(field: str) -> str:
    return field.partition(".")[0]


def open_fields(task_id: str, values: Document, fields: Sequence[str]) -> Operation[Document]:
    """Return the values of these fields, decrypted. `values` holds extra fields, too."""
    using = yield from sealer()
    if using is None:
        return values
    name, _, key = task_id.partition(":")
    former = values.get("task_state.former_queues")
    queues = [queue for queue in (values.get("queue"), *(former or ())) if isinstance(queue, str)]
    if must_be_sealed(using, queues[0] if queues else "", key, values.get("sealed")):
        held = [field for field in values if _first_of(field) in _HOLDING and not field.startswith("params.")]
        values = {**values, **{field: readable.without_readable(task_id, field, values[field]) for field in held}}
        if PARAMS in values and values[PARAMS] is None:
            values[PARAMS] = refused(task_id, PARAMS)
    owner, told = Owner(name, key, queues), list[Any]()
    own = {PARAMS: values[PARAMS]} if PARAMS in values else {}
    others = {field: value for field, value in values.items() if field != PARAMS}
    is_hidden = isinstance(own.get(PARAMS), Sealed)
    places = [*places_in_values(owner, others), *(p._replace(told=told) for p in places_in_values(owner, own))]
    yield from open_places(using, places)
    values = {**others, **own}
    entries = [LookupEntry.model_construct(**each) for each in values.get(LOOKUP) or () if {"k", "v"} == set(each)]
    _check_lookups(task_id, [(entries, told)])
    are_copied = any(isinstance(entry.v, Sealed) and entry.v.why == _COPIED for entry in entries)
    for field in fields:
        if is_hidden and field.startswith("params."):
            values[field] = _at(values[PARAMS], field.split(".")[1:])
        elif are_copied and _first_of(field) == LOOKUP:
            values[field] = refused(task_id, field, _COPIED)
    return {field: values[field] for field in fields}


def _at(value: Any, path: Sequence[str]) -> Any:
    if isinstance(value, Sealed):
        return value
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value
