"""Reads all that metrics tell of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from mtask.features.metrics import task_counts as counts
from mtask.features.metrics.operations import KEPT
from mtask.features.metrics.rules import TOTALS_ID
from mtask.features.metrics.task_counts import Counts
from mtask.kernel.driver.operation import Operation, metrics
from mtask.kernel.operations import workers
from mtask.kernel.worker.process.tally import MAX_PAIRS, Tally, tally_of, total

Document = dict[str, Any]
#: The age of a fold after which the tally itself says that it is in the totals.
_OLD_FOLD = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that metrics tell of: the tallies of all workers, dead ones included; the live workers; the counts."""

    tally: Tally
    #: The live workers' documents, each with the server's time as `now`, and what is stored of their last write.
    workers: Sequence[Document]
    recent: Mapping[str, Document] = field(default_factory=dict)
    counts: Counts | None = None


def read() -> Operation[Fleet]:
    """Return what metrics tell of. The tasks themselves are not read, except by who counts them for all."""
    counted = yield from counts.shared()
    found = yield metrics("find", {"kind": {"$in": ["worker", "totals"]}})
    live = yield from workers.live()
    now = live[0]["now"] if live else None
    admitted = dict.fromkeys(counted.admitted if counted is not None else ())
    tally = total(map(tally_of, _not_folded(found, now))).limited(admitted, is_full=len(admitted) >= MAX_PAIRS)
    recent = {document["incarnation"]: document for document in found if isinstance(document.get("incarnation"), str)}
    return Fleet(tally, live, recent, counted)


def _not_folded(found: Iterable[Document], now: datetime | None) -> list[Document]:
    """Return the totals, and the tallies that are not in them.

    The documents are not read at one instant. Whatever happens between two of them, each tally counts once: by itself,
    as long as the totals that were read do not name it. Totals name a tally for as long as it exists, and for an hour
    at least.
    """
    documents = list(found)
    totals = next((document for document in documents if document["_id"] == TOTALS_ID), {})
    folded = set(totals.get("folded", ()))
    kept = []
    for document in documents:
        expiry = document.get("expire_time")
        is_old = isinstance(expiry, datetime) and now is not None and expiry < now + KEPT - _OLD_FOLD
        if document["_id"] not in folded and not is_old:
            kept.append(document)
    return kept
