"""A call is awaited in its caller's own asyncio task, and only until there is a new primary."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import anyio
import pymongo
import pytest
from pymongo import AsyncMongoClient, _csot
from pymongo.hello import Hello
from pymongo.server_description import ServerDescription
from pymongo.topology_description import TOPOLOGY_TYPE, TopologyDescription

from mtask.errors import DatabaseUnavailable
from mtask.kernel.driver.failover import _LOOK_FOR_PRIMARY, WhilePrimary
from mtask.kernel.driver.stores import AsyncStore
from tests.mongo import PATIENCE


class Servers:
    """Three servers. One of them, or none, is known as the primary."""

    def __init__(self, primary: int | None = 1) -> None:
        self.elect(primary)

    def elect(self, primary: int | None) -> None:
        described: dict[tuple[str, int | None], ServerDescription] = {}
        for port in (1, 2, 3):
            is_primary = port == primary
            said = {"ok": 1, "setName": "rs", "isWritablePrimary": is_primary, "secondary": not is_primary}
            described["a", port] = ServerDescription(("a", port), Hello(said))
        kind = TOPOLOGY_TYPE.ReplicaSetNoPrimary if primary is None else TOPOLOGY_TYPE.ReplicaSetWithPrimary
        self.topology_description = TopologyDescription(kind, described, "rs", None, None, None)


class Asking:
    """A call that asks a server. The server answers when `answer` is set; the end of the call may take long."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_asked, self.may_end, self.has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.rests: list[asyncio.Task[Any]] = []

    async def ask(self) -> str:
        self.is_asked.set()
        try:
            return await self.answer
        finally:
            await self.may_end.wait()
            await asyncio.sleep(0)
            self.has_ended.set()

    async def wait(self, servers: Servers, call: Coroutine[Any, Any, str] | None = None) -> str:
        return await WhilePrimary(call or self.ask(), servers, self.rests.append)


async def test_answer_and_error_of_a_call_reach_its_caller() -> None:
    answered, failed = Asking(), Asking()
    answered.answer.set_result("answer")
    assert await answered.wait(Servers()) == "answer"
    failed.answer.set_exception(KeyError("x"))
    with pytest.raises(KeyError, match="x"):
        await failed.wait(Servers())
    assert answered.rests == failed.rests == []


async def test_call_runs_in_the_asyncio_task_of_its_caller() -> None:
    async def task_of_call() -> object:
        await asyncio.sleep(0)
        return asyncio.current_task()

    found: object = await WhilePrimary(task_of_call(), Servers(), _never)
    assert found is asyncio.current_task()


async def test_time_limit_within_a_call_is_the_error_of_the_call() -> None:
    async def limited() -> str:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        return "never"

    async def asked_again() -> str:
        with suppress(TimeoutError):
            await limited()
        await asyncio.sleep(0)
        return "answer"

    for call, told in ((limited(), TimeoutError), (asked_again(), "answer")):
        asking = Asking()
        found, cancellations = await asyncio.create_task(_outcome(asking.wait(Servers(), call)))
        assert found == told or type(found) is told
        assert cancellations == 0
        assert asking.rests == []


async def test_caller_that_is_cancelled_waits_until_the_call_has_ended() -> None:
    asking = Asking()
    asking.may_end.clear()
    caller = asyncio.create_task(asking.wait(Servers()))
    await asking.is_asked.wait()
    caller.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not caller.done()
    asking.may_end.set()
    await asyncio.wait((caller,), timeout=PATIENCE)
    assert caller.cancelled()
    assert asking.has_ended.is_set()


@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_caller_ends_a_call_that_drops_a_cancellation(steps: int) -> None:
    event = asyncio.Event()

    async def ask_again() -> str:
        while True:  # as the driver waits for a server
            await asyncio.wait_for(event.wait(), PATIENCE)
            event.clear()

    caller = asyncio.create_task(Asking().wait(Servers(), ask_again()))
    await asyncio.sleep(0)
    event.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait((caller,), timeout=PATIENCE)
    assert caller.cancelled()


async def test_call_gets_one_cancellation_however_often_its_caller_is_cancelled() -> None:
    asking, cancellations, is_in_order = Asking(), 0, False

    async def puts_in_order() -> str:
        nonlocal cancellations, is_in_order
        try:
            return await asking.ask()
        finally:
            for turn in range(20):
                try:
                    await asyncio.sleep(0.001 * (turn % 2))
                except asyncio.CancelledError:
                    cancellations += 1
            is_in_order = True

    caller = asyncio.create_task(asking.wait(Servers(), puts_in_order()))
    await asking.is_asked.wait()
    while not caller.done():
        caller.cancel()
        await asyncio.sleep(0)
    assert caller.cancelled()
    assert is_in_order
    assert cancellations == 0


