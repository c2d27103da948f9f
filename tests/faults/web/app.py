"""Handlers whose ends are what hostile callers write: returns, reasons of failures, and messages of progress."""

from __future__ import annotations

from typing import Any

from mtask import App, Context, Fail

app = App()


@app.task
def echo(**params: Any) -> Any:
    """Return the params."""
    return params


@app.task
def refuse(context: Context, text: str = "") -> None:
    """Fail with this reason."""
    context.progress(0.5, text[:500])
    raise Fail(text)
