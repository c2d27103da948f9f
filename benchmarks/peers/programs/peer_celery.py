"""Celery on Redis or on MongoDB, by PEER_URI; results are ignored, as its guide to optimizing recommends."""

from __future__ import annotations

import os

import publishing
from celery import Celery
from notes import handle

_lease = os.environ.get("PEER_LEASE")
_is_polled = os.environ["PEER_URI"].startswith("mongodb")

app = Celery("peer", broker=os.environ["PEER_URI"])
app.conf.update(
    task_ignore_result=True,
    # Its guide to optimizing recommends 64 or more for short tasks; where workers die, its default shall be seen.
    worker_prefetch_multiplier=4 if os.environ.get("PEER_TRIAL") == "kill" else 64,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    # MongoDB is polled, by default once a second when it was empty.
    broker_transport_options={"polling_interval": 0.02} if _is_polled else {},
)
if _lease:
    # What its documentation calls for where a task must survive its worker.
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_transport_options={**app.conf.broker_transport_options, "visibility_timeout": float(_lease)},
    )


@app.task(name="noop")
def noop(number: int, sent: int, hold_ms: int) -> None:
    """Note the start."""
    handle(number, sent, hold_ms)


if __name__ == "__main__":
    with app.connection_for_write():
        publishing.run(lambda *payload: noop.delay(*payload))
