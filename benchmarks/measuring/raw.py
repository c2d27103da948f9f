"""The raw ceiling: the same database work as the engine's, by bare PyMongo calls and with nothing around them.

Same documents, same guarantees, groups of 200 with four in flight. A claim is one `update_many` by ids with a guard and
the shortest pipeline that appends a RUNNING run and moves next_preempt_time, then the read-back; a finish is one
`update_many` that closes the runs. It has no rules, no derived fields, no pings, no discovery.

Draining is measured a second time, by bare calls again, with the statements that the engine sends for simple tasks.
The difference between the two is the cost of guards and derived fields; the rest, to mtask, is the worker process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import uuid4

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.synchronous.collection import Collection
from pymongo.write_concern import WriteConcern

from mtask.kernel.document.options import build_option
from mtask.kernel.document.status import RunStatus
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import claim as pipelines
from mtask.kernel.statements import filters
from mtask.kernel.statements.finish import Outcome
from mtask.kernel.statements.publish import task_document

Document = dict[str, Any]
T = TypeVar("T")
AsyncTasks = AsyncCollection[Document]
#: Gives the value that a task returns, from its document.
Returned = Callable[[Document], Any]

GROUP = 200
IN_FLIGHT = 4
LEASE_MS = 60_000
_RUNS = "task_state.worker_states"
_NEXT = "task_state.next_preempt_time"
_INSERTED_AT_ONCE = 1_000


def document(
    name: str,
    key: str,
    now: datetime,
    params: Any = None,
    delay: timedelta | None = None,
    options: Mapping[str, Any] | None = None,
) -> Document:
    """Return a complete task document, as `publish_many` inserts it."""
    fixed = {
        "_id": f"{name}:{key}",
        "name": name,
        "key": key,
        "queue": "default",
        "params": params,
        "task_option": build_option(options or {}).stored(),
    }
    return task_document(fixed, None if delay is None else now + delay, now)


def finished_document(name: str, key: str, now: datetime) -> Document:
    """Return the document of a task that has succeeded a day ago."""
    made = document(name, key, now - timedelta(days=1))
    state = made["task_state"]
    del state["next_preempt_time"]
    ended = state["create_time"] + timedelta(seconds=1)
    run = {
        "run_id": f"{key}-0",
        "worker_id": "earlier",
        "attempt": 1,
        "status": "SUCCESS",
        "claim_time": state["create_time"],
        "ping_expire_time": state["create_time"] + timedelta(milliseconds=LEASE_MS),
        "success_time": ended,
        "returns": None,
    }
    state |= {"status": "SUCCESS", "finish_time": ended, "worker_states": [run]}
    return made


def insert(tasks: Collection[Document], documents: Iterator[Document]) -> list[str]:
    """Insert these documents ahead of a measurement, without waiting for the journal; return their ids."""
    unhurried = tasks.with_options(write_concern=WriteConcern(w=1, j=False))
    ids: list[str] = []
    for batch in _batches(documents, _INSERTED_AT_ONCE):
        unhurried.insert_many(batch, ordered=False)
        ids += [made["_id"] for made in batch]
    return ids


def claim_pipeline(token: str) -> list[Document]:
    """Return the update that appends a RUNNING run to each task."""
    lease = {"$add": ["$$NOW", LEASE_MS]}
    run = {
        "run_id": {"$concat": [token, "-", "$_id"]},
        "worker_id": "raw",
        "attempt": {"$literal": 1},
        "status": "RUNNING",
        "claim_time": "$$NOW",
        "ping_expire_time": lease,
    }
    return [
        {"$set": {_RUNS: {"$concatArrays": [f"${_RUNS}", [run]]}, "task_state.status": "RUNNING", _NEXT: lease}},
    ]


def claim_guard(ids: Sequence[str]) -> Document:
    """Match those of these tasks that are due."""
    which = ids[0] if len(ids) == 1 else {"$in": list(ids)}
    return {"_id": which, _NEXT: {"$exists": True}, "$expr": {"$lte": [f"${_NEXT}", "$$NOW"]}}


async def claim(tasks: AsyncTasks, ids: Sequence[str], token: str) -> list[Document]:
    """Claim a group and read back what was won."""
    await tasks.update_many(claim_guard(ids), claim_pipeline(token))
    mine = {"_id": {"$in": list(ids)}, f"{_RUNS}.run_id": {"$in": _run_ids(ids, token)}}
    return await tasks.find(mine, batch_size=len(ids) + 1).to_list()


async def finish(tasks: AsyncTasks, documents: Sequence[Document], token: str, returned: Returned | None) -> None:
    """Close the runs of a group with SUCCESS."""
    ids = [found["_id"] for found in documents]
    returns: Any = None
    if returned is not None:
        values = [returned(found) for found in documents]
        returns = {"$arrayElemAt": [{"$literal": values}, {"$indexOfArray": [{"$literal": ids}, "$_id"]}]}
    closed = {"$mergeObjects": ["$$run", {"status": "SUCCESS", "success_time": "$$NOW", "returns": returns}]}
    closes = {"$eq": ["$$run.status", "RUNNING"]}
    runs = {"$map": {"input": f"${_RUNS}", "as": "run", "in": {"$cond": [closes, closed, "$$run"]}}}
    fence = {"run_id": {"$in": _run_ids(ids, token)}, "status": "RUNNING"}
    await tasks.update_many(
        {"_id": {"$in": ids}, _RUNS: {"$elemMatch": fence}},
        [
            {
                "$set": {
                    _RUNS: runs,
                    "task_state.status": "SUCCESS",
                    "task_state.finish_time": "$$NOW",
                    _NEXT: "$$REMOVE",
                }
            }
        ],
    )


async def claim_by_rules(tasks: AsyncTasks, ids: Sequence[str], token: str) -> list[Document]:
    """Claim a group as the engine does, and read back what was won."""
    guard, pipeline = pipelines.unbegun(ids), pipelines.claim_unbegun("raw", pipelines.run_id_in_group(token, ids))
    await tasks.update_many(guard, pipeline, hint=claims.BY_ID)
    mine = filters.with_runs(ids, list(claims.run_ids_of(ids, token).values()))
    return await tasks.find(mine, batch_size=len(ids) + 1).to_list()


async def finish_by_rules(
    tasks: AsyncTasks, documents: Sequence[Document], token: str, returned: Returned | None
) -> None:
    """Close the runs of a group with SUCCESS as the engine does."""
    outcomes = []
    for found in documents:
        run_id = next(r["run_id"] for r in found["task_state"]["worker_states"] if r["run_id"].startswith(token))
        value = None if returned is None else returned(found)
        outcomes.append(Outcome(found["_id"], run_id, RunStatus.SUCCESS, value))
    await tasks.update_many(pipelines.held_alone(outcomes), pipelines.succeed(outcomes), hint=claims.BY_ID)


@dataclass(frozen=True, slots=True)
class Statements:
    """How a group is claimed and finished."""

    claim: Callable[[AsyncTasks, Sequence[str], str], Awaitable[list[Document]]]
    finish: Callable[[AsyncTasks, Sequence[Document], str, Returned | None], Awaitable[None]]


SHORTEST = Statements(claim, finish)
ENGINES = Statements(claim_by_rules, finish_by_rules)


async def drain(
    tasks: AsyncTasks, ids: Sequence[str], returned: Returned | None = None, statements: Statements = SHORTEST
) -> int:
    """Claim and finish all of these tasks; return how many were won."""
    groups = deque(_batches(iter(ids), GROUP))
    won = 0

    async def lane() -> None:
        nonlocal won
        while groups:
            token = uuid4().hex
            documents = await statements.claim(tasks, groups.popleft(), token)
            if documents:
                won += len(documents)
                await statements.finish(tasks, documents, token, returned)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(IN_FLIGHT):
            lanes.create_task(lane())
    return won


def hold(tasks: Collection[Document], ids: Sequence[str], token: str) -> None:
    """Claim these tasks from sync code."""
    tasks.update_many(claim_guard(ids), claim_pipeline(token))


def ping(tasks: Collection[Document], ids: Sequence[str], token: str, lease_ms: int) -> int:
    """Move the leases of a group of held runs and read their tasks back; return how many were held."""
    lease = {"$add": ["$$NOW", lease_ms]}
    moved = {"$mergeObjects": ["$$run", {"ping_expire_time": lease}]}
    holds = {"$eq": ["$$run.status", "RUNNING"]}
    runs = {"$map": {"input": f"${_RUNS}", "as": "run", "in": {"$cond": [holds, moved, "$$run"]}}}
    fence = {"run_id": {"$in": _run_ids(ids, token)}, "status": "RUNNING"}
    held = tasks.update_many(
        {"_id": {"$in": list(ids)}, _RUNS: {"$elemMatch": fence}}, [{"$set": {_RUNS: runs, _NEXT: lease}}]
    )
    view = {f"{_RUNS}.run_id": 1, f"{_RUNS}.status": 1, f"{_RUNS}.ping_expire_time": 1}
    tasks.find({"_id": {"$in": list(ids)}}, view).to_list()
    return held.matched_count


def _run_ids(ids: Sequence[str], token: str) -> list[str]:
    return [f"{token}-{task_id}" for task_id in ids]


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
