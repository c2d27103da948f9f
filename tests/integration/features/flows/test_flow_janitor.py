"""The janitor on flows: what cannot be settled holds up nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from mtask import Client, Flow
from mtask.features.flows import read
from mtask.features.flows import settle as settling
from mtask.features.flows import worker as flow_janitor
from mtask.features.flows.worker import FlowPart
from mtask.kernel.driver import connect
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.worker.discovery import relays
from mtask.parts import relays as listed
from tests.clients import claim, fail, succeed


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_janitor, "OWED_GRACE", timedelta(0))
    monkeypatch.setattr(relays, "ALONE_TIMEOUT", timedelta(milliseconds=300))


def publish_ended(mongo_uri: str, store: SyncStore, *keys: str) -> None:
    """Publish flows a → p of these keys. The worker of each a dies right after its finish."""
    with Client(mongo_uri, database=store.database.name) as client:
        for key in keys:
            flow = Flow(key)
            flow.add("p", "work", after=[flow.add("a", "work")])
            client.publish_flow(flow)
            succeed(store, f"work:{key}/a", claim(store, f"work:{key}/a"))


_RARELY = flow_janitor._ORPHANS_EVERY


def look_after(
    mongo_uri: str, database_name: str, counts: Sequence[int] = (_RARELY - 1,), *, has_heard: bool = True
) -> bool:
    """Let one worker look after the flows at these regular scans; return whether it knows of flows.

    Each statement may take a second. `has_heard`: whether the worker has heard of a flow before.
    """

    async def scenario() -> bool:
        store = connect.async_store(mongo_uri, database_name)
        store.timeout = timedelta(seconds=1)
        ledger = SimpleNamespace(owing={"flow"} if has_heard else set(), running={})
        scope: Any = SimpleNamespace(store=store, ledger=ledger)
        part = FlowPart(scope, "incarnation", listed.RELAYS)
        try:
            for count in counts:
                await part.upkeep(count, is_full=False)
        finally:
            await store.close()
        return "flow" in ledger.owing

    return asyncio.run(scenario())


@contextmanager
def locked(store: SyncStore, task_id: str) -> Iterator[None]:
    with store.client.start_session() as session:
        session.start_transaction()
        store.tasks.update_one({"_id": task_id}, {"$set": {"params": 1}}, session=session)
        yield
        session.abort_transaction()


def status(store: SyncStore, task_id: str) -> Any:
    return store.tasks.find_one({"_id": task_id})["task_state"]["status"]  # type: ignore[index]


def test_a_locked_step_does_not_hold_up_other_flows(
    mongo_uri: str, store: SyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    publish_ended(mongo_uri, store, "f", "g", "h")
    with locked(store, "work:f/p"), caplog.at_level(logging.WARNING):
        look_after(mongo_uri, store.database.name, [_RARELY - 1, _RARELY - 1])
    assert [status(store, f"work:{key}/p") for key in "fgh"] == ["WAITING", "INIT", "INIT"]
    assert [record.message for record in caplog.records].count(
        "change of a step not settled, left alone for a while"
    ) == 1
    look_after(mongo_uri, store.database.name)
    assert status(store, "work:f/p") == "INIT"


def test_an_error_that_nobody_foresaw_does_not_hold_up_other_flows(
    mongo_uri: str, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(task_ids: Any) -> Any:
        if "work:f/a" in task_ids:
            raise AttributeError("nobody foresaw this")
        return (yield from settling.settle_all(task_ids))

    monkeypatch.setattr(listed, "RELAYS", [replace(settling.RELAY, settle=refusing)])
    publish_ended(mongo_uri, store, "f", "g", "h")
    look_after(mongo_uri, store.database.name)
    assert [status(store, f"work:{key}/p") for key in "fgh"] == ["WAITING", "INIT", "INIT"]


def test_what_ends_because_of_an_end_that_a_dead_process_left_is_told_at_once(mongo_uri: str, store: SyncStore) -> None:
    with Client(mongo_uri, database=store.database.name) as client:
        flow = Flow("f")
        flow.add("p", "work", after=[flow.add("a", "work")], callback={"url": "https://hooks.example.com/"})
        client.publish_flow(flow)
    fail(store, "work:f/a", claim(store, "work:f/a"), final=True)
    look_after(mongo_uri, store.database.name)
    assert status(store, "work:f/p") == "CANCELED"
    assert store.tasks.count_documents({"name": "mtask/callback"}) == 1


def test_orphans_that_cannot_be_decided_do_not_hold_up_the_end_of_flows(
    mongo_uri: str, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(limit: int = 0) -> Any:
        raise AttributeError("nobody foresaw this")

    monkeypatch.setattr(read, "orphans", refusing)
    publish_ended(mongo_uri, store, "f")
    store.run(settling.settle_all(["work:f/a"]))
    succeed(store, "work:f/p", claim(store, "work:f/p"))
    look_after(mongo_uri, store.database.name)
    ended = store.tasks.find_one({"flow.head": "f"})
    assert ended is not None
    assert ended["flow"]["end_time"] is not None


def test_a_worker_that_heard_of_no_flow_soon_finds_what_is_owed_and_seldom_looks_for_more(
    mongo_uri: str, store: SyncStore
) -> None:
    def finds(*counts: int) -> bool:
        return look_after(mongo_uri, store.database.name, counts, has_heard=False)

    often = flow_janitor._OWED_EVERY
    publish_ended(mongo_uri, store, "f")
    assert not finds(*range(1, often))
    assert finds(often)
    assert status(store, "work:f/p") == "INIT"
    # Nothing is owed any more. What is left to do in this flow is done once a minute.
    assert not finds(*range(1, _RARELY))
    assert finds(_RARELY)
