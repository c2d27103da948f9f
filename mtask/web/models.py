"""The bodies of requests and answers, as the OpenAPI document describes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mtask.model.callbacks.callback import MAX_URL, SECRET_PATTERN, Told
from mtask.web.schemas import (
    PARAMS_PATH,
    CallId,
    CatchUpLimit,
    Jitter,
    Kept,
    Key,
    Lookup,
    Name,
    Options,
    Permits,
    Slots,
    Status,
    Text,
    Wait,
    Window,
    says,
)

_ANY_JSON = "MongoDB extended JSON: {'$date': ...}, {'$oid': ...} and the like keep BSON's types."


def instant(value: object) -> datetime:
    """Return an instant: ISO 8601 text with an offset, or extended JSON's `$date`."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise ValueError("write ISO 8601 with an offset: 2030-12-31T23:59:00Z")
    if value.utcoffset() is None:
        raise ValueError("it has no offset: add Z for UTC")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("it lies outside of the years 1 to 9999") from None


Instant = Annotated[
    datetime,
    BeforeValidator(instant),
    Field(description="ISO 8601 with an offset.", examples=["2030-12-31T23:59:00Z"]),
]
Seconds = Annotated[float, Field(ge=0, le=315_360_000, allow_inf_nan=False, description="Seconds.")]
Params = Annotated[Any, Field(description=f"What the handler gets. {_ANY_JSON}")]
IfExists = Literal["keep", "update", "reject"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CallbackBody(_Body):
    """Whom the end of a task is told to."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"url": "https://hooks.example.com/mtask"}]})

    url: Annotated[
        str,
        Field(max_length=MAX_URL),
        says(
            "An address that begins with https://, without user, password and fragment.",
            pattern=r"^https?://[A-Za-z0-9.-]+(:[1-9][0-9]{0,3})?(/[!$-;=-Z_a-z~]*)?$",
        ),
    ]
    on: Annotated[list[Told], says(minItems=1)] | None = Field(
        default=None, description="The ends to tell; null: each."
    )
    secret: Annotated[str, says(pattern=SECRET_PATTERN)] | None = Field(
        default=None, description="The name of the secret that signs; null: `default`."
    )


class TaskBody(_Body):
    """A task without its name and key."""

    params: Params = None
    queue: Text | None = None
    start_time: Instant | None = None
    delay: Seconds | None = None
    lookup: Lookup | None = None
    callback: CallbackBody | None = None
    options: Options = Field(default_factory=dict)


class Existing(_Body):
    """What becomes of a task that exists already, and how calls under one key gather."""

    if_exists: IfExists = "keep"
    clean_failed: bool = False
    clean_success: bool = False
    not_update_running: bool = False
    debounce: Wait | None = None
    max_wait: Wait | None = None
    collect: bool = False
    if_running: Literal["keep", "again"] = "keep"
    window: Wait | None = None


class PutTask(TaskBody, Existing):
    """The body of `PUT /v1/tasks/{name}/{key}`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"params": {"to": "a@b.c", "subject": "hi"}, "options": {"priority": 5}}]}
    )

    call_id: CallId | None = None


class PublishTask(PutTask):
    """The body of `POST /v1/tasks`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "send_email", "key": "welcome/42", "params": {"to": "a@b.c"}, "delay": 60}]
        }
    )

    name: Name
    key: Key | None = None


class JobBody(_Body):
    """The body of `POST /jobs`, as jobber takes it: the name of the task, and its params."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jobType": "send_email", "payload": {"to": "a@b.c"}}]})

    jobType: Name
    payload: Params = None


class BatchTask(TaskBody):
    """One task of a batch."""

    name: Name
    key: Key | None = None


class PublishBatch(Existing):
    """The body of `POST /v1/tasks:batch`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"tasks": [{"name": "send_email", "key": "a"}, {"name": "send_email"}]}]}
    )

    tasks: Annotated[list[BatchTask], Field(min_length=1, max_length=1000)]


class ChangeOptions(_Body):
    """The body of `PATCH /v1/tasks/{name}/{key}`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"options": {"priority": 9}}]})

    options: Annotated[Options, says(minProperties=1)]


