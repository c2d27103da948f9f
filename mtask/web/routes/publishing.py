"""The routes that publish tasks: one, many, and one as jobber does."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Header, Response

from mtask.arguments.publish import Declarations, PolicyArguments, PublishManyArguments, TaskArguments, policy
from mtask.client import AsyncClient, TaskSpec
from mtask.errors import DatabaseError, InvalidInput, TaskError, UnknownTaskName
from mtask.kernel.document.identity import check_key, check_name, fresh_key, stored_key, task_id_of
from mtask.kernel.document.parts import Sealed
from mtask.kernel.operations.publish import Published
from mtask.web import views
from mtask.web.access import Caller, Role
from mtask.web.bodies import about
from mtask.web.models.common import taken
from mtask.web.models.publishing import (
    JobBody,
    PublishBatch,
    PublishedBatch,
    PublishedJob,
    PublishedTask,
    PublishTask,
    PutTask,
    QueuedJob,
    QueuedJobBody,
    TaskBody,
)
from mtask.web.paths import TaskKey, TaskName
from mtask.web.problems import IdempotencyKeyReused, document_of, response_of
from mtask.web.routes.common import TheCaller, TheClient, check_retention, checked_options, router, tenant_of
from mtask.web.schemas import KEY

routes = router("tasks")

IdempotencyKey = Annotated[
    str | None,
    Header(
        description="The key of a task that is published without one. Then a repeat publishes nothing.",
        json_schema_extra=KEY,
    ),
]


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


@routes.post("/jobs", status_code=201, response_model=PublishedJob, openapi_extra=about(Role.PUBLISH, any_type=True))
async def publish_job(
    body: JobBody, client: TheClient, caller: TheCaller, idempotency_key: IdempotencyKey = None
) -> Any:
    """Publish a task as jobber does: `jobType` is its name, `payload` holds its params, and `jobId` is its key.

    The body is JSON, whatever its Content-Type says, as long as no browser sends it.
    """
    return await _publish_job(body.jobType, body.payload, "jobId", client, caller, idempotency_key)


@routes.post(
    "/jobber/queue", status_code=201, response_model=QueuedJob, openapi_extra=about(Role.PUBLISH, any_type=True)
)
async def queue_job(
    body: QueuedJobBody, client: TheClient, caller: TheCaller, idempotency_key: IdempotencyKey = None
) -> Any:
    """Publish a task by the address and the names in jobber's README. Its server has those of `POST /jobs`."""
    return await _publish_job(body.type, body.payload, "job-id", client, caller, idempotency_key)


async def _publish_job(
    name: str, params: Any, told_as: str, client: AsyncClient, caller: Caller, idempotency_key: str | None
) -> Response:
    key = check_key(idempotency_key) if idempotency_key is not None else fresh_key(datetime.now(UTC))
    task = PutTask(params=params)
    made = await _publish(task, name, key, client, caller, is_implied=idempotency_key is not None)
    if made.status_code not in (200, 201):
        return made
    return views.answer({told_as: key}, 201, {"Location": made.headers["location"]})


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
    task, existing = _arguments(body, key, caller), taken(body, PolicyArguments)
    spec = TaskSpec(check_name(name), body.params, **task)
    if policy(**existing).replaces_options:
        check_retention(spec.options, caller)
    made: dict[str, Any] = _named(spec, caller)
    try:
        result = await client.publish(spec.task, spec.params, **task, **existing)
        made |= {"created": result.created, "updated": result.updated} | _warnings(client, name, caller)
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
    location = f"/v1/tasks/{quote(name, safe='')}/{quote(made['key'], safe='')}"
    return views.answer(made, 201 if result.created else 200, {"Location": location})


def _arguments(body: TaskBody, key: str, caller: Caller) -> Any:
    """Return the task of a body as keywords for the client, but for its name and its params."""
    options, tenant = checked_options(body.options), tenant_of(body.tenant, caller)
    checked = {"key": key, "tenant": tenant, "callback": body.callback and body.callback.checked(tenant)}
    return {**taken(body, TaskArguments), **checked, **options}


