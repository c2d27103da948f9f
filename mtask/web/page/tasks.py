"""The list of tasks: filters, pages by cursor, and rows that change in their places."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any

from starlette.responses import Response

from mtask.errors import InvalidInput
from mtask.kernel.document.identity import check_name, check_tenant, task_id_of
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.driver.extended_json import parse_strict
from mtask.search.order import Order, order_of
from mtask.search.partial import TaskFields
from mtask.web.access import Caller
from mtask.web.page.forms import Form
from mtask.web.page.reads import PAGE, Search
from mtask.web.page.rendering import url
from mtask.web.page.rows import task_rows
from mtask.web.page.views import Addresses, Visit

addresses = Addresses()
#: The longest time that "within" goes back, in seconds: ten years.
_LONGEST_AGO = 315_360_000.0
_TEXTS = ("name", "queue", "key", "worker_id")
_FIELDS = ("status", *_TEXTS, "tenant", "lookup", "params", "since", "until", "last")


@addresses.get_at("/tasks")
async def tasks(visit: Visit) -> Response:
    """Show a page of the list. A list that is shown already asks for the same tasks anew, so no row moves."""
    query, caller, reads = visit.query, visit.caller, visit.parts.reads
    now = await reads.now()
    try:
        wanted = search_of(query, now)
        shown = _ids(query.exact("shown"), caller)
        if visit.is_fragment and shown:
            by_id, now = await reads.rows(shown, caller)
            rows = [by_id.get(task_id) or TaskFields(task_id, None, {}) for task_id in shown]
            fresh = 0 if query.text("cursor") else await _fresh(visit, wanted, shown)
            return _list(visit, rows, now, fresh=fresh)
        found = await reads.tasks(wanted, caller, query.text("cursor") or None)
        page = found.page
        more = None if page.next_cursor is None else url("/tasks", **given_in(query), cursor=page.next_cursor)
        return _list(visit, page.tasks, found.now, more=more, looked_to=page.looked_to)
    except InvalidInput as error:
        return _list(visit, (), now, wrong=caller.shown_text(str(error)))


def _list(
    visit: Visit,
    rows: Sequence[TaskFields],
    now: datetime,
    *,
    fresh: int = 0,
    more: str | None = None,
    looked_to: datetime | None = None,
    wrong: str = "",
) -> Response:
    query = visit.query
    given, chosen = given_in(query), query.texts("status")
    found = [row_of(row, visit.caller) for row in rows]
    return visit.html(
        "tasks.html",
        code=422 if wrong else 200,
        rows=found,
        table=task_rows(found, now),
        now=now,
        fresh=fresh,
        more=more,
        looked_to=looked_to,
        wrong=wrong,
        given=given,
        statuses=[status.value for status in TaskStatus],
        chosen=chosen,
        order=_order(chosen, given),
        texts={name: query.exact(name) or "" for name in _FIELDS if name != "status"},
        cursor=query.text("cursor"),
        token=shown_token,
        plain=url("/tasks", **given),
        plan=url("/bulk/plan", **given),
        is_timed=not {"since", "until", "last"}.isdisjoint(given),
    )


_WORDS = {
    Order.CREATED: "The newest first",
    Order.FINISHED: "The last finished first",
    Order.DUE: "The first due first",
}


def _order(chosen: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return in words how the list is sorted."""
    known = [TaskStatus(status) for status in chosen if status in TaskStatus.__members__]
    return _WORDS[Order.CREATED if "lookup" in given else order_of(known or None)]


async def _fresh(visit: Visit, wanted: Search, shown: Sequence[str]) -> int:
    """Return the number of tasks on the first page, as it is now, that the list does not show."""
    found = await visit.parts.reads.first(wanted, visit.caller)
    known = set(shown)
    if wanted.status and order_of([TaskStatus(status) for status in wanted.status]) is Order.DUE:
        return sum(row.id not in known for row in found.page.tasks)
    # Where tasks are removed, older ones come up at the end of the first page: these are not new.
    return sum(1 for _ in takewhile(lambda row: row.id not in known, found.page.tasks))


def row_of(row: TaskFields, caller: Caller) -> dict[str, Any]:
    """Return a task of a list as templates show it. A task that is gone has the status GONE."""
    values = dict(row.items())
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


def search_of(query: Form, now: datetime) -> Search:
    """Return the search of a query; raise InvalidInput."""
    last = query.seconds("last")
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
        tenant=check_tenant(tenant) if (tenant := query.text("tenant")) else None,
        lookup=_pairs(query.text("lookup"), "lookup", "=", "user_id=7"),
        params={
            path.removeprefix("params."): values[0]
            for path, values in _pairs(query.text("params"), "params", ":", "user.id:7").items()
        },
        since=query.instant("since") if last is None else _whole(now) - timedelta(seconds=min(last, _LONGEST_AGO)),
        until=query.instant("until"),
    )


def _whole(now: datetime) -> datetime:
    """Return a moment that is the same for all searches of some seconds: they share what they read."""
    return now.replace(second=now.second // 5 * 5, microsecond=0)


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
    return [task_id_of(check_name(name), caller.stored_key(key)) for name, key in pairs[:PAGE]]


def shown_token(rows: list[dict[str, Any]]) -> str:
    """Return the tasks of a list as a text that the list sends back."""
    pairs = [(row["name"], row["key"]) for row in rows]
    return base64.urlsafe_b64encode(json.dumps(pairs, ensure_ascii=False).encode()).decode("ascii")


def given_in(query: Form) -> dict[str, Any]:
    """Return the fields of the filter that are not empty."""
    return {name: values for name, values in query.given().items() if name in _FIELDS}
