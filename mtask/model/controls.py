"""What holds for a queue, or for a task name, whoever works on it: the documents in the collection `controls`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from mtask.errors import InvalidInput
from mtask.model.documents import Instant, Text
from mtask.model.identity import check_name, check_text
from mtask.model.options import WHOLE

Kind = Literal["queue", "name"]


class Control(BaseModel):
    """What holds for one queue or one task name."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    id: Annotated[Text, Field(alias="_id")]  #: "queue:mail" or "name:send_email"
    kind: Kind
    target: Annotated[Text, Field(min_length=1)]
    paused: StrictBool = False
    #: Counts the changes: a worker says which it goes by.
    revision: Annotated[int, Field(ge=1), WHOLE]
    update_time: Instant
    schema_version: Literal[1]

    @model_validator(mode="after")
    def _identity_holds(self) -> Self:
        if self.id != control_id(self.kind, self.target):
            raise ValueError(f"_id {self.id!r} is not kind:target")
        return self


def control_id(kind: Kind, target: str) -> str:
    """Return the `_id`; a kind holds no colon, so no two targets share one."""
    return f"{kind}:{target}"


def check_target(queue: object, name: object) -> tuple[Kind, str]:
    """Return what is meant, a queue or a task name; raise InvalidInput."""
    if (queue is None) == (name is None):
        raise InvalidInput("say which: a queue, or the name of a task.", field="queue")
    return ("queue", check_text("queue", queue)) if name is None else ("name", check_name(name))
