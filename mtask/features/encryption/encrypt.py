"""Operations that encrypt what is about to be sent.

Without encryption they ask nothing of the database. With it, they load data keys, at most once a minute each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mtask.errors import EncryptionError, InvalidInput, WorkersTooOld
from mtask.features.encryption.cipher import LOG, MESSAGE, REASON, RETURNS, Sealer
from mtask.features.encryption.settings import QUEUE, TENANT, key_names
from mtask.features.logs.operations import RunLines
from mtask.kernel.document.identity import stored_key
from mtask.kernel.document.parts import NO_KEYS, Sealed
from mtask.kernel.document.task import Task
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.operations import workers
from mtask.kernel.operations.publish import NewTask
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.outbox import OwedTask
from mtask.kernel.statements.publish import NewParams

T = TypeVar("T")
Document = dict[str, Any]
_EXAMPLES = 5
#: The sealer of the store that runs the operation, or None.
SEALER = Call("keys", "get")


def sealer() -> Operation[Sealer | None]:
    """Return the sealer of the store that runs this operation; None: the store has no keys."""
    found: Sealer | None = yield SEALER
    return found


def load(using: Sealer, names: Iterable[str], key_ids: Iterable[bytes] = ()) -> Operation[None]:
    """Load data keys that are not loaded, or were loaded too long ago."""
    wanted, ids = list(dict.fromkeys(names)), list(dict.fromkeys(key_ids))
    if using.vault.lacks(wanted, ids):
        yield Call("keys", "load", (wanted, ids))


def seal_tasks(batch: Sequence[NewTask]) -> Operation[list[NewTask]]:
    """Encrypt params and lookups of new tasks, as far as their queues or tenants have data keys.

    Raises subclasses of EncryptionError, InvalidLookup, WorkersTooOld, and subclasses of DatabaseError.
    """
    using = yield from sealer()
    if using is None:
        return list(batch)
    yield from _load_to_publish(using, {(task.queue, task.key) for task in batch})
    return [_sealed_task(using, task) for task in batch]


def _load_to_publish(using: Sealer, places: Iterable[tuple[str, str]]) -> Operation[None]:
    names = {name for queue, key in places for name in using.names_for(queue, key)}
    if not using.vault.lacks(names):
        return
    yield from load(using, sorted(names))
    if any(using.vault.problem_of(name) is None for name in names):
        # Workers come seldom, and keys are loaded again after a minute: this need not be asked for each task.
        old = yield from workers.without_encryption(_EXAMPLES)
        if old:
            raise WorkersTooOld(old, what="encrypted tasks")


def _sealed_task(using: Sealer, task: NewTask) -> NewTask:
    name = using.vault.name_of(task.queue, task.key)
    if name is None:
        return task
    lookup = None if task.lookup is None else using.seal_lookup(name, task.lookup)
    params = using.seal_params(name, task.name, task.key, task.params, task.lookup)
    return replace(task, params=params, lookup=lookup, sealed=name)


def seal_params(task: Task, params: Any) -> Operation[NewParams]:
    """Encrypt new params of a task that exists, and its lookups with them. The task is decrypted.

    Raises DecryptionFailed if its lookups are refused: the new params would say that they belong to the task.
    """
    using = yield from sealer()
    if using is None:
        return NewParams(params)
    yield from _load_to_publish(using, [(task.queue, task.key)])
    name = using.vault.name_of(task.queue, task.key)
    if name is None:
        return NewParams(params)
    for entry in task.lookup or ():
        if isinstance(entry.v, Sealed):
            raise entry.v.error
    lookup = None if task.lookup is None else [{"k": entry.k, "v": entry.v} for entry in task.lookup]
    sealed = using.seal_params(name, task.name, task.key, params, lookup)
    return NewParams(sealed, name, None if lookup is None else using.seal_lookup(name, lookup))


def seal_owed(batch: Sequence[OwedTask]) -> Operation[list[OwedTask]]:
    """Encrypt params and lookups of tasks that another task is to publish."""
    using = yield from sealer()
    if using is None:
        return list(batch)
    names = {name for one in batch for name in using.names_for(one.fixed["queue"], one.fixed["key"])}
    yield from load(using, sorted(names))
    return [_sealed_owed(using, one) for one in batch]


def _sealed_owed(using: Sealer, one: OwedTask) -> OwedTask:
    fixed = one.fixed
    name = using.vault.name_of(fixed["queue"], fixed["key"])
    if name is None:
        return one
    lookup = fixed.get("lookup")
    params = using.seal_params(name, fixed["name"], fixed["key"], fixed["params"], lookup)
    made = {**fixed, "params": params, "sealed": name}
    if lookup is not None:
        made["lookup"] = using.seal_lookup(name, lookup)
    return replace(one, fixed=made)


def _names_for(using: Sealer, task: Task) -> list[str]:
    return [*using.names_for(task.queue, task.key), *([] if task.sealed is None else [task.sealed])]


def _name_for(using: Sealer, task: Task) -> str | None:
    """Return the data key of what a run of this task writes. None: it stays readable."""
    return _chosen(using, task.queue, task.key, task.sealed)


def _chosen(using: Sealer, queue: str, key: str, sealed: str | None) -> str | None:
    """Return the data key of such a task. `sealed`: the data key that encrypts it, by its document.

    An encrypted task stays encrypted, also if the configuration of this process does not ask for it.
    """
    name = using.vault.name_of(queue, key)
    return sealed if name is None and sealed in key_names([queue], key) else name


def seal_outcome(task: Task, outcome: Outcome) -> Operation[Outcome]:
    """Encrypt what the end of a run stores: returns, reason, progress and the next task."""
    using = yield from sealer()
    if using is None:
        return outcome
    names = _names_for(using, task)
    if outcome.next is not None:
        names += using.names_for(outcome.next.fixed["queue"], outcome.next.fixed["key"])
    yield from load(using, names)
    return sealed_outcome(using, task, outcome)


def sealed_outcome(using: Sealer, task: Task, outcome: Outcome) -> Outcome:
    """Encrypt an outcome with keys that are loaded."""
    name = _name_for(using, task)
    following = None if outcome.next is None else _sealed_owed(using, outcome.next)
    if name is None:
        return outcome if following is None else replace(outcome, next=following)
    returns, reason = outcome.returns, outcome.reason
    return replace(
        outcome,
        # Nothing is to be hidden in None, and most handlers return it.
        returns=None if returns is None else using.seal(name, task.name, task.key, RETURNS, returns),
        reason=None if reason is None else using.seal(name, task.name, task.key, REASON, reason),
        progress=sealed_progress(using, task, outcome.progress),
        next=following,
    )


def sealed_progress(using: Sealer, task: Task, progress: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Encrypt the message of a progress. Its fraction stays readable."""
    if progress is None or type(progress.get("message")) is not str:
        return progress
    name = _name_for(using, task)
    if name is None:
        return progress
    return {**progress, "message": using.seal(name, task.name, task.key, MESSAGE, progress["message"])}


