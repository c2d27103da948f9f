"""Operations that decrypt what was read, as far as the keys of this reader allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtask.model.documents import Task
from mtask.model.encryption.sealed import Sealed, is_sealed
from mtask.model.publishing.tenants import stored_key
from mtask.model.run_logs import LogLine, RunLog
from mtask.model.scheduling.schedules import Schedule
from mtask.store.driver.operation import Operation
from mtask.store.encryption.sealer import LOG, MESSAGE, PARAMS, REASON, RETURNS, Owner, Sealer
from mtask.store.encryption.sealing import load, sealer
from mtask.store.streams.events import TaskEvent

Document = dict[str, Any]
#: One value to decrypt: where it belongs, its field, the value, and the function that puts the result in its place.
Place = tuple[Owner, str, Sealed, Callable[[Any], None]]
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
_OWNING = ("queue", "task_state.former_queues")


def open_tasks(tasks: Sequence[Task]) -> Operation[None]:
    """Decrypt the values of tasks in place, as far as the keys of this reader allow."""
    using = yield from sealer()
    if using is not None:
        yield from open_places(using, [place for task in tasks for place in places_in(task)])


def open_places(using: Sealer, places: Sequence[Place]) -> Operation[None]:
    """Decrypt these values, and put each in its place."""
    if not places:
        return
    yield from load(using, (), (sealed.content[1:17] for _, _, sealed, _ in places))
    open_loaded(using, places)


def open_loaded(using: Sealer, places: Iterable[Place]) -> None:
    """Decrypt these values with keys that are loaded."""
    for owner, field, sealed, put in places:
        if field.startswith("lookup "):
            put(using.open_lookup(owner, field.removeprefix("lookup "), sealed))
        else:
            put(using.open(owner, field, sealed))


def owner_of(task: Task) -> Owner:
    """Return the task as the owner of its values."""
    queues = [task.queue, *task.task_state.former_queues]
    if task.again is not None:
        queues.append(task.again.queue)
    return Owner(task.name, task.key, queues)


def places_in(task: Task) -> list[Place]:
    """Return the encrypted values of a task."""
    owner = owner_of(task)
    found: list[Place] = []
    parts: list[Any] = [task, *task.former_params]
    if task.again is not None:
        parts.append(task.again)
    for part in parts:
        found += _params_in(owner, part)
        for entry in getattr(part, "lookup", None) or ():
            if isinstance(entry.v, Sealed):
                found.append((owner, f"lookup {entry.k}", entry.v, _setter(entry, "v")))
    if isinstance(task.task_state.reason, Sealed):
        found.append((owner, REASON, task.task_state.reason, _setter(task.task_state, "reason")))
    for run in task.runs:
        if isinstance(run.returns, Sealed):
            found.append((owner, RETURNS, run.returns, _setter(run, "returns")))
        if isinstance(run.fail_reason, Sealed):
            found.append((owner, REASON, run.fail_reason, _setter(run, "fail_reason")))
        if run.progress is not None and isinstance(run.progress.message, Sealed):
            found.append((owner, MESSAGE, run.progress.message, _setter(run.progress, "message")))
    return found


def _params_in(owner: Owner, part: Any) -> Iterator[Place]:
    if isinstance(part.params, Sealed):
        yield owner, PARAMS, part.params, _setter(part, "params")
    elif type(part.params) is dict and type(calls := part.params.get("calls")) is list:
        for index, call in enumerate(calls):
            if isinstance(call, Sealed):
                yield owner, PARAMS, call, _item_setter(calls, index)


def _setter(part: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(part, name, value)


def _item_setter(values: Any, index: Any) -> Callable[[Any], None]:
    return lambda value: values.__setitem__(index, value)


def open_schedules(schedules: Sequence[Schedule]) -> Operation[None]:
    """Decrypt the params and lookups of schedules in place."""
    using = yield from sealer()
    if using is None:
        return
    places: list[Place] = []
    for schedule in schedules:
        owner = _owner_of_schedule(schedule)
        if isinstance(schedule.params, Sealed):
            places.append((owner, PARAMS, schedule.params, _setter(schedule, "params")))
        places += [
            (owner, f"lookup {entry.k}", entry.v, _setter(entry, "v"))
            for entry in schedule.lookup or ()
            if isinstance(entry.v, Sealed)
        ]
    yield from open_places(using, places)


def _owner_of_schedule(schedule: Schedule) -> Owner:
    """Return the owner of the values of a schedule: its key begins like those of all tasks that it publishes."""
    return Owner(schedule.name, f"{stored_key(schedule.tenant, schedule.id)}/", [schedule.queue])


def open_logs(logs: Sequence[RunLog]) -> Operation[None]:
    """Decrypt the lines of runs in place. In place of lines that cannot be decrypted, one line says why."""
    encrypted = [log for log in logs if isinstance(log.sealed_lines, Sealed)]
    if not encrypted:
        return
    using = yield from sealer()
    if using is not None:
        yield from open_places(using, [_place_in_log(log) for log in encrypted])
    for log in encrypted:
        if isinstance(log.sealed_lines, Sealed):
            log.lines = [_unreadable(log, log.sealed_lines.why)]
        else:
            try:
                log.lines = [LogLine.model_validate(line) for line in log.sealed_lines]
            except (TypeError, ValueError):
                log.lines = [_unreadable(log, "what was encrypted is no log of mtask")]


def _place_in_log(log: RunLog) -> Place:
    name, _, key = log.task_id.partition(":")
    return Owner(name, key, [log.queue or ""]), LOG, log.sealed_lines, _setter(log, "sealed_lines")


def _unreadable(log: RunLog, why: str) -> LogLine:
    log.first = max(0, log.line_cnt - 1)
    return LogLine(time=log.update_time, level="WARNING", logger="mtask", message=f"(encrypted: {why})")


def readable_schedule(using: Sealer, schedule: Schedule, document: Mapping[str, Any]) -> Document:
    """Return the stored document of a schedule with its params and lookups, decrypted with keys that are loaded."""
    owner = _owner_of_schedule(schedule)
    params, lookup = schedule.params, document.get("lookup")
    if isinstance(params, Sealed):
        params = using.open(owner, PARAMS, params)
    if schedule.lookup is not None:
        lookup = [
            {"k": e.k, "v": using.open_lookup(owner, e.k, e.v) if isinstance(e.v, Sealed) else e.v}
            for e in schedule.lookup
        ]
    return {**document, "params": params, "lookup": lookup}


def open_rows(rows: Sequence[Document], field: str) -> Operation[None]:
    """Decrypt one field of rows in place. A row holds `_id`, `queues` and the field.

    A value that cannot be decrypted raises DecryptionFailed.
    """
    using = yield from sealer()
    sealed = [row for row in rows if is_sealed(row.get(field))]
    if not sealed:
        return
    if using is None:
        raise Sealed(sealed[0][field], task_id=sealed[0]["_id"], field=field).error
    places: list[Place] = []
    for row in sealed:
        name, _, key = row["_id"].partition(":")
        queues = [queue for queue in row.get("queues") or () if isinstance(queue, str)]
        places.append((Owner(name, key, queues), field, Sealed(row[field]), _item_setter(row, field)))
    yield from open_places(using, places)
    for row in sealed:
        if isinstance(row[field], Sealed):
            raise row[field].error


def open_event(event: TaskEvent) -> Operation[TaskEvent]:
    """Return the event with its texts decrypted, if its queue or its tenant is certain."""
    using = yield from sealer()
    if using is None:
        return event
    owner = Owner(event.name, event.key, [] if event.queue is None else [event.queue])
    texts: Document = {}
    for name, field in (("reason", REASON), ("message", MESSAGE)):
        text = getattr(event, name)
        if isinstance(text, Sealed):
            yield from open_places(using, [(owner, field, text, _item_setter(texts, name))])
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
        if is_sealed(value) or isinstance(value, Sealed):
            if name == "v" and isinstance(values, dict) and isinstance(values.get("k"), str):
                inner = f"lookup {values['k']}"
            sealed = value if isinstance(value, Sealed) else Sealed(value)
            yield owner, inner, sealed, _item_setter(values, name)
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
    return [name for name in extra if name not in fields]


def open_fields(task_id: str, values: Document, fields: Sequence[str]) -> Operation[Document]:
    """Return the values of these fields, decrypted. `values` holds extra fields, too."""
    using = yield from sealer()
    if using is None:
        return values
    name, _, key = task_id.partition(":")
    former = values.get("task_state.former_queues")
    queues = [queue for queue in (values.get("queue"), *(former or ())) if isinstance(queue, str)]
    is_hidden = isinstance(values.get("params"), Sealed)
    yield from open_places(using, list(places_in_values(Owner(name, key, queues), values)))
    if is_hidden:
        for field in fields:
            if field.startswith("params."):
                values[field] = _at(values["params"], field.split(".")[1:])
    return {field: values[field] for field in fields}


def _at(value: Any, path: Sequence[str]) -> Any:
    if isinstance(value, Sealed):
        return value
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value
