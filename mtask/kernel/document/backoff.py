"""The delay before the next attempt after a failed run.

The server computes the same delay with the expression in `mtask.kernel.statements.rules`.
"""

from __future__ import annotations

from mtask.kernel.document.options import MAX_DURATION_MS, TaskOption

#: The largest fraction of a delay by which jitter can shorten the delay. Jitter applies only if retry_backoff is above
#: 1.
JITTER = 0.25


def retry_delay_ms(option: TaskOption, failures: int, jitter: float) -> int:
    """Return the delay after failed run number `failures`, in ms. The first failed run has number 1.

    Each further failure multiplies the delay by retry_backoff, up to retry_max_delay_ms. If retry_backoff is above 1,
    `jitter` shortens the delay by up to a quarter. So tasks that failed together are not all tried again at the same
    time.

    `jitter`: a number from 0 to 1. The caller must draw it at random.
    """
    limit = MAX_DURATION_MS if option.retry_max_delay_ms is None else option.retry_max_delay_ms
    if option.retry_backoff <= 1:
        return min(option.unexpected_retry_delay_ms, limit)
    exponent = min(max(failures - 1, 0), 64)
    try:
        grown = option.unexpected_retry_delay_ms * option.retry_backoff**exponent
    except OverflowError:
        grown = MAX_DURATION_MS
    return int(min(grown, limit) * (1 - JITTER * jitter))
