"""Publishes tasks. A task is inserted only once, even if it is published several times.

A policy sets the effect of a publish on a task that exists already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from pymongo import ReturnDocument, UpdateOne

from mtask.errors import DuplicateKey, TaskExists, TaskRunning, WorkersTooOld
from mtask.kernel.document.parts import KNOWN_SINCE, OPTIONAL
from mtask.kernel.driver.bson import as_sent
from mtask.kernel.driver.codec import GET_CODEC, Codec, Owner
from mtask.kernel.driver.operation import Operation, server_time, tasks
from mtask.kernel.operations import workers
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements import filters
from mtask.kernel.statements import publish as requests

IfExists = Literal["keep", "update", "reject"]
_RACES = 5
_REPLACED = ("queue", "params", "task_option", *OPTIONAL)


@dataclass(slots=True)  # not frozen: that would make its creation several times as slow, and there are many
class NewTask:
    """A validated task, ready to be published. Nobody changes it."""

    task_id: str
    name: str
    key: str
    queue: str
    params: Any
    task_option: Mapping[str, Any]
    #: The start of the task: an instant, or a delay after the publish. If it is None, the task starts at once.
    start: datetime | timedelta | None = None
    #: The lookups in their stored form. None: the task has none, and its document has no such field.
    lookup: Sequence[Mapping[str, Any]] | None = None
    #: Who is told of the ends of the task, in the stored form. None: nobody, and its document has no such field.
    callback: Mapping[str, Any] | None = None
    #: The span that publishes the task. None: nobody traces it, and its document has no such field.
    trace: Mapping[str, str] | None = None
    #: Whose task it is. None: nobody's, and its document has no such field.
    tenant: str | None = None
    #: The name of the data key that encrypts the params. None: they are readable, and the document has no such field.
    sealed: str | None = None
    #: The version of the handler that the publisher knows. None: it knows none, and the document has no such field.
    declared: str | None = None
    #: When the task expires: an instant, or so long after the publish. None: never.
    expires: datetime | timedelta | None = None
    #: The version of the handler for which the params are made. None: it is 1, and the document has no such field.
    version: int | None = None
    #: Whether the key is fresh, and the result is to tell the create_time.
    tells_time: bool = False

    def fixed(self) -> dict[str, Any]:
        """Return the fields that do not depend on the clock."""
        made: dict[str, Any] = {"_id": self.task_id, "name": self.name, "key": self.key}
        if self.tenant is not None:
            made["tenant"] = self.tenant
        made["queue"] = self.queue
        made["params"] = self.params
        made["task_option"] = self.task_option
        if self.sealed is not None:
            made["sealed"] = self.sealed
        if self.declared is not None:
            made["declared"] = self.declared
        if self.version is not None:
            made["version"] = self.version
        if self.lookup is not None:
            made["lookup"] = self.lookup
        if self.callback is not None:
            made["callback"] = self.callback
        if self.trace is not None:
            made["trace"] = self.trace
        return made

    def guard(self) -> dict[str, Any]:
        """Return the filter that matches the task in the database, if it is of this tenant."""
        return {"_id": self.task_id} if self.tenant is None else {"_id": self.task_id, "tenant": self.tenant}

    def start_expression(self) -> x.Expression:
        """Return start_time as an expression that the server evaluates by its clock."""
        return _expression(self.start)

    def not_after_expression(self) -> x.Expression:
        """Return not_after as an expression that the server evaluates by its clock."""
        return _expression(self.expires)

    def not_after_at(self, now: datetime) -> datetime | None:
        """Return not_after, computed from the server's time `now`."""
        return now + self.expires if isinstance(self.expires, timedelta) else self.expires

    def start_at(self, now: datetime) -> datetime | None:
        """Return start_time, computed from the server's time `now`."""
        return now + self.start if isinstance(self.start, timedelta) else self.start


def _expression(moment: datetime | timedelta | None) -> x.Expression:
    return x.add_ms(x.NOW, milliseconds(moment)) if isinstance(moment, timedelta) else moment


