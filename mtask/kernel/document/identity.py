"""The names and keys of tasks, and the `_id` of a task, which consists of both."""

from __future__ import annotations

import hashlib
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


# --- tenants ---------------------------------------------------------------------------------------------

# Tenants: whose a task is. The stored key of a tenant's task begins with the tenant and a colon.
#
# A removal is reported by the task's `_id` alone. So the `_id` says whose the task was, and the field `tenant` repeats
# it for the indexes.

TENANT_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"

#: The number of characters behind a common beginning that `between` varies, and the number of values of each.
_DIGITS, _BASE = 6, 128

_TENANT = re.compile(TENANT_PATTERN.removesuffix("$") + r"\Z")


def is_tenant(tenant: object) -> bool:
    """Whether this is a valid tenant. It holds no colon, so no two tenants share a key."""
    return isinstance(tenant, str) and _TENANT.match(tenant) is not None


def check_tenant(tenant: object) -> str:
    """Return the tenant; raise InvalidInput."""
    if not is_tenant(tenant):
        raise InvalidInput(
            f"tenant {shown(tenant, 80)}: use 1 to 64 letters, digits, '_', '.' or '-', such as acme.", field="tenant"
        )
    return str(tenant)


def prefix_of(tenant: str) -> str:
    """Return the beginning of the stored keys of a tenant."""
    return f"{tenant}:"


def stored_key(tenant: str | None, key: object) -> str:
    """Return the stored form of a key that the tenant gave; raise InvalidKey. None: the tasks of no tenant."""
    checked = check_key(key)
    if tenant is None:
        return checked
    stored = prefix_of(tenant) + checked
    size = len(stored.encode("utf-8"))
    if size > MAX_KEY_BYTES:
        raise InvalidKey(key, f"it has {size} bytes together with its tenant and a colon")
    return stored


def own_key(tenant: str | None, key: str) -> str:
    """Return a stored key as its tenant gave it."""
    return key if tenant is None else key.removeprefix(prefix_of(tenant))


def between(first: str, last: str, part: float) -> str:
    """Return a text between two tenants. `part`: how far from the first one to the last, from 0 to 1.

    Tenants often have names that begin alike, so only what follows is varied.
    """
    alike = 0
    while alike < min(len(first), len(last)) and first[alike] == last[alike]:
        alike += 1
    low, high = (_as_number(text[alike:]) for text in (first, last))
    value, tail = low + int((high - low) * part), ""
    for _ in range(_DIGITS):
        value, digit = divmod(value, _BASE)
        tail = chr(digit) + tail
    return first[:alike] + tail.rstrip("\0")


def _as_number(text: str) -> int:
    value = 0
    for place in range(_DIGITS):
        value = value * _BASE + (ord(text[place]) % _BASE if place < len(text) else 0)
    return value


def is_key_of(tenant: str, key: str) -> bool:
    """Whether a stored key is one of this tenant."""
    return key.startswith(prefix_of(tenant)) and len(key) > len(prefix_of(tenant))


# --- firings ---------------------------------------------------------------------------------------------

# Firings: the key of a task that a schedule publishes is that of the schedule, a slash, and the time of the firing.

_FIRING = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")


def is_firing_of(schedule_key: str, key: str) -> bool:
    """Whether this is the stored key of a task that a firing published. `schedule_key`: see `stored_key`."""
    return key.startswith(f"{schedule_key}/") and _FIRING.fullmatch(key, len(schedule_key) + 1) is not None


# --- buckets ---------------------------------------------------------------------------------------------

# Buckets: each task belongs to one bucket, by a hash of its `_id`. The workers divide the buckets among themselves.
#
# The server computes the same bucket with `mtask.kernel.statements.expressions.bucket`. Both use the hash function of
# MongoDB's hashed indexes.

#: The number of buckets. It is a power of two, so that the low bits of a hash are the bucket's number.
BUCKET_CNT = 1024

#: The hash after the first bytes that the server hashes: the seed (0) and the type of the value (string).
_STEM = hashlib.md5(bytes(4) + (15).to_bytes(4, "little"), usedforsecurity=False)


def bucket_of(task_id: str) -> int:
    """Return the number of a task's bucket."""
    text = task_id.encode("utf-8", "surrogatepass") + b"\0"
    hashed = _STEM.copy()
    hashed.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(hashed.digest()[:2], "little") % BUCKET_CNT
