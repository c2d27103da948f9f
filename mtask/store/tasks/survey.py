"""What a demonstration reads of all tasks of one name, and how it keeps to a place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.store.driver.operation import COLLECTIONS
from mtask.store.driver.stores import bounded
from mtask.store.driver.types import SyncCollection
from mtask.store.statements.filters import RUNS

Document = dict[str, Any]
#: How long a look at single documents may take, and one at all tasks.
_TIMEOUT, _LONG_TIMEOUT = timedelta(seconds=30), timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Others:
    """What else is in a database than tasks of some names, and workers."""

    #: The first collection that is not ours.
    collection: str | None
    #: The first of our other collections that holds documents.
    kept: str | None
    #: The `_id` of a task of another name, in a document of its own.
    task: Document | None


def others(tasks: SyncCollection, names: Sequence[str]) -> Others:
    """Return what else the database of this collection holds than tasks of these names."""
    database = tasks.database
    with bounded(_TIMEOUT):
        foreign = set(database.list_collection_names()) - set(COLLECTIONS)
        kept = [name for name in COLLECTIONS[2:] if database[name].find_one({}, {"_id": 1}) is not None]
        task = tasks.find_one({"name": {"$nin": list(names)}}, {"_id": 1})
    return Others(min(foreign, default=None), kept[0] if kept else None, task)


def clear(tasks: SyncCollection) -> None:
    """Remove our collections, and so a database that holds nothing else."""
    with bounded(_TIMEOUT):
        for name in COLLECTIONS:
            tasks.database[name].drop()


def server_version(tasks: SyncCollection) -> str:
    """Return MongoDB's version."""
    with bounded(_LONG_TIMEOUT):
        return str(tasks.database.command("buildInfo")["version"])


def runs_by_worker(tasks: SyncCollection, name: str) -> dict[tuple[str, str], int]:
    """Return how many runs each worker has of tasks of this name, by its id and the run's status."""
    group = {"worker_id": f"${RUNS}.worker_id", "status": f"${RUNS}.status"}
    pipeline: list[Document] = [
        {"$match": {"name": name}},
        {"$project": {f"{RUNS}.worker_id": 1, f"{RUNS}.status": 1}},
        {"$unwind": f"${RUNS}"},
        {"$group": {"_id": group, "count": {"$sum": 1}}},
    ]
    with bounded(_LONG_TIMEOUT):
        return {(row["_id"]["worker_id"], row["_id"]["status"]): row["count"] for row in tasks.aggregate(pipeline)}


def leased_beyond(tasks: SyncCollection, name: str, worker_id: str, instant: datetime) -> list[Document]:
    """Return the tasks of this name that a worker held with a lease beyond the instant, and without a SUCCESS."""
    held = {"worker_id": worker_id, "ping_expire_time": {"$gt": instant}, "success_time": None}
    with bounded(_LONG_TIMEOUT):
        return list(tasks.find({"name": name, RUNS: {"$elemMatch": held}}))


def documents(tasks: SyncCollection, name: str) -> Iterator[Document]:
    """Yield the documents of all tasks of this name, as they are stored."""
    with bounded(None):
        yield from tasks.find({"name": name})
