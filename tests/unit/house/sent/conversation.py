"""Conversations: what an operation sends if it gets these replies. And the one text of each thing that is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import EllipsisType
from typing import Any

from bson import json_util
from bson.int64 import Int64
from pymongo import IndexModel, UpdateOne

from mtask.errors import MtaskError
from mtask.kernel.driver.codec import Codec
from mtask.kernel.driver.operation import Call, Operation

#: The server's time in all replies.
NOW = datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
_CANONICAL = json_util.JSONOptions(json_mode=json_util.JSONMode.CANONICAL)
#: The most calls of one operation.
_MANY = 200


@dataclass(frozen=True, slots=True)
class Written:
    """The reply to a write: how many documents it has found and changed, and the id of the one that it has made."""

    matched_count: int = 0
    upserted_id: Any = None

    @property
    def modified_count(self) -> int:
        return self.matched_count

    @property
    def deleted_count(self) -> int:
        return self.matched_count


#: A reply, an error to raise, or `...`: what an empty database replies.
Reply = Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """An operation, and the replies that it gets. Thereafter it gets those of an empty database."""

    operation: Operation[Any]
    replies: Sequence[Reply | EllipsisType] = ()
    #: The fields with random values, or with this machine's time.
    random: Sequence[str] = ()
    #: Whether a condition of this operation holds a set: its values come in any order, and are sorted here.
    has_sets: bool = False

    def calls(self) -> list[Call]:
        """Return the calls, up to the operation's end or to an error that the user is told."""
        sent: list[Call] = []
        replies = iter(self.replies)
        try:
            call = next(self.operation)
            while True:
                sent.append(call)
                assert len(sent) <= _MANY, "the operation does not end"
                reply = next(replies, ...)
                if isinstance(reply, Exception):
                    call = self.operation.throw(reply)
                else:
                    call = self.operation.send(_of_nothing(call) if reply is ... else reply)
        except (StopIteration, MtaskError):
            pass
        left = [*replies]
        assert not left, f"replies to nothing: {left}"
        return sent


def told(
    operation: Operation[Any], *replies: Reply, random: Sequence[str] = (), has_sets: bool = False
) -> Conversation:
    """Return a conversation."""
    return Conversation(operation, replies, random, has_sets)


def _of_nothing(call: Call) -> Any:
    """Return what an empty database replies."""
    if call.method in ("find", "find_naive", "rows"):
        return []
    if call.method in ("insert_new", "upserted") or call.target == "names":
        return set()
    if call.method in ("count_documents", "estimated_document_count"):
        return 0
    if call.method == "command":
        cursor = {"id": 0, "firstBatch": [], "atClusterTime": None}
        return {"cursor": cursor, "n": 0, "localTime": NOW, "setName": "rs", "maxWireVersion": 21, "roles": []}
    if call.target == "codec":
        return Codec()
    if call.method in ("find_one", "find_one_and_update") or call.target == "session":
        return None
    return Written()


def texts(name: str, case: object, indent: int | None = None) -> dict[str, str]:
    """Return the text of each thing that a case sends, by its name. Without `indent`, it is short, and made fast."""
    if not isinstance(case, Conversation):
        return {name: json.dumps(_Plain().of(case), indent=indent, ensure_ascii=False)}
    calls = [call for call in case.calls() if call.target not in ("codec", "names")]
    named = [(name if len(calls) == 1 else f"{name}, call {place}", call) for place, call in enumerate(calls, 1)]
    plain = _Plain(case.random, case.has_sets)
    return {each: _text(call, plain, indent) for each, call in named}


def _text(call: Call, plain: _Plain, indent: int | None) -> str:
    def shown(value: object) -> str:
        return json.dumps(plain.of(value), indent=indent, ensure_ascii=False)

    lines = [f"{call.target}.{call.method}", *map(shown, call.args)]
    lines += [f"{name} = {shown(value)}" for name, value in call.kwargs.items()]
    if call.timeout is not None:
        lines.append(f"within {call.timeout}")
    if call.is_for_everybody:
        lines.append("for everybody")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Plain:
    """The form in which a value is shown: that of JSON. The order of fields stays, as the server sees it."""

    random: Sequence[str] = ()
    has_sets: bool = False

    def of(self, value: Any) -> Any:
        """Return a value in this form."""
        if isinstance(value, Mapping):
            return {
                name: "(random)" if name in self.random else self._field(name, part) for name, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.of(part) for part in value]
        if isinstance(value, UpdateOne):
            return {"update_one": self.of([value._filter, value._doc, {"upsert": value._upsert}])}
        if isinstance(value, IndexModel):
            return {"index": self.of(value.document)}
        if isinstance(value, datetime):  # what is encoded once is read without a zone
            return {"$date": value.replace(tzinfo=UTC).isoformat(timespec="milliseconds")}
        if value is None or (isinstance(value, str | int | float) and not isinstance(value, Int64)):
            return value
        return json_util.default(value, _CANONICAL)

    def _field(self, name: str, value: Any) -> Any:
        if self.has_sets and name == "$in" and all(isinstance(part, str) for part in value):
            return sorted(value)
        return self.of(value)
