"""The updates of `handlers`, and what is read of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtask.features.registry.rules import MAX_VERSIONS
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.statements import expressions as x
from mtask.kernel.statements.derive import Pipeline

#: The stored versions. A document may be malformed.
_VERSIONS = {"$cond": [{"$isArray": "$versions"}, "$versions", []]}


def start(declared: Mapping[str, Any], *, is_served: bool) -> Pipeline:
    """Store that a worker starts this version of a handler. Send it as an upsert by the name.

    The version becomes current if no live worker has it (`is_served` is False), or if it is new: of several workers
    of a new version that start at once, each finds the others. A version that a live worker has stays where it is.
    """
    version_hash = declared["hash"]
    is_known = {"$in": [x.literal(version_hash), {"$map": {"input": _VERSIONS, "in": "$$this.hash"}}]}
    others = {"$filter": {"input": _VERSIONS, "cond": {"$ne": ["$$this.hash", x.literal(version_hash)]}}}
    fresh = {"$mergeObjects": [x.literal(dict(declared)), {"since": x.NOW}]}
    renewed = {
        "current": x.literal(version_hash),
        "versions": {"$slice": [{"$concatArrays": [others, [fresh]]}, -MAX_VERSIONS]},
        "schema_version": SCHEMA_VERSION,
    }
    if not is_served:
        return [{"$set": renewed}]
    stays = {"current": "$current", "versions": "$versions", "schema_version": "$schema_version"}
    return [{"$set": {name: {"$cond": [is_known, stays[name], value]} for name, value in renewed.items()}}]


def succeed(name: str, current: str, since: Any, successor: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the filter and the update by which another version becomes current.

    `since` is that of the current version: if a worker has started it anew meanwhile, nothing changes.
    """
    as_read = {"$elemMatch": {"hash": current, "since": since}}
    guard = {"_id": name, "current": current, "versions": as_read, "versions.hash": successor}
    return guard, {"$set": {"current": successor}}


def current_version() -> dict[str, Any]:
    """Return the projection of a document with its current version alone."""
    is_current = {"$eq": ["$$this.hash", "$current"]}
    return {"current": 1, "schema_version": 1, "versions": {"$filter": {"input": _VERSIONS, "cond": is_current}}}


def hashes() -> dict[str, Any]:
    """Return the projection of a document with the hashes of its versions, and when these were started."""
    return {"current": 1, "versions.hash": 1, "versions.since": 1}
