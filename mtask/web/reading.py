"""Reads the body of a request: within its bounds, its time, and what its sender may have in the server at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from mtask.web.problems import BodyTooLarge, RequestTimeout

#: A body up to this size, in bytes, is small: to parse it takes a few milliseconds at most.
SMALL = 8 * 1024
#: The time that a body may take, in seconds, and the bytes that must come in each further second.
_TIME, _SLOWEST = 20.0, 16 * 1024
#: The longest time that a large body waits for those of other requests, in seconds.
PATIENCE = 20.0

#: Waits until the sender may have a body of so many bytes in the server; raises Busy.
Hold = Callable[[int], Awaitable[object]]


async def body_of(request: Request, largest: int, hold: Hold | None = None) -> bytes:
    """Return the body; raise BodyTooLarge, RequestTimeout or Busy. `hold` is called before a large body is read."""
    told = request.headers.get("content-length", "")
    length = int(told[:20]) if told.isascii() and told.isdecimal() else largest
    if told and length > largest:
        raise _too_large(largest)
    loop = asyncio.get_running_loop()
    began, size, is_held = loop.time(), 0, hold is None
    parts: list[bytes] = []
    try:
        async with asyncio.timeout_at(began + _TIME) as limit:
            async for part in request.stream():
                size += len(part)
                if size > largest:
                    raise _too_large(largest)
                parts.append(part)
                if size > SMALL and not is_held and hold is not None:
                    limit.reschedule(None)  # the sender does not answer for this wait
                    waited = loop.time()
                    await hold(length)
                    began, is_held = began + loop.time() - waited, True
                limit.reschedule(began + _TIME + size / _SLOWEST)
    except TimeoutError:
        raise RequestTimeout("The body of the request did not come in time. Send it again, at once.") from None
    return b"".join(parts)


def _too_large(largest: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body may have at most {largest} bytes.")
