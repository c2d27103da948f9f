"""Slots: each task falls into one of a fixed number by its `_id`, here as on the server, so that workers can share.

The server's twin is `mtask.store.statements.expressions.slot`: the hash is the one of its hashed indexes.
"""

from __future__ import annotations

import hashlib

#: A power of two, so that the low bits of a hash are its slot.
BUCKET_CNT = 1024

#: What the server's hash begins with: its seed, 0, and the kind of value, text.
_STEM = hashlib.md5(bytes(4) + (15).to_bytes(4, "little"), usedforsecurity=False)


def bucket_of(task_id: str) -> int:
    """Return the slot of a task."""
    text = task_id.encode("utf-8", "surrogatepass") + b"\0"
    hashed = _STEM.copy()
    hashed.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(hashed.digest()[:2], "little") % BUCKET_CNT
