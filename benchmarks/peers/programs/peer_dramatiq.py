"""Dramatiq on Redis. `heartbeat_timeout` and `maintenance_chance` decide when a dead worker's messages return."""

from __future__ import annotations

import os

import dramatiq
import publishing
from dramatiq.brokers.redis import RedisBroker
from notes import handle

_lease = os.environ.get("PEER_LEASE")
_options = {"heartbeat_timeout": int(float(_lease) * 1000), "maintenance_chance": 100_000} if _lease else {}

broker = RedisBroker(url=os.environ["PEER_URI"], **_options)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(number: int, sent: int, hold_ms: int) -> None:
    """Note the start."""
    handle(number, sent, hold_ms)


if __name__ == "__main__":
    publishing.run(lambda *payload: noop.send(*payload))
