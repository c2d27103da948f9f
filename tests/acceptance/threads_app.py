"""An app whose handlers leave threads that never end, and use the threads of the event loop."""

from __future__ import annotations

import asyncio
import threading

from mtask import App, Context

app = App()
_never = threading.Event()


@app.task
async def waits_in_threads(cnt: int) -> None:
    """Wait in as many threads of the event loop as it gives."""
    await asyncio.gather(*(asyncio.to_thread(_never.wait) for _ in range(cnt)))


@app.task
def leaves_a_thread() -> None:
    """Leave a thread that is no daemon."""
    threading.Thread(target=_never.wait).start()


@app.task
async def transacts(context: Context) -> None:
    """Begin a transaction and commit it."""
    async with context.transaction():
        pass
