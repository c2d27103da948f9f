"""The delay before the next attempt after a failed run. Its server-side twin is in `mtask.store.statements.rules`."""

from __future__ import annotations

from mtask.model.options import MAX_DURATION_MS, TaskOption

#: The greatest part of a delay that jitter can take away. Jitter applies only if retry_backoff is above 1.
JITTER = 0.25


def retry_delay_ms(option: TaskOption, failures: int, jitter: float) -> int:
    """Return the delay after the `failures`-th failed run (1 = the first), in ms.

    Each failure multiplies the delay by retry_backoff, up to retry_max_delay_ms. With a backoff above 1, `jitter`
    (0 to 1, drawn by the caller) shortens the delay by up to a quarter. So tasks that failed together do not all
    come back at the same time.
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
