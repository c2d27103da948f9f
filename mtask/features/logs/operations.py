"""Operations on kept logs. A run has one document. Only its worker writes it, and always whole: a write may repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pymongo import UpdateOne

from mtask.database import setup
from mtask.errors import EncryptionError
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.codec import GET_CODEC, Codec, Owner
from mtask.kernel.driver.operation import Operation, on
from mtask.kernel.statements import expressions as x

Document = dict[str, Any]
#: The most runs whose logs are read together.
MAX_RUNS = 20
#: The name under which lines are encoded.
LINES = "log"
#: The time limit of one write. A log must not keep a connection busy.
_PATIENCE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class RunLines:
    """The lines of a run as they are to be stored."""

    run_id: str
    name: str
    key: str
    queue: str
    worker_id: str
    attempt: int
    first: int  #: the number of lines before these
    lines: Sequence[Mapping[str, Any]]
    is_over: bool
    trace_id: str | None
    size: int  #: of the lines, in bytes
    sealed: Any = None  #: the lines, if they are encoded; then `lines` is empty
    sealed_cnt: int = 0
    key_name: str | None = None  #: what the task says of the form of its values
    tenant: str | None = None  #: the task's tenant

    @property
    def task_id(self) -> str:
        """The task's `_id`."""
        return f"{self.name}:{self.key}"

    @property
    def line_cnt(self) -> int:
        """The number of all lines that the run has written."""
        return self.first + len(self.lines) + self.sealed_cnt


def make_ready() -> Operation[None]:
    """Make the collection, if it is missing."""
    yield from setup.make_sure(["logs"])


def write(logs: Sequence[RunLines], kept_for: timedelta) -> Operation[None]:
    """Store the lines of these runs in one statement. Lines that are older than those stored change nothing."""
    kept_ms = kept_for // timedelta(milliseconds=1)
    yield on("logs", "upserted", [_upsert(one, kept_ms) for one in logs]).within(_PATIENCE)


def encoded(logs: Sequence[RunLines]) -> Operation[Sequence[RunLines]]:
    """Encode the lines of these runs. Lines that cannot be encoded are left out."""
    codec: Codec = yield GET_CODEC
    if codec.is_plain:
        return logs
    owners = [Owner(log.name, log.key, [log.queue], log.key_name) for log in logs]
    yield from codec.load(owners)
    return [_encoded(codec, owner, log) for owner, log in zip(owners, logs, strict=True)]


def _encoded(codec: Codec, owner: Owner, log: RunLines) -> RunLines:
    lines = list(log.lines)
    try:
        made = codec.value(owner, LINES, lines)
    except EncryptionError:  # the data key was removed meanwhile: nothing may be stored readable
        return replace(log, first=log.line_cnt, lines=())
    return log if made is lines else replace(log, lines=(), sealed=made, sealed_cnt=len(lines))


def _upsert(log: RunLines, kept_ms: int) -> UpdateOne:
    said = {
        "task_id": log.task_id,
        "tenant": log.tenant,  # also None: without the field, nobody knows whose task it was
        "worker_id": log.worker_id,
        "attempt": log.attempt,
        "first": log.first,
        "line_cnt": log.line_cnt,
        "lines": list(log.lines),
        "is_over": log.is_over,
        **({} if log.sealed is None else {"sealed_lines": log.sealed, "queue": log.queue}),
        **({} if log.trace_id is None else {"trace_id": log.trace_id}),
        "schema_version": SCHEMA_VERSION,
    }
    times = {
        "_id": "$_id",
        "begin_time": {"$ifNull": ["$begin_time", x.NOW]},
        "update_time": x.NOW,
        "expire_time": x.add_ms(x.NOW, kept_ms),
    }
    # A write whose answer was lost may arrive after the next one.
    is_older = {"$or": [{"$gt": ["$line_cnt", log.line_cnt]}, {"$and": ["$is_over", not log.is_over]}]}
    made = {"$mergeObjects": [x.literal(said), times]}
    return UpdateOne({"_id": log.run_id}, [{"$replaceWith": {"$cond": [is_older, "$$ROOT", made]}}], upsert=True)


def of_tenant(tenant: str, *, is_own: bool) -> Document:
    """Match the logs that a tenant may read. `is_own`: whether the task is there, and is the tenant's.

    The key does not decide: a task of nobody may have had it. Older workers store no tenant.
    """
    return {"$or": [{"tenant": tenant}, *([{"tenant": {"$exists": False}}] if is_own else [])]}


def of_task(task_id: str, run_id: str | None, whose: Document | None = None) -> Operation[list[Document]]:
    """Return the logs of a task's newest runs, or of one of its runs, the first run first. `whose`: a condition."""
    wanted = {"task_id": task_id, **({} if run_id is None else {"_id": run_id}), **(whose or {})}
    found: list[Document] = yield on("logs", "find", wanted, sort=[("begin_time", -1)], limit=MAX_RUNS)
    return found[::-1]


def is_task(task_id: str) -> Operation[bool]:
    """Whether there is a task under this id."""
    return (yield on("tasks", "find_one", {"_id": task_id}, {"_id": 1})) is not None
