"""Pydantic models of the stored documents. The database's validators are made from these models.

The rules in `mtask.kernel.document.rules` take tasks in the form of these models.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AwareDatetime,
    Field,
    Strict,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from mtask.errors import SchemaMismatch, shown
from mtask.kernel.document.identity import (
    MAX_KEY_BYTES,
    NAME_PATTERN,
    TENANT_PATTERN,
    check_key,
    check_name,
    is_key_of,
    own_key,
    task_id_of,
)
from mtask.kernel.document.lookup import MAX_LOOKUPS, LookupEntry
from mtask.kernel.document.options import STORED_OPTIONS, WHOLE, Count, Duration, PositiveCount, TaskOption
from mtask.kernel.document.parts import MAX_OWED, Callback, OwedCallback, SealedAny, SealedText
from mtask.kernel.document.status import RunStatus, TaskStatus, WorkerStatus
from mtask.kernel.document.values import MAX_TRACEPARENT, Stored, TraceContext

SCHEMA_VERSION = 1
#: The revision of the validators and indexes. Add 1 when you change one of them but keep the schema_version.
SCHEMA_REVISION = 11
#: The first revision whose workers know flows. An older worker marks a WAITING task FAIL.
FLOWS_REVISION = 5
#: The first revision whose workers know the limits and fair turns of tenants.
TENANTS_REVISION = 7
#: The first revision whose workers end pauses by themselves.
ENDING_PAUSES_REVISION = 11
DEFAULT_QUEUE = "default"
#: The most former queues that a task's document lists.
MAX_FORMER_QUEUES = 20
#: The most former params that a task's document keeps, and their greatest size in all, in bytes.
MAX_FORMER_PARAMS, MAX_FORMER_BYTES = 5, 1024 * 1024
#: The most tasks of one flow, and so the most dependencies of one task.
MAX_STEPS = 10_000
#: The most ancestors of a child in a flow.
MAX_DEPTH = 16
#: The longest id of a publish call, in characters.
MAX_CALL_ID = 64
#: The most calls that one round of a task collects, and so the most ids of former calls that its document keeps.
MAX_CALLS = 1000
#: The greatest version of a handler.
MAX_VERSION = 1_000_000
#: The longest hash of a handler's declaration, in characters.
MAX_HASH = 64
#: The longest version of an app, in characters.
MAX_APP_VERSION = 100

#: A version of the marshal format that writes no references. So equal values have equal bytes, but 1, 1.0 and True have
#: different bytes.
_MARSHAL_VERSION = 2
_MAX_KNOWN_BYTES = 1_000

#: A BSON date. Text that looks like a date is refused, because the server would not compare it as a date.
Instant = Annotated[AwareDatetime, Strict()]
#: A BSON string. Bytes are refused.
Text = Annotated[str, Strict()]
#: The version of a handler, as `@app.task(version=...)` says it.
HandlerVersionNumber = Annotated[int, Field(ge=1, le=MAX_VERSION), WHOLE]
StoredT = TypeVar("StoredT", bound=Stored)


class Progress(Stored):
    """The progress that the handler of a run reported last."""

    fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    message: Annotated[Text | None, SealedText] = None
    time: Instant  #: the time at which a ping or the finish wrote the progress


class RunError(Stored):
    """The exception that a handler raised."""

    type: Text  #: the path of its class, such as "shop.errors.SoldOut"
    traceback: Annotated[Text, SealedText]


class Run(Stored):
    """One attempt of one worker at a task: an entry of `worker_states`. All times are the server's, in UTC."""

    run_id: Annotated[Text, Field(min_length=1)]
    worker_id: Annotated[Text, Field(min_length=1)]
    attempt: PositiveCount
    status: RunStatus
    claim_time: Instant
    ping_expire_time: Instant  #: the end of the lease; this time stays after the run is closed
    success_time: Instant | None = None
    fail_time: Instant | None = None
    fail_reason: Annotated[str | None, SealedText] = None
    #: What the handler raised, in the newest failed run only. The next failure drops it from this one.
    error: RunError | None = None
    #: Whether the run met a conflict with another transaction, and so goes back without being counted.
    conflict: StrictBool = False
    #: Of a run that was handed on, as the params did not fit the worker's version of the handler: the time since which
    #: they fit none.
    misfit_since: Instant | None = None
    returns: SealedAny = None
    #: Of a run whose transaction has committed its SUCCESS, and whose handler is still to return its value: the
    #: incarnation of the worker in which the handler goes on.
    returns_owed_by: Text | None = None
    #: Why the value of a run that is SUCCESS is not stored. Only a value that comes after the commit can be lost.
    returns_lost: Text | None = None
    progress: Progress | None = None
    #: The session of the run's latest transaction. The worker that rescues the task ends that session.
    session_id: Text | None = None
    #: The earliest time of the next attempt, if the run failed or was handed back.
    retry_time: Instant | None = None
    #: Whether the run ended in a final failure.
    final: StrictBool = False
    #: Whether the run belongs to an earlier round, before a retry or rerun. Such a run can be read but does not count.
    past: StrictBool = False
    #: The span of a run that did not succeed: the next run links to it.
    traceparent: Annotated[Text, Field(max_length=MAX_TRACEPARENT)] | None = None

    def is_live(self, now: datetime) -> bool:
        """Whether the run is RUNNING and its lease has not lapsed at `now`."""
        return self.status is RunStatus.RUNNING and self.ping_expire_time > now

    def is_lapsed(self, now: datetime) -> bool:
        """Whether the run is RUNNING and its lease has lapsed at `now`."""
        return self.status is RunStatus.RUNNING and self.ping_expire_time <= now

    @property
    def end_time(self) -> datetime | None:
        """The time at which the run was closed; None: it is not closed."""
        return self.success_time or self.fail_time


