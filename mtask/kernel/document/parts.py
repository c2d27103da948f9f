"""The parts of a task's document that features use. The document is one contract, which other languages write, too."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, Strict

from mtask.kernel.document.options import PositiveCount

#: The fields that a task has only where they are given. A publish that replaces a task replaces these, too.
OPTIONAL = ("sealed", "lookup", "callback", "trace")
#: The fields that only workers of a later mtask know: the first revision of the schema whose workers know each, and
#: what they are called. An older worker would leave undone what the field asks for.
KNOWN_SINCE = {"callback": (6, "callbacks")}
#: The statuses that a callback can tell.
Told = Literal["SUCCESS", "FAIL", "CANCELED"]
TOLD: tuple[Told, ...] = ("SUCCESS", "FAIL", "CANCELED")
MAX_URL = 2_000
#: The most ends of a task that wait to be told. They wait for seconds, unless no worker is there for long. Of more
#: ends, the oldest is dropped.
MAX_OWED = 100
#: The name of a secret. A tenant's secrets have names with a slash: TENANT/NAME.
SECRET_PATTERN = r"^[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})?$"
_TENANT = r"^[A-Za-z0-9_.-]{1,64}$"
Instant = Annotated[AwareDatetime, Strict()]
Text = Annotated[str, Strict()]


class Callback(BaseModel):
    """Whom the ends of a task are told to."""

    model_config = ConfigDict(defer_build=True, extra="ignore", populate_by_name=True)

    url: Annotated[Text, Field(pattern=r"^https?://", max_length=MAX_URL)]
    on: Annotated[list[Told], Field(min_length=1, max_length=3)]
    #: The name of the secret with which messages are signed. Workers know the secret itself.
    secret: Annotated[Text, Field(pattern=SECRET_PATTERN)] | None = None
    #: The tenant whose token published the task. Messages show keys without the tenant's name.
    tenant: Annotated[Text, Field(pattern=_TENANT)] | None = None


class OwedCallback(BaseModel):
    """One end of a task that is still to be told. `url`, `secret` and `tenant` are those of the callback at the end."""

    model_config = ConfigDict(defer_build=True, extra="ignore", populate_by_name=True)

    number: PositiveCount  #: the number of the end: 1 for the first one that is told
    status: Told
    time: Instant  #: the finish_time
    url: Text
    secret: Text | None = None
    tenant: Text | None = None