def seal_value(task: Task, field: str, value: Any) -> Operation[Any]:
    """Encrypt one value of a task."""
    using = yield from sealer()
    if using is None or value is None:
        return value
    yield from load(using, _names_for(using, task))
    name = _name_for(using, task)
    return value if name is None else using.seal(name, task.name, task.key, field, value)


def seal_logs(logs: Sequence[RunLines]) -> Operation[list[RunLines]]:
    """Encrypt the lines of runs whose tasks are encrypted. Lines that cannot be encrypted are left out."""
    using = yield from sealer()
    if using is None:
        return list(logs)
    names = {name for log in logs for name in using.names_for(log.queue, log.key)}
    yield from load(using, sorted(names | {log.key_name for log in logs if log.key_name is not None}))
    return [_sealed_log(using, log) for log in logs]


def _sealed_log(using: Sealer, log: RunLines) -> RunLines:
    try:
        name = _chosen(using, log.queue, log.key, log.key_name)
        sealed = None if name is None else using.seal(name, log.name, log.key, LOG, list(log.lines))
    except EncryptionError:  # the data key was removed meanwhile: nothing may be stored readable
        return replace(log, first=log.line_cnt, lines=())
    return log if sealed is None else replace(log, lines=(), sealed=sealed, sealed_cnt=len(log.lines))