OnFailed = Literal["cancel", "run", "fail"]


class FlowStep(Stored):
    """The part of a task's document that says for which tasks of its flow the task waits."""

    key: Annotated[Text, Field(min_length=1, max_length=MAX_KEY_BYTES)]  #: the key of the flow
    step: Annotated[Text, Field(min_length=1, max_length=MAX_KEY_BYTES)]
    #: The ids of the task's dependencies. The task also waits for the descendants of these tasks.
    after: Annotated[list[Text], Field(max_length=MAX_STEPS)] = Field(default_factory=list)
    #: What becomes of the task if a dependency ends as FAIL or CANCELED.
    on_failed: OnFailed
    #: Whether a FAIL of this task cancels the open tasks of its flow.
    fail_fast: StrictBool = False
    #: The least time between the release and the first claim.
    delay_ms: Duration | None = None
    #: The time since which the task waits for no other task. Without this time, the task is WAITING.
    release_time: Instant | None = None
    #: While the task is WAITING: one open dependency. The end of that dependency makes the task look again. After an
    #: end that another task caused: that task.
    held_by: Text | None = None
    #: Whether no WAITING task watches this one, so that its success needs no mark. A watch removes the field first.
    unwatched: StrictBool = False
    #: The tasks to which this task was added as a child, the nearest last.
    ancestors: Annotated[list[Text], Field(max_length=MAX_DEPTH)] = Field(default_factory=list)
    has_children: StrictBool = False
    #: The key of the flow, in the flow's first task only. An index makes it unique.
    head: Text | None = None
    #: The time since which no task of the flow is open, in the flow's first task only: null until then.
    end_time: Instant | None = None


class Chain(Stored):
    """The part of a task's document that says as which task's continuation it was published. See `mtask.Next`."""

    before: Text  #: the id of the task that went on as this one
    first: Text  #: the id of the first task of the chain
    number: PositiveCount  #: 1 for the task after the first one
    run_id: Text | None = None  #: the run of the task before that went on
    #: The end of the keys in this chain, if a task went on more than once: "-round-2", for example.
    rounds: Text | None = None


GatherKind = Literal["latest", "calls"]


class CallMark(Stored):
    """The place of a publish call in the order of all calls under its key: first by its time, then by its id."""

    asked_time: Instant  #: the server's time, read before the call was sent
    call_id: Annotated[Text, Field(min_length=1, max_length=MAX_CALL_ID)]


