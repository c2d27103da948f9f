"""The routes of one task: read, cancel, retry, rerun, change and remove."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

from fastapi import Body as body_of
from fastapi import Header, Response
from pydantic import BaseModel, ConfigDict, Field

from mtask.client import AsyncClient
from mtask.errors import TaskNotFound
from mtask.features.events.hub import Gap, Hub
from mtask.kernel.document.identity import check_key, check_name, task_id_of
from mtask.kernel.document.task import Task
from mtask.web import views
from mtask.web.access import Caller, Role
from mtask.web.bodies import about
from mtask.web.models.common import Body, OpenAnswer, Params, example
from mtask.web.paths import TaskKey, TaskName
from mtask.web.problems import InvalidRequest
from mtask.web.routes.common import TheCaller, TheClient, TheHub, TheRooms, check_retention, checked_options, router
from mtask.web.schemas import ETAG, Options, says


class ChangeOptions(Body):
    """The body of `PATCH /v1/tasks/{name}/{key}`."""

    model_config = example({"options": {"priority": 9}})

    options: Annotated[Options, says(minProperties=1)]


class RetryTask(Body):
    """The body of `POST /v1/tasks/{name}/{key}:retry`. Without `params`, the task keeps its params."""

    model_config = example({"params": {"to": "a@b.c"}})

    params: Params = None


class TaskDocument(BaseModel):
    """A task, with the field names of its document."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    id: Annotated[str, Field(alias="_id")]
    name: str
    key: str
    tenant: str | None = None
    queue: str
    params: Any
    task_option: dict[str, Any]
    lookup: dict[str, list[Any]] | None = None
    task_state: dict[str, Any]


class ListedTask(BaseModel):
    """A task of a list, with the fields that were asked for."""

    model_config = ConfigDict(populate_by_name=True)

    id: Annotated[str, Field(alias="_id")]
    name: str
    key: str
    fields: dict[str, Any]


class TaskList(BaseModel):
    """A page of tasks. next_cursor: pass it as `cursor` for the next page; null: there is none.

    looked_to: the instant up to which the search has come, if it stopped before the page was full.
    """

    tasks: list[ListedTask]
    next_cursor: str | None
    looked_to: str | None = None


class TaskCount(BaseModel):
    """A number of tasks. is_more: the count stopped there, and there may be more."""

    model_config = example({"count": 10000, "is_more": True})

    count: int
    is_more: bool


class ReasonEntry(OpenAnswer):
    """A reason why a task waits."""

    code: str
    message: str
    until: str | None


class PositionEntry(OpenAnswer):
    """The place of a task among the due tasks of its queue. is_more: there may be more tasks before it.

    tenants_ahead: where the tenants of the queue take turns, the number of those that have their turn first. ahead is
    then the number of tasks of its own tenant. A token of a tenant is told of its own tasks alone, and of no rate and
    start_estimate where the tenants take no turns.
    """

    model_config = example(
        {
            "task_id": "send_email:welcome/42",
            "status": "INIT",
            "ahead": 12,
            "is_more": False,
            "due_time": "2030-12-31T23:59:00.000Z",
            "start_estimate": "2030-12-31T23:59:30.000Z",
            "rate": 0.4,
            "reasons": [],
            "now": "2030-12-31T23:59:10.000Z",
            "tenants_ahead": None,
            "declared": "9f2c01ab34de",
            "version": 1,
        }
    )

    task_id: str
    status: str
    ahead: int | None
    is_more: bool
    due_time: str | None
    start_estimate: str | None
    rate: float | None
    reasons: list[ReasonEntry]
    now: str
    tenants_ahead: int | None
    declared: str | None
    version: int


routes = router("tasks")

_LONGEST_WAIT = 30.0
#: The first and the longest pause between two reads of a task whose handler is still to return its value, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)
_ETAG = re.compile(r'"([!#-~]{1,100})"')
IfMatch = Annotated[
    str | None,
    Header(description="The ETag of the task that was read. If it has changed: 412.", json_schema_extra=ETAG),
]


