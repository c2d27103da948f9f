"""The route of the action log."""

from typing import Annotated, Any, get_args

from fastapi import Query
from pydantic import BaseModel

from mtask.features.audit_log.rules import Intent
from mtask.web import views
from mtask.web.bodies import about
from mtask.web.routes.common import TheClient, given_instant, router
from mtask.web.schemas import INSTANT, says

routes = router("operating")

IntentText = Annotated[str, says(enum=list(get_args(Intent)))]
Several = Annotated[list[str] | None, Query(description="May be given several times.")]
Intents = Annotated[list[IntentText] | None, Query(description="May be given several times.")]


class ActionEntry(BaseModel):
    """One entry of the action log."""

    id: str
    time: str
    actor: str
    via: str
    intent: str
    target: str
    detail: str
    result: str | None
    end_time: str | None


class ActionList(BaseModel):
    """A page of the action log, the newest first. next_cursor: as in a list of tasks."""

    actions: list[ActionEntry]
    next_cursor: str | None


@routes.get("/v1/actions", response_model=ActionList, openapi_extra=about(of_database=True))
async def actions(
    client: TheClient,
    actor: Several = None,
    intent: Intents = None,
    target: Several = None,
    since: Annotated[
        str | None, Query(description="The instant of the oldest action.", json_schema_extra=INSTANT)
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before.")] = None,
) -> Any:
    """List who changed what, the newest first: `task:NAME:KEY`, `queue:mail`, `worker:ID`, `schedule:ID`, `flow:KEY`.

    The log keeps 90 days. `result` is `done`, or the name of the error that refused the action. It is null while the
    action is under way, and if its process ended before it.
    """
    found = await client.actions(
        actor=actor, intent=intent, target=target, since=given_instant(since, "since"), limit=limit, after=cursor
    )
    next_cursor = found[-1].id if len(found) == limit else None
    return views.answer({"actions": [views.record(one) for one in found], "next_cursor": next_cursor})
