"""Operations for demonstrations: look for foreign data, clear the database, and read the tasks of one name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mtask.kernel.driver.operation import COLLECTIONS
from mtask.kernel.driver.stores import bounded
from mtask.kernel.driver.types import SyncCollection
from mtask.kernel.statements.filters import RUNS

Document = dict[str, Any]
#: Time limit of a request for single documents, and of a request that may read all tasks.
_TIMEOUT, _LONG_TIMEOUT = timedelta(seconds=30), timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Others:
    """Examples of data in a database that are neither workers nor tasks of the given names."""

    #: The first collection that does not belong to mtask.
    collection: str | None
    #: The first of mtask's collections, except tasks and workers, that holds documents.
    kept: str | None
    #: A task of another name, as a document that holds only its `_id`.
    task: Document | None


def others(tasks: SyncCollection, names: Sequence[str]) -> Others:
    """Look in the collection's database for data that are neither workers nor tasks of these names."""
    database = tasks.database
    with bounded(_TIMEOUT):
        foreign = set(database.list_collection_names()) - set(COLLECTIONS)
        kept = [name for name in COLLECTIONS[2:] if database[name].find_one({}, {"_id": 1}) is not None]
        task = tasks.find_one({"name": {"$nin": list(names)}}, {"_id": 1})
    return Others(min(foreign, default=None), kept[0] if kept else None, task)


def clear(tasks: SyncCollection) -> None:
    """Remove mtask's collections. If the database holds nothing else, it disappears, too."""
    with bounded(_TIMEOUT):
        for name in COLLECTIONS:
            tasks.database[name].drop()


def server_version(tasks: SyncCollection) -> str:
    """Return MongoDB's version."""
    with bounded(_LONG_TIMEOUT):
        return str(tasks.database.command("buildInfo")["version"])


def runs_by_worker(tasks: SyncCollection, name: str) -> dict[tuple[str, str], int]:
    """Return the number of runs in the tasks of this name, by worker_id and by the status of the run."""
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
    """Return the tasks of this name that have a matching run of the worker.

    A run matches if its lease ends after `instant` and it has no SUCCESS.
    """
    held = {"worker_id": worker_id, "ping_expire_time": {"$gt": instant}, "success_time": None}
    with bounded(_LONG_TIMEOUT):
        return list(tasks.find({"name": name, RUNS: {"$elemMatch": held}}))


def documents(tasks: SyncCollection, name: str) -> Iterator[Document]:
    """Yield the documents of all tasks of this name, as they are stored."""
    with bounded(None):
        yield from tasks.find({"name": name})
