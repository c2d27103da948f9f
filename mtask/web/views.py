"""The answers: tasks, flows, workers, controls and schedules in JSON types, as one caller may see them.

Field names are those of the documents. Instants are ISO 8601 text in UTC. Params and returns are extended JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mtask.client import AsyncClient
from mtask.doctor.position import Position
from mtask.kernel.document.task import Task, WorkerDocument
from mtask.kernel.driver.extended_json import extended_exactly
from mtask.search.partial import TaskFields
from mtask.web.access import Caller

Json = dict[str, Any]
#: The fields of a task that an answer leaves out: they are notes between workers.
_INNER = frozenset({"owed_since", "owed_tasks", "quiet_time", "callback_owed"})
#: The fields of a task in a list, unless the caller asks for others.
LISTED = (
    "status",
    "queue",
    "task_state.create_time",
    "task_state.start_time",
    "task_state.not_after",
    "task_state.next_preempt_time",
    "task_state.finish_time",
    "task_state.failed_cnt",
    "fail_reason",
)


def answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return answer_of(text_of(document), status, headers)


def text_of(document: Any) -> bytes:
    """Return a document as JSON."""
    return _ENCODER.encode(document).encode("ascii")


def answer_of(text: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer with a text that is JSON already."""
    sent = {"Cache-Control": "no-store", **(headers or {})}
    return Response(text, status, headers=sent, media_type="application/json")


class EventStream(StreamingResponse):
    """A stream of server-sent events. Its end, however it comes, closes what the stack holds."""

    def __init__(
        self, written: AsyncIterator[str], stack: AsyncExitStack, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        sent = {**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(written, headers=sent, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the reader or the server ends."""
        async with self._stack:
            await super().__call__(scope, receive, send)


_ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def instant(moment: datetime) -> str:
    """Return an instant as ISO 8601 text in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def plain(value: Any) -> Any:
    """Return a value of mtask's own in JSON types."""
    if value is None or type(value) is str or type(value) is bool:
        return value
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else extended_exactly(value)


def record(found: Any) -> Json:
    """Return the fields of a dataclass that holds no other dataclass. Unlike `asdict`, this copies no value."""
    return {field.name: plain(getattr(found, field.name)) for field in fields(found)}


def task(found: Task, caller: Caller) -> Json:
    """Return a task."""
    made: Json = found.model_dump(by_alias=True, exclude_unset=True, exclude=set(_INNER))
    made["params"] = None
    for run in made["task_state"]["worker_states"]:
        run.pop("session_id", None)
        run.pop("returns", None)
    if "again" in made:
        del made["again"]["params"]
    for former in made.get("former_params", ()):
        former["params"] = None
    made = plain(made)
    made["params"] = extended_exactly(found.params)
    for shown, stored in zip(made["task_state"]["worker_states"], found.runs, strict=True):
        if stored.returns is not None:
            shown["returns"] = extended_exactly(stored.returns)
    if found.again is not None:
        made["again"]["params"] = extended_exactly(found.again.params)
    for former, stored_one in zip(made.get("former_params", ()), found.former_params, strict=True):
        former["params"] = extended_exactly(stored_one.params)
    if found.lookup:
        made["lookup"] = {name: [extended_exactly(v) for v in values] for name, values in found.lookups.items()}
    return _with_shown_ids(made, found, caller)


def _with_shown_ids(made: Json, found: Task, caller: Caller) -> Json:
    made["_id"], made["key"] = caller.shown_id(found.id), caller.shown_key(found.key)
    if caller.tenant is None:
        return made
    made.pop("tenant", None)
    state, flow, chain = made["task_state"], made.get("flow"), made.get("chain")
    if state.get("next_id") is not None:
        state["next_id"] = caller.shown_id(state["next_id"])
    if state.get("unpublished"):
        state["unpublished"] = [caller.shown_id(one) for one in state["unpublished"]]
    if state.get("reason") is not None:
        state["reason"] = caller.shown_text(state["reason"])
    if flow is not None:
        for field in ("key", "head"):
            if flow.get(field) is not None:
                flow[field] = caller.shown_key(flow[field])
        for field in ("after", "ancestors"):
            if field in flow:
                flow[field] = [caller.shown_id(one) for one in flow[field]]
        if flow.get("held_by") is not None:
            flow["held_by"] = caller.shown_id(flow["held_by"])
    if chain is not None:
        for field in ("before", "first"):
            chain[field] = caller.shown_id(chain[field])
    return made


def etag(found: Task) -> str:
    """Return the ETag of a task: of all that a caller may want to change, and not of its pings."""
    return f'"{AsyncClient.etag(found)}"'


def same_params(given: Any, stored: Any) -> bool:
    """Whether two values of params are equal. 1 and 1.0 and true are different; the order of members is nothing."""
    # Value by value: to convert all of them takes as long as to parse them, and few differ.
    kind = type(given)
    if isinstance(given, Mapping) and isinstance(stored, Mapping):
        return given.keys() == stored.keys() and all(same_params(item, stored[name]) for name, item in given.items())
    if isinstance(given, list | tuple) and isinstance(stored, list | tuple):
        return len(given) == len(stored) and all(map(same_params, given, stored))
    if kind is type(stored) and kind is not float and given == stored:
        return True
    return _as_json(given) == _as_json(stored)


def _as_json(value: Any) -> str:
    return json.dumps(extended_exactly(value), sort_keys=True)


def listed(found: TaskFields, caller: Caller) -> Json:
    """Return a task of a list, with the fields that were asked for."""
    return {
        "_id": caller.shown_id(found.id),
        "name": found.name,
        "key": caller.shown_key(found.key),
        "fields": {field: value if type(value) is str else _field(value) for field, value in found.items()},
    }


def _field(value: Any) -> Any:
    return instant(value) if isinstance(value, datetime) else extended_exactly(value)


def position(found: Position, caller: Caller) -> Json:
    """Return the position of a task."""
    made: Json = plain(asdict(found))
    made["task_id"], made["status"] = caller.shown_id(found.task_id), found.status.value
    for reason in made["reasons"]:
        reason["message"] = caller.shown_text(reason["message"])
    return made


def worker(found: WorkerDocument, now: datetime) -> Json:
    """Return a worker."""
    made: Json = plain(found.model_dump(by_alias=True, exclude={"controls_seen", "incarnation", "pid_scope"}))
    return {**made, "is_live": found.is_live(now)}
