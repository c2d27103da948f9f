"""The stream that keeps pages live, and the numbers of the charts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mtask.web.page import rendering
from mtask.web.page.pulse import Page
from mtask.web.page.views import Addresses, Visit
from mtask.web.problems import Busy, MethodNotAllowed

addresses = Addresses()
#: The time between two comments on a quiet stream, in seconds: they keep proxies from closing it.
_QUIET = 15.0


@addresses.get_at("/live")
async def live(visit: Visit) -> Response:
    """Tell the page when something has changed, as server-sent events."""
    if visit.request.method == "HEAD":  # its answer has no body, so no stream would ever end
        raise MethodNotAllowed("This address takes GET alone.")
    pulse = visit.parts.pulse(visit.caller)
    if visit.parts.hub.is_closing:
        raise Busy("The server ends. Reload the page in a moment.")
    stack = AsyncExitStack()
    stack.enter_context(visit.parts.rooms.pages.taken(visit.caller))
    page = await stack.enter_async_context(pulse.joined())
    return _Stream(_written(page), stack)


async def _written(page: Page) -> AsyncIterator[str]:
    yield "retry: 1000\n\n"
    while (message := await page.next(_QUIET)) is not None:
        yield message or ": quiet\n\n"


class _Stream(StreamingResponse):
    """A stream. Its end, however it comes, ends the live page."""

    def __init__(self, written: AsyncIterator[str], stack: AsyncExitStack) -> None:
        headers = {**rendering.SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(written, headers=headers, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages until the page or the server ends."""
        async with self._stack:
            await super().__call__(scope, receive, send)


@addresses.get_at("/charts")
async def charts(visit: Visit) -> Response:
    """Return the last minutes of starts, ends and lateness, by second, as far as somebody has watched."""
    pulse = visit.parts.pulse(visit.caller)
    now = await visit.parts.reads.now()
    document = {"now": round(now.timestamp() * 1000), "rows": pulse.history()}
    return JSONResponse(document, headers={**rendering.SECURITY, "Cache-Control": "no-store"})
