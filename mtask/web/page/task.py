"""One task: its life as a timeline, why it waits, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from starlette.responses import Response

from mtask.doctor.explain import Inspected
from mtask.errors import InvalidInput, TaskNotFound
from mtask.features.logs.client import RunLog
from mtask.kernel.document import rules
from mtask.kernel.document.identity import task_id_of
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import Run, Task
from mtask.web import views as answers
from mtask.web.access import Role
from mtask.web.page.rendering import pretty, url, whole
from mtask.web.page.views import Addresses, Visit, see

addresses = Addresses()
#: The longest params that the form of a retry shows, in characters.
_LONGEST_EDITED = 200_000
#: The most lines of a log that the page shows. `mtask logs` and the API show all that are kept.
_MOST_LINES = 300


@addresses.get_at("/task")
async def task(visit: Visit) -> Response:
    """Show a task."""
    name, key = _named(visit)
    caller = visit.caller
    found, position = await visit.parts.reads.task(name, key, caller)
    made = found.task
    shown: dict[str, Any] = {"name": name, "key": key, "now": found.now, "position": position, "found": found}
    if made is None:
        fault = caller.shown_text(found.malformed or "")
        return visit.html("malformed.html", **shown, fault=fault, document=_document(found))
    flow = made.flow
    chosen = _chosen_run(made, visit)
    kept = [] if chosen is None else await visit.client.logs(name, caller.stored_key(key), run_id=chosen.run_id)
    return visit.html(
        "task.html",
        **shown,
        task=made,
        status=made.status.value,
        reasons=[(caller.shown_text(reason.message), reason.until) for reason in found.reasons],
        ended_by=caller.shown_text(made.fail_reason or ""),
        timeline=timeline(made, found.now),
        width=WIDTH,
        options=_options(made),
        flow_key=None if flow is None else caller.shown_key(flow.key),
        neighbours=_neighbours(made, visit),
        params=pretty(made.params),
        former=[(one, pretty(one.params)) for one in reversed(made.former_params)],
        version=visit.client.etag(made),
        editable=text if len(text := whole(made.params)) <= _LONGEST_EDITED else None,
        runs=list(reversed(made.runs)),
        chosen=chosen,
        log=_log(kept[0], visit) if kept else None,
        returns=None if made.returns is None else pretty(made.returns),
    )


def _chosen_run(made: Task, visit: Visit) -> Run | None:
    """Return the run whose log is shown: the one that the address names, else the last one."""
    wanted = visit.query.exact("run")
    found = [run for run in made.runs if not wanted or run.run_id == wanted]
    return found[-1] if found else None


def _log(log: RunLog, visit: Visit) -> dict[str, Any]:
    """Return what the page shows of a run's log: its last lines."""
    lines = log.lines[-_MOST_LINES:]
    return {
        "left_out": log.first + len(log.lines) - len(lines),
        "is_over": log.is_over,
        "trace_id": log.trace_id,
        "lines": [
            (line, visit.caller.shown_text(line.message), visit.caller.shown_text(line.exception or ""))
            for line in lines
        ],
    }


def _named(visit: Visit) -> tuple[str, str]:
    name, key = visit.query.exact("name"), visit.query.exact("key")
    if not name or not key:
        raise InvalidInput("Name the task: /task?name=NAME&key=KEY.", field="key")
    return name, key


def _document(found: Inspected) -> str:
    try:
        return pretty(found.document)
    except (ValueError, TypeError):  # what is no JSON cannot be shown
        return str(found.document)


def _options(made: Task) -> list[tuple[str, Any, bool]]:
    """Return each option's name and value, and whether the value differs from the default."""
    default = TaskOption()
    return [
        (name, getattr(made.task_option, name), getattr(made.task_option, name) != getattr(default, name))
        for name in TaskOption.model_fields
    ]


