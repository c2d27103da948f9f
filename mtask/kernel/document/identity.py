"""The names and keys of tasks, and the `_id` of a task, which consists of both."""

from __future__ import annotations

import re
import secrets
from datetime import datetime

from mtask.errors import InvalidInput, InvalidKey, InvalidName, shown

NAME_PATTERN = r"^[A-Za-z0-9_./-]{1,256}$"
MAX_KEY_BYTES = 512
MAX_TEXT_BYTES = 256

_NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold the text. BSON uses UTF-8.

    Python strings can hold lone surrogates, but UTF-8 cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_name(name: object) -> bool:
    """Whether this is a valid task name."""
    return isinstance(name, str) and _NAME.match(name) is not None


def check_name(name: object) -> str:
    """Return the task name; raise InvalidName."""
    if not isinstance(name, str):
        raise InvalidName(name, f"it is {type(name).__name__}, not text")
    if not _NAME.match(name):
        raise InvalidName(name, "it is empty" if not name else "it is too long or holds another character")
    return str(name)


def check_key(key: object) -> str:
    """Return the key; raise InvalidKey."""
    if not isinstance(key, str):
        raise InvalidKey(key, f"it is {type(key).__name__}, not text")
    if not key:
        raise InvalidKey(key, "it is empty")
    try:
        size = len(key.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidKey(key, "it holds a lone surrogate, which is not text") from None
    if size > MAX_KEY_BYTES:
        raise InvalidKey(key, f"it has {size} bytes")
    return str(key)


def check_text(field: str, text: object) -> str:
    """Return the text, for example a queue or a worker_id. `field` is the name of the text in the error.

    Raises InvalidInput unless the text is printable, holds no comma and has 1 to 256 bytes.
    """
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise InvalidInput(f"{field} {shown(text)}: use non-empty printable text.", field=field)
    if "," in text:
        raise InvalidInput(f"{field} {shown(text)}: a comma separates entries and cannot be part of one.", field=field)
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise InvalidInput(f"{field} {shown(text, 40)}: at most {MAX_TEXT_BYTES} bytes.", field=field)
    return str(text)


def task_id_of(name: str, key: str) -> str:
    """Return the `_id` of a task. A name holds no colon, so no two tasks share an `_id`."""
    return f"{name}:{key}"


def split_task_id(task_id: str) -> tuple[str, str]:
    """Return the name and the key in an `_id`; raise InvalidInput if the `_id` has no colon."""
    name, colon, key = task_id.partition(":")
    if not colon:
        raise InvalidInput(
            f"{shown(task_id)} is no task id: a task id is NAME:KEY, so give the key, too.", field="task"
        )
    return check_name(name), check_key(key)


def fresh_key(now: datetime) -> str:
    """Return a new key of 32 hex digits: 48 bits of time in ms, then 80 random bits. The keys sort by time."""
    return f"{int(now.timestamp() * 1000):012x}{secrets.token_hex(10)}"


def fresh_token() -> str:
    """Return 96 random bits in hex. They serve as the random part of run_ids, or as a worker's incarnation."""
    return secrets.token_hex(12)
