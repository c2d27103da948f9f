"""What holds for a queue, or for a task name, whoever works on it: the documents in the collection `controls`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from mtask.errors import InvalidInput
from mtask.model.documents import Instant, Text
from mtask.model.identity import check_name, check_text
from mtask.model.options import WHOLE, PositiveCount

Kind = Literal["queue", "name"]
#: What one document can count.
MAX_PERMITS = 1_000
MAX_KEPT = 1_000_000
MIN_WINDOW_MS, MAX_WINDOW_MS = 100, 86_400_000
#: What to do about a control that cannot be read.
MENDING = (
    "set what is malformed anew (mtask pause, resume, limit or keep), or mend the document by hand, or remove it: "
    "then nothing holds"
)


class Limit(BaseModel):
    """How many runs at once, and how many starts in any window of time, over all workers; None: any number."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    concurrency: Annotated[int, Field(ge=1, le=MAX_PERMITS), WHOLE] | None = None
    starts: Annotated[int, Field(ge=1, le=MAX_PERMITS), WHOLE] | None = None
    window_ms: Annotated[int, Field(ge=MIN_WINDOW_MS, le=MAX_WINDOW_MS), WHOLE] | None = None

    @model_validator(mode="after")
    def _starts_have_a_window(self) -> Self:
        if (self.starts is None) != (self.window_ms is None):
            raise ValueError("starts and window_ms go together")
        if self.concurrency is None and self.starts is None:
            raise ValueError("it limits nothing: give concurrency, or starts and window_ms")
        return self

    def __str__(self) -> str:
        parts = [] if self.concurrency is None else [f"{self.concurrency} at once"]
        if self.starts is not None and self.window_ms is not None:
            parts.append(f"{self.starts} starts in {self.window_ms / 1000:g} s")
        return ", ".join(parts)


class Control(BaseModel):
    """What holds for one queue or one task name."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    id: Annotated[Text, Field(alias="_id")]  #: "queue:mail" or "name:send_email"
    kind: Kind
    target: Annotated[Text, Field(min_length=1)]
    paused: StrictBool = False
    limit: Limit | None = None  #: of the queue
    key_limit: Limit | None = None  #: of each limit_key in the queue
    #: How many finished tasks of the queue are kept, the newest; None: all. A FAIL and a CANCELED are of one kind.
    keep_success: Annotated[int, Field(ge=0, le=MAX_KEPT), WHOLE] | None = None
    keep_fail: Annotated[int, Field(ge=0, le=MAX_KEPT), WHOLE] | None = None
    #: Counts the changes: a worker says which it goes by.
    revision: PositiveCount
    update_time: Instant
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _identity_holds(self) -> Self:
        if self.id != control_id(self.kind, self.target):
            raise ValueError(f"_id {self.id!r} is not kind:target")
        of_queues = (self.limit, self.key_limit, self.keep_success, self.keep_fail)
        if self.kind == "name" and any(value is not None for value in of_queues):
            raise ValueError("limits and what is kept are for queues")
        return self


class Start(BaseModel):
    """A start that is counted."""

    task_id: Text
    token: Text  #: the claim's
    time: Instant  #: of the claim; before it has landed, the latest at which it can be


class Running(BaseModel):
    """A run that takes up a place."""

    task_id: Text
    token: Text
    claim_by: Instant  #: until when it may be claimed


class PermitPoolDocument(BaseModel):
    """What is counted for a limited queue, or one limit_key in it: one document in the collection `places`."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    id: Annotated[Text, Field(alias="_id")]  #: the queue, or queue and limit_key, as a JSON list
    starts: list[Start] = Field(default_factory=list)
    running: list[Running] = Field(default_factory=list)
    expire_time: Instant | None = None
    schema_version: Literal[1]


def control_id(kind: Kind, target: str) -> str:
    """Return the `_id`; a kind holds no colon, so no two targets share one."""
    return f"{kind}:{target}"


def check_target(queue: object, name: object) -> tuple[Kind, str]:
    """Return what is meant, a queue or a task name; raise InvalidInput."""
    if (queue is None) == (name is None):
        raise InvalidInput("say which: a queue, or the name of a task, and not both.", field="queue")
    return ("queue", check_text("queue", queue)) if name is None else ("name", check_name(name))
