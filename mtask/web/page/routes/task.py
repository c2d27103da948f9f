"""One task: its life, why it waits, and what can be done with it."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from mtask.doctor.explain import Inspected
from mtask.errors import InvalidInput, TaskNotFound
from mtask.features.logs.rules import RunLog
from mtask.kernel.document.identity import task_id_of
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.task import Run, Task
from mtask.web import views as answers
from mtask.web.access import Role
from mtask.web.page.drawing.timeline import WIDTH, timeline
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
