"""Shared answers: who waits for a read, and how old an answer may be. The clock is the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mtask.errors import DatabaseUnavailable
from mtask.web.sharing import Shared
from tests.loops import in_loop


class Reads:
    """A clock, and a read that returns its number. The test says how long a read takes, and whether it fails."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.takes = 0.0
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()

    def monotonic(self) -> float:
        return self.now

    async def read(self) -> int:
        self.count += 1
        number = self.count
        await self.gate.wait()
        self.now += self.takes
        if self.fails:
            raise DatabaseUnavailable("away")
        return number


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
@in_loop
async def shared(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shared[int]]:
    monkeypatch.setattr("mtask.web.sharing.time", reads)
    made = Shared(reads.read, fresh=1.0, times=10.0, most=30.0)
    yield made
    reads.gate.set()
    await made.end()


async def settled() -> None:
    """Let what has begun go on until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_quick_answer_is_fresh_for_a_moment_and_then_read_anew(reads: Reads, shared: Shared[int]) -> None:
    assert [await shared.get(), await shared.get()] == [1, 1]
    reads.now += 0.99
    assert await shared.get() == 1
    reads.now += 0.02
    assert await shared.get() == 2, "nobody gets an old answer where a new one costs nothing"


async def test_a_read_that_hangs_does_not_keep_all_later_callers_waiting(reads: Reads, shared: Shared[int]) -> None:
    hung, reads.gate = reads.gate, asyncio.Event()
    reads.gate.clear()
    first = asyncio.create_task(shared.get())
    await settled()
    reads.now += 60.0
    second = asyncio.create_task(shared.get())
    await settled()
    assert reads.count == 1, "it may still end"
    reads.now += 0.1
    reads.gate = hung  # open
    assert await shared.get() == 2
    first.cancel()
    second.cancel()


async def test_callers_share_one_read(reads: Reads, shared: Shared[int]) -> None:
    reads.gate.clear()
    callers = [asyncio.create_task(shared.get()) for _ in range(5)]
    await settled()
    callers[0].cancel()
    await settled()
    reads.gate.set()
    assert await asyncio.gather(*callers[1:]) == [1, 1, 1, 1]
    assert reads.count == 1


async def test_nobody_waits_for_a_slow_read_while_others_ask(reads: Reads, shared: Shared[int]) -> None:
    reads.takes = 0.4
    assert await shared.get() == 1
    reads.now += 3.9
    assert (await shared.get(), reads.count) == (1, 1)
    reads.now += 0.2
    reads.gate.clear()
    assert [await shared.get(), await shared.get()] == [1, 1], "the former answer, while the next one is read"
    await settled()
    assert reads.count == 2
    reads.gate.set()
    await settled()
    assert (await shared.get(), reads.count) == (2, 2)
    reads.now += 4.1 + 59.8
    assert await shared.get() == 2, "still, though nobody asked for a minute"
    await settled()
    reads.now += 4.1 + 60.1
    assert await shared.get() == 4, "an answer that old is given to nobody"


async def test_a_very_slow_answer_is_fresh_for_a_bounded_time(reads: Reads, shared: Shared[int]) -> None:
    reads.takes = 60.0
    assert await shared.get() == 1
    reads.now += 29.0
    assert (await shared.get(), reads.count) == (1, 1)
    reads.now += 2.0
    assert await shared.get() == 1
    await settled()
    assert reads.count == 2


async def test_after_a_change_callers_wait_for_an_answer_that_knows_it(reads: Reads, shared: Shared[int]) -> None:
    reads.takes = 0.4
    assert await shared.get() == 1
    shared.forget()
    assert await shared.get() == 2
    reads.now += 4.1
    reads.gate.clear()
    assert await shared.get() == 2
    await settled()
    shared.forget()  # the read that is under way may have begun before the change
    waiting = asyncio.create_task(shared.get())
    await settled()
    reads.gate.set()
    assert await waiting == 4
    assert await shared.get() == 4


async def test_an_error_of_a_read_in_the_background_is_told_to_the_next_caller(
    reads: Reads, shared: Shared[int]
) -> None:
    reads.takes = 0.4
    assert await shared.get() == 1
    reads.now += 4.1
    reads.fails = True
    assert await shared.get() == 1
    await settled()
    with pytest.raises(DatabaseUnavailable):
        await shared.get()
    reads.fails = False
    assert await shared.get() == 4
