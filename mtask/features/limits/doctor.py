"""The doctor's check of permits: those that are kept by runs that have ended, and those for which nobody asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta

from mtask.features.limits import usage as pools
from mtask.features.limits.explain import Bound, name_of
from mtask.kernel.driver.operation import Operation
from mtask.search.findings import Finding, brief, fail, listed

#: The longest time that the permit of an ended run may stay in use while tasks wait. Any worker takes it back earlier.
GRACE = timedelta(minutes=2)
#: The most permits whose runs are read.
_RUNS = 1_000


def kept(bounds: Iterable[Bound]) -> Operation[list[Finding]]:
    """Return findings about limits that are reached, but by runs that ended long ago. Tasks must wait for them."""
    old = []
    for bound in bounds:
        if bound.content is not None and not bound.free:
            old += [(bound, held) for held in bound.running if held.claim_by < bound.content.now - GRACE]
    runs = yield from pools.holders([held for _, held in old[:_RUNS]])
    ended: dict[str, list[str]] = {}
    for bound, held in old[:_RUNS]:
        run = runs.get((held.task_id, held.token))
        assert bound.content is not None
        since = held.claim_by if run is None else run.end_time
        if (run is None or run.is_over) and (since is None or since < bound.content.now - GRACE):
            ended.setdefault(name_of(bound.pool), []).append(held.task_id)
    return [_kept(name, task_ids) for name, task_ids in ended.items()]


def _kept(name: str, task_ids: list[str]) -> Finding:
    count = f"permits of {name}, for which tasks wait, belong to runs that ended over 2 min ago: {len(task_ids)}"
    message = f"{count}, such as that of {brief(task_ids[0])}"
    remedy = "Workers that serve the queue take such permits back within seconds: look into their logs."
    return fail("permits", message, remedy, task_ids=task_ids)


def unasked(bounds: Collection[Bound], live_ids: Collection[str]) -> str:
    """Return what to say of the limits of a task that nobody takes although permits are free: who asked last."""
    if not bounds:
        return ""
    waiters = [waiter for bound in bounds if bound.content is not None for waiter in bound.content.waiters]
    gone = sorted({waiter.worker_id for waiter in waiters} - set(live_ids))
    last = f"; {listed(gone)} asked last, and {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
    return f", and its limits have free permits{last}"
