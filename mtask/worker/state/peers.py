"""The other workers: who ranks where for a task, so that many who see it do not all reach for it."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

from mtask.model.buckets import BUCKET_CNT, bucket_of

#: The rank that waits longest, however few the workers are: see `mtask.worker.state.queue.MAX_STAGGER`.
_BEHIND = 3
#: Four bytes, as an array's kind.
_SCORE = "I"
_ONES = int.from_bytes(b"\1\0\0\0\0\0\0\0" * (BUCKET_CNT // 2), "little")
_ABOVE, _SCORES = _ONES << 63, _ONES * 0xFFFFFFFF
_PLACE_BITS = 20
_MAX_PLACE = 2**_PLACE_BITS - 1
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
        #: By worker, its scores.
        self._digests: dict[str, bytes] = {}

    def prepare(self, workers: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
        """Compute in any thread what `update` by these workers needs for these names: of a thousand it takes long."""
        others, _ = self._serving(workers)
        for ids in {others[name] for name in names if name in others}:
            if ids not in self._ranks:
                self._ranks[ids] = self._ranks_of(ids)

    def update(self, workers: Iterable[Mapping[str, Any]]) -> None:
        """Take the live workers' documents; paused ones do not count."""
        self._others, self._unshared = self._serving(workers)
        self._ranks = {ids: self._ranks[ids] for ids in self._others.values() if ids in self._ranks}
        live = {self._worker_id}.union(*self._others.values())
        self._digests = {worker: digest for worker, digest in self._digests.items() if worker in live}

    def _serving(self, workers: Iterable[Mapping[str, Any]]) -> tuple[dict[str, tuple[str, ...]], set[str]]:
        """Return by name who else serves it, and the names that some serve in other queues."""
        others: dict[str, set[str]] = {}
        unshared: set[str] = set()
        for worker in workers:
            if worker["_id"] == self._worker_id or not worker.get("concurrency"):
                continue
            if worker.get("status") == "stopping":
                continue
            names = worker.get("names")
            for name in names if isinstance(names, list) else ():
                others.setdefault(str(name), set()).add(str(worker["_id"]))
                if self._queues is not None and not _are(worker.get("queues"), self._queues):
                    unshared.add(str(name))
        return {name: tuple(sorted(ids)) for name, ids in others.items()}, unshared

    def rank(self, task_id: str, name: str) -> int:
        """Return how many live workers that serve this name come before this one for the task."""
        others = self._others.get(name)
        return self._ranks_among(others)[bucket_of(task_id)] if others else 0

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
            ranks = self._ranks[others] = self._ranks_of(others)
        return ranks

    def _ranks_of(self, others: tuple[str, ...]) -> bytes:
        if not others:
            return bytes(BUCKET_CNT)
        workers = (self._worker_id, *others)
        digests = {worker: self._digests.get(worker) or _digest(worker) for worker in workers}
        self._digests |= digests
        return _ranks(self._worker_id, others, digests)


def _are(found: Any, queues: set[str]) -> bool:
    return isinstance(found, list) and {str(queue) for queue in found} == queues


def _ranks(worker_id: str, others: Sequence[str], digests: Mapping[str, bytes]) -> bytes:
    """Return how many of the others come before this worker, for each slot.

    Whoever scores highest for a slot comes first, unless it has its part of the slots already: none is to be done with
    its part of a backlog before the others. Those that stay keep nearly all of their slots when one comes or goes.
    """
    workers = sorted([worker_id, *others])
    me, room = workers.index(worker_id), [-(-BUCKET_CNT // len(workers))] * len(workers)
    table = array(_SCORE, b"".join([digests[worker] for worker in workers]))
    if sys.byteorder == "big":
        table.byteswap()
    ranks = bytearray()
    for slot, (first, before) in enumerate(_firsts(workers, me, digests)):
        chosen = first
        if not room[first]:
            scores = table[slot::BUCKET_CNT].tolist()
            chosen = scores.index(max(compress(scores, room)))
            if not room[chosen]:  # another has the same score, and its part of the slots already
                chosen = max((place for place, left in enumerate(room) if left), key=scores.__getitem__)
        room[chosen] -= 1
        is_passed_over = chosen != first and table[chosen * BUCKET_CNT + slot] <= table[me * BUCKET_CNT + slot]
        ranks.append(0 if chosen == me else min(before + is_passed_over, _LAST))
    return bytes(ranks)


def _firsts(workers: Sequence[str], me: int, digests: Mapping[str, bytes]) -> Iterable[tuple[int, int]]:
    """Return for each slot who scores highest, and how many score higher than this worker.

    All slots are compared at once: a number holds a score in each 64 bits, and behind it a figure that is the higher
    the earlier the worker comes, so that no two are the same. The bit above is there to borrow from, and stays where
    what is taken away is no more.
    """
    mine = [half | _ABOVE for half in _halves(digests[workers[me]], me)]
    counts, best = [0, 0], [0, 0]
    for place, worker in enumerate(workers):
        for side, theirs in enumerate(_halves(digests[worker], place)):
            counts[side] += ((mine[side] - theirs) >> 63) & _ONES
            stays = (((best[side] | _ABOVE) - theirs) >> 63) & _ONES
            best[side] = theirs ^ ((best[side] ^ theirs) & ((stays << 63) - stays))
    no_less, packed = (chain.from_iterable(zip(*map(_lanes, sides), strict=True)) for sides in (counts, best))
    return (
        (_MAX_PLACE - one % (_MAX_PLACE + 1), len(workers) - count) for one, count in zip(packed, no_less, strict=True)
    )


def _halves(digest: bytes, place: int) -> tuple[int, int]:
    """Return the scores of the even slots and those of the odd ones, each in 64 bits of one number."""
    number, figures = int.from_bytes(digest, "little"), (_MAX_PLACE - place) * _ONES
    even, odd = number & _SCORES, (number >> 32) & _SCORES
    return (even << _PLACE_BITS) | figures, (odd << _PLACE_BITS) | figures


def _lanes(number: int) -> tuple[int, ...]:
    return struct.unpack(f"<{BUCKET_CNT // 2}Q", number.to_bytes(4 * BUCKET_CNT, "little"))


def _digest(worker_id: str) -> bytes:
    """Return for each slot four bytes, its score, that look random and are the same in every process."""
    return hashlib.shake_128(worker_id.encode("utf-8", "surrogatepass")).digest(4 * BUCKET_CNT)