def _neighbours(made: Task, visit: Visit) -> list[tuple[str, str, str]]:
    """Return the tasks to which this one leads: what they are to it, their names and their keys."""
    ids = []
    if made.flow is not None:
        ids += [("depends on", task_id) for task_id in made.flow.after[:20]]
        if made.flow.held_by is not None:
            ids.append(("held by", made.flow.held_by))
    if made.chain is not None:
        ids.append(("goes on from", made.chain.before))
    if made.task_state.next_id is not None:
        ids.append(("goes on as", made.task_state.next_id))
    pairs = [(what, *visit.caller.shown_id(task_id).partition(":")[::2]) for what, task_id in dict.fromkeys(ids)]
    return [(what, name, key) for what, name, key in pairs]


# --- changes ----------------------------------------------------------------------------------------------


def _address(name: str, key: str) -> str:
    return url("/task", name=name, key=key)


@addresses.post_at("/task/cancel", Role.PUBLISH)
async def cancel(visit: Visit) -> Response:
    """Cancel a task, or ask the worker that runs it to stop."""
    name, key = _named(visit)
    made = await visit.client.cancel(name, visit.caller.stored_key(key))
    if made.status.is_final:
        return visit.back(_address(name, key), f"It is {made.status.value}.")
    return visit.back(_address(name, key), "Its worker was asked to stop the run.")


@addresses.post_at("/task/retry", Role.PUBLISH)
async def retry(visit: Visit) -> Response:
    """Let a FAIL or CANCELED task run again, with the params of the form if they were changed."""
    name, key = _named(visit)
    stored, client = visit.caller.stored_key(key), visit.client
    text = visit.form.exact("params")
    if text is None:
        await client.retry(name, stored)
        return visit.back(_address(name, key), "It runs again.")
    # The form edits the params that it was made with: of a task that has changed since, they may be others.
    version = visit.form.text("version") or None
    params = visit.form.value("params")
    if answers.same_params(params, (await client.get(name, stored)).params):
        await client.retry(name, stored, if_match=version)
        return visit.back(_address(name, key), "It runs again, with the same params.")
    await client.retry(name, stored, params=params, if_match=version)
    return visit.back(_address(name, key), "It runs again, with the changed params.")


@addresses.post_at("/task/rerun", Role.PUBLISH)
async def rerun(visit: Visit) -> Response:
    """Let a finished task run again from the start."""
    name, key = _named(visit)
    await visit.client.rerun(name, visit.caller.stored_key(key))
    return visit.back(_address(name, key), "It runs again from the start.")


@addresses.post_at("/task/priority", Role.PUBLISH)
async def priority(visit: Visit) -> Response:
    """Change the priority of a task."""
    name, key = _named(visit)
    text = visit.form.needed("priority")
    try:
        value = int(text)
    except ValueError:
        raise InvalidInput("priority: use a whole number.", field="priority") from None
    await visit.client.update_option(name, visit.caller.stored_key(key), priority=value)
    return visit.back(_address(name, key), f"Its priority is {value}.")


@addresses.post_at("/task/remove", Role.OPERATE)
async def remove(visit: Visit) -> Response:
    """Remove a task."""
    name, key = _named(visit)
    stored = visit.caller.stored_key(key)
    if not await visit.client.remove(name, stored):
        raise TaskNotFound(task_id_of(name, stored))
    visit.session.note(f"{name}:{key} is removed.")
    return see("/tasks")


# --- timeline --------------------------------------------------------------------------------------------

# The timeline of a task: its waits and its runs as bars on one axis of time, from 0 to WIDTH.

WIDTH = 1000.0
#: The most runs that a timeline shows, the newest ones, and the narrowest bar.
MOST_RUNS, _NARROWEST = 12, 3.0
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar. `kind`: the class by which the style sheet colours it."""

    x: float
    width: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant on a lane: the last ping, or the end of the lease."""

    x: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the timeline: the task itself, or one run."""

    label: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline. `ticks`: instants at equal distances, the first at 0 and the last at WIDTH."""

    lanes: tuple[Lane, ...]
    ticks: tuple[datetime, ...]
    span: timedelta
    left_out: int  #: the number of older runs that it does not show


