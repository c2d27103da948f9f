"""The routes of tasks: publish, read, list, cancel, retry, rerun, change and remove."""

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Header, Query, Request, Response

from mtask.client import AsyncClient, TaskSpec
from mtask.client.asking.publication import policy
from mtask.errors import DatabaseError, InvalidInput, TaskError, TaskNotFound
from mtask.model.documents import Task
from mtask.model.publishing.identity import check_key, check_name, fresh_key, task_id_of
from mtask.store.driver.extended_json import parse_strict
from mtask.store.tasks.publishing import Published
from mtask.web import views
from mtask.web.access import Caller, Role
from mtask.web.bodies import about
from mtask.web.hub import Gap, Hub
from mtask.web.models import (
    ChangeOptions,
    Existing,
    PublishBatch,
    PublishedBatch,
    PublishedTask,
    PublishTask,
    PutTask,
    TaskBody,
    TaskDocument,
    TaskList,
)
from mtask.web.paths import TaskKey, TaskName
from mtask.web.problems import Forbidden, IdempotencyKeyReused, InvalidRequest, document_of, response_of
from mtask.web.routes.common import TheCaller, TheClient, TheHub, TheSettings, checked_callback, checked_options, router

routes = router("tasks")

_LONGEST_WAIT = 30.0
_MOST_LISTED = 1000
_LOOKUP = "lookup."
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)
IdempotencyKey = Annotated[
    str | None, Header(description="The key of a task that is published without one. Then a repeat publishes nothing.")
]
IfMatch = Annotated[str | None, Header(description="Only `*` is supported: the task must exist.")]
Several = Annotated[list[str] | None, Query(description="May be given several times.")]


@routes.post(
    "/v1/tasks",
    status_code=201,
    response_model=PublishedTask,
    responses={200: {"model": PublishedTask, "description": "The task existed before."}},
    openapi_extra=about(Role.PUBLISH),
)
async def publish(
    body: PublishTask, client: TheClient, caller: TheCaller, idempotency_key: IdempotencyKey = None
) -> Any:
    """Publish a task once for each name and key. Without a key, the Idempotency-Key is the key, else a fresh one."""
    is_implied = body.key is None and idempotency_key is not None
    key = body.key if body.key is not None else idempotency_key if is_implied else fresh_key(datetime.now(UTC))
    return await _publish(body, body.name, check_key(key), client, caller, is_implied=is_implied)


@routes.put(
    "/v1/tasks/{name}/{key}",
    status_code=201,
    response_model=PublishedTask,
    responses={200: {"model": PublishedTask, "description": "The task existed before."}},
    openapi_extra=about(Role.PUBLISH),
)
async def put(name: TaskName, key: TaskKey, body: PutTask, client: TheClient, caller: TheCaller) -> Any:
    """Publish a task once for each name and key, by its address."""
    return await _publish(body, name, key, client, caller, is_implied=False)


async def _publish(
    body: PutTask, name: str, key: str, client: AsyncClient, caller: Caller, *, is_implied: bool
) -> Response:
    spec = _spec(body, name, key, caller)
    made: dict[str, Any] = {"task_id": task_id_of(name, key), "name": name, "key": key}
    try:
        result = await client.publish(
            spec.task,
            spec.params,
            key=spec.key,
            queue=spec.queue,
            start_time=spec.start_time,
            delay=spec.delay,
            lookup=spec.lookup,
            callback=spec.callback,
            **_existing(body),
            call_id=body.call_id,
            **spec.options,
        )
        made |= {"created": result.created, "updated": result.updated}
        if not result.created and not result.updated:
            differs = (await _differing(client, [(result.task_id, body.params)]))[0]
            made |= {} if differs is None else {"params_differ": differs}
    except DatabaseError as error:
        # The task may be published nevertheless. A repeat with this key publishes it once.
        return response_of(error, caller, {"name": name, "key": key})
    if is_implied and made.get("params_differ"):
        raise IdempotencyKeyReused(
            "The Idempotency-Key belongs to a task with other params. Use another key for another task."
        )
    location = f"/v1/tasks/{quote(name, safe='')}/{quote(key, safe='')}"
    return views.answer(made, 201 if result.created else 200, {"Location": location})


