"""Counts lapsed runs that this worker has closed without a claim."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from mtask.errors import MtaskError
from mtask.kernel.operations import find_due
from mtask.kernel.worker.process.log import fields, logger, told
from mtask.kernel.worker.process.state import Scope

#: No statement that closes lapsed runs takes longer, together with its time limit.
_RECENT = timedelta(seconds=15)


async def count_lapses(scope: Scope, task_ids: Collection[Any], task_cnt: int) -> None:
    """Count the lapsed runs of a statement that has changed this number of these tasks. Leases seldom lapse.

    An error only makes the count too low.
    """
    if not task_cnt:
        return
    try:
        scope.meter.lapsed(
            await scope.store.run(find_due.lapses_closed(task_ids, task_cnt, scope.clock.now() - _RECENT))
        )
    except MtaskError as error:
        logger.warning("lapsed runs not counted", extra=fields(tasks=task_cnt, reason=told(error)))
