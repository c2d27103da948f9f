"""The handler of the tasks `mtask/callback`: each tells one end of a task to a receiver."""

from __future__ import annotations

import json
import random
from typing import Any

from mtask.app.app import App
from mtask.app.context import Context
from mtask.errors import Fail, Retry
from mtask.features.callbacks.allowed import CallbackOptions, Target
from mtask.features.callbacks.rules import DELIVERY, DELIVERY_QUEUE
from mtask.features.callbacks.seats import MOST, Seats
from mtask.features.callbacks.sending import NotTaken, Resolve, resolved, send
from mtask.features.callbacks.signatures import headers_of
from mtask.version import __version__

_GONE = 410


class Deliverer:
    """Sends messages, with what one worker may call."""

    def __init__(self, options: CallbackOptions, resolve: Resolve = resolved, seats: Seats | None = None) -> None:
        self._options = options
        self._resolve = resolve
        self._seats = Seats(MOST) if seats is None else seats

    def deliver(
        self, context: Context, webhook_id: str, url: str, event: dict[str, Any], secret: str | None = None
    ) -> dict[str, int]:
        """Tell the receiver one end of a task, unless too many other messages are under way."""
        target = self._options.target(url)
        owners = [f"receiver {target.host}:{target.port}"]
        tenant, slash, _ = (secret or "").partition("/")  # a tenant's callbacks are signed with its own secrets
        owners += [f"tenant {tenant}"] if slash else []
        with self._seats.taken(owners) as is_taken:
            if not is_taken:
                raise Retry(delay=random.uniform(1.0, 3.0))
            return {"status": self._send(context, webhook_id, target, event, secret)}

    def _send(
        self, context: Context, webhook_id: str, target: Target, event: dict[str, Any], secret: str | None
    ) -> int:
        body = json.dumps(event, separators=(",", ":")).encode()
        signed = headers_of(self._options.key(secret, target), webhook_id, _now(context), body)
        headers = {"Content-Type": "application/json", "User-Agent": f"mtask/{__version__}", **signed}
        status = send(target, body, headers, self._options, self._resolve)
        if status == _GONE:
            raise Fail(f"{target.host} answered 410: it wants no more messages")
        if not 200 <= status < 300:
            more = ": redirects are not followed" if 300 <= status < 400 else ""
            raise NotTaken(f"{target.host} answered {status}{more}")
        return status


def _now(context: Context) -> int:
    """Return the time of the message in seconds: when this run was claimed, by the server's clock.

    A receiver refuses a message that is minutes old, and the clock of this machine may be wrong by minutes.
    """
    claimed = next(run.claim_time for run in reversed(context.task.runs) if run.run_id == context.run_id)
    return int(claimed.timestamp())


def with_deliveries(app: App, options: CallbackOptions, concurrency: int) -> App:
    """Return an app with all that this one has registered, and with the handler that delivers callbacks.

    `concurrency` is the number of the worker's slots: receivers that are slow must not take all of them.
    """
    own = App()
    own.include(app)
    deliverer = Deliverer(options, seats=Seats(max(1, min(MOST, concurrency // 2))))
    own.task(name=DELIVERY, queue=DELIVERY_QUEUE, isolation="thread")(deliverer.deliver)
    return own
