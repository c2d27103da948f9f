"""The other workers: who ranks where for a task, so that many who see it do not all reach for it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtask.model.slots import SLOT_CNT, slot_of

#: The rank that waits longest, however few the workers are: see `mtask.worker.queue.MAX_STAGGER`.
_BEHIND = 3
_SCORES = struct.Struct(f"<{SLOT_CNT}I")
#: A rank is kept in a byte.
_LAST = 255


class Peers:
    """The live workers, by the task names they serve. All of them rank all of them alike, for each slot of tasks."""

    def __init__(self, worker_id: str, queues: Iterable[str] | None = None) -> None:
        """`queues`: those that this worker serves; None: the same as all others."""
        self._worker_id = worker_id
        self._queues = None if queues is None else set(queues)
        self._others: dict[str, tuple[str, ...]] = {}
        #: Names that some serve in other queues than this worker does: their tasks cannot be shared alike.
        self._unshared: set[str] = set()
        #: By who else there is: this worker's rank for each slot.
        self._ranks: dict[tuple[str, ...], bytes] = {}

    def update(self, workers: Iterable[Mapping[str, Any]]) -> None:
        """Take the live workers' documents; paused ones do not count."""
        others: dict[str, set[str]] = {}
        self._unshared = set()
        for worker in workers:
            if worker["_id"] == self._worker_id or not worker.get("concurrency"):
                continue
            if worker.get("status") == "stopping":
                continue
            names = worker.get("names")
            for name in names if isinstance(names, list) else ():
                others.setdefault(str(name), set()).add(str(worker["_id"]))
                if self._queues is not None and not _are(worker.get("queues"), self._queues):
                    self._unshared.add(str(name))
        self._others = {name: tuple(sorted(ids)) for name, ids in others.items()}
        self._ranks = {ids: self._ranks[ids] for ids in self._others.values() if ids in self._ranks}

    def rank(self, task_id: str, name: str) -> int:
        """Return how many live workers that serve this name come before this one for the task."""
        others = self._others.get(name)
        return self._ranks_among(others)[slot_of(task_id)] if others else 0

    def last(self, name: str) -> int:
        """Return the rank behind every other live worker that serves this name; 0 where there is none."""
        others = len(self._others.get(name, ()))
        return others and max(others, _BEHIND)

    def shares(self, names: Iterable[str]) -> list[tuple[list[str], str]]:
        """Return the slots that this worker ranks first for: names, and for each slot "1" if it is among them, or "0".

        Nothing where it has all of them for itself: alone with each name, or with others that serve other queues, too.
        """
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            alike.setdefault(() if name in self._unshared else self._others.get(name, ()), []).append(name)
        if not any(alike):
            return []
        return [
            (found, "".join("0" if rank else "1" for rank in self._ranks_among(others)))
            for others, found in alike.items()
        ]

    def _ranks_among(self, others: tuple[str, ...]) -> bytes:
        ranks = self._ranks.get(others)
        if ranks is None:
            ranks = self._ranks[others] = _ranks(self._worker_id, others) if others else bytes(SLOT_CNT)
        return ranks


def _are(found: Any, queues: set[str]) -> bool:
    return isinstance(found, list) and {str(queue) for queue in found} == queues


def _ranks(worker_id: str, others: Sequence[str]) -> bytes:
    """Return how many of the others come before this worker, for each slot.

    Whoever scores highest for a slot comes first, unless it has its part of the slots already: none is to be done with
    its part of a backlog before the others. Those that stay keep nearly all of their slots when one comes or goes.
    """
    workers = sorted([worker_id, *others])
    me, room = workers.index(worker_id), [-(-SLOT_CNT // len(workers))] * len(workers)
    ranks = bytearray()
    for scores in zip(*map(_scores, workers), strict=True):
        first = scores.index(max(scores))
        if not room[first]:
            first = max((place for place, left in enumerate(room) if left), key=scores.__getitem__)
        room[first] -= 1
        before = sum(score > scores[me] for score in scores)
        ranks.append(0 if first == me else min(before + (scores[first] <= scores[me]), _LAST))
    return bytes(ranks)


def _scores(worker_id: str) -> tuple[int, ...]:
    """Return for each slot a number that looks random, and is the same in every process."""
    return _SCORES.unpack(hashlib.shake_128(worker_id.encode("utf-8", "surrogatepass")).digest(_SCORES.size))