def timeline(task: Task, now: datetime) -> Timeline:
    """Return the timeline of a task."""
    state = task.task_state
    runs = task.runs[-MOST_RUNS:]
    begin = state.create_time if len(runs) == len(task.runs) else runs[0].claim_time
    begin = min([begin, *(run.claim_time for run in runs)])
    ends = [run.ping_expire_time for run in runs if run.status is RunStatus.RUNNING]
    end = max(state.finish_time or now, *(run.end_time or run.claim_time for run in runs), *ends, begin)
    if state.finish_time is None and state.next_preempt_time is not None and not ends:
        # A time far ahead would squeeze all that has happened.
        end = max(end, min(state.next_preempt_time, now + max(now - begin, timedelta(seconds=10))))
    span = max(end - begin, timedelta(milliseconds=10))

    def at(moment: datetime) -> float:
        return round(min(1.0, max(0.0, (moment - begin) / span)) * WIDTH, 1)

    lanes = [Lane("task", tuple(_bar(at, *one) for one in _of_task(task, begin, now, runs)), (), "task")]
    lanes += [_of_run(run, at, now, _closed(run, task.runs, now)) for run in runs]
    ticks = tuple(begin + span * index / _TICKS for index in range(_TICKS + 1))
    return Timeline(tuple(lanes), ticks, span, len(task.runs) - len(runs))


def _of_task(
    task: Task, begin: datetime, now: datetime, runs: list[Run]
) -> Iterator[tuple[datetime, datetime, str, str]]:
    """Yield the spans in which the task waited, and those in which it was held."""
    end = task.task_state.finish_time or now
    due = min(max(rules.due_time(task), begin), end)
    at = begin
    for run in sorted(runs, key=lambda run: run.claim_time):
        start, stop = run.claim_time, _closed(run, task.runs, now)
        if start > at:
            yield from _waits(at, start, due)
        if stop > at:
            yield max(start, at), stop, "held", "held by a run"
            at = stop
        due = max(due, run.retry_time or due)
    if at < end:
        yield from _waits(at, end, due)


def _waits(start: datetime, stop: datetime, due: datetime) -> Iterator[tuple[datetime, datetime, str, str]]:
    if start < due:
        yield start, min(due, stop), "early", "not due yet"
    if max(start, due) < stop:
        yield max(start, due), stop, "waits", "waits for a worker"


def _closed(run: Run, runs: list[Run], now: datetime) -> datetime:
    """Return when a run ended. A run whose lease lapsed holds the task until another run preempts it."""
    if run.end_time is not None:
        return run.end_time
    if run.status is RunStatus.RUNNING:
        return now if run.is_live(now) else run.ping_expire_time
    later = [other.claim_time for other in runs if other.claim_time > run.claim_time]
    return min([run.ping_expire_time, *later])


def _of_run(run: Run, at: Callable[[datetime], float], now: datetime, stop: datetime) -> Lane:
    bars = [_bar(at, run.claim_time, stop, run.status.value, _words(run, stop))]
    marks = []
    if run.status is RunStatus.RUNNING and run.is_live(now):
        bars.append(_bar(at, now, run.ping_expire_time, "lease", "the rest of its lease"))
    if run.progress is not None and run.progress.time <= stop:
        marks.append(Mark(at(run.progress.time), "progress", "progress was reported"))
    if run.status is RunStatus.TIMEOUT or run.is_lapsed(now):
        marks.append(Mark(at(min(run.ping_expire_time, stop)), "lapsed", "its lease lapsed"))
    return Lane(f"run {run.attempt}", tuple(bars), tuple(marks), run.status.value)


def _words(run: Run, stop: datetime) -> str:
    return f"{run.status.value} after {(stop - run.claim_time).total_seconds():.1f} s on {run.worker_id}"


def _bar(at: Callable[[datetime], float], start: datetime, stop: datetime, kind: str, words: str) -> Bar:
    x = at(start)
    width = max(_NARROWEST, round(at(stop) - x, 1))
    return Bar(min(x, WIDTH - width), width, kind, words)
