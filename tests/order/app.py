"""Two apps whose tasks may share a queue. Their handlers record their starts and ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from mtask import App, Context
from tests.acceptance.app import EVENTS_VARIABLE, noted

first, second = App(), App()
#: The names of their handlers.
WORK, OTHER, ISOLATED = "work", "other", "isolated"
_LOOK = 0.02


def gate_beside(events: Path, name: str) -> Path:
    """Return the file that opens a gate, beside the file of events."""
    return events.with_name(f"gate-{name}")


async def _work(context: Context, seconds: float = 0.0, fails: int = 0, gate: str | None = None) -> None:
    """Take a while. `fails`: how often it fails first. `gate`: the first run waits until this gate is open."""
    with noted(context):
        if gate is not None and context.attempt == 1:
            opened = gate_beside(Path(os.environ[EVENTS_VARIABLE]), gate)
            while not opened.exists():  # noqa: ASYNC110 the test opens it from another process
                await asyncio.sleep(_LOOK)
        await asyncio.sleep(seconds)
        if context.attempt <= fails:
            raise RuntimeError(f"attempt {context.attempt}")


first.task(name=WORK)(_work)
second.task(name=OTHER)(_work)


@first.task(name=ISOLATED, isolation="process")
def isolated(context: Context) -> None:
    """Return at once, from an executor."""
    with noted(context):
        return
