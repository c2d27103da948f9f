"""The threads of plain handlers: what they return and raise, and that they are used again and let go."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mtask.kernel.worker.running.call import Threads
from tests.mongo import eventually

NAME = "threads-under-test"
_START = threading.Thread.start


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Let the threads of a test end before the next test counts its own."""
    yield
    eventually(lambda: not _alive(), message="all threads end")


def _refuse(thread: threading.Thread) -> None:
    # Threads of the driver start as they do otherwise: clients of other tests live in this process.
    if not thread.name.startswith(NAME):
        return _START(thread)
    raise RuntimeError("can't start new thread")


def _alive() -> int:
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


async def _result(threads: Threads, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    made = threads.start(call)
    await made.future
    return made.take()


async def test_call_gives_what_it_returns_and_is_made_in_the_callers_context_in_another_thread() -> None:
    color = contextvars.ContextVar("color", default="none")
    threads = Threads(NAME)
    color.set("red")
    assert await _result(threads, lambda: (color.get(), threading.current_thread().name)) == (
        ("red", f"{NAME}-0"),
        None,
    )
    threads.close()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), StopIteration(1)])
def test_whatever_it_raises_comes_back_and_the_thread_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def scenario() -> None:
        threads = Threads(NAME)
        assert await _result(threads, fail) == (None, error)
        assert await _result(threads, lambda: "next") == ("next", None)
        assert _alive() == 1
        threads.close()

    asyncio.run(scenario())


def test_calls_run_beside_each_other_and_threads_are_used_again() -> None:
    together = threading.Barrier(20)

    async def scenario() -> None:
        threads = Threads(NAME)
        for _ in range(3):
            made = [threads.start(together.wait) for _ in range(20)]
            await asyncio.wait_for(asyncio.gather(*(call.future for call in made)), 20)
            assert sorted(call.take()[0] for call in made) == list(range(20))
        assert _alive() == 20
        threads.close()

    asyncio.run(scenario())


async def test_every_one_of_many_ends_is_heard_of() -> None:
    threads = Threads(NAME)
    for size in (1, 2, 3, 50):
        for _ in range(200):
            made = [threads.start(int) for _ in range(size)]
            await asyncio.wait_for(asyncio.gather(*(call.future for call in made)), 20)
    threads.close()


async def test_end_of_a_call_that_nobody_waits_for_is_told() -> None:
    threads, gate, told = Threads(NAME), threading.Event(), asyncio.Event()
    made = threads.start(gate.wait)
    made.future.cancel()
    assert not told.is_set()
    made.when_over(told.set)
    gate.set()
    await asyncio.wait_for(told.wait(), 20)
    assert made.is_over
    threads.close()


async def test_call_that_nobody_waits_for_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    threads, gate = Threads(NAME), threading.Event()
    first = threads.start(gate.wait)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refuse)
        late = threads.start(lambda: begun.append("late"))
        still = threads.start(lambda: begun.append("still"))
    late.future.cancel()
    gate.set()
    await asyncio.wait_for(asyncio.gather(first.future, still.future), 20)
    threads.close()
    assert begun == ["still"]


async def test_what_an_abandoned_call_raises_is_let_go() -> None:
    threads, gate, told = Threads(NAME), threading.Event(), asyncio.Event()

    def fail() -> None:
        gate.wait()
        raise ValueError("nobody hears of it")

    made = threads.start(fail)
    made.future.cancel()
    made.when_over(told.set)
    gate.set()
    await asyncio.wait_for(told.wait(), 20)
    assert made.take() == (None, None)
    threads.close()


def test_calls_that_end_at_once_take_few_threads() -> None:
    async def scenario() -> None:
        threads = Threads(NAME)
        most = 0
        for _ in range(20):
            made = threads.start(int)
            # The thread is done with it, and the loop has not heard: the next call needs no further one.
            eventually(lambda made=made: threads._ended and made in threads._ended, message="ended")  # type: ignore[misc]
            most = max(most, _alive())
        assert most == 1
        threads.close()

    asyncio.run(scenario())


def test_closed_threads_end_each_when_its_call_has() -> None:
    gate = threading.Event()

    async def scenario() -> None:
        threads = Threads(NAME)
        held = threads.start(gate.wait)
        await _result(threads, int)
        threads.close()
        eventually(lambda: _alive() == 1, message="the idle thread ends")
        assert not held.is_over

    asyncio.run(scenario())
    gate.set()  # its loop is gone by now: nobody is left to hear of it, and that is no error
    for thread in threading.enumerate():
        if thread.name.startswith(NAME):
            thread.join(20)
    assert _alive() == 0


async def test_where_no_further_thread_can_be_started_a_call_waits_for_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, gate = Threads(NAME), threading.Event()
    first = threads.start(gate.wait)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refuse)
        second = threads.start(lambda: "second")
        with pytest.raises(RuntimeError, match="can't start"):
            Threads(NAME).start(int)
    gate.set()
    await asyncio.wait_for(asyncio.gather(first.future, second.future), 20)
    assert second.take() == ("second", None)
    threads.close()
