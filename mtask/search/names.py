"""The names of all tasks. No index begins with the name, but `_id` does, so one seek finds the next name.

A store remembers the names that it has found. So the next search asks the server once: for an id that has none of these
names. A name that no task has any more does no harm: nothing is found under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtask.kernel.driver.operation import Call, Operation, tasks

#: The most names that are looked for.
MOST = 50


def names_of_tasks() -> Operation[list[str] | None]:
    """Return the names of all tasks, perhaps with names that tasks had before. None: there are too many."""
    remembered: set[str] = yield Call("names", "get")
    names = set(remembered)
    #: Each id that has no name, as it is malformed.
    nameless: set[str] = set()
    while len(names) + len(nameless) <= MOST:
        unknown = _with_none_of(names, nameless)
        found = yield tasks("find", unknown, {"_id": 1}, sort=[("_id", 1)], limit=1, hint="_id_").for_everybody()
        if not found:
            remembered |= names
            return sorted(names)
        name, colon, _ = found[0]["_id"].partition(":")
        known = names if colon else nameless
        if name in known:  # an id that is no UTF-8: what was read of it is not what the server compares
            break
        known.add(name)
    remembered.clear()  # of these names, some may be gone
    return None


def _with_none_of(names: set[str], nameless: set[str]) -> dict[str, Any]:
    """Match the tasks whose ids lie between the ranges of these names, and are none of the others."""
    # The ids of a name lie between its colon and the character behind the colon.
    passed = sorted([*((f"{name}:", f"{name};") for name in names), *((one, f"{one}\0") for one in nameless)])
    starts = ["", *(high for _, high in passed)]
    gaps: Sequence[dict[str, Any]] = [
        {"_id": {"$gte": start, "$lt": low}} for start, (low, _) in zip(starts, passed, strict=False)
    ]
    return {"$or": [*gaps, {"_id": {"$gte": starts[-1]}}]}
