"""Buckets: a hash of its `_id` puts each task into one of a fixed number of buckets, which workers share out.

The server's twin is `mtask.store.statements.expressions.bucket`. Both use the hash of MongoDB's hashed indexes.
"""

from __future__ import annotations

import hashlib

#: A power of two, so that the low bits of a hash are the bucket's number.
BUCKET_CNT = 1024

#: The first bytes that the server hashes: its seed, 0, and the type of the value, string.
_STEM = hashlib.md5(bytes(4) + (15).to_bytes(4, "little"), usedforsecurity=False)


def bucket_of(task_id: str) -> int:
    """Return the bucket of a task."""
    text = task_id.encode("utf-8", "surrogatepass") + b"\0"
    hashed = _STEM.copy()
    hashed.update(len(text).to_bytes(4, "little") + text)
    return int.from_bytes(hashed.digest()[:2], "little") % BUCKET_CNT
