"""Handlers of tasks that gather. They note with what they ran."""

from __future__ import annotations

import asyncio
from typing import Any

from mtask import App, Context
from tests.acceptance.app import note

app = App()


@app.task
async def index(context: Context, number: int) -> None:
    note(context, "start", number=number)
    await asyncio.sleep(0.02)
    note(context, "end", number=number)


@app.task
async def digest(context: Context, calls: list[dict[str, Any]]) -> None:
    numbers = [call["number"] for call in calls]
    note(context, "start", numbers=numbers)
    await asyncio.sleep(0.1)
    note(context, "end", numbers=numbers)
