"""Tokens of events: whoever goes on with one is told the rest, with whichever filter, and whatever was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from mtask import AsyncClient, RunStatus
from mtask.database import setup
from mtask.errors import InvalidInput
from mtask.features.events.events_aio import AsyncEvents
from mtask.features.events.task_events import TaskEvent
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from tests.clients import KINDS, AnyClient, Kind, claim, open_client, server_now
from tests.integration.client.event_readings import SOON, Reading, told
from tests.integration.stores import lapse
from tests.integration.stores import publish as publish_task

_DONE = {"fraction": 1.0, "message": "done"}
_PREEMPTED = [("timed_out", "task:k"), ("claimed", "task:k")]
_FINISHED = [("progress", "task:other"), ("succeeded", "task:other")]


@pytest.fixture(autouse=True)
def set_up(store: SyncStore) -> None:
    store.run(setup.ensure())


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    with open_client("sync", mongo_uri, database_name) as made:
        yield made


def abandoned(store: SyncStore, key: str = "k") -> None:
    """Let there be a task whose next claim tells two events: the lapse, and the claim."""
    publish_task(store, key, retry_delay=0)
    claim(store, f"task:{key}", "w1")
    lapse(store, key)


def finish_with_progress(store: SyncStore, key: str, run_id: str) -> None:
    """Finish a run by a change that tells two events: its last progress, and the success."""
    outcome = Outcome(f"task:{key}", run_id, RunStatus.SUCCESS, progress=_DONE)
    assert store.run(claims.finish([outcome])) == {run_id}


def next_second(store: SyncStore) -> datetime:
    """Return the next whole second by the server's clock, once it has come: `since` counts in seconds."""
    instant = server_now(store).replace(microsecond=0) + timedelta(seconds=1)
    while server_now(store) < instant:
        pass
    return instant


def left_in_the_middle(client: AnyClient, store: SyncStore, **given: Any) -> TaskEvent:
    """Let a task be preempted and another one finish; return the first event of the former's change."""
    abandoned(store)
    publish_task(store, "other")
    run_id = claim(store, "task:other", "w1")
    with Reading(client, **given) as reading:
        claim(store, "task:k", "w2")
        (first,) = reading.take(1)
    assert told([first]) == _PREEMPTED[:1]
    finish_with_progress(store, "other", run_id)
    return first


@pytest.mark.parametrize("kind", KINDS)
def test_since_an_instant_a_reader_may_stop_within_the_first_change(
    mongo_uri: str, database_name: str, store: SyncStore, kind: Kind
) -> None:
    abandoned(store)
    since = next_second(store)
    claim(store, "task:k", "w2")
    with open_client(kind, mongo_uri, database_name) as client:
        with Reading(client, since=since) as reading:
            (first,) = reading.take(1)
            assert reading.token == first.token
        with Reading(client, after=first.token) as reading:
            assert told([first, *reading.take(1)]) == _PREEMPTED
            assert reading.is_silent()


def test_reader_goes_on_in_the_middle_of_a_change(client: AnyClient, store: SyncStore) -> None:
    first = left_in_the_middle(client, store)
    with Reading(client, after=first.token) as reading:
        assert reading.token == first.token
        found = reading.take(3)
        assert told(found) == [*_PREEMPTED[1:], *_FINISHED]
    with Reading(client, after=found[1].token) as reading:
        assert told(reading.take(1)) == _FINISHED[1:]


@pytest.mark.parametrize("given", [{"key": "other"}, {"key": "other", "queue": "default"}])
def test_token_within_a_change_skips_nothing_of_what_another_filter_tells(
    client: AnyClient, store: SyncStore, given: dict[str, Any]
) -> None:
    first = left_in_the_middle(client, store)
    with Reading(client, after=first.token, **given) as reading:
        assert told(reading.take(2)) == _FINISHED
        assert reading.is_silent()


def test_token_within_a_change_counts_the_same_events_with_another_filter(client: AnyClient, store: SyncStore) -> None:
    first = left_in_the_middle(client, store)
    with Reading(client, after=first.token, key="k", queue="default") as reading:
        assert told(reading.take(1)) == _PREEMPTED[1:]
        assert reading.is_silent()


def test_token_within_a_change_of_a_removed_task_skips_nothing_of_the_next(client: AnyClient, store: SyncStore) -> None:
    first = left_in_the_middle(client, store, queue="default")
    store.tasks.delete_one({"_id": "task:k"})
    with Reading(client, after=first.token, queue="default") as reading:
        assert told(reading.take(2)) == _FINISHED


