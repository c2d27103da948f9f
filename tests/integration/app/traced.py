"""An app that is traced, for worker processes and their executors."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from opentelemetry import trace

import mtask.otel
from mtask import App, Context, Retry
from tests.tracing import SPANS_VARIABLE, file_provider

log = logging.getLogger("shop")
app = App()
# A process of a test session that only imports this module makes no spans.
provider = file_provider() if SPANS_VARIABLE in os.environ else trace.NoOpTracerProvider()
mtask.otel.instrument(app, tracer_provider=provider)
_tracer = provider.get_tracer("shop")


@app.task
async def greet(who: str) -> str:
    with _tracer.start_as_current_span("inner"):
        log.info("greeting %s", who)
    return f"hello {who}"


@app.task(isolation="process")
def apart(context: Context, how: str = "") -> int:
    with _tracer.start_as_current_span("inner"):
        log.info("apart, attempt %d", context.attempt)
    if how == "raise":
        raise ValueError("no such thing at mongodb://u:secret@h/")
    if how == "retry" and context.attempt == 1:
        raise Retry(delay=timedelta(0))
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@app.task(isolation="process")
def chatter(lines: int, folder: str) -> None:
    """Write lines, then wait for the gate."""
    for number in range(lines):
        log.info("line %d", number)
    while not (Path(folder) / "gate").exists():
        time.sleep(0.01)


@app.task
async def talk(lines: list[Any]) -> None:
    for line in lines:
        log.info("%s", line)