class PublishPolicy(Protocol):
    """A way to publish tasks, of which some may exist already. `Policy` is the plain one; features have others."""

    @property
    def replaces_options(self) -> bool:
        """Whether a publish may replace the options of an existing task."""

    def publish(self, task: NewTask, *, in_session: bool) -> Operation[Published]:
        """Publish one task; raise a TaskError. `in_session`: in a transaction of the caller."""

    def publish_many(self, batch: Sequence[NewTask], *, in_session: bool) -> Operation[list[Any]]:
        """Publish many tasks. Return one entry for each task, in order: its result, or its TaskError."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The effect of a publish on a task that exists already."""

    if_exists: IfExists = "keep"
    clean_failed: bool = False
    clean_success: bool = False
    not_update_running: bool = False

    @property
    def changes_existing(self) -> bool:
        """Whether a publish may change an existing task."""
        return self.if_exists == "update" or self.clean_failed or self.clean_success

    @property
    def replaces_options(self) -> bool:
        """Whether a publish may replace the options of an existing task."""
        return self.if_exists == "update"

    def publish(self, task: NewTask, *, in_session: bool) -> Operation[Published]:
        """Publish one task; raise TaskExists or TaskRunning."""
        return publish(task, self)

    def publish_many(self, batch: Sequence[NewTask], *, in_session: bool) -> Operation[list[Any]]:
        """Publish many tasks. Return one entry for each task, in order: its result, a TaskExists or a TaskRunning."""
        return publish_many(batch, self, in_session=in_session)


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a publish. It says whether the task is new, or whether an existing task was changed."""

    task_id: str
    created: bool
    updated: bool
    #: When the task was created, by the server's clock, if the publish asked for it: see `TaskSpec.tells_time`.
    create_time: datetime | None = field(default=None, compare=False, repr=False)


def milliseconds(duration: timedelta) -> int:
    """Return a duration in ms, rounded up, so that no task starts early."""
    return -(-duration // timedelta(milliseconds=1))


def publish(task: NewTask, policy: Policy) -> Operation[Published]:
    """Publish one task. This takes one round trip, or two if an existing task changes.

    Raises TaskExists or TaskRunning, depending on the policy.
    """
    if task.tells_time:
        return (yield from _insert_fresh(task))
    for _ in range(_RACES):
        if (yield from _insert(task)):
            return Published(task.task_id, created=True, updated=False)
        if (yield from _strangers([task])):
            raise TaskExists(task.task_id, not_of=task.tenant)
        changed = yield from _change_existing(task, policy)
        if changed is not None:
            return Published(task.task_id, created=False, updated=changed)
    raise TaskRunning(task.task_id)


def _insert(task: NewTask) -> Operation[bool]:
    pipeline = requests.publish(task.fixed(), task.start_expression(), not_after=task.not_after_expression())
    for _ in range(_RACES):
        try:
            result = yield tasks("update_one", {"_id": task.task_id}, pipeline, upsert=True)
        except DuplicateKey:
            continue  # another publisher was faster; the next attempt finds the task
        return result.upserted_id is not None
    return False


def _insert_fresh(task: NewTask) -> Operation[Published]:
    """Insert a task whose key nobody else has, and read its create_time in the same round trip."""
    pipeline = requests.publish(task.fixed(), task.start_expression())
    answer = {"projection": {"task_state.create_time": 1}, "return_document": ReturnDocument.AFTER}
    made = yield tasks("find_one_and_update", {"_id": task.task_id}, pipeline, upsert=True, **answer)
    return Published(task.task_id, created=True, updated=False, create_time=made["task_state"]["create_time"])


def _strangers(batch: Sequence[NewTask]) -> Operation[set[str]]:
    """Return those of these tasks that exist already, and are not of the tenant for which they are published.

    Who publishes for no tenant may give any key, also one that begins like those of a tenant.
    """
    tenants = {task.task_id: task.tenant for task in batch if task.tenant is not None}
    if not tenants:
        return set()
    found = yield tasks("find", filters.by_ids([*tenants]), {"tenant": 1}).for_everybody()
    return {document["_id"] for document in found if document.get("tenant") != tenants[document["_id"]]}


def _change_existing(task: NewTask, policy: Policy) -> Operation[bool | None]:
    """Apply the policy; return whether it changed the task, or None if the task no longer exists."""
    if policy.if_exists == "reject":
        raise TaskExists(task.task_id)
    if not policy.changes_existing:
        return False
    fixed = task.fixed()
    replacement = {name: fixed.get(name) for name in _REPLACED} if policy.if_exists == "update" else None
    pipeline = requests.republish(
        replacement=replacement,
        start=task.start_expression(),
        clean_failed=policy.clean_failed,
        clean_success=policy.clean_success,
        not_after=task.not_after_expression(),
    )
    guard = filters.not_running(task.task_id) if policy.not_update_running else {}
    result = yield tasks("update_one", {**guard, **task.guard()}, pipeline)
    if result.matched_count:
        return bool(result.modified_count)
    if policy.not_update_running:
        exists = yield tasks("find_one", {"_id": task.task_id}, {"_id": 1})
        if exists is not None:
            raise TaskRunning(task.task_id)
    return None


def publish_many(
    batch: Sequence[NewTask], policy: Policy, *, in_session: bool
) -> Operation[list[Published | Exception]]:
    """Publish many tasks. Return one entry for each task, in order: its result, a TaskExists or a TaskRunning.

    One bulk insert stores the new tasks. Their create_time is the server's time, which is read once per call.

    The insert reports an error for a task that exists already. In a transaction, this error would abort the
    transaction. So a transaction uses a bulk upsert instead.
    """
    first: dict[str, int] = {}
    for index, task in enumerate(batch):
        first.setdefault(task.task_id, index)
    unique = [batch[index] for index in first.values()]
    if in_session:
        upserts = [
            UpdateOne(
                {"_id": t.task_id},
                requests.publish(t.fixed(), t.start_expression(), not_after=t.not_after_expression()),
                upsert=True,
            )
            for t in unique
        ]
        inserted = yield tasks("upserted", upserts)
        created = {unique[index].task_id for index in inserted}
    else:
        now = yield from server_time()
        # The tasks that start at once have one state: it is encoded once.
        at_once = requests.task_document({}, None, now)
        at_once["task_state"] = as_sent(at_once["task_state"])
        documents = [
            {**t.fixed(), **at_once}
            if t.start is None and t.expires is None
            else requests.task_document(t.fixed(), t.start_at(now), now, t.not_after_at(now))
            for t in unique
        ]
        existing = yield tasks("insert_new", documents)
        created = {task.task_id for index, task in enumerate(unique) if index not in existing}
    results: list[Published | Exception] = []
    strangers = yield from _strangers([task for task in unique if task.task_id not in created])
    for index, task in enumerate(batch):
        if task.task_id in created and first[task.task_id] == index:
            results.append(Published(task.task_id, created=True, updated=False))
            continue
        if task.task_id in strangers:
            results.append(TaskExists(task.task_id, not_of=task.tenant))
            continue
        try:
            changed = yield from _change_existing(task, policy)
            if changed is None:
                results.append((yield from publish(task, policy)))
            else:
                results.append(Published(task.task_id, created=False, updated=changed))
        except (TaskExists, TaskRunning) as error:
            results.append(error)
    return results


def check_fields(tasks: Sequence[NewTask]) -> Operation[None]:
    """Raise WorkersTooOld if a live worker does not know a field that one of these new tasks has."""
    for name, (_, what) in KNOWN_SINCE.items():
        if any(getattr(task, name) is not None for task in tasks):
            old = yield from workers.without_field(name)
            if old:
                raise WorkersTooOld(old, what=what)


def encoded(batch: Sequence[NewTask]) -> Operation[Sequence[NewTask]]:
    """Encode params and lookups of new tasks.

    Raises subclasses of EncryptionError, InvalidLookup, WorkersTooOld, and subclasses of DatabaseError.
    """
    codec: Codec = yield GET_CODEC
    if codec.is_plain:
        return batch
    owners = [Owner(task.name, task.key, [task.queue]) for task in batch]
    yield from codec.load(owners, to_publish=True)
    pairs = zip(owners, batch, strict=True)
    return [replace(task, **codec.content(owner, task.params, task.lookup)) for owner, task in pairs]
