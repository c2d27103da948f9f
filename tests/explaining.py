"""What the server examines for the calls of an operation, told by `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.driver.stores import CODEC, SyncStore

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Examined:
    """What one call examined, and how many documents it returned."""

    keys: int
    documents: int
    returned: int
    stages: frozenset[str]


def examined_by(store: SyncStore, operation: Operation[Any]) -> tuple[Any, list[Examined]]:
    """Run an operation; return its result, and what each of its finds and aggregations on tasks examined."""
    found: list[Examined] = []
    try:
        call = next(operation)
        while True:
            if call.target == "database" and "count" in call.args[0]:
                found.append(explained(store, call))
            if call.target == "tasks" and call.method in ("find", "find_naive", "find_one", "rows", "count_documents"):
                found.append(explained(store, call))
            call = operation.send(store.run(only(call)))
    except StopIteration as stop:
        return stop.value, found


def only(call: Call) -> Operation[Any]:
    """Return an operation that makes this one call."""
    return (yield call)


def explained(store: SyncStore, call: Call) -> Examined:
    """Explain a call. The server runs it once for that."""
    command = _command(call)
    plan = store.database.command("explain", command, verbosity="executionStats", codec_options=CODEC)
    stages = list(_stages(plan))
    totals = [stage["executionStats"] for stage in stages if "executionStats" in stage]
    assert len(totals) == 1, plan
    assert totals[0]["executionSuccess"]
    names = frozenset(str(stage["stage"]) for stage in _stages(totals[0]) if "stage" in stage)
    return Examined(totals[0]["totalKeysExamined"], totals[0]["totalDocsExamined"], totals[0]["nReturned"], names)


def _command(call: Call) -> Document:
    if call.target == "database":
        return dict(call.args[0])
    hint = {"hint": call.kwargs["hint"]} if "hint" in call.kwargs else {}
    if call.method == "rows":
        return {"aggregate": "tasks", "pipeline": call.args[0], "cursor": {}, **hint}
    if call.method == "count_documents":
        pipeline = [{"$match": call.args[0]}, {"$group": {"_id": 1, "n": {"$sum": 1}}}]
        return {"aggregate": "tasks", "pipeline": pipeline, "cursor": {}, **hint}
    projection = call.args[1] if len(call.args) > 1 and call.args[1] is not None else {}
    limit = 1 if call.method == "find_one" else call.kwargs.get("limit", 0)
    made: Document = {"find": "tasks", "filter": call.args[0], "projection": projection, "limit": limit, **hint}
    made["skip"] = call.kwargs.get("skip", 0)
    if "sort" in call.kwargs:
        made["sort"] = dict(call.kwargs["sort"])
    return made


def _stages(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for inner in node.values():
            yield from _stages(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _stages(inner)
