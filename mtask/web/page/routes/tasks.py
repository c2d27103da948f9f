"""The list of tasks: filters, pages by cursor, and rows that change in their places."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

from starlette.responses import Response

from mtask.client.reading.partial import TaskFields
from mtask.errors import InvalidInput
from mtask.model.status import TaskStatus
from mtask.store.driver.extended_json import parse_strict
from mtask.web import views as answers
from mtask.web.access import Caller
from mtask.web.page.forms import Form
from mtask.web.page.reads import MOST_NEW, PAGE, Search
from mtask.web.page.rendering import url
from mtask.web.page.views import Addresses, Visit
from mtask.web.problems import Forbidden

addresses = Addresses()
_TEXTS = ("name", "queue", "key", "worker_id")
_FIELDS = ("status", *_TEXTS, "lookup", "params", "since", "until", "last")


@addresses.get_at("/tasks")
async def tasks(visit: Visit) -> Response:
    """Show a page of the list. A list that is shown already asks for the same tasks anew, so no row moves."""
    query = visit.query
    reads, wanted, wrong = visit.parts.reads, Search(), ""
    rows: list[TaskFields] = []
    after, now, is_cut = None, await reads.now(), False
    try:
        last = query.seconds("last")
        wanted = search_of(query)
        if last:
            wanted = Search(**{**_members(wanted), "since": now - timedelta(seconds=last)})
        shown = _ids(query.exact("shown"), visit.caller)
        if visit.is_fragment and shown:
            by_id, now = await reads.rows(shown)
            rows = [by_id.get(task_id) or TaskFields(task_id, None, {}) for task_id in shown]
            return visit.html(
                "tasks.html",
                rows=[row_of(row, visit.caller) for row in rows],
                now=now,
                fresh=await _fresh(visit, wanted, rows, by_id),
                **_texts(query, visit),
                more=None,
                is_cut=False,
                wrong="",
            )
        found = await reads.tasks(wanted, visit.caller, answers.task_at(query.text("cursor") or None))
        rows, after, now, is_cut = list(found.tasks), found.after, found.now, found.is_cut
    except (InvalidInput, Forbidden) as error:
        wrong = str(error)
    more = None if after is None else url("/tasks", **_given(query), cursor=answers.cursor_of(after))
    return visit.html(
        "tasks.html",
        code=422 if wrong and query.given() else 200,
        rows=[row_of(row, visit.caller) for row in rows],
        now=now,
        fresh=0,
        **_texts(query, visit),
        more=more,
        is_cut=is_cut,
        wrong=wrong,
    )


async def _fresh(visit: Visit, wanted: Search, rows: list[TaskFields], by_id: Any) -> int:
    """Return the number of tasks that have come above the first row of the list, up to MOST_NEW."""
    if visit.query.text("cursor") or wanted.params:
        return 0
    first = next((row for row in rows if row.id in by_id), None)
    found = await visit.parts.reads.tasks(wanted, visit.caller, most=MOST_NEW)
    shown = {row.id for row in rows}
    fresh = 0
    for row in found.tasks:
        is_older = first is not None and (row.create_time, row.id) < (first.create_time, first.id)
        if row.id in shown or is_older:
            break
        fresh += 1
    return fresh


def row_of(row: TaskFields, caller: Caller) -> dict[str, Any]:
    """Return a task of a list as templates show it. A task that is gone has the status GONE."""
    values = dict(row)
    return {
        "name": row.name,
        "key": caller.shown_key(row.key),
        "status": values.get("status") if row.create_time is not None else "GONE",
        "queue": values.get("queue"),
        "create_time": row.create_time,
        "due_time": values.get("task_state.next_preempt_time"),
        "finish_time": values.get("task_state.finish_time"),
        "failed_cnt": values.get("task_state.failed_cnt"),
        "cancel_requested": values.get("task_state.cancel_requested") is True,
        "reason": caller.shown_text(str(values.get("fail_reason") or "")),
        "flow": caller.shown_key(str(values.get("flow.key") or "")),
    }


def search_of(query: Form) -> Search:
    """Return the search of a query; raise InvalidInput."""
    statuses = query.texts("status")
    for status in statuses:
        if status not in TaskStatus.__members__:
            raise InvalidInput(f"status: use {', '.join(TaskStatus.__members__)}.", field="status")
    exact = {field: [text for text in (query.exact(field) or "",) if text.strip()] for field in _TEXTS}
    return Search(
        status=statuses,
        name=[text.strip() for text in exact["name"]],
        queue=[text.strip() for text in exact["queue"]],
        key=exact["key"],
        worker_id=[text.strip() for text in exact["worker_id"]],
        lookup=_pairs(query.text("lookup"), "lookup", "=", "user_id=7"),
        params={
            path.removeprefix("params."): values[0]
            for path, values in _pairs(query.text("params"), "params", ":", "user.id:7").items()
        },
        since=query.instant("since"),
        until=query.instant("until"),
    )


def _members(wanted: Search) -> dict[str, Any]:
    return {name: getattr(wanted, name) for name in Search.__slots__}


def _pairs(text: str, field: str, sign: str, example: str) -> dict[str, list[Any]]:
    """Return the value of `name=value`: JSON, or else text; raise InvalidInput."""
    if not text:
        return {}
    name, found, value = text.partition(sign)
    if not found or not name.strip():
        raise InvalidInput(f"{field}: write it like {example}.", field=field)
    try:
        return {name.strip(): [parse_strict(value.strip(), field)]}
    except InvalidInput:
        return {name.strip(): [value.strip()]}


def _ids(shown: str | None, caller: Caller) -> list[str]:
    """Return the ids of the tasks that the list shows; raise InvalidInput. A tenant can name only its own."""
    if shown is None:
        return []
    try:
        ids = json.loads(base64.urlsafe_b64decode(shown.encode("ascii")).decode("utf-8"))
        pairs = [(str(name), str(key)) for name, key in ids]
    except (ValueError, TypeError, RecursionError):
        raise InvalidInput("shown: reload the list.", field="shown") from None
    return [f"{name}:{caller.stored_key(key)}" for name, key in pairs[:PAGE]]


def shown_token(rows: list[dict[str, Any]]) -> str:
    """Return the tasks of a list as a text that the list sends back."""
    pairs = [(row["name"], row["key"]) for row in rows]
    return base64.urlsafe_b64encode(json.dumps(pairs, ensure_ascii=False).encode()).decode("ascii")


def _given(query: Form) -> dict[str, Any]:
    return {name: values for name, values in query.given().items() if name in _FIELDS}


def _texts(query: Form, visit: Visit) -> dict[str, Any]:
    """Return what the filter shows."""
    given = _given(query)
    return {
        "given": given,
        "statuses": [status.value for status in TaskStatus],
        "chosen": query.texts("status"),
        "texts": {name: query.exact(name) or "" for name in _FIELDS if name != "status"},
        "cursor": query.text("cursor"),
        "token": shown_token,
        "plain": url("/tasks", **given),
        "is_tenant": visit.caller.tenant is not None,
    }
