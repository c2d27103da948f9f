"""RQ: SimpleWorker, which runs jobs in its own process instead of forking for each; results are not kept."""

from __future__ import annotations

import os

import publishing
from notes import handle
from redis import Redis
from rq import Queue, Retry

_lease = os.environ.get("PEER_LEASE")
_timeout = int(float(_lease)) if _lease else None
_options = {"result_ttl": 0} | ({"retry": Retry(max=3)} if _lease else {})


def noop(number: int, sent: int, hold_ms: int) -> None:
    """Note the start."""
    handle(number, sent, hold_ms)


if __name__ == "__main__":
    queue = Queue(connection=Redis.from_url(os.environ["PEER_URI"]))
    # By its name: a function of the module __main__ cannot be found by a worker.
    name = "peer_rq.noop"
    publishing.run(
        lambda *payload: queue.enqueue(name, args=payload, job_timeout=_timeout, **_options),
        lambda payloads: queue.enqueue_many(
            [Queue.prepare_data(name, args=one, timeout=_timeout, **_options) for one in payloads]
        ),
    )