def test_token_within_a_transaction_names_one_of_its_changes(client: AnyClient, store: SyncStore) -> None:
    for key in ("a", "b", "c"):
        abandoned(store, key)
    with Reading(client) as reading:
        with store.client.start_session() as session, session.start_transaction():
            for key in ("a", "b", "c"):  # all at one instant of the oplog
                store.run(claims.claim([f"task:{key}"], "w2", f"of {key}"), session)
        found = reading.take(6)
    expected = [(kind, f"task:{key}") for key in ("a", "b", "c") for kind in ("timed_out", "claimed")]
    assert told(found) == expected
    for place, event in enumerate(found[:-1]):
        with Reading(client, after=event.token) as reading:
            assert told(reading.take(5 - place)) == expected[place + 1 :]
    with Reading(client, after=found[2].token, key="c") as reading:
        assert told(reading.take(2)) == expected[4:]


def test_token_of_an_earlier_version_serves(client: AnyClient, store: SyncStore) -> None:
    """It names the change before, and how many events of the next one were read."""
    abandoned(store)
    with Reading(client) as reading:
        publish_task(store, "before")
        before = reading.take(1)[0].token.partition(".")[0]
        claim(store, "task:k", "w2")
        reading.take(2)
        publish_task(store, "behind")
    behind = [("published", "task:behind")]
    for read in (1, 0):
        with Reading(client, after=f"{before}.{read}" if read else before) as reading:
            assert told(reading.take(3 - read)) == [*_PREEMPTED[read:], *behind]
    for token in (before, f"{before}.1"):  # asked for less, the server does not find the change itself
        with Reading(client, after=token, key="behind") as reading:
            assert told(reading.take(1)) == behind


@pytest.mark.parametrize("after", ["ab.1.2", "ab.1.x-1", "ab.1.-1-1", "ab.1.99999999999-1", "ab.1.1-1.1", "ab.-1.1-1"])
def test_token_that_is_none_is_refused(client: AnyClient, after: str) -> None:
    with pytest.raises(InvalidInput, match="is no token"):
        client.events(after=after)


async def _next_within(happening: AsyncEvents, seconds: float) -> TaskEvent | None:
    try:
        return await asyncio.wait_for(anext(happening), seconds)
    except TimeoutError:
        return None


@pytest.mark.parametrize("kind", ["asyncio", "motor"])
def test_what_a_cancelled_reader_would_have_been_told_is_told_to_the_next(
    mongo_uri: str, database_name: str, store: SyncStore, kind: Kind
) -> None:
    async def scenario(client: AsyncClient) -> list[str]:
        found = []
        async with client.events() as happening:
            for number in range(4):
                assert await _next_within(happening, 0.05 * (number + 1)) is None
                began = happening.token
                await asyncio.to_thread(publish_task, store, str(number))
                await asyncio.to_thread(publish_task, store, f"{number} too")
                async with client.events(after=began) as again:
                    event = await again.poll(SOON)
                    assert event is not None
                    assert event.key == str(number)
                for _ in range(2):
                    event = await happening.poll(SOON)
                    assert event is not None
                    found.append(event.key)
        return found

    with open_client(kind, mongo_uri, database_name) as client:
        found = client.runner.run(scenario(client.client))
    assert found == [key for number in range(4) for key in (str(number), f"{number} too")]


@pytest.mark.parametrize("kind", ["asyncio", "motor"])
def test_reader_that_is_cancelled_all_the_time_is_told_each_event_once(
    mongo_uri: str, database_name: str, store: SyncStore, kind: Kind
) -> None:
    count = 60

    def publish_all() -> None:
        for number in range(count):
            publish_task(store, str(number))

    async def scenario(client: AsyncClient) -> list[str]:
        found: list[str] = []
        happening = client.events()
        await happening.open()
        publishing = asyncio.create_task(asyncio.to_thread(publish_all))
        async with asyncio.timeout(SOON):
            while len(found) < count:
                event = await _next_within(happening, 0.001 * (1 + len(found) % 7))
                if event is not None:
                    found.append(event.key)
        await publishing
        await happening.close()
        return found

    with open_client(kind, mongo_uri, database_name) as client:
        assert client.runner.run(scenario(client.client)) == [str(number) for number in range(count)]
