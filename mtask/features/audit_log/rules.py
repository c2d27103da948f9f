"""The action log: who changed what, and what came of it.

An action has one document in the collection `actions` before it begins, and another one after its end. Nobody ever
changes a document of this collection.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from mtask.kernel.document.task import Instant, Text
from mtask.kernel.document.values import Stored

#: The way by which an action came.
Via = Literal["python", "command line", "web"]
#: What an action is to do.
Intent = Literal[
    "cancel",
    "retry",
    "rerun",
    "update",
    "remove",
    "purge",
    "cancel flow",
    "retry flow",
    "bulk cancel",
    "bulk retry",
    "bulk remove",
    "pause",
    "resume",
    "limit",
    "breaker",
    "keep",
    "fair",
    "stop worker",
    "set worker",
    "add schedule",
    "pause schedule",
    "resume schedule",
    "remove schedule",
    "create data key",
    "remove data key",
]
Stamp: TypeAlias = Any  #: a BSON timestamp, which only the store can name

#: The result of an action that was carried out. Any other result is the name of the error that refused it.
DONE = "done"
#: The time after which an action leaves the log.
KEPT_FOR = timedelta(days=90)
#: The most characters of a target, and of a detail.
MAX_TARGET, MAX_DETAIL = 1_000, 500
#: The end of the id of the document that holds an action's result.
RESULT_SUFFIX = ":result"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and by which way: a user of the operating system, a service, or the name of a token."""

    name: str
    via: Via


class ActionDocument(Stored):
    """One document in the collection `actions`: the beginning of an action, or its result."""

    id: Annotated[Text, Field(alias="_id", min_length=1)]  #: a result has the action's id with ":result" behind it
    #: When the server stored the document. The server fills this in, to the second, and no two have the same.
    time: Stamp = None
    actor: Annotated[Text, Field(min_length=1)] | None = None
    via: Via | None = None
    intent: Intent | None = None
    #: What the action concerns: "task:send_email:42", "queue:mail", "name:send_email", "worker:a", "schedule:nightly",
    #: "flow:order/7", or "tasks" for many of them.
    target: Annotated[Text, Field(max_length=MAX_TARGET)] | None = None
    detail: Annotated[Text, Field(max_length=MAX_DETAIL)] | None = None
    result: Annotated[Text, Field(max_length=MAX_DETAIL)] | None = None
    expire_time: Instant  #: when the TTL index removes it
    schema_version: Literal[1]
