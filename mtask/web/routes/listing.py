"""The routes that list and count tasks."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

from fastapi import Depends, Query, Request

from mtask.arguments.criteria import PageCriteria
from mtask.errors import InvalidInput
from mtask.kernel.document.identity import MAX_KEY_BYTES
from mtask.kernel.driver.extended_json import parse_strict
from mtask.says import hints_of
from mtask.web import views
from mtask.web.bodies import about
from mtask.web.models.common import EACH
from mtask.web.problems import InvalidRequest
from mtask.web.routes.common import TheCaller, TheClient, given_instant, router
from mtask.web.routes.tasks import TaskCount, TaskList
from mtask.web.schemas import FIELDS, INSTANT

routes = router("tasks")

_MOST_LISTED = 1000
_LOOKUP, _PARAMS = "lookup.", "params."
_FREE = (_LOOKUP, _PARAMS)
KeyPrefix = Annotated[
    str | None, Query(min_length=1, max_length=MAX_KEY_BYTES, description="The beginning of the keys.")
]


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


async def _criteria(request: Request, caller: TheCaller, **given: Any) -> dict[str, Any]:
    params = _free(request, _PARAMS)
    if any(len(values) > 1 for values in params.values()):
        raise InvalidRequest("Give each path of params once.")
    if given["key"]:
        given["key"] = [caller.stored_key(one) for one in given["key"]]
    given["key_prefix"] = caller.stored_prefix(given["key_prefix"])
    values = {path: values[0] for path, values in params.items()}
    return {**given, "lookup": _free(request, _LOOKUP) or None, "params": values or None}


def _query() -> Iterator[inspect.Parameter]:
    """Yield the parameters of the query that the criteria are. Lookups and params have free names."""
    for name, hint in hints_of(PageCriteria):
        kinds = get_args(hint.__origin__)
        if Mapping[str, Any] not in kinds:
            several = Query(description="May be given several times.")
            told = (
                Annotated[list[EACH.get(name, str)] | None, several]  # type: ignore[misc]
                if Sequence[str] in kinds
                else KeyPrefix
            )
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=told)


_first_two = list(inspect.signature(_criteria).parameters.values())[:2]
_criteria.__signature__ = inspect.Signature([*_first_two, *_query()])  # type: ignore[attr-defined]
Criteria = Annotated[dict[str, Any], Depends(_criteria)]


@routes.get("/v1/tasks", response_model=TaskList, openapi_extra=about(free_query=_FREE))
async def find(
    client: TheClient,
    caller: TheCaller,
    criteria: Criteria,
    fields: Annotated[
        str | None,
        Query(description="Fields, comma-separated: status,params.user_id", json_schema_extra=FIELDS),
    ] = None,
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
        **criteria,
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
    client: TheClient,
    criteria: Criteria,
    most: Annotated[int, Query(ge=1, le=10_000, description="Count no more than this.")] = 10_000,
) -> Any:
    """Count tasks, up to a bound. `is_more`: there may be more. The criteria are those of the list."""
    found = await client.count_up_to(**criteria, most=most)
    return views.answer({"count": found.count, "is_more": found.is_more})