def _spec(body: TaskBody, name: str, key: str, caller: Caller) -> TaskSpec:
    options = checked_options(body.options)
    return TaskSpec(
        check_name(name),
        body.params,
        key=caller.stored_key(key),
        queue=body.queue,
        start_time=body.start_time,
        delay=body.delay,
        lookup=body.lookup,
        callback=checked_callback(body.callback, caller),
        **options,
    )


def _existing(body: Existing) -> Any:
    return {name: getattr(body, name) for name in Existing.model_fields}


async def _differing(client: AsyncClient, pairs: Sequence[tuple[str, Any]]) -> list[bool | None]:
    """Return whether existing tasks have other params than those given. None: the task is gone."""
    if not pairs:
        return []
    found = (await client.get_many([task_id for task_id, _ in pairs], fields=["params"])).tasks
    return [
        not views.same_params(given, found[task_id]["params"]) if task_id in found else None for task_id, given in pairs
    ]


@routes.post("/v1/tasks:batch", response_model=PublishedBatch, openapi_extra=about(Role.PUBLISH, batch=True))
async def publish_batch(
    body: PublishBatch, client: TheClient, caller: TheCaller, idempotency_key: IdempotencyKey = None
) -> Any:
    """Publish up to 1,000 tasks. The answer tells of each one. With an Idempotency-Key, task i has the key HEADER/i."""
    checked = policy(**_existing(body))
    if idempotency_key is not None:
        check_key(idempotency_key)
    rows: list[dict[str, Any]] = []
    specs: dict[int, TaskSpec] = {}
    implied = {index for index, entry in enumerate(body.tasks) if entry.key is None and idempotency_key is not None}
    for index, entry in enumerate(body.tasks):
        fresh = f"{idempotency_key}/{index}" if index in implied else fresh_key(datetime.now(UTC))
        key = entry.key if entry.key is not None else fresh
        rows.append({"task_id": task_id_of(entry.name, key), "name": entry.name, "key": key})
        try:
            spec = _spec(entry, entry.name, check_key(key), caller)
            spec.prepare(checked)
            specs[index] = spec
        except InvalidInput as error:
            rows[index] |= {"created": False, "updated": False, "problem": document_of(error, caller)}
    try:
        results = dict(zip(specs, await client.publish_many(specs.values(), **_existing(body)), strict=True))
        untouched = {index: result for index, result in results.items() if _is_untouched(result)}
        pairs = [(result.task_id, body.tasks[index].params) for index, result in untouched.items()]
        differing = dict(zip(untouched, await _differing(client, pairs), strict=True))
    except DatabaseError as error:
        return response_of(error, caller, {"tasks": [{"name": row["name"], "key": row["key"]} for row in rows]})
    for index, result in results.items():
        if isinstance(result, TaskError):
            rows[index] |= {"created": False, "updated": False, "problem": document_of(result, caller)}
            continue
        rows[index] |= {"created": result.created, "updated": result.updated}
        if differing.get(index) is not None:
            rows[index]["params_differ"] = differing[index]
        if index in implied and differing.get(index):
            reused = IdempotencyKeyReused("The Idempotency-Key belongs to a batch with other params.")
            rows[index]["problem"] = document_of(reused, caller)
    return views.answer({"tasks": rows})


def _is_untouched(result: Published | TaskError) -> bool:
    return isinstance(result, Published) and not result.created and not result.updated