def seal_schedule(schedule_id: str, fields: Mapping[str, Any]) -> Operation[Document]:
    """Encrypt params and lookups of a schedule, as its tasks get them."""
    using = yield from sealer()
    if using is None:
        return dict(fields)
    base = stored_key(fields.get("tenant"), schedule_id)
    key = f"{base}/"
    yield from _load_to_publish(using, [(fields["queue"], key)])
    name = using.vault.name_of(fields["queue"], key)
    if name is None:
        return dict(fields)
    lookup = None if fields["lookup"] is None else using.seal_lookup(name, fields["lookup"])
    params = using.seal_of_schedule(name, fields["name"], base, fields["params"], fields["lookup"])
    return {**fields, "params": params, "lookup": lookup, "sealed": name}


def seal_criteria(criteria: Mapping[str, Any], *, sealed_only: bool = False) -> Operation[Document]:
    """Add to looked-up values their encrypted forms, under each data key that a task found may have.

    With `sealed_only`, the encrypted forms stand for the values, if there are any.

    Raises InvalidInput and subclasses of DatabaseError.
    """
    using = yield from sealer()
    given = dict(criteria)
    if using is None or not given.get("lookup"):
        return given
    names = yield from _names_to_look_under(using, given)
    found: dict[str, list[Any]] = {}
    for name, values in given["lookup"].items():
        sealed = [using.seal_value(key, name, value) for key in names for value in values if _may_be_sealed(value)]
        found[name] = sealed if sealed and sealed_only else [*values, *sealed]
    return {**given, "lookup": found}


def seal_params_of_bulk(bulk_id: str, criteria: Mapping[str, Any]) -> Operation[Document]:
    """Encrypt the params by which a bulk change finds its tasks, as its criteria are stored for days.

    This takes the data key of the tenant or queue that the criteria name, or else any. Without a data key, they stay
    readable.
    """
    using = yield from sealer()
    given = dict(criteria)
    if using is None or not given.get("params"):
        return given
    named = [QUEUE + queue for queue in _several(given.get("queue"))]
    if given.get("tenant") is not None:
        named.insert(0, TENANT + given["tenant"])
    rows = yield Call("keys", "every")
    names = [row.name for row in rows if row.remove_time is None]
    for name in sorted(names, key=lambda name: named.index(name) if name in named else len(named)):
        yield from load(using, [name])
        if using.vault.problem_of(name) is None:
            return {**given, "params": using.seal_criteria(name, bulk_id, given["params"])}
    return given


def _several(wanted: Any) -> list[str]:
    return [] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)


def _may_be_sealed(value: Any) -> bool:
    # Such values cannot be encrypted, so only readable tasks have them.
    return not isinstance(value, bool | float)


def _names_to_look_under(using: Sealer, criteria: Mapping[str, Any]) -> Operation[list[str]]:
    tenants = _several(criteria.get("key"))
    if (prefix := criteria.get("key_prefix")) and ":" in prefix:
        tenants.append(prefix)
    several = _several(criteria.get("queue"))
    names: list[str]
    if several and tenants:
        names = [name for queue in several for key in tenants for name in using.names_for(queue, key)]
    else:
        names = yield Call("keys", "names")
    yield from load(using, names)
    return [name for name in dict.fromkeys(names) if using.vault.problem_of(name) is None]


def ask_vault(method: str, *args: Any) -> Operation[Any]:
    """Call a method of the key vault; raise InvalidInput if the store has no keys."""
    using = yield from sealer()
    if using is None:
        raise InvalidInput(NO_KEYS, field="encryption")
    return (yield Call("keys", method, args))
