"""Reads and writes the registry of handlers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pymongo import UpdateOne

from mtask.database import setup
from mtask.features.registry import statements
from mtask.features.registry.rules import label, successor
from mtask.kernel.driver.operation import Operation, handlers, workers
from mtask.kernel.operations.workers import is_live

Document = dict[str, Any]
#: The most names among which a similar one is looked for, and the most documents of a list.
MAX_NAMES = 10_000


def current(names: Sequence[str]) -> Operation[list[Document]]:
    """Return the documents of these names, each with its current version alone."""
    found: list[Document] = yield handlers(
        "find", {"_id": {"$in": list(names)}}, statements.current_version(), batch_size=len(names) + 1
    ).apart()
    return found


def names() -> Operation[list[str]]:
    """Return the registered names, at most 10,000, in order."""
    found = yield handlers("find", {}, {"_id": 1}, sort=[("_id", 1)], limit=MAX_NAMES).apart()
    return [str(document["_id"]) for document in found]


def served(wanted: Sequence[str]) -> Operation[set[str]]:
    """Return those of these names that live workers serve: also workers of an mtask that registers nothing."""
    found = yield workers("find", {**is_live(), "names": {"$in": list(wanted)}}, {"names": 1}).apart()
    return {name for document in found for name in _list(document.get("names")) if name in wanted}


def every() -> Operation[list[Document]]:
    """Return all documents, in the order of the names."""
    found: list[Document] = yield handlers("find", {}, sort=[("_id", 1)], limit=MAX_NAMES)
    return found


def one(name: str) -> Operation[Document | None]:
    """Return the document of a name; None: there is none."""
    found: Document | None = yield handlers("find_one", {"_id": name})
    return found


def live_workers() -> Operation[list[Document]]:
    """Return the names and the versions of handlers that each live worker has."""
    view = {"names": 1, "handlers": 1}
    found: list[Document] = yield workers("find", is_live(), view, sort=[("_id", 1)])
    return found


# --- what workers do -------------------------------------------------------------------------------------


def labels_of(documents: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the versions that these workers have. A worker's document may be malformed."""
    return {str(one) for document in documents for one in _list(document.get("handlers"))}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def served_by_others(worker_id: str, labels: Sequence[str]) -> Operation[set[str]]:
    """Return those of these versions that live workers other than this one have."""
    wanted = list(labels)
    stages = [
        {"$match": {**is_live(), "_id": {"$ne": worker_id}, "handlers": {"$in": wanted}}},
        {"$unwind": "$handlers"},
        {"$match": {"handlers": {"$in": wanted}}},
        {"$group": {"_id": "$handlers"}},
    ]
    return {row["_id"] for row in (yield workers("rows", stages))}


def start(
    worker_id: str, incarnation: str, declared: Mapping[str, Mapping[str, Any]], again: Iterable[str] | None = None
) -> Operation[None]:
    """Store what the handlers of a worker that starts declare, and then, in its document, which versions it has.

    In this order: workers that start a version at once find none of each other. `again`: the only names to store.
    """
    stored = declared if again is None else {name: declared[name] for name in again}
    yield from store(stored, worker_id)
    yield from tell(worker_id, incarnation, sorted(label(name, each["hash"]) for name, each in declared.items()))


def store(declared: Mapping[str, Mapping[str, Any]], worker_id: str = "") -> Operation[None]:
    """Store what handlers declare that are started, by this worker."""
    if not declared:
        return
    labels = {name: label(name, each["hash"]) for name, each in declared.items()}
    served = yield from served_by_others(worker_id, list(labels.values()))
    yield from setup.make_sure(["handlers"])
    yield handlers(
        "upserted",
        [
            UpdateOne({"_id": name}, statements.start(each, is_served=labels[name] in served), upsert=True)
            for name, each in declared.items()
        ],
    )


def tell(worker_id: str, incarnation: str, labels: Sequence[str]) -> Operation[None]:
    """Store in the document of a worker which versions it has, unless it says so already."""
    guard = {"_id": worker_id, "incarnation": incarnation, "handlers": {"$ne": list(labels)}}
    yield workers("update_one", guard, {"$set": {"handlers": list(labels)}})


def hashes() -> Operation[list[Document]]:
    """Return the hashes of all names: of the current version, and of the others."""
    found: list[Document] = yield handlers("find", {}, statements.hashes(), limit=MAX_NAMES)
    return found


def succeed(documents: Sequence[Mapping[str, Any]]) -> Operation[list[str]]:
    """Let a version that a live worker has become current where no live worker has the current one.

    `documents` come from `hashes`. Return the names of which the current version has changed.
    """
    wanted = [
        label(str(document["_id"]), str(version.get("hash")))
        for document in documents
        for version in _list(document.get("versions"))
        if isinstance(version, Mapping)
    ]
    live = yield from served_by_others("", wanted)
    changed = []
    for document in documents:
        name, now = str(document["_id"]), str(document.get("current"))
        versions = [one for one in _list(document.get("versions")) if isinstance(one, Mapping)]
        since = {str(one.get("hash")): one.get("since") for one in versions}
        found = successor([*since], now, {one for one in since if label(name, one) in live})
        if found is not None:
            result = yield handlers("update_one", *statements.succeed(name, now, since.get(now), found))
            if result.matched_count:
                changed.append(name)
    return changed
