"""The routes that list and count tasks."""

from typing import Annotated, Any

from fastapi import Query, Request

from mtask.errors import InvalidInput
from mtask.kernel.document.identity import MAX_KEY_BYTES
from mtask.kernel.driver.extended_json import parse_strict
from mtask.web import views
from mtask.web.access import Caller
from mtask.web.bodies import about
from mtask.web.problems import InvalidRequest
from mtask.web.routes.common import TheCaller, TheClient, given_instant, router
from mtask.web.routes.tasks import TaskCount, TaskList
from mtask.web.schemas import FIELDS, INSTANT, Key, Status

routes = router("tasks")

_MOST_LISTED = 1000
_LOOKUP, _PARAMS = "lookup.", "params."
_FREE = (_LOOKUP, _PARAMS)
KeyPrefix = Annotated[
    str | None, Query(min_length=1, max_length=MAX_KEY_BYTES, description="The beginning of the keys.")
]
Keys = Annotated[list[Key] | None, Query(description="May be given several times.")]
Several = Annotated[list[str] | None, Query(description="May be given several times.")]
Statuses = Annotated[list[Status] | None, Query(description="May be given several times.")]


@routes.get("/v1/tasks", response_model=TaskList, openapi_extra=about(free_query=_FREE))
async def find(
    request: Request,
    client: TheClient,
    caller: TheCaller,
    status: Statuses = None,
    name: Several = None,
    queue: Several = None,
    key: Keys = None,
    worker_id: Several = None,
    fields: Annotated[
        str | None,
        Query(description="Fields, comma-separated: status,params.user_id", json_schema_extra=FIELDS),
    ] = None,
    key_prefix: KeyPrefix = None,
    since: Annotated[
        str | None, Query(description="Only tasks from this instant on, by the order.", json_schema_extra=INSTANT)
    ] = None,
    until: Annotated[
        str | None, Query(description="Only tasks before this instant, by the order.", json_schema_extra=INSTANT)
    ] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 100,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before, with the same criteria.")] = None,
) -> Any:
    """List tasks, the newest first; finished ones by their ends, the last one first; open ones as they are due.

    `lookup.NAME=VALUE` finds tasks by a lookup, and `params.PATH=VALUE` by a value in their params. VALUE is JSON, or
    else text. A page that holds fewer tasks than `limit`, and has a `next_cursor`, has looked to the instant
    `looked_to`: `next_cursor` goes on from there.
    """
    page = await client.find_page(
        **_criteria(request, caller, status, name, queue, key, worker_id, key_prefix),
        since=given_instant(since, "since"),
        until=given_instant(until, "until"),
        fields=fields.split(",") if fields is not None else list(views.LISTED),
        limit=limit,
        cursor=cursor,
    )
    return views.answer(
        {
            "tasks": [views.listed(one, caller) for one in page.tasks],
            "next_cursor": page.next_cursor,
            "looked_to": views.plain(page.looked_to),
        }
    )


@routes.get("/v1/tasks:count", response_model=TaskCount, openapi_extra=about(free_query=_FREE))
async def count(
    request: Request,
    client: TheClient,
    caller: TheCaller,
    status: Statuses = None,
    name: Several = None,
    queue: Several = None,
    key: Keys = None,
    worker_id: Several = None,
    key_prefix: KeyPrefix = None,
    most: Annotated[int, Query(ge=1, le=10_000, description="Count no more than this.")] = 10_000,
) -> Any:
    """Count tasks, up to a bound. `is_more`: there may be more. The criteria are those of the list."""
    found = await client.count_up_to(
        **_criteria(request, caller, status, name, queue, key, worker_id, key_prefix), most=most
    )
    return views.answer({"count": found.count, "is_more": found.is_more})


def _criteria(
    request: Request,
    caller: Caller,
    status: list[str] | None,
    name: list[str] | None,
    queue: list[str] | None,
    key: list[str] | None,
    worker_id: list[str] | None,
    key_prefix: str | None,
) -> dict[str, Any]:
    params = _free(request, _PARAMS)
    if any(len(values) > 1 for values in params.values()):
        raise InvalidRequest("Give each path of params once.")
    return {
        "status": status,
        "name": name,
        "queue": queue,
        "key": [caller.stored_key(one) for one in key] if key else None,
        "worker_id": worker_id,
        "lookup": _free(request, _LOOKUP) or None,
        "key_prefix": caller.stored_prefix(key_prefix),
        "params": {path: values[0] for path, values in params.items()} or None,
    }


def _free(request: Request, prefix: str) -> dict[str, list[Any]]:
    """Return the values of the query parameters that begin with the prefix. A value is JSON, or else text."""
    found: dict[str, list[Any]] = {}
    for name, text in request.query_params.multi_items():
        if name.startswith(prefix):
            try:
                value = parse_strict(text, name)
            except InvalidInput:
                value = text
            found.setdefault(name.removeprefix(prefix), []).append(value)
    return found