class RetryTask(_Body):
    """The body of `POST /v1/tasks/{name}/{key}:retry`. Without `params`, the task keeps its params."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"params": {"to": "a@b.c"}}]})

    params: Params = None


Texts = Annotated[list[str], Field(min_length=1, max_length=1000)]


class BulkFilter(_Body):
    """The tasks of a bulk change: those that meet all criteria. At least one must be given."""

    status: Annotated[list[Status], Field(min_length=1, max_length=1000)] | None = None
    name: Texts | None = None
    queue: Texts | None = None
    key: Annotated[list[Key], Field(min_length=1, max_length=1000)] | None = None
    worker_id: Texts | None = None
    key_prefix: Key | None = None
    lookup: Lookup | None = None
    params: Annotated[
        dict[str, Any] | None,
        says("Values by their paths in the params, such as user.id.", propertyNames=PARAMS_PATH),
    ] = None


class BulkBody(_Body):
    """The body of `POST /v1/bulk/{action}`: a filter with dry_run, or the plan that this returned."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"filter": {"queue": ["mail"], "name": ["send_email"]}, "dry_run": True}],
            "oneOf": [
                {
                    "properties": {
                        "filter": {"type": "object", "minProperties": 1},
                        "dry_run": {"const": True},
                        "plan": {"type": "null"},
                    },
                    "required": ["filter", "dry_run"],
                },
                {
                    "properties": {"filter": {"type": "null"}, "dry_run": {"const": False}, "plan": {"type": "string"}},
                    "required": ["plan"],
                },
            ],
        }
    )

    filter: BulkFilter | None = None
    dry_run: bool = False
    plan: Annotated[str, Field(max_length=100_000)] | None = None


class FlowStepBody(TaskBody):
    """One step of a flow."""

    step: Annotated[str, says("Name of the step: text without a slash.", minLength=1, maxLength=500, pattern="^[^/]+$")]
    name: Name
    after: list[str] = Field(default_factory=list, description="The steps that must end before this one begins.")
    on_failed: Literal["cancel", "run", "fail"] = "cancel"
    lookup: None = Field(default=None, exclude=True)


class PublishFlow(_Body):
    """The body of `POST /v1/flows`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "key": "order-7",
                    "steps": [
                        {"step": "charge", "name": "charge_card", "params": {"order": 7}},
                        {"step": "ship", "name": "ship", "after": ["charge"]},
                    ],
                }
            ]
        }
    )

    key: Key
    queue: Text | None = None
    fail_fast: bool = False
    options: Options = Field(default_factory=dict)
    steps: Annotated[list[FlowStepBody], Field(min_length=1, max_length=10_000)]


class CancelFlow(_Body):
    """The body of `POST /v1/flows/{key}:cancel`."""

    everything: bool = Field(default=False, description='Cancel the steps with on_failed="run" as well.')


class RateBody(_Body):
    """The most starts in any window of time."""

    starts: Permits
    window: Window


class LimitBody(_Body):
    """The body of `PUT /v1/queues/{queue}/limit`. A limit that is not given is removed."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"concurrency": 10, "rate": {"starts": 100, "window": 1}}]}
    )

    concurrency: Permits | None = None
    rate: RateBody | None = None
    key_concurrency: Permits | None = None
    key_rate: RateBody | None = None


class KeepBody(_Body):
    """The body of `PUT /v1/queues/{queue}/keep`. A number that is not given keeps all."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"success": 1000, "fail": 1000}]})

    success: Kept | None = None
    fail: Kept | None = None


class WorkerBody(_Body):
    """The body of `PATCH /v1/workers/{worker_id}`. null: the number with which the worker started."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"concurrency": 20}]})

    concurrency: Slots | None


def _without(*names: str) -> dict[str, Any]:
    """Return the properties of a schema that are null, or not given."""
    return {name: {"type": "null"} for name in names}


