"""The parts of a task's document that features use. The document is one contract, which other languages write, too."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

from pydantic import AwareDatetime, BeforeValidator, Field, Strict, ValidatorFunctionWrapHandler, WrapValidator

from mtask.errors import DecryptionFailed
from mtask.kernel.document.options import PositiveCount
from mtask.kernel.document.values import Stored

#: The fields that a task has only where they are given. A publish that replaces a task replaces these, too.
OPTIONAL = ("sealed", "declared", "version", "lookup", "callback", "trace")
#: The fields that only workers of a later mtask know: the first revision of the schema whose workers know each, and
#: what they are called. An older worker would leave undone what the field asks for.
KNOWN_SINCE = {"callback": (6, "callbacks"), "expires": (11, "expiry")}
#: The fields by which a task may come to owe others something: news of its end, or the task as which it goes on.
OWING = ("flow", "chain", "callback")
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


class Callback(Stored):
    """Who is told of the ends of a task."""

    url: Annotated[Text, Field(pattern=r"^https?://", max_length=MAX_URL)]
    on: Annotated[list[Told], Field(min_length=1, max_length=3)]
    #: The name of the secret with which messages are signed. Workers know the secret itself.
    secret: Annotated[Text, Field(pattern=SECRET_PATTERN)] | None = None
    #: The tenant whose token published the task. Messages show keys without the tenant's name.
    tenant: Annotated[Text, Field(pattern=_TENANT)] | None = None


class OwedCallback(Stored):
    """One end of a task that is still to be told. `url`, `secret` and `tenant` are those of the callback at the end."""

    number: PositiveCount  #: the number of the end: 1 for the first one that is told
    status: Told
    time: Instant  #: the finish_time
    url: Text
    secret: Text | None = None
    tenant: Text | None = None


# --- sealed ----------------------------------------------------------------------------------------------

# Sealed values: what a reader without the data key has in place of an encrypted value.

#: The BSON subtype of encrypted values.
SUBTYPE = 6
#: The fewest bytes of an encrypted value: the kind of encryption, the id of the data key, the type of the value.
MIN_BYTES = 18
NO_KEYS = "no keys are given: use encryption=Encryption(...), or --encryption-key-file"
READABLE = "it must be encrypted, and is stored readable: publish the task anew, with the keys"


class Sealed(str):
    """An encrypted value that was not decrypted. As a text, it says so; each use as another value says why."""

    __slots__ = ("content", "field", "is_final", "task_id", "why")

    content: bytes
    field: str
    #: Whether no key makes it readable: it is not what was encrypted, or does not belong here.
    is_final: bool
    task_id: str
    why: str

    def __new__(
        cls, content: bytes, why: str = NO_KEYS, task_id: str = "", field: str = "", *, is_final: bool = False
    ) -> Sealed:
        """Keep the encrypted bytes, and the reason why they were not decrypted."""
        made = super().__new__(cls, "(encrypted)")
        made.content, made.why, made.task_id, made.field = bytes(content), why, task_id, field
        made.is_final = is_final
        return made

    def __repr__(self) -> str:
        return f"Sealed({self.why!r})"

    @property
    def error(self) -> DecryptionFailed:
        """The error that says why the value is not readable."""
        return DecryptionFailed(self.task_id, self.field, self.why)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self.error

    # These stand for the use of params or of a result. The texts of `str` stay usable: a reason is shown as it is.
    __getitem__ = get = _refuse


def refused(task_id: str, field: str, why: str = READABLE) -> Sealed:
    """Return what stands for a value that no key makes credible."""
    return Sealed(b"", why, task_id, field, is_final=True)


def is_sealed(value: Any) -> bool:
    """Whether a stored value is an encrypted one."""
    return getattr(value, "subtype", None) == SUBTYPE and isinstance(value, bytes) and len(value) >= MIN_BYTES


def is_encrypted(params: Any) -> bool:
    """Whether stored params are encrypted, or some of the calls that a task has collected."""
    return sealed_in(params) is not params


def sealed_in(value: Any) -> Any:
    """Return a stored value, sealed if it is encrypted. Among collected calls, the encrypted ones are sealed."""
    # Nearly all values are of these types. So nearly no value costs more than this look.
    if type(value) is dict:
        calls = value.get("calls")  # the params of a task that collects calls
        if type(calls) is list and any(map(is_sealed, calls)):
            return {**value, "calls": [Sealed(call) if is_sealed(call) else call for call in calls]}
        return value
    if value is None or type(value) is str:
        return value
    return Sealed(value) if is_sealed(value) else value


def _text(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    if type(value) is str or value is None:
        return check(value)
    if isinstance(value, Sealed):
        return value
    return Sealed(value) if is_sealed(value) else check(value)


#: A value that may be encrypted, and a text that may be.
SealedAny = Annotated[Any, BeforeValidator(sealed_in)]
SealedText = WrapValidator(_text)
