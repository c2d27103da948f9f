"""The other workers: who ranks where for a task, so that many who see it do not all reach for it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
#: The rank that waits longest, however few the workers are: see `mtask.worker.queue.MAX_STAGGER`.
_BEHIND = 3


def _score(task_hash: int, worker_hash: int) -> int:
    """Return a number that looks random for each pair, and is the same in every process."""
    mixed = ((task_hash ^ worker_hash) * _MIX) & _MASK
    mixed ^= mixed >> 29
    return (mixed * _MIX) & _MASK


class Peers:
    """The live workers, by the task names they serve. Rendezvous hashing ranks them per task."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._own = zlib.crc32(worker_id.encode())
        self._others: dict[str, list[int]] = {}

    def update(self, workers: Iterable[Mapping[str, Any]]) -> None:
        """Take the live workers' documents; paused ones do not count."""
        others: dict[str, list[int]] = {}
        for worker in workers:
            if worker["_id"] == self._worker_id or not worker.get("concurrency"):
                continue
            if worker.get("status") == "stopping":
                continue
            seed = zlib.crc32(str(worker["_id"]).encode())
            names = worker.get("names")
            for name in names if isinstance(names, list) else ():
                others.setdefault(str(name), []).append(seed)
        self._others = others

    def rank(self, task_id: str, name: str) -> int:
        """Return how many live workers that serve this name come before this one for the task."""
        seeds = self._others.get(name)
        if not seeds:
            return 0
        task_hash = zlib.crc32(task_id.encode())
        own = _score(task_hash, self._own)
        return sum(_score(task_hash, seed) < own for seed in seeds)

    def last(self, name: str) -> int:
        """Return the rank behind every other live worker that serves this name; 0 where there is none."""
        others = len(self._others.get(name, ()))
        return others and max(others, _BEHIND)
