"""The app of most tests of workers."""

from __future__ import annotations

import pytest

from mtask import App, Context


@pytest.fixture
def app() -> App:
    """Return an app whose one task tells which worker has run it."""
    made = App()

    @made.task
    async def work(context: Context) -> str:
        return context.worker_id

    return made