@routes.get(
    "/v1/tasks/{name}/{key}",
    response_model=TaskDocument,
    responses={304: {"description": "The task still has the ETag in If-None-Match."}},
    openapi_extra=about(),
)
async def get(
    name: TaskName,
    key: TaskKey,
    client: TheClient,
    caller: TheCaller,
    hub: TheHub,
    rooms: TheRooms,
    prefer: Annotated[str | None, Header(description="`wait=30` waits up to 30 s for the end of the task.")] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """Return a task. With `Prefer: wait=30`, wait for its end first, and then return it whatever its status."""
    stored = caller.stored_key(key)
    wait = _wait_in(prefer)
    headers: dict[str, str] = {}
    if wait and rooms.waiters.admits(caller) and not hub.is_closing:
        with rooms.waiters.taken(caller):
            found = await _after_wait(client, hub, name, stored, wait)
        headers["Preference-Applied"] = f"wait={wait:g}"
    else:
        found = await client.get(name, stored)
    tag = views.etag(found)
    if if_none_match is not None and tag in (one.strip() for one in if_none_match.split(",")):
        return Response(None, 304, headers={"ETag": tag, **headers})
    return _task(found, caller, headers)


def _wait_in(prefer: str | None) -> float:
    match = _WAIT.search(prefer or "")
    return 0.0 if match is None else min(float(match[1]), _LONGEST_WAIT)


async def _after_wait(client: AsyncClient, hub: Hub, name: str, key: str, wait: float) -> Task:
    """Return the task once it has ended, or after `wait` seconds. Raises TaskNotFound, also if it was removed."""
    loop = asyncio.get_running_loop()
    end = loop.time() + wait
    task_id = task_id_of(check_name(name), check_key(key))
    found = await client.get(name, key)
    if found.is_complete:
        return found
    async with hub.view(lambda event: event.task_id == task_id) as viewer:
        while True:
            # The task is read after the viewer has joined. So no end lies between the two.
            found = await client.get(name, key)
            pause = _FIRST_PAUSE
            while found.status.is_final and not found.is_complete:
                # No event tells of a value that a handler returns after its transaction has committed.
                left = end - loop.time()
                if left <= 0:
                    return found
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                found = await client.get(name, key)
            while not found.status.is_final:
                event = await viewer.next(max(0.0, end - loop.time()))
                if event is None or (isinstance(event, Gap) and event.word == "closing"):
                    return found
                if isinstance(event, Gap) or event.is_end or event.kind == "removed":
                    break
            else:
                return found


def _task(found: Task, caller: Caller, headers: dict[str, str] | None = None) -> Response:
    return views.answer(views.task(found, caller), headers={"ETag": views.etag(found), **(headers or {})})


@routes.delete("/v1/tasks/{name}/{key}", status_code=204, openapi_extra=about(Role.OPERATE))
async def remove(
    name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None
) -> Response:
    """Remove a task, whatever its status. If it runs, its run ends."""
    stored = caller.stored_key(key)
    if not await client.remove(name, stored, if_match=_tag(if_match)):
        raise TaskNotFound(task_id_of(name, stored))
    return Response(None, 204)


@routes.post("/v1/tasks/{name}/{key}:cancel", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def cancel(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None) -> Any:
    """Cancel a task, or ask the worker that runs it to stop. A finished task is not changed."""
    return _task(await client.cancel(name, caller.stored_key(key), if_match=_tag(if_match)), caller)


@routes.post("/v1/tasks/{name}/{key}:retry", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def retry(
    name: TaskName,
    key: TaskKey,
    client: TheClient,
    caller: TheCaller,
    body: Annotated[RetryTask, body_of()] = RetryTask(),  # noqa: B008 it is never changed
    if_match: IfMatch = None,
) -> Any:
    """Let a FAIL or CANCELED task run again. Its earlier failures no longer count.

    With `params`, it runs with these. Its former params stay in `former_params`: the newest five, 1 MiB in all.
    """
    given = {"params": body.params} if "params" in body.model_fields_set else {}
    return _task(await client.retry(name, caller.stored_key(key), **given, if_match=_tag(if_match)), caller)


@routes.post("/v1/tasks/{name}/{key}:rerun", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def rerun(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None) -> Any:
    """Let a finished task run again from the start, even if it succeeded."""
    return _task(await client.rerun(name, caller.stored_key(key), if_match=_tag(if_match)), caller)


@routes.patch("/v1/tasks/{name}/{key}", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def change(
    name: TaskName,
    key: TaskKey,
    body: ChangeOptions,
    client: TheClient,
    caller: TheCaller,
    if_match: IfMatch = None,
) -> Any:
    """Change some of a task's options."""
    options = checked_options(body.options)
    check_retention(options, caller)
    return _task(await client.update_option(name, caller.stored_key(key), if_match=_tag(if_match), **options), caller)


@routes.get("/v1/tasks/{name}/{key}/position", response_model=PositionEntry, openapi_extra=about())
async def position(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller) -> Any:
    """Return the place of a task among the due tasks of its queue, when it probably starts, and why it waits."""
    return views.answer(views.position(await client.position(name, caller.stored_key(key)), caller))


def _tag(if_match: str | None) -> str | None:
    """Return the tag in a header If-Match; raise InvalidRequest. `*` is any version, so it needs no test."""
    if if_match is None or if_match.strip() == "*":
        return None
    match = _ETAG.fullmatch(if_match.strip())
    if match is None:
        raise InvalidRequest('If-Match: send one ETag as the task had it, such as "1f0c…", or *.')
    return match[1]
