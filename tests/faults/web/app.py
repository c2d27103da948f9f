"""Handlers whose ends are what hostile callers write: returns, reasons of failures, and messages of progress."""

from __future__ import annotations

import re
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


#: What a run keeps of the handler's own failure: from the head of its traceback to the line that raises.
_OWN_ERROR = re.compile(r"Traceback \(most recent call last\):.{1,9000}?\bin refuse\b.{1,400}?Fail\b", re.DOTALL)


def without_own_error(text: str) -> str:
    """Return an answer without what `refuse` has raised: readers of a task see it, and nothing else of the kind."""
    return _OWN_ERROR.sub("", text)
