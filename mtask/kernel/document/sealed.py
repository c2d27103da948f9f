"""Sealed values: what a reader without the data key has in place of an encrypted value."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, ValidatorFunctionWrapHandler, WrapValidator

from mtask.errors import DecryptionFailed

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
