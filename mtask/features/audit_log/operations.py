"""Operations on the action log. It is insert-only: no operation changes or removes a document.

The server's clock gives the time of each document: the server replaces an empty timestamp in an insert. So the log is
in the order of the inserts, whatever the clocks of the clients say.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from bson.timestamp import Timestamp

from mtask.errors import DuplicateKey
from mtask.features.audit_log.rules import KEPT_FOR, MAX_DETAIL, MAX_TARGET, RESULT_SUFFIX, Actor, Intent
from mtask.kernel.document.task import SCHEMA_VERSION
from mtask.kernel.driver.operation import Operation, actions

Document = dict[str, Any]
#: The time limit of one write to the log. It is short, because an action waits for it.
_PATIENCE = timedelta(seconds=3)


def begin(actor: Actor, intent: Intent, target: str, detail: str = "", action_id: str | None = None) -> Operation[str]:
    """Write down who is about to do what; return the action's id. With an `action_id`, it is written down once."""
    action_id = action_id or secrets.token_hex(12)
    said = {"actor": actor.name, "via": actor.via, "intent": intent, "target": _cut(target, MAX_TARGET)}
    if detail:
        said["detail"] = _cut(detail, MAX_DETAIL)
    yield from _insert(action_id, said)
    return action_id


def end(action_id: str, result: str) -> Operation[None]:
    """Write down what came of an action."""
    yield from _insert(action_id + RESULT_SUFFIX, {"result": _cut(result, MAX_DETAIL)})


def _insert(document_id: str, said: Mapping[str, Any]) -> Operation[None]:
    # No decision rests on expire_time, so the client's clock is good enough for it.
    expiry = datetime.now(UTC) + KEPT_FOR
    document = {"_id": document_id, "time": Timestamp(0, 0), **said, "expire_time": expiry}
    with suppress(DuplicateKey):  # another process, or the same one before, has written it
        yield actions("insert_one", {**document, "schema_version": SCHEMA_VERSION}).within(_PATIENCE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


#: The last second that a BSON timestamp holds. It lies in the year 2106.
_LAST_SECOND = 2**32 - 1


def find(
    criteria: Mapping[str, Sequence[str]], since: datetime | None, limit: int, after: str | None
) -> Operation[list[Document]]:
    """Return actions, the newest first, each with its `result` and `end_time` if these are known.

    `criteria` gives the values that each field may have. `after` is the id of the action before the first one.
    """
    matched: Document = {"actor": {"$exists": True}, **{field: {"$in": [*of]} for field, of in criteria.items()}}
    bounds: Document = {}
    if since is not None:
        bounds["$gte"] = Timestamp(min(_LAST_SECOND, max(0, int(since.timestamp()))), 0)
    if after is not None:
        last = yield actions("find_one", {"_id": after}, {"time": 1})
        if last is None:
            return []  # it has left the log, and so have all before it
        bounds["$lt"] = last["time"]
    if bounds:
        matched["time"] = bounds
    found: list[Document] = yield actions("find", matched, sort=[("time", -1)], limit=limit)
    if not found:
        return []
    ids = [str(document["_id"]) + RESULT_SUFFIX for document in found]
    results: list[Document] = yield actions("find", {"_id": {"$in": ids}})
    by_id = {str(result["_id"]).removesuffix(RESULT_SUFFIX): result for result in results}
    for document in found:
        result = by_id.get(str(document["_id"]), {})
        document["time"] = _instant(document["time"])
        document["result"] = result.get("result")
        document["end_time"] = _instant(result.get("time"))
    return found


def _instant(stamp: Any) -> datetime | None:
    return stamp.as_datetime().astimezone(UTC) if isinstance(stamp, Timestamp) else None