@routes.get("/v1/tasks", response_model=TaskList, openapi_extra=about(free_query=_LOOKUP))
async def find(
    request: Request,
    client: TheClient,
    caller: TheCaller,
    status: Several = None,
    name: Several = None,
    queue: Several = None,
    key: Several = None,
    worker_id: Several = None,
    fields: Annotated[str | None, Query(description="Fields, comma-separated: status,params.user_id")] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 100,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before.")] = None,
) -> Any:
    """List tasks, the newest first. `lookup.NAME=VALUE` finds tasks by a lookup: JSON, or else text."""
    if caller.tenant is not None and not (key and name):
        raise Forbidden("A tenant's list names its tasks: give name and key.")
    wanted = fields.split(",") if fields is not None else list(views.LISTED)
    found = await client.find(
        status=status,
        name=name,
        queue=queue,
        key=[caller.stored_key(one) for one in key] if key else None,
        worker_id=worker_id,
        lookup=_lookup(request),
        fields=wanted,
        limit=limit,
        after=views.task_at(cursor),
    )
    has_more = len(found) == limit
    return views.answer(
        {
            "tasks": [views.listed(one, caller) for one in found],
            "next_cursor": views.cursor_of(found[-1]) if has_more else None,
        }
    )


def _lookup(request: Request) -> dict[str, list[Any]] | None:
    lookup: dict[str, list[Any]] = {}
    for name, text in request.query_params.multi_items():
        if name.startswith(_LOOKUP):
            try:
                value = parse_strict(text, name)
            except InvalidInput:
                value = text
            lookup.setdefault(name.removeprefix(_LOOKUP), []).append(value)
    return lookup or None


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
    settings: TheSettings,
    prefer: Annotated[str | None, Header(description="`wait=30` waits up to 30 s for the end of the task.")] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """Return a task. With `Prefer: wait=30`, wait for its end first, and then return it whatever its status."""
    stored = caller.stored_key(key)
    wait = _wait_in(prefer)
    headers: dict[str, str] = {}
    if wait and hub.viewer_cnt < settings.max_waiters and not hub.is_closing:
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
    if found.status.is_final:
        return found
    async with hub.view(lambda event: event.task_id == task_id) as viewer:
        while True:
            # The task is read after the viewer has joined. So no end lies between the two.
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
    _check_match(if_match)
    stored = caller.stored_key(key)
    if not await client.remove(name, stored):
        raise TaskNotFound(task_id_of(name, stored))
    return Response(None, 204)


Action = Literal["cancel", "retry", "rerun"]


async def _act(
    action: Action, name: str, key: str, client: AsyncClient, caller: Caller, if_match: str | None
) -> Response:
    _check_match(if_match)
    act = {"cancel": client.cancel, "retry": client.retry, "rerun": client.rerun}[action]
    return _task(await act(name, caller.stored_key(key)), caller)


@routes.post("/v1/tasks/{name}/{key}:cancel", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def cancel(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None) -> Any:
    """Cancel a task, or ask the worker that runs it to stop. A finished task is not changed."""
    return await _act("cancel", name, key, client, caller, if_match)


@routes.post("/v1/tasks/{name}/{key}:retry", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def retry(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None) -> Any:
    """Let a FAIL or CANCELED task run again. Its earlier failures no longer count."""
    return await _act("retry", name, key, client, caller, if_match)


@routes.post("/v1/tasks/{name}/{key}:rerun", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def rerun(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None) -> Any:
    """Let a finished task run again from the start, even if it succeeded."""
    return await _act("rerun", name, key, client, caller, if_match)


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
    _check_match(if_match)
    options = checked_options(body.options)
    return _task(await client.update_option(name, caller.stored_key(key), **options), caller)


@routes.get("/v1/tasks/{name}/{key}/position", openapi_extra=about())
async def position(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller) -> Any:
    """Return the place of a task among the due tasks of its queue, when it probably starts, and why it waits."""
    return views.answer(views.position(await client.position(name, caller.stored_key(key)), caller))


def _check_match(if_match: str | None) -> None:
    """Refuse a condition on the task's state: no change can test it in its own write yet."""
    if if_match is not None and if_match.strip() != "*":
        raise InvalidRequest("If-Match with an ETag is not supported yet. Send the request without it.")
