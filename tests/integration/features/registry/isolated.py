"""An app whose handlers run in executors, and publish tasks of a handler that it lacks."""

from __future__ import annotations

from mtask import App, Child, Context, Next

app = App()


@app.task(isolation="process")
def parent(context: Context) -> None:
    """Add a child."""
    context.add_children([Child("child", "send", {"to": "a"})])


@app.task(isolation="process")
def goes_on() -> Next:
    """Go on as another task."""
    return Next("send", {"to": "a"})