def _named(spec: TaskSpec, caller: Caller) -> dict[str, Any]:
    """Return the id, the name and the key of a new task as the caller sees them."""
    name, key = str(spec.task), caller.shown_key(stored_key(spec.tenant, spec.key))
    return {"task_id": task_id_of(name, key), "name": name, "key": key}


def _warnings(client: AsyncClient, name: str, caller: Caller) -> dict[str, Any]:
    """Return what seems to be wrong with a task that was published. The names of handlers concern no tenant."""
    found = client.unknown_name(name)
    if found is None:
        return {}
    told = found if caller.tenant is None else UnknownTaskName(name, None)
    return {"warnings": [str(told)]}


def _differs(given: Any, stored: Any) -> bool | None:
    # This server may lack the keys of encrypted params. Then nobody can tell.
    return None if isinstance(stored, Sealed) else not views.same_params(given, stored)


async def _differing(client: AsyncClient, pairs: Sequence[tuple[str, Any]]) -> list[bool | None]:
    """Return whether existing tasks have other params than those given. None: nobody can tell, or the task is gone."""
    if not pairs:
        return []
    found = (await client.get_many([task_id for task_id, _ in pairs], fields=["params"])).tasks
    return [None if task_id not in found else _differs(given, found[task_id]["params"]) for task_id, given in pairs]


@routes.post("/v1/tasks:batch", response_model=PublishedBatch, openapi_extra=about(Role.PUBLISH, batch=True))
async def publish_batch(
    body: PublishBatch, client: TheClient, caller: TheCaller, idempotency_key: IdempotencyKey = None
) -> Any:
    """Publish up to 1,000 tasks. The answer tells of each one. With an Idempotency-Key, task i has the key HEADER/i."""
    existing = taken(body, PublishManyArguments)
    checked = policy(**existing)
    if idempotency_key is not None:
        check_key(idempotency_key)
    known = await _known(body, client)
    rows: list[dict[str, Any]] = []
    specs: dict[int, TaskSpec] = {}
    implied = {index for index, entry in enumerate(body.tasks) if entry.key is None and idempotency_key is not None}
    for index, entry in enumerate(body.tasks):
        fresh = f"{idempotency_key}/{index}" if index in implied else fresh_key(datetime.now(UTC))
        key = entry.key if entry.key is not None else fresh
        rows.append({"task_id": task_id_of(entry.name, key), "name": entry.name, "key": key})
        try:
            check_key(key)
            spec = TaskSpec(check_name(entry.name), entry.params, **_arguments(entry, key, caller))
            if checked.replaces_options:
                check_retention(spec.options, caller)
            spec.prepare(checked, known=known)
            specs[index] = spec
            rows[index] = _named(spec, caller)
        except InvalidInput as error:
            rows[index] |= {"created": False, "updated": False, "problem": document_of(error, caller)}
    try:
        results = dict(zip(specs, await client.publish_many(specs.values(), **existing), strict=True))
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
        rows[index] |= _warnings(client, body.tasks[index].name, caller)
        if differing.get(index) is not None:
            rows[index]["params_differ"] = differing[index]
        if index in implied and differing.get(index):
            reused = IdempotencyKeyReused("The Idempotency-Key belongs to a batch with other params.")
            rows[index]["problem"] = document_of(reused, caller)
    return views.answer({"tasks": rows})


async def _known(body: PublishBatch, client: AsyncClient) -> Declarations | None:
    """Find out what handlers declare, so that the params of each task are checked by itself."""
    names: dict[str, None] = {}
    for entry in body.tasks:
        with suppress(InvalidInput):  # the answer tells of it
            names[check_name(entry.name)] = None
    try:
        return await client.look_up(names)
    except DatabaseError:
        return None  # the publish tells of it


def _is_untouched(result: Published | TaskError) -> bool:
    return isinstance(result, Published) and not result.created and not result.updated
