"""Receivers share the seats of a worker's messages: one that does not answer leaves seats for the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mtask import App
from mtask.features.callbacks.allowed import CallbackOptions, Secret, read_options
from mtask.features.callbacks.sending import Seats
from mtask.features.callbacks.signatures import read_secret
from mtask.testing import CallbackReceiver
from tests.integration.worker_harness import Working
from tests.mongo import until


class Silent(CallbackReceiver):
    """A receiver that answers nothing before the test has ended."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.over = threading.Event()
        super().__init__(answer=self._wait)

    def _wait(self, number: int) -> int:
        self.asked.append(number)
        self.over.wait()
        return 204


@pytest.fixture
def silent() -> Iterator[Silent]:
    with Silent() as opened:
        yield opened
        opened.over.set()


@pytest.fixture
def receiver() -> Iterator[CallbackReceiver]:
    with CallbackReceiver() as opened:
        yield opened


def options_for(*receivers: CallbackReceiver) -> CallbackOptions:
    """Return options of a worker that waits for longer than the test does."""
    found = read_options(",".join(each.host for each in receivers), "127.0.0.0/8")
    secret = Secret(read_secret(receivers[0].secret))
    return CallbackOptions(found.hosts, found.networks, {"default": secret, "acme/default": secret}, timeout=300.0)


async def test_a_receiver_that_does_not_answer_takes_no_seat_of_another(
    working: Working, silent: Silent, receiver: CallbackReceiver
) -> None:
    callbacks = options_for(silent, receiver)
    async with working(App(), concurrency=12, features=[callbacks]) as bench:
        for number in range(12):
            await bench.client.publish("t", key=f"silent/{number}", callback={"url": silent.url}, delay=3600)
            await bench.client.cancel("t", f"silent/{number}")
        # Six seats: three for the receiver that does not answer, and three for others.
        await until(lambda: len(silent.asked) == 3, message="it has its seats")
        await bench.client.publish("t", key="other", callback={"url": receiver.url}, delay=3600)
        await bench.client.cancel("t", "other")
        await asyncio.to_thread(receiver.wait, 1)
        assert len(silent.asked) == 3
        assert all(task.task_state.failed_cnt == 0 for task in await bench.client.find(name="mtask/callback"))


def test_a_tenant_has_its_share_of_the_seats_whatever_its_receivers() -> None:
    seats = Seats(8)
    with seats.taken(["receiver a", "tenant acme"]), seats.taken(["receiver b", "tenant acme"]) as second:
        assert second
        with (
            seats.taken(["receiver c", "tenant acme"]) as third,
            seats.taken(["receiver d", "tenant acme"]) as fourth,
            seats.taken(["receiver e", "tenant acme"]) as fifth,
        ):
            assert (third, fourth, fifth) == (True, True, False)
            with seats.taken(["receiver e", "tenant umbra"]) as of_another, seats.taken(["receiver f"]) as of_none:
                assert (of_another, of_none) == (True, True)
    with seats.taken(["receiver c", "tenant acme"]) as again:
        assert again
