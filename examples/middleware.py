"""Middleware and hooks: what is done around every publish, run and outcome, and once in each worker process.

Run a worker:  mtask-worker examples.middleware:app
Publish:       python -m examples.middleware

Both find MongoDB by MTASK_URI. `yield` stands for the step; what comes of it is there when it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from typing import Any

from mtask import App, Client, Context, TaskSpec
from mtask.app.middleware import FinishCall, RunCall

app = App()
log = logging.getLogger("examples.middleware")

Middleware = Generator[None, Any, None]


@app.middleware("publish")
def urgent_for_gold(spec: TaskSpec) -> Middleware:
    """Give the tasks of gold customers a higher priority, wherever they are published."""
    if isinstance(spec.params, dict) and spec.params.get("plan") == "gold":
        spec.options["priority"] = 10
    yield


@app.middleware
def warn_of_slow(run: RunCall) -> Middleware:
    """Log each run that takes longer than five seconds."""
    began = time.monotonic()
    try:
        yield
    finally:
        if time.monotonic() - began > 5:
            log.warning("%s took long, try %d", run.task.id, run.attempt)


@app.middleware("finish")
def count(finish: FinishCall) -> Middleware:
    """Log each outcome that was written; none is where the lease was lost."""
    if (yield):
        log.info("%s ended: %s", finish.task.id, finish.status)


@app.on_start
def prices() -> Iterator[dict[str, int]]:
    """Open what all runs of a worker share; the part after the `yield` closes it, after the last run."""
    yield {"gold": 99, "basic": 9}


@app.task
def invoice(context: Context, customer: str, plan: str) -> int:
    """Write an invoice."""
    return context.value(prices)[plan]


def main() -> None:
    """Publish two invoices, within the app's middleware."""
    with Client(middleware=app.around.publish) as client:
        for customer, plan in (("ann", "gold"), ("bob", "basic")):
            client.publish(invoice, {"customer": customer, "plan": plan}, key=customer)
            task = client.wait(invoice, customer, timeout=30)
            print(customer, task.returns, "priority", task.task_option.priority)


if __name__ == "__main__":
    main()
