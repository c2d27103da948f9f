"""mtask, at its defaults: majority writes, an async handler. Run as a worker by `mtask-worker peer_mtask:app`."""

from __future__ import annotations

import os
from typing import Any

import publishing
from notes import handle_async

from mtask import App, Client, TaskSpec

app = App()

_lease = publishing.lease(60.0)
_options: Any = {"worker_timeout": _lease, "ping_interval": _lease / 2}


@app.task
async def noop(number: int, sent: int, hold_ms: int) -> None:
    """Note the start."""
    await handle_async(number, sent, hold_ms)


def _params(number: int, sent: int, hold_ms: int) -> dict[str, int]:
    return {"number": number, "sent": sent, "hold_ms": hold_ms}


if __name__ == "__main__":
    options = _options if os.environ.get("PEER_LEASE") else {}
    with Client(os.environ["PEER_URI"]) as client:
        publishing.run(
            lambda *payload: client.publish(noop, _params(*payload), **options),
            lambda payloads: client.publish_many([TaskSpec("noop", _params(*one), **options) for one in payloads]),
        )
