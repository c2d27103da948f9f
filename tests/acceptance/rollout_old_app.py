"""The handlers of a deploy, as the former code has them."""

from __future__ import annotations

from mtask import App, Context
from tests.acceptance.app import note

app = App(version="1.0")


@app.task
async def send(context: Context, to: str) -> str:
    note(context, "start")
    return to


@app.task
async def bill(context: Context, euros: int) -> str:
    note(context, "start")
    return f"{euros} EUR"
