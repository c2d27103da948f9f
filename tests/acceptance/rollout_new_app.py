"""The handlers of a deploy, as the new code has them: one takes another param, one has params of version 2."""

from __future__ import annotations

from typing import Any

from mtask import App, Context
from tests.acceptance.app import note

app = App(version="2.0")


@app.task
async def send(context: Context, to: str, subject: str = "hi") -> str:
    note(context, "start")
    return f"{to} {subject}"


@app.task(version=2)
async def bill(context: Context, cents: int) -> str:
    note(context, "start")
    return f"{cents} cents"


@app.upcast(bill, from_version=1)
def in_cents(params: dict[str, Any]) -> dict[str, Any]:
    return {"cents": 100 * params["euros"]}
