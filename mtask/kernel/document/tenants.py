"""Tenants: whose a task is. The stored key of a tenant's task begins with the tenant and a colon.

A removal is reported by the task's `_id` alone. So the `_id` says whose the task was, and the field `tenant` repeats it
for the indexes.
"""

from __future__ import annotations

import re

from mtask.errors import InvalidInput, InvalidKey, shown
from mtask.kernel.document.identity import MAX_KEY_BYTES, check_key

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