class Gathering(Stored):
    """The calls that one round of a task gathers."""

    #: "latest": the params of the newest call win. "calls": the params are a list with the params of all calls. A task
    #: that a plain publish has changed since has no kind.
    kind: GatherKind | None = None
    newest: CallMark | None = None  #: the newest call of this round
    #: The newest call of the rounds before. A call that is not newer than this one comes too late.
    consumed: CallMark | None = None
    first_time: Instant | None = None  #: the asked_time of the first call of this round
    debounce_ms: Duration | None = None
    max_wait_ms: Duration | None = None
    #: The ids of the calls in the params (kind "calls"), or those that callers chose themselves (kind "latest"), and
    #: those of the rounds before. The newest is the last one.
    ids: Annotated[list[Text], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    seen: Annotated[list[Text], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    full: StrictBool = False  #: whether a call found no room: the round starts now and takes no more calls


class NextRound(Stored):
    """The round that a task begins once no run holds it any more: what was published while a run held it."""

    params: SealedAny = None
    sealed: Text | None = None
    version: HandlerVersionNumber | None = None
    queue: Annotated[Text, Field(min_length=1)]
    task_option: TaskOption
    lookup: Annotated[list[LookupEntry], Field(max_length=MAX_LOOKUPS)] | None = None
    start_time: Instant | None = None
    gather: Gathering


class FormerParams(Stored):
    """Params that a task had before a retry changed them."""

    params: SealedAny = None
    until: Instant  #: the time of that retry


class TaskState(Stored):
    """The state of a task."""

    status: TaskStatus
    create_time: Instant
    start_time: Instant | None = None
    #: No run starts from this time on: the task ends instead.
    not_after: Instant | None = None
    finish_time: Instant | None = None
    next_preempt_time: Instant | None = None
    failed_cnt: Count
    cancel_requested: StrictBool = False
    #: The number of publishes that dropped runs (clean_failed, clean_success). A reader of changes tells by this number
    #: whether a change was such a publish or a claim.
    clean_cnt: Count = 0
    #: The time at which a publish moved the task to its present queue. With this time and the former queues, readers of
    #: events find the queue that the task had at the time of an event.
    queue_time: Instant | None = None
    #: The former queues of the task, the newest first.
    former_queues: Annotated[list[Text], Field(max_length=MAX_FORMER_QUEUES)] = Field(default_factory=list)
    #: The reason why the task ended, if no run gives it: another task of the flow failed.
    reason: Annotated[Text | None, SealedText] = None
    #: The id of the task as which this round of the task went on. A rerun does not go on a second time.
    next_id: Text | None = None
    #: The number of rounds in which this task went on. A round that begins with a new publish goes on by itself.
    next_cnt: Count = 0
    #: The ids of tasks that this one was to publish, and did not: other tasks had these ids already.
    unpublished: list[Text] = Field(default_factory=list)
    worker_states: list[Run]


class Task(Stored):
    """A task: one document in the collection `tasks`."""

    id: Annotated[Text, Field(alias="_id")]
    name: Annotated[Text, Field(pattern=NAME_PATTERN)]
    key: Annotated[Text, Field(min_length=1, max_length=MAX_KEY_BYTES)]
    #: Whose task it is. The key then begins with the tenant and a colon. A task of no tenant has no such field.
    tenant: Annotated[Text, Field(pattern=TENANT_PATTERN)] | None = None
    queue: Annotated[Text, Field(min_length=1)]
    params: SealedAny = None
    task_option: TaskOption
    #: The name of the data key that encrypts the params: queue:NAME or tenant:NAME. A readable task has no such field.
    sealed: Text | None = None
    #: The version of the handler whose declaration the publisher knew: its hash in `handlers`. Else no such field.
    declared: Annotated[Text, Field(max_length=MAX_HASH)] | None = None
    #: The version of the handler for which the params were made. A task of version 1 need not have the field.
    version: HandlerVersionNumber | None = None
    #: The values by which clients look the task up. If a task has no lookups, its document has no such field.
    lookup: Annotated[list[LookupEntry], Field(max_length=MAX_LOOKUPS)] | None = None
    task_state: TaskState
    #: The task's part in its flow. A task of no flow has no such field.
    flow: FlowStep | None = None
    #: The task's part in a chain. Only a task as which another one went on has this field.
    chain: Chain | None = None
    #: The time of the last change of the task that other tasks of its flow have not been told of yet.
    owed_since: Instant | None = None
    #: Complete documents of tasks that are to be published because of this task.
    owed_tasks: list[dict[str, Any]] = Field(default_factory=list)
    #: The calls that this round gathers. A task that gathers no calls has no such field.
    gather: Gathering | None = None
    #: The round that follows this one, if calls came while a run held the task.
    again: NextRound | None = None
    #: The params before retries with other params, the newest first. A task that had none has no such field.
    former_params: Annotated[list[FormerParams], Field(max_length=MAX_FORMER_PARAMS)] = Field(default_factory=list)
    #: Who is told of the ends of the task. A task without a callback has none of these three fields.
    callback: Callback | None = None
    callback_cnt: Count = 0  #: the number of ends that were to be told
    #: The ends that are still to be told. A worker publishes a task for each, and crosses it off.
    callback_owed: Annotated[list[OwedCallback], Field(max_length=MAX_OWED)] = Field(default_factory=list)
    #: The span that has published the task. A task that nobody traces has no such field.
    trace: TraceContext | None = None
    expire_time: Instant | None = None
    #: The time at which a worker last made a change that does not concern other workers. Change streams skip such
    #: changes.
    quiet_time: Instant | None = None
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        _check_identity(self)
        return self

    @property
    def own_key(self) -> str:
        """The key as it was published: without the tenant."""
        return own_key(self.tenant, self.key)

    @property
    def handler_version(self) -> int:
        """The version of the handler for which the params were made."""
        return self.version or 1

    @property
    def status(self) -> TaskStatus:
        """The task's status."""
        return self.task_state.status

    @property
    def runs(self) -> list[Run]:
        """The runs that the document still holds, the oldest first."""
        return self.task_state.worker_states

    @property
    def lookups(self) -> dict[str, list[Any]]:
        """The values by which the task is looked up, by name."""
        found: dict[str, list[Any]] = {}
        for entry in self.lookup or ():
            found.setdefault(entry.k, []).append(entry.v)
        return found

    @property
    def fail_reason(self) -> str | None:
        """The reason why the task ended without a run, or that of the last run that did not succeed, or None."""
        if self.task_state.reason is not None:
            return self.task_state.reason
        return next((run.fail_reason for run in reversed(self.runs) if run.fail_reason is not None), None)

    @property
    def error(self) -> RunError | None:
        """What the handler raised in the newest run that failed by an exception, or None."""
        return next((run.error for run in reversed(self.runs) if run.error is not None), None)

    @property
    def returns(self) -> Any:
        """The value that the last successful run of this round returned, or None."""
        return None if (run := self._successful) is None else run.returns

    @property
    def returns_lost(self) -> str | None:
        """Why the value that the last successful run of this round returned is not stored. None: it is, or will be."""
        return None if (run := self._successful) is None else run.returns_lost

    @property
    def _successful(self) -> Run | None:
        return next((run for run in reversed(self.runs) if run.status is RunStatus.SUCCESS and not run.past), None)

    @property
    def is_complete(self) -> bool:
        """Whether the status is final, and no handler of a SUCCESS is still to return its value."""
        is_owed = any(run.returns_owed_by is not None and not run.past for run in self.runs)
        return self.status.is_final and not (self.status is TaskStatus.SUCCESS and is_owed)


class StoredTask(Task):
    """A task's document as mtask accepts it from the database.

    All options in `STORED_OPTIONS` must be present, because the rules that run on the server know no defaults. If the
    status is neither final nor WAITING, next_preempt_time must be present, too. A WAITING task must be of a flow.
    """

    @field_validator("task_option", mode="wrap")
    @classmethod
    def _options_are_complete(cls, option: Any, check: ValidatorFunctionWrapHandler) -> TaskOption:
        known = known_option(option)
        return _complete_option(option, check) if known is None else known

    @field_validator("task_state")
    @classmethod
    def _can_be_met(cls, state: TaskState) -> TaskState:
        if state.next_preempt_time is None and not (state.status.is_final or state.status is TaskStatus.WAITING):
            raise ValueError(f"it lacks next_preempt_time, and is {state.status}")
        return state

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        # It stands for the validator of `Task`: a second one would cost each claim more.
        _check_identity(self)
        if self.task_state.status is TaskStatus.WAITING and self.flow is None:
            raise ValueError("the status is WAITING, but the task is of no flow: nothing can release it")
        return self

    def with_own_options(self) -> Self:
        """Return a copy of the task with a copy of its options.

        Tasks with equal options share one options object. A caller that lets others change the options needs this copy.
        """
        option = self.task_option
        own = option.model_copy(update={"specific_worker_ids": [*option.specific_worker_ids]})
        return self.model_copy(update={"task_option": own})


def _check_identity(task: Task) -> None:
    if task.id != task_id_of(check_name(task.name), check_key(task.key)):
        raise ValueError(f"_id {task.id!r} is not name:key")
    if task.tenant is not None and not is_key_of(task.tenant, task.key):
        raise ValueError(f"the key {task.key!r} does not begin with the tenant {task.tenant!r} and a colon")


def known_option(option: Any) -> TaskOption | None:
    """Return the checked options of a task's document; None: they are invalid, or too rare to be remembered.

    Most tasks of one handler have the same options. So options that passed the check are remembered, and equal options
    are not checked again: they share one object.
    """
    if type(option) is dict and option.get("specific_worker_ids") == []:
        try:
            marshalled = marshal.dumps(option, _MARSHAL_VERSION)
            if len(marshalled) <= _MAX_KNOWN_BYTES:
                return _good_option(marshalled)
        except ValueError:  # marshal cannot hold the options, or they are invalid
            pass
    return None


@lru_cache(maxsize=256)
def _good_option(marshalled: bytes) -> TaskOption:
    return _complete_option(marshal.loads(marshalled), TaskOption.model_validate)


def _complete_option(option: Any, check: Callable[[Any], TaskOption]) -> TaskOption:
    missing = [name for name in STORED_OPTIONS if isinstance(option, Mapping) and name not in option]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return check(option)


def runs_in(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in a task's stored document, the oldest first. Entries that are no documents are left out."""
    state = document.get("task_state")
    runs = state.get("worker_states") if isinstance(state, dict) else None
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []


class WorkerControl(Stored):
    """A client's order to a worker."""

    stop: bool = False
    concurrency: Count | None = None


class WorkerDocument(Stored):
    """A worker process: one document in the collection `workers`."""

    id: Annotated[str, Field(alias="_id")]
    incarnation: str  #: unique for each process: by it, a process notices that another one took over its worker_id
    host: str
    pid: Count
    pid_scope: str | None = None  #: the boot id and the pid namespace, if the system has them
    status: WorkerStatus
    started_time: AwareDatetime
    heartbeat_time: AwareDatetime
    heartbeat_expire_time: AwareDatetime
    queues: list[str]
    names: list[str]
    #: The versions of those handlers that have one above 1, each as name@version.
    handler_versions: list[str] = Field(default_factory=list)
    #: The names of tasks in the worker's queues for which the worker has no handler.
    unserved_names: list[str] = Field(default_factory=list)
    #: The versions of its handlers, each as name@hash. Workers of before have no such field.
    handlers: list[str] = Field(default_factory=list)
    #: The names of the data keys that the worker cannot use, and ["*"] for a worker without keys.
    unusable_keys: list[str] = Field(default_factory=list)
    concurrency: Count
    running_cnt: Count
    version: str
    #: The revision of the validators and indexes that the worker knows. Workers of before have no such field.
    schema_revision: Count = 0
    #: The revisions of the controls that the worker has applied.
    controls_seen: list[dict[str, Any]] = Field(default_factory=list)
    #: How often the worker has appealed to the others. None: it is of a version that never appeals.
    appeal_cnt: Count | None = None
    was_silent: bool = False  #: whether the worker's registration had expired before its last heartbeat
    control: WorkerControl = Field(default_factory=WorkerControl)

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self.id

    def can_decrypt(self, sealed: str | None) -> bool:
        """Whether the worker can decrypt tasks of this data key, as far as it knows. None: the task is readable."""
        return sealed is None or not {"*", sealed} & set(self.unusable_keys)

    def version_of(self, name: str) -> int:
        """Return the version of the worker's handler of this name. A handler that says nothing has version 1."""
        found = next((each for each in self.handler_versions if each.rpartition("@")[0] == name), "")
        number = found.rpartition("@")[2]
        return int(number) if number.isascii() and number.isdecimal() else 1

    def is_live(self, now: datetime) -> bool:
        """Whether the worker is live: it has not stopped, and its last heartbeat has not expired."""
        return self.status is not WorkerStatus.STOPPED and self.heartbeat_expire_time > now


def describe_validation(error: ValidationError) -> str:
    """Return one line that names the wrong fields, at most five."""
    found = [
        f"{'.'.join(str(part) for part in item['loc']) or 'document'}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more


def read_as(model: type[StoredT], document: Mapping[str, Any], what: str, collection: str, remedy: str) -> StoredT:
    """Return a document as its model; raise SchemaMismatch, which says `what` is malformed."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        reason = f"{what} {shown(document.get('_id'))} is malformed: {describe_validation(error)}"
        raise SchemaMismatch(collection, reason, remedy) from None
