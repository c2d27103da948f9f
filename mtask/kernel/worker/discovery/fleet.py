"""The peers: ranks the live workers for each task. So not all workers that see a task try to claim it at once."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from math import inf
from time import monotonic
from typing import Any

from mtask.errors import MtaskError
from mtask.kernel.document.identity import BUCKET_CNT, bucket_of
from mtask.kernel.operations import workers
from mtask.kernel.operations.workers import texts
from mtask.kernel.statements.filters import Filter, Shares, of_shares
from mtask.kernel.worker.discovery.buffer import PreemptionQueue
from mtask.kernel.worker.process import runtime
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope

#: The smallest number that `Peers.last` returns if there are other workers. A worker with this rank waits longest, even
#: if there are few workers: see `mtask.kernel.worker.discovery.ready.MAX_STAGGER`.
_BEHIND = 3
#: The array type code of a score: an unsigned integer of four bytes.
_SCORE = "I"
#: A long integer consists of lanes of 64 bits, each with one score. `_ONES` has the value 1 in each lane. `_ABOVE` has
#: only the top bit of each lane set. `_SCORES` is the mask of the scores.
_ONES = int.from_bytes(b"\1\0\0\0\0\0\0\0" * (BUCKET_CNT // 2), "little")
_ABOVE, _SCORES = _ONES << 63, _ONES * 0xFFFFFFFF
#: The number of bits below a score. These bits hold the index of the worker.
_INDEX_BITS = 20
_MAX_INDEX = 2**_INDEX_BITS - 1
#: The largest rank: a rank is stored in one byte.
_LAST = 255

#: The ids of the workers that serve the same names. The key: these names, and whether the workers serve them in the
#: queues of this worker.
_Services = dict[tuple[tuple[str, ...], bool], list[str]]


class Peers:
    """The live workers, by the task names that they serve.

    For each bucket, all workers compute the same order of the workers.
    """

    def __init__(self, worker_id: str, queues: Iterable[str] | None = None) -> None:
        """`queues`: the queues that this worker serves; None: all workers serve the same queues."""
        self._worker_id = worker_id
        self._queues = None if queues is None else set(queues)
        self._services: _Services = {}
        self._others: dict[str, tuple[str, ...]] = {}
        #: The task names that another worker serves in other queues than this worker does. The buckets of these names
        #: cannot be divided evenly.
        self._unshared: set[str] = set()
        #: The ranks of this worker, one byte for each bucket. The key is the ids of the other workers.
        self._ranks: dict[tuple[str, ...], bytes] = {}
        #: The scores of each worker.
        self._digests: dict[str, bytes] = {}
        #: Whether all live workers appeal if they have no room. Older versions do not.
        self.do_all_appeal = True

    def is_news(self, workers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these documents of the live workers differ from the last ones in anything that matters here."""
        return self._services != self._services_of(workers) or self.do_all_appeal != _do_all_appeal(workers)

    def prepare(self, workers: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
        """Compute the ranks that `update` will need for these workers.

        Any thread may call this. The computation takes long if there are many workers.
        """
        others = _others_in(self._services_of(workers))
        for ids in {others[name] for name in names if name in others}:
            if ids not in self._ranks:
                self._ranks[ids] = self._ranks_of(ids)

    def update(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Use these documents of the live workers from now on. Workers that stop or have concurrency 0 do not count."""
        self._services = self._services_of(workers)
        self._others = _others_in(self._services)
        self._unshared = {name for names, is_shared in self._services if not is_shared for name in names}
        self.do_all_appeal = _do_all_appeal(workers)
        self._ranks = {ids: self._ranks[ids] for ids in set(self._others.values()) if ids in self._ranks}
        live = {self._worker_id}.union(*self._services.values())
        self._digests = {worker: digest for worker, digest in self._digests.items() if worker in live}

    def _services_of(self, workers: Iterable[Mapping[str, Any]]) -> _Services:
        # Most workers of a fleet serve the same names, and these may be hundreds. So the names are looked at once for
        # all of these workers, and not once for each.
        services: _Services = {}
        for worker in workers:
            if worker["_id"] == self._worker_id or not worker.get("concurrency"):
                continue
            if worker.get("status") == "stopping":
                continue
            is_shared = self._queues is None or set(texts(worker.get("queues"))) == self._queues
            services.setdefault((texts(worker.get("names")), is_shared), []).append(str(worker["_id"]))
        return {service: sorted(ids) for service, ids in services.items()}

    def rank(self, task_id: str, name: str) -> int:
        """Return this worker's rank for a task.

        The rank is the number of live workers that serve the name and come before this worker.
        """
        others = self._others.get(name)
        return self._ranks_among(others)[bucket_of(task_id)] if others else 0

    def last(self, name: str) -> int:
        """Return the rank behind all other live workers that serve this name. Return 0 if no other worker serves it."""
        others = len(self._others.get(name, ()))
        return others and max(others, _BEHIND)

    def is_divided(self, name: str) -> bool:
        """Whether a share of the tasks of this name is the tasks for which this worker ranks first, and no others."""
        return name not in self._unshared

    def has_others(self, names: Iterable[str]) -> bool:
        """Whether another live worker serves one of these names."""
        return bool(self._others) and any(self._others.get(name) for name in names)

    def shares(self, names: Iterable[str], depth: int = 1, fleet: int = 1) -> list[tuple[list[str], str]]:
        """Return the buckets for which this worker is among the first `depth` workers: by default, the first one.

        Each entry holds some names and a text. The text has one character for each bucket: "1" if this worker is among
        these for the bucket, and "0" if it is not. For a name that fewer than `fleet` others serve, all are "1".

        The list is empty if this worker ranks first for all buckets of all names. In that case other workers serve none
        of the names, or they serve the names in other queues.
        """
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            alike.setdefault(() if name in self._unshared else self._others.get(name, ()), []).append(name)
        if not any(alike):
            return []
        made = []
        for others, alike_names in alike.items():
            reach = depth if len(others) >= fleet else len(others) + 1
            buckets = "".join("1" if rank < reach else "0" for rank in self._ranks_among(others))
            made.append((alike_names, buckets))
        return made

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
        return ranks_among(self._worker_id, others, digests)


def _others_in(services: _Services) -> dict[str, tuple[str, ...]]:
    """Return the workers that serve each name. Names that the same workers serve share one tuple."""
    serving: dict[str, list[int]] = {}
    for index, (names, _) in enumerate(services):
        for name in set(names):
            serving.setdefault(name, []).append(index)
    fleets = list(services.values())
    merged: dict[tuple[int, ...], tuple[str, ...]] = {}
    for indexes in set(map(tuple, serving.values())):
        merged[indexes] = tuple(sorted({*chain.from_iterable(fleets[index] for index in indexes)}))
    return {name: merged[tuple(indexes)] for name, indexes in serving.items()}


def _do_all_appeal(workers: Iterable[Mapping[str, Any]]) -> bool:
    return all(isinstance(worker.get("appeal_cnt"), int) for worker in workers)


def ranks_among(worker_id: str, others: Sequence[str], digests: Mapping[str, bytes]) -> bytes:
    """Return this worker's rank for each bucket: the number of other workers that rank before this worker.

    The worker with the highest score ranks first, unless it already ranks first for its equal share of the buckets.
    With equal shares, all workers finish their parts of a backlog at about the same time. When a worker comes or goes,
    the others keep nearly all of their buckets.
    """
    workers = sorted([worker_id, *others])
    me, room = workers.index(worker_id), [-(-BUCKET_CNT // len(workers))] * len(workers)
    table = array(_SCORE, b"".join([digests[worker] for worker in workers]))
    if sys.byteorder == "big":
        table.byteswap()
    ranks = bytearray()
    for bucket, (first, before) in enumerate(_firsts(workers, me, digests)):
        chosen = first
        if not room[first]:
            scores = table[bucket::BUCKET_CNT].tolist()
            chosen = scores.index(max(compress(scores, room)))
            if not room[chosen]:  # several workers have that score, and the first of them has its share already
                chosen = max((index for index, left in enumerate(room) if left), key=scores.__getitem__)
        room[chosen] -= 1
        is_passed_over = chosen != first and table[chosen * BUCKET_CNT + bucket] <= table[me * BUCKET_CNT + bucket]
        ranks.append(0 if chosen == me else min(before + is_passed_over, _LAST))
    return bytes(ranks)


def _firsts(workers: Sequence[str], me: int, digests: Mapping[str, bytes]) -> Iterable[tuple[int, int]]:
    """Return for each bucket the index of the worker with the highest score, and the number of scores above `me`'s.

    All buckets are compared at once, in long integers. Such an integer has 64 bits for each bucket: the score and,
    below the score, a tiebreaker. The tiebreaker is larger for a smaller index, so no two values are equal.

    For each bucket, the top bit is set before a subtraction. The top bit stays set if the subtracted value is not
    larger. It also keeps a borrow from reaching the next bucket.
    """
    mine = [half | _ABOVE for half in _halves(digests[workers[me]], me)]
    counts, best = [0, 0], [0, 0]
    for index, worker in enumerate(workers):
        for side, theirs in enumerate(_halves(digests[worker], index)):
            counts[side] += ((mine[side] - theirs) >> 63) & _ONES
            stays = (((best[side] | _ABOVE) - theirs) >> 63) & _ONES
            best[side] = theirs ^ ((best[side] ^ theirs) & ((stays << 63) - stays))
    no_less, packed = (chain.from_iterable(zip(*map(_lanes, sides), strict=True)) for sides in (counts, best))
    return (
        (_MAX_INDEX - one % (_MAX_INDEX + 1), len(workers) - count) for one, count in zip(packed, no_less, strict=True)
    )


def _halves(digest: bytes, index: int) -> tuple[int, int]:
    """Return two long integers: the scores of the even buckets, and those of the odd ones. Each score has 64 bits."""
    number, figures = int.from_bytes(digest, "little"), (_MAX_INDEX - index) * _ONES
    even, odd = number & _SCORES, (number >> 32) & _SCORES
    return (even << _INDEX_BITS) | figures, (odd << _INDEX_BITS) | figures


def _lanes(number: int) -> tuple[int, ...]:
    return struct.unpack(f"<{BUCKET_CNT // 2}Q", number.to_bytes(4 * BUCKET_CNT, "little"))


def _digest(worker_id: str) -> bytes:
    """Return a worker's scores, four bytes for each bucket. They look random and are the same in every process."""
    return hashlib.shake_128(worker_id.encode("utf-8", "surrogatepass")).digest(4 * BUCKET_CNT)


# --- ranks -----------------------------------------------------------------------------------------------

# Ranks: orders the live workers for each task, and finds the share of tasks for which this worker ranks first.

#: Of the new tasks of a name that this number of other workers serve, or more, a worker hears only if it is among the
#: first `_HEARERS` for the task. Tests tune `FLEET`.
FLEET, _HEARERS = 3, 2


class Ranks:
    """Ranks this worker among all live workers, and orders the preemption queue by these ranks."""

    def __init__(self, scope: Scope, queue: PreemptionQueue) -> None:
        self._ledger = scope.ledger
        self._worker_id = scope.worker_id
        self._names = scope.names
        self._queue = queue
        self._peers = Peers(scope.worker_id, scope.queues)
        #: The number of times that the ranks were computed.
        self.version = 0
        #: The shares of new tasks of which this worker must hear; None: of all tasks, as it is not one of a fleet.
        self.heard: Shares | None = None

    async def take(self, live: Sequence[Mapping[str, Any]]) -> bool:
        """Compute the ranks again for these live workers; return False if nothing that matters has changed."""
        self._ledger.has_peers = any(worker["_id"] != self._worker_id for worker in live)
        if not self._peers.is_news(live):
            return False
        # The computation runs in a thread, because it takes 0.1 s for a thousand workers.
        await runtime.to_thread(self._peers.prepare, live, self._names)
        self._peers.update(live)
        self.version += 1
        shares = self._peers.shares(self._names, _HEARERS, FLEET) if self._peers.do_all_appeal else []
        self.heard = shares if any("0" in buckets for _, buckets in shares) else None
        self._queue.rerank((task_id, self.rank(task_id, name)) for task_id, name in self._queue.names())
        return True

    def rank(self, task_id: str, name: str) -> int:
        """Return this worker's rank: the number of live workers that should try the task before this worker."""
        # If this worker has claimed the task before, the run did not succeed. Another worker may do better, so this
        # worker ranks last. If only the task's id decided, the task might come back to this worker until no try is
        # left.
        return self._peers.last(name) if self._ledger.was_claimed(task_id) else self._peers.rank(task_id, name)

    def rank_in_share(self, task_id: str, name: str) -> int:
        """Return the same as `rank` for a task that is in this worker's share."""
        if self._ledger.was_claimed(task_id):
            return self._peers.last(name)
        # To find the bucket takes a third of all that is done for a task of a scan.
        return 0 if self._peers.is_divided(name) else self._peers.rank(task_id, name)

    def has_others(self, names: Iterable[str]) -> bool:
        """Whether other live workers share the tasks of these names with this worker."""
        return self._peers.has_others(names)

    def share(self, names: Iterable[str]) -> tuple[list[Filter], float]:
        """Return the filter for this worker's share, and the size of the share as a fraction of all tasks.

        The share is the tasks for which this worker ranks first. If the fraction differs between the names, the
        smallest is returned. If this worker ranks first for all tasks, the list of filters is empty.
        """
        shares = self._peers.shares(names)
        fraction = min((buckets.count("1") / len(buckets) for _, buckets in shares), default=1.0)
        return ([of_shares(shares)] if shares else []), fraction


# --- roster ----------------------------------------------------------------------------------------------

# The roster: reads the live workers when some may have come, gone or changed. While many do, it reads them seldom.

#: The least time between a read and the next one for which a change of some worker asks: in seconds, and as a multiple
#: of the first one's duration, which includes the computation of the ranks. Until then, ranks are those of before. They
#: only suggest who tries a task first.
_PAUSE, _TIMES = 1.0, 20


class Roster:
    """Knows the live workers, and has the ranks computed again when they have changed."""

    def __init__(self, scope: Scope, ranks: Ranks) -> None:
        self._scope = scope
        self._ranks = ranks
        self._live: list[dict[str, Any]] = []
        #: Whether a read is asked for: in any case, or for a change, not before `_next`.
        self._is_overdue, self._is_asked = True, False
        self._next = 0.0

    def ask(self) -> None:
        """Read the live workers soon. Call this when one of them has come, gone or changed."""
        self._is_asked = True

    def ask_now(self) -> None:
        """Read the live workers with the next scan. Call this when changes may have come unheard."""
        self._is_overdue = True

    @property
    def due_at(self) -> float:
        """When the live workers must be read (monotonic seconds); infinity: not before someone asks."""
        if self._is_overdue:
            return 0.0
        return self._next if self._is_asked else inf

    async def read_if_due(self) -> bool:
        """Read the live workers if that is due; return whether the ranks have changed.

        If they cannot be read, the ranks stay those of before. Tasks are found with any ranks, so no scan fails for it.
        """
        sent = monotonic()
        if sent < self.due_at:
            return False
        self._is_overdue = self._is_asked = False  # what changes from now on asks again
        try:
            scope = self._scope
            self._live = await scope.store.run(workers.peers(scope.worker_id, scope.queues, self._live))
            if self._live:  # each document holds the server's time, so an idle worker learns this time, too
                scope.clock.observe(self._live[0]["now"], sent, monotonic())
            return await self._ranks.take(self._live)
        except BaseException as error:
            self._is_asked = True
            if not isinstance(error, MtaskError):
                raise
            logger.warning("live workers not read, will be tried again", extra=fields(reason=told(error)))
            return False
        finally:
            self._next = monotonic() + max(_PAUSE, _TIMES * (monotonic() - sent))