class PutSchedule(_Body):
    """The body of `PUT /v1/schedules/{schedule_id}`. Give one of cron, every and at. A timezone goes with cron."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "report", "cron": "30 2 * * *", "timezone": "Europe/Berlin"}],
            "oneOf": [
                {"required": ["cron"], "properties": {"cron": {"type": "string"}, **_without("every", "at")}},
                {
                    "required": ["every"],
                    "properties": {"every": {"type": "number"}, **_without("cron", "at", "timezone")},
                },
                {
                    "required": ["at"],
                    "properties": {"at": {"type": "string"}, **_without("cron", "every", "timezone", "jitter")},
                },
            ],
        }
    )

    name: Name
    params: Params = None
    cron: Annotated[str, says("A crontab of five fields.")] | None = None
    every: Annotated[float, Field(ge=1, le=316_224_000, allow_inf_nan=False)] | None = None
    at: Instant | None = None
    timezone: str | None = None
    start_time: Instant | None = None
    end_time: Instant | None = None
    jitter: Jitter | None = None
    catch_up: Literal["none", "last", "all"] = "last"
    catch_up_limit: CatchUpLimit = 100
    overlap: Literal["allow", "skip"] = "allow"
    paused: bool | None = None
    queue: Text | None = None
    lookup: Lookup | None = None
    options: Options = Field(default_factory=dict)
    if_exists: IfExists = "update"


# --- answers ----------------------------------------------------------------------------------------------


class BulkPlanned(BaseModel):
    """A bulk change that was counted and not begun. is_more: the count stopped, and there may be more tasks."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "action": "retry",
                    "count": 42,
                    "is_more": False,
                    "plan": "WyI0Zj…",
                    "cutoff": "2030-12-31T23:59:00.000Z",
                    "expires": "2031-01-01T00:09:00.000Z",
                }
            ]
        }
    )

    action: str
    count: int
    is_more: bool
    plan: str
    cutoff: str
    expires: str


class BulkState(BaseModel):
    """A bulk change and how far it has come. left_cnt: tasks that were found and could not be changed."""

    bulk_id: str
    action: str
    filter: dict[str, Any]
    done_cnt: int
    left_cnt: int
    is_over: bool
    cutoff: str
    begin_time: str
    end_time: str | None


class BulkList(BaseModel):
    """The newest bulk changes."""

    bulks: list[BulkState]


class ProblemDocument(BaseModel):
    """An error (RFC 9457). `type` names the kind of error; further members tell of its details."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "/v1/problems/task-not-found",
                    "title": "No task has this name and key.",
                    "status": 404,
                    "detail": "there is no task send_email:welcome/42. Check name and key; a task may also have "
                    "expired by its retention.",
                    "task_id": "send_email:welcome/42",
                }
            ]
        },
    )

    type: str
    title: str
    status: int
    detail: str


class PublishedTask(BaseModel):
    """The result of publishing a task."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "task_id": "send_email:welcome/42",
                    "name": "send_email",
                    "key": "welcome/42",
                    "created": True,
                    "updated": False,
                }
            ]
        }
    )

    task_id: str
    name: str
    key: str
    created: bool
    updated: bool
    #: Only of a task that existed before and was not changed: whether it has other params than this request.
    params_differ: bool | None = None


class BatchEntry(BaseModel):
    """The result of one task of a batch: that of a publish, or a problem."""

    model_config = ConfigDict(extra="allow")

    task_id: str
    name: str
    key: str
    created: bool = False
    updated: bool = False
    params_differ: bool | None = None
    problem: ProblemDocument | None = None


class PublishedBatch(BaseModel):
    """The results of a batch, in the order of its tasks."""

    tasks: list[BatchEntry]


class TaskDocument(BaseModel):
    """A task, with the field names of its document."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    id: Annotated[str, Field(alias="_id")]
    name: str
    key: str
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

    model_config = ConfigDict(json_schema_extra={"examples": [{"count": 10000, "is_more": True}]})

    count: int
    is_more: bool


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


class Removed(BaseModel):
    """Whether something was removed."""

    removed: bool


class PublishedJob(BaseModel):
    """The result of `POST /jobs`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jobId": "019a5f6b1c2d4e5f60718293a4b5c6d7"}]})

    jobId: str


