"""The runs in a task's document as the driver reads it: it may be malformed."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def runs_in(document: Document) -> list[Document]:
    """Return what can be read as a run, the oldest first: the document may be malformed, and beside others."""
    state = document.get("task_state")
    runs = state.get("worker_states") if isinstance(state, dict) else None
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
