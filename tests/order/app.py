"""Two apps whose tasks may share a queue. Their handlers record their starts and ends."""

from __future__ import annotations

import asyncio

from mtask import App, Context
from tests.acceptance.app import noted

first, second = App(), App()
#: The names of their handlers.
WORK, OTHER, ISOLATED = "work", "other", "isolated"
_HOLD = 60.0


async def _work(context: Context, seconds: float = 0.0, fails: int = 0, holds: bool = False) -> None:
    """Take a while. `fails`: how often it fails first. `holds`: the first run does not end by itself."""
    with noted(context):
        await asyncio.sleep(_HOLD if holds and context.attempt == 1 else seconds)
        if context.attempt <= fails:
            raise RuntimeError(f"attempt {context.attempt}")


first.task(name=WORK)(_work)
second.task(name=OTHER)(_work)


@first.task(name=ISOLATED, isolation="process")
def isolated(context: Context) -> None:
    """Return at once, from an executor."""
    with noted(context):
        return
