"""The routes of tasks: publish, read, list, cancel, retry, rerun, change and remove."""

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Body, Header, Query, Request, Response

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
    JobBody,
    PositionEntry,
    PublishBatch,
    PublishedBatch,
    PublishedJob,
    PublishedTask,
    PublishTask,
    PutTask,
    RetryTask,
    TaskBody,
    TaskCount,
    TaskDocument,
    TaskList,
)
from mtask.web.paths import TaskKey, TaskName
from mtask.web.problems import IdempotencyKeyReused, InvalidRequest, document_of, response_of
from mtask.web.routes.common import (
    TheCaller,
    TheClient,
    TheHub,
    TheSettings,
    checked_callback,
    checked_options,
    given_instant,
    router,
)
from mtask.web.schemas import ETAG, FIELDS, INSTANT, KEY, Status

routes = router("tasks")

_LONGEST_WAIT = 30.0
_MOST_LISTED = 1000
_LOOKUP, _PARAMS = "lookup.", "params."
_FREE = (_LOOKUP, _PARAMS)
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)
_ETAG = re.compile(r'"([!#-~]{1,100})"')
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="The key of a task that is published without one. Then a repeat publishes nothing.",
        json_schema_extra=KEY,
    ),
]
IfMatch = Annotated[
    str | None,
    Header(description="The ETag of the task that was read. If it has changed: 412.", json_schema_extra=ETAG),
]
KeyPrefix = Annotated[str | None, Query(min_length=1, description="The beginning of the keys.")]
Several = Annotated[list[str] | None, Query(description="May be given several times.")]
Statuses = Annotated[list[Status] | None, Query(description="May be given several times.")]


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
    if idempotency_key is not None:
        check_key(idempotency_key)  # also where the task has a key of its own: a mistake shows at once
    is_implied = body.key is None and idempotency_key is not None
    key = body.key if body.key is not None else idempotency_key if is_implied else fresh_key(datetime.now(UTC))
    return await _publish(body, body.name, check_key(key), client, caller, is_implied=is_implied)


@routes.post("/jobs", status_code=201, response_model=PublishedJob, openapi_extra=about(Role.PUBLISH))
async def publish_job(
    body: JobBody, client: TheClient, caller: TheCaller, idempotency_key: IdempotencyKey = None
) -> Any:
    """Publish a task as jobber does: `jobType` is its name, `payload` holds its params, and `jobId` is its key."""
    key = check_key(idempotency_key) if idempotency_key is not None else fresh_key(datetime.now(UTC))
    task = PutTask(params=body.payload)
    made = await _publish(task, body.jobType, key, client, caller, is_implied=idempotency_key is not None)
    if made.status_code not in (200, 201):
        return made
    return views.answer({"jobId": key}, 201, {"Location": made.headers["location"]})


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


@routes.get("/v1/tasks", response_model=TaskList, openapi_extra=about(free_query=_FREE))
async def find(
    request: Request,
    client: TheClient,
    caller: TheCaller,
    status: Statuses = None,
    name: Several = None,
    queue: Several = None,
    key: Several = None,
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
    key: Several = None,
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
    stored = caller.stored_key(key)
    if not await client.remove(name, stored, if_match=_tag(if_match)):
        raise TaskNotFound(task_id_of(name, stored))
    return Response(None, 204)


Action = Literal["cancel", "rerun"]


async def _act(
    action: Action, name: str, key: str, client: AsyncClient, caller: Caller, if_match: str | None
) -> Response:
    act = {"cancel": client.cancel, "rerun": client.rerun}[action]
    return _task(await act(name, caller.stored_key(key), if_match=_tag(if_match)), caller)


@routes.post("/v1/tasks/{name}/{key}:cancel", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def cancel(name: TaskName, key: TaskKey, client: TheClient, caller: TheCaller, if_match: IfMatch = None) -> Any:
    """Cancel a task, or ask the worker that runs it to stop. A finished task is not changed."""
    return await _act("cancel", name, key, client, caller, if_match)


@routes.post("/v1/tasks/{name}/{key}:retry", response_model=TaskDocument, openapi_extra=about(Role.PUBLISH))
async def retry(
    name: TaskName,
    key: TaskKey,
    client: TheClient,
    caller: TheCaller,
    body: Annotated[RetryTask, Body()] = RetryTask(),  # noqa: B008 it is never changed
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
    options = checked_options(body.options)
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
