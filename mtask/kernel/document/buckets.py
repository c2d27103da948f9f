"""Buckets: each task belongs to one bucket, by a hash of its `_id`. The workers divide the buckets among themselves.

The server computes the same bucket with `mtask.kernel.statements.expressions.bucket`. Both use the hash function of
MongoDB's hashed indexes.
"""

from __future__ import annotations

import hashlib

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