async def test_time_limit_within_a_call_that_comes_late_is_not_for_its_caller() -> None:
    limit: asyncio.Timeout

    async def waits_as_the_driver() -> str:
        nonlocal limit
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE) as limit:
                try:
                    await asyncio.Event().wait()
                finally:
                    for _ in range(5):  # the lock of the condition is taken
                        await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        return "answer"

    asking = Asking()
    caller = asyncio.create_task(_outcome(asking.wait(Servers(), waits_as_the_driver())))
    await asyncio.sleep(0)
    limit.reschedule(0)
    assert await asyncio.wait_for(caller, PATIENCE) == ("answer", 0)


async def test_new_primary_is_noticed_after_a_time_limit_within_the_call() -> None:
    servers, asking = Servers(1), Asking()

    async def waits_twice() -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        return await asking.ask()

    caller = asyncio.create_task(_outcome(asking.wait(servers, waits_twice())))
    await asking.is_asked.wait()
    servers.elect(2)
    told, _ = await asyncio.wait_for(caller, PATIENCE)
    assert isinstance(told, DatabaseUnavailable)


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_what_a_cancellation_says_reaches_the_caller(is_dropped: bool) -> None:
    asking = Asking()

    async def drops() -> str:
        with suppress(asyncio.CancelledError):
            await asking.ask()
        return "answer"

    caller = asyncio.create_task(asking.wait(Servers(), drops() if is_dropped else asking.ask()))
    await asking.is_asked.wait()
    caller.cancel("by a scope")
    with pytest.raises(asyncio.CancelledError, match="by a scope"):
        await caller


async def test_scope_of_anyio_ends_a_call() -> None:
    asking = Asking()
    asking.may_end.clear()
    with anyio.move_on_after(0.01) as scope:
        asyncio.get_running_loop().call_later(0.05, asking.may_end.set)
        await asking.wait(Servers())
    assert scope.cancelled_caught
    assert asking.has_ended.is_set(), "the scope cancels its task at each turn of the loop"


async def test_scope_of_anyio_ends_a_call_that_has_a_time_limit_of_its_own() -> None:
    async def waits_as_the_driver() -> str:
        async with asyncio.timeout(0):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)  # the lock of the condition is taken
        return "never"

    with anyio.move_on_after(0.05) as scope:
        await Asking().wait(Servers(), waits_as_the_driver())
    assert scope.cancelled_caught


async def test_call_within_a_call_that_is_given_up_interrupts_nobody() -> None:
    servers, asking = Servers(1), Asking()
    asking.may_end.clear()

    async def ask_within() -> str:
        await asyncio.sleep(_LOOK_FOR_PRIMARY / 5)  # so the outer call looks for a primary first
        return await asking.wait(servers)

    async def caller() -> str:
        with pytest.raises(DatabaseUnavailable):
            await asking.wait(servers, ask_within())
        servers.elect(3)
        await asyncio.sleep(2 * _LOOK_FOR_PRIMARY)  # longer than the interval at which a call looks for a primary
        return "not interrupted"

    calling = asyncio.create_task(_outcome(caller()))
    await asking.is_asked.wait()
    servers.elect(2)
    assert await asyncio.wait_for(calling, PATIENCE) == ("not interrupted", 0)
    asking.may_end.set()
    await asyncio.wait(asking.rests, timeout=PATIENCE)
    assert len(asking.rests) == 1
    assert asking.has_ended.is_set()


async def test_caller_is_told_of_a_new_primary_before_the_call_has_ended() -> None:
    servers, asking = Servers(1), Asking()
    asking.may_end.clear()
    caller = asyncio.create_task(_outcome(asking.wait(servers)))
    await asking.is_asked.wait()
    servers.elect(2)
    told, cancellations = await asyncio.wait_for(caller, PATIENCE)
    assert isinstance(told, DatabaseUnavailable)
    assert "a:1 has not answered, and a:2 is primary now" in str(told)
    assert cancellations == 0, "later cancellations would be counted wrongly"
    (rest,) = asking.rests
    assert not rest.done()
    asking.may_end.set()
    await asyncio.wait((rest,), timeout=PATIENCE)
    assert asking.has_ended.is_set()


async def test_time_limit_of_what_is_given_up_does_not_stay_with_the_caller() -> None:
    servers, asking = Servers(1), Asking()
    asking.may_end.clear()

    async def limited() -> str:
        with pymongo.timeout(PATIENCE):
            return await asking.ask()

    async def caller(store: AsyncStore) -> float | None:
        with pytest.raises(DatabaseUnavailable):
            await store.while_primary(limited())
        return _csot.remaining()

    async with AsyncMongoClient[dict[str, Any]](connect=False) as client:
        store: Any = AsyncStore(client, "unused")
        store.client = servers
        calling = asyncio.create_task(caller(store))
        await asking.is_asked.wait()
        servers.elect(2)
        assert await asyncio.wait_for(calling, PATIENCE) is None
        asking.may_end.set()
        await asyncio.wait_for(asking.has_ended.wait(), PATIENCE)


