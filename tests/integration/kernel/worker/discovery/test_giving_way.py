"""When a worker reads its change stream again after an event: it leaves the worker that ranks first time to claim."""

from __future__ import annotations

from typing import Any

import pytest

from mtask import App, TaskSpec
from mtask import Client as SyncClient
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations.change_stream import Stream
from mtask.kernel.worker.discovery import stream
from mtask.kernel.worker.discovery.fleet import Peers
from mtask.kernel.worker.running.claim import Sender
from tests.integration.stores import register
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client, until

#: Longer than any test waits.
_FOR_EVER = 3_600.0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what the worker does from now on: it asks for an event, has one, sends a claim."""
    noted: list[str] = []
    read, claim = Stream.next, Sender.claim_group

    async def noted_read(self: Stream) -> Any:
        noted.append("read")
        event = await read(self)
        if event is not None:
            noted.append(str(event.task_id))
        return event

    async def noted_claim(self: Sender, task_ids: list[str], **given: Any) -> Any:
        noted.append("claim")
        return await claim(self, task_ids, **given)

    monkeypatch.setattr(Stream, "next", noted_read)
    monkeypatch.setattr(Sender, "claim_group", noted_claim)
    return noted


def keys_by_rank(peer: str) -> tuple[str, str]:
    """Return a key for which w1 ranks first, and one for which the peer does."""
    peers = Peers("w1")
    peers.update([{"_id": peer, "concurrency": 10, "names": ["work"]}])
    ranked = {peers.rank(f"work:{number}", "work"): str(number) for number in range(100)}
    return ranked[0], ranked[1]


async def ready(bench: Bench, peer_cnt: int) -> None:
    """Wait until the worker hears of tasks by its stream, and by nothing else, and knows its peers."""
    parts = bench.worker.parts
    await until(lambda: parts.stream.is_open, message="the stream is open")
    await until(lambda: len(bench.others("work")) == peer_cnt, message="the peers are known")
    bench.stop_scans()


async def test_worker_gives_way_to_the_first_one_and_takes_the_task_if_that_one_does_not(
    working: Working, app: App, store: SyncStore, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody claims for the peer. The stream stays unread, and the claim follows nevertheless."""
    monkeypatch.setattr(stream, "GIVE_WAY", _FOR_EVER)
    register(store, "idle", ["work"])
    _, theirs = keys_by_rank("idle")
    async with working(app) as bench:
        await ready(bench, 1)
        await bench.client.publish("work", key=theirs)
        await bench.status(f"work:{theirs}", "SUCCESS")
        after = steps[steps.index(f"work:{theirs}") + 1 :]
        assert after == ["claim"]


async def test_events_that_came_together_are_all_taken_before_a_worker_gives_way(
    working: Working, database_name: str, mongo: Client, app: App, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "GIVE_WAY", _FOR_EVER)
    register(store, "idle", ["work"])
    mine, theirs = keys_by_rank("idle")
    async with working(app) as bench:
        await ready(bench, 1)
        before = bench.worker.parts.stream.event_cnt
        specs = [TaskSpec("work", {}, key=theirs), TaskSpec("work", {}, key=mine)]
        with (  # all become visible at one instant
            SyncClient(mongo, database=database_name) as client,
            mongo.start_session() as session,
            session.start_transaction(),
        ):
            client.publish_many(specs, session=session)
        await bench.heard(before + 1)
        await bench.status(f"work:{mine}", "SUCCESS")


async def test_events_in_series_are_not_late(
    working: Working, app: App, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker gives way only to a task that comes some time after the last event."""
    monkeypatch.setattr(stream, "GIVE_WAY", _FOR_EVER)
    monkeypatch.setattr(stream, "APART", _FOR_EVER)
    register(store, "idle", ["work"])
    mine, theirs = keys_by_rank("idle")
    async with working(app) as bench:
        await ready(bench, 1)
        await bench.client.publish("work", key=mine)  # the first event of all is never in a series
        await bench.status(f"work:{mine}", "SUCCESS")
        await bench.client.publish("work", key=theirs)
        await bench.status(f"work:{theirs}", "SUCCESS")
        await bench.client.publish("work", key="last")
        await bench.status("work:last", "SUCCESS")
