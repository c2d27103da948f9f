"""The channel between a worker and an executor: messages arrive whole, in order, and as they were sent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from bson import Binary

from mtask.features.isolation.executor import Rate
from mtask.features.isolation.messages import Channel, outcome_document, outcome_in
from mtask.features.isolation.processes import cause_of_death, resident_bytes
from mtask.kernel.driver.bson import packed, unpacked
from tests.mongo import until

Message = dict[str, Any]


class End:
    """One end of a channel, and what it has received."""

    def __init__(self, connected: socket.socket, then: Callable[[Message], None] = lambda _: None) -> None:
        self.received: list[Message] = []
        self.has_ended = False
        self._then = then
        self.channel = Channel(connected, self._take, self._end)
        self.channel.open()

    def _take(self, message: Message) -> None:
        self.received.append(message)
        self._then(message)

    def _end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("sizes", [[1, 2, 3], [0, 5_000_000, 1, 100_000, 70_000], [64 * 1024] * 20])
async def test_messages_of_all_sizes_arrive_whole_and_in_order(sizes: list[int]) -> None:
    ours, theirs = socket.socketpair()
    one, other = End(ours), End(theirs)
    sent = [{"number": number, "text": "x" * size} for number, size in enumerate(sizes)]
    for message in sent:
        one.channel.send(message)
        other.channel.send(message)
    await until(lambda: len(one.received) == len(other.received) == len(sent), message="all")
    assert one.received == other.received == sent
    one.channel.close()
    await until(lambda: other.has_ended, message="the end")
    other.channel.send({"late": True})  # nobody is there any more, and nothing is raised
    other.channel.close()


async def test_what_has_arrived_before_the_end_is_passed_on() -> None:
    ours, theirs = socket.socketpair()
    one = End(ours)
    body = packed({"last": "words"})
    theirs.sendall(struct.pack("<I", len(body)) + body)
    theirs.close()
    one.channel.drain()
    assert one.received == [{"last": "words"}]
    assert one.has_ended
    one.channel.close()


async def test_an_unreadable_message_ends_the_channel_and_a_failing_receiver_does_not() -> None:
    def fail(message: Message) -> None:
        if message.get("fails"):
            raise ValueError("cannot take it")

    ours, theirs = socket.socketpair()
    one = End(ours, fail)
    for message in ({"fails": True}, {"fails": False}):
        body = packed(message)
        theirs.sendall(struct.pack("<I", len(body)) + body)
    await until(lambda: len(one.received) == 2, message="both")
    theirs.sendall(struct.pack("<I", 4) + b"junk")
    await until(lambda: one.has_ended, message="the end")
    one.channel.close()
    theirs.close()


def test_a_value_that_the_usual_codec_cannot_read_arrives_as_the_driver_reads_it() -> None:
    broken = Binary(b"12345", 4)
    assert unpacked(packed({"id": broken})) == {"id": broken}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "exited with code 3"),
        (0, "exited with code 0"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL, perhaps for want of memory"),
        (-1000, "killed by signal 1000"),
    ],
)
def test_the_cause_of_a_death_is_said_in_words(code: int, said: str) -> None:
    assert cause_of_death(code) == said


def test_the_memory_of_a_process_that_is_gone_is_not_known() -> None:
    assert resident_bytes(2**30) == 0


def test_an_outcome_arrives_as_it_was_made() -> None:
    from mtask.kernel.document.status import RunStatus
    from mtask.kernel.statements.finish import Outcome
    from mtask.kernel.statements.outbox import OwedTask

    owed = OwedTask({"_id": "a:b", "params": {"x": 1}}, delay_ms=5)
    for outcome in (
        Outcome("a:1", "r", RunStatus.SUCCESS, {"x": [1]}, next=owed),
        Outcome("a:1", "r", RunStatus.FAIL, reason="why", final=True, jitter=0.5),
        Outcome("a:1", "r", RunStatus.CANCELED, reason="later", delay_ms=7),
    ):
        assert outcome_in(unpacked(packed(outcome_document(outcome)))) == outcome


def test_few_runs_wait_for_executors_and_none_where_handlers_take_long() -> None:
    rate = Rate()
    assert rate.ahead(2) == 0  # nothing is known yet
    for _ in range(100):
        rate.took(0.01)
    assert rate.ahead(2) == pytest.approx(60, abs=1)
    rate.took(10.0)  # one long run, and none waits behind it
    assert rate.ahead(2) == 0
    for _ in range(20):  # and the executors soon have enough to do again
        rate.took(0.01)
    assert rate.ahead(2) > 50
    for _ in range(100):
        rate.took(0.0)
    assert rate.ahead(1) == 50  # never more than this for one executor
    rate.forget()
    assert rate.ahead(1) == 0