async def test_rest_that_is_cancelled_before_its_first_step_still_ends_the_call() -> None:
    servers, asking = Servers(1), Asking()
    asking.may_end.clear()
    asking.rests = _CancelledAtOnce()
    call = asking.ask()
    caller = asyncio.create_task(_outcome(asking.wait(servers, call)))
    await asking.is_asked.wait()
    servers.elect(2)
    await asyncio.wait_for(caller, PATIENCE)
    await asyncio.wait(asking.rests, timeout=PATIENCE)
    assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED


async def test_first_primary_that_is_known_is_the_one_that_was_asked() -> None:
    servers, asking = Servers(None), Asking()
    caller = asyncio.create_task(_outcome(asking.wait(servers)))
    await asking.is_asked.wait()
    servers.elect(3)
    await asyncio.wait((caller,), timeout=0.8)
    assert not caller.done(), "a primary is there now, and no other one has gone"
    servers.elect(None)
    await asyncio.wait((caller,), timeout=0.8)
    assert not caller.done(), "no primary is no new primary"
    servers.elect(1)
    told, _ = await asyncio.wait_for(caller, PATIENCE)
    assert "a:3 has not answered, and a:1 is primary now" in str(told)


async def test_answer_that_comes_with_the_news_of_a_new_primary_is_returned() -> None:
    servers = Servers(1)
    stubborn = asyncio.Event()

    async def answers_when_interrupted() -> str:
        try:
            await stubborn.wait()
        except asyncio.CancelledError:
            return "answer"
        return "never"

    caller = asyncio.create_task(_outcome(Asking().wait(servers, answers_when_interrupted())))
    await asyncio.sleep(0)
    servers.elect(2)
    assert await asyncio.wait_for(caller, PATIENCE) == ("answer", 0)


async def test_cancellation_from_outside_wins_over_a_new_primary() -> None:
    servers, asking = Servers(1), Asking()
    caller = asyncio.create_task(asking.wait(servers))
    await asking.is_asked.wait()
    servers.elect(2)
    while not caller.cancelling():  # noqa: ASYNC110 between the interruption and its effect there is no event
        await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait((caller,), timeout=PATIENCE)
    assert caller.cancelled()
    assert asking.has_ended.is_set()


async def test_cancellation_of_what_a_call_awaits_is_the_business_of_the_call() -> None:
    own: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def tries_again() -> str:
        try:
            await own
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "answer"

    caller = asyncio.create_task(Asking().wait(Servers(), tries_again()))
    await asyncio.sleep(0)
    own.cancel()
    assert await asyncio.wait_for(caller, PATIENCE) == "answer"


async def test_time_limit_of_the_caller_ends_the_call() -> None:
    asking = Asking()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asking.wait(Servers())
    assert asking.has_ended.is_set()


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_cancelled_call_held_is_freed_without_a_look_for_cycles(fails: bool) -> None:
    asking = Asking()

    class Held:
        """A value of the call."""

    async def ask_with(held: Held) -> str:
        assert held
        try:
            return await asking.ask()
        finally:
            if fails:
                await _failing()

    held = Held()
    gone = weakref.ref(held)
    caller = asyncio.create_task(asking.wait(Servers(), ask_with(held)))
    del held
    await asking.is_asked.wait()
    gc.disable()
    try:
        caller.cancel()
        await asyncio.wait((caller,), timeout=PATIENCE)
        assert caller.cancelled()
        asking.rests.clear()
        del caller
        assert gone() is None
    finally:
        gc.enable()


class _CancelledAtOnce(list[Any]):
    """Cancels each asyncio task that is put into it."""

    def append(self, rest: asyncio.Task[Any]) -> None:
        rest.cancel()
        super().append(rest)


async def _outcome(waiting: Coroutine[Any, Any, str]) -> tuple[object, int]:
    """Return what a caller gets, and how many cancellations its asyncio task then counts."""
    caller = asyncio.current_task()
    assert caller is not None
    try:
        got: object = await waiting
    except (DatabaseUnavailable, TimeoutError) as error:
        got = error
    return got, caller.cancelling()


def _failing() -> asyncio.Future[None]:
    """Return a future that fails soon."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_exception, KeyError("x"))
    return future


def _never(rest: asyncio.Task[Any]) -> None:
    raise AssertionError(f"given up: {rest}")
