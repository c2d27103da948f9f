"""What the examples' workers run, in one app: so that the tests need one worker for all, or two."""

from __future__ import annotations

from examples import app as first
from examples import guild_queues, limits, middleware, progress, schedule, several_workers, transaction
from mtask import App

app = App()
for example in (first, guild_queues, limits, middleware, progress, schedule, several_workers, transaction):
    app.include(example.app)