class _Open(BaseModel):
    """An answer that may have further members."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class StatEntry(_Open):
    """The number of tasks with one queue, name and status. is_more: it is incomplete."""

    queue: str
    name: str
    status: str
    count: int
    oldest_preempt_time: str | None
    stuck: str | None
    is_more: bool


class StatList(BaseModel):
    """The statistics."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "stats": [
                        {
                            "queue": "mail",
                            "name": "send_email",
                            "status": "INIT",
                            "count": 7,
                            "oldest_preempt_time": "2030-12-31T23:59:00.000Z",
                            "stuck": "no worker is live",
                            "is_more": False,
                        }
                    ]
                }
            ]
        }
    )

    stats: list[StatEntry]


class ControlEntry(_Open):
    """A control of a queue or a task name."""

    id: Annotated[str, Field(alias="_id")]
    kind: str
    target: str
    paused: bool
    revision: int
    update_time: str


class ControlList(BaseModel):
    """The controls."""

    controls: list[ControlEntry]


class QueueEntry(_Open):
    """A queue. more: the statuses that may have more tasks than were counted."""

    queue: str
    counts: dict[str, int]
    more: list[str]
    oldest_preempt_time: str | None
    stuck: list[str]
    control: ControlEntry | None


class QueueList(BaseModel):
    """The queues."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "queues": [
                        {
                            "queue": "mail",
                            "counts": {"INIT": 7, "SUCCESS": 10000},
                            "more": ["SUCCESS"],
                            "oldest_preempt_time": "2030-12-31T23:59:00.000Z",
                            "stuck": [],
                            "control": None,
                        }
                    ]
                }
            ]
        }
    )

    queues: list[QueueEntry]


class WorkerEntry(_Open):
    """A worker."""

    id: Annotated[str, Field(alias="_id")]
    host: str
    pid: int
    status: str
    started_time: str
    heartbeat_time: str
    queues: list[str]
    names: list[str]
    concurrency: int
    running_cnt: int
    version: str
    is_live: bool


class WorkerList(BaseModel):
    """The workers."""

    workers: list[WorkerEntry]


class ScheduleEntry(_Open):
    """A schedule. next_firings: only if they were asked for."""

    id: Annotated[str, Field(alias="_id")]
    name: str
    queue: str
    params: Any
    task_option: dict[str, Any]
    trigger: dict[str, Any]
    paused: bool
    schedule_state: dict[str, Any]
    next_firings: list[str] | None = None


class ScheduleList(BaseModel):
    """The schedules."""

    schedules: list[ScheduleEntry]


class ReasonEntry(_Open):
    """A reason why a task waits."""

    code: str
    message: str
    until: str | None


class PositionEntry(_Open):
    """The place of a task among the due tasks of its queue. is_more: there may be more tasks before it."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
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
                }
            ]
        },
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


class PublishedFlowEntry(BaseModel):
    """The result of publishing a flow. differs: the flow of this key that existed before has other steps."""

    key: str
    task_ids: list[str]
    created: bool
    differs: bool


class ChangedFlowEntry(BaseModel):
    """A flow that was changed: the tasks that were changed, and the numbers of its steps by status."""

    key: str
    task_ids: list[str]
    counts: dict[str, int]


class FlowStepEntry(_Open):
    """A step of a flow."""

    task_id: str
    step: str
    status: str
    after: list[str]


class FlowEntry(_Open):
    """A flow with its steps."""

    key: str
    head: str | None
    steps: list[FlowStepEntry]
    progress: float | None


class FlowSummary(_Open):
    """A flow of a list."""

    key: str
    head: str
    counts: dict[str, int]
    is_ended: bool


class FlowList(BaseModel):
    """The flows."""

    flows: list[FlowSummary]


class Health(_Open):
    """Whether the server can work."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"status": "ok"}]})

    status: str


class ProblemKind(BaseModel):
    """A kind of problem."""

    type: str
    title: str
    status: int
