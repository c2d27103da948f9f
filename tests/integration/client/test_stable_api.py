"""Clients of a service that keeps to the Stable API, strictly: whatever they do goes without other commands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo.server_api import ServerApi

from mtask import App, Client, TaskSpec
from mtask.errors import MtaskError, NotInStableApi
from mtask.search.findings import Level
from tests.clients import AnyClient, Kind, claim, fail, open_client, open_store, succeed
from tests.integration.worker_harness import Working
from tests.mongo import eventually

STRICT: dict[str, Any] = {"server_api": ServerApi("1", strict=True)}
DAY = timedelta(days=1)


@pytest.fixture(params=["sync", "asyncio", pytest.param("motor", marks=pytest.mark.long)])
def strict(request: pytest.FixtureRequest, mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    """A client of each kind that refuses all else, on a database that nobody has set up."""
    kind: Kind = request.param
    with open_client(kind, mongo_uri, database_name, **STRICT) as client:
        yield client


def test_strict_client_sets_up_publishes_finds_and_changes_tasks(
    strict: AnyClient, mongo_uri: str, database_name: str
) -> None:
    strict.init()
    assert strict.publish("mail", {"n": 1}, key="a").created
    assert not strict.publish("mail", {"n": 2}, key="a", if_exists="update", delay=DAY).created
    assert [done.created for done in strict.publish_many([TaskSpec("mail", key=k) for k in "abc"])] == [
        False,
        True,
        True,
    ]
    assert {task.key for task in strict.find(name="mail")} == {"a", "b", "c"}
    assert (strict.count(), strict.count(status="INIT")) == (3, 3)
    assert strict.update_option("mail", "a", priority=7).task_option.priority == 7
    assert strict.cancel("mail", "a").status == "CANCELED"
    assert strict.retry("mail", "a").status == "INIT"
    assert strict.stats()
    assert strict.inspect("mail:a").task is not None
    with open_store(mongo_uri, database_name) as store:
        fail(store, "mail:b", claim(store, "mail:b"), final=True)
        succeed(store, "mail:c", claim(store, "mail:c"), 5)
    assert strict.retry("mail", "b").status == "INIT"
    assert strict.rerun("mail", "c").status == "INIT"
    assert strict.purge(status="INIT", name="mail", limit=1) == 1
    assert strict.remove("mail", "a") is not None
    strict.in_transaction(lambda session: strict.client.publish("mail", key="in/transaction", session=session))
    assert strict.get("mail", "in/transaction").status == "INIT"


def test_strict_client_administers_queues_and_schedules(strict: AnyClient) -> None:
    for change in (strict.pause, strict.resume):
        change(queue="mail")
    strict.limit("mail", concurrency=3, key_rate=(3, 10))
    strict.keep("mail", success=10)
    assert [control.target for control in strict.controls()] == ["mail"]
    strict.add_schedule("nightly", "mail", DAY)
    strict.pause_schedule("nightly")
    strict.resume_schedule("nightly")
    assert strict.next_firings("nightly", 2)
    assert [schedule.id for schedule in strict.schedules()] == ["nightly"]
    assert strict.remove_schedule("nightly")
    assert strict.workers() == []
    with pytest.raises(MtaskError, match="no live worker"):
        strict.stop_worker("gone")


async def test_strict_client_hears_of_what_a_worker_does_and_stops_it(
    working: Working, mongo_uri: str, database_name: str
) -> None:
    app = App()

    @app.task
    def greet(to: str) -> str:
        return f"hello {to}"

    def follow() -> list[str]:
        with open_client("sync", mongo_uri, database_name, **STRICT) as client:
            told: list[str] = []
            with client.events(name="greet") as happening:
                client.publish("greet", {"to": "you"}, key="k")
                for event in happening:
                    told.append(event.kind)
                    if event.is_end:
                        break
            assert client.wait("greet", "k", timeout=40).returns == "hello you"
            client.publish("greet", {"to": "me"}, key="late", delay=timedelta(seconds=1.5))
            assert client.wait("greet", "late", timeout=40).returns == "hello me"
            client.set_worker("w1", concurrency=2)
            client.stop_worker("w1")
            return told

    async with working(app) as bench:
        told = await asyncio.to_thread(follow)
        await asyncio.wait_for(asyncio.shield(bench.life), 40)
        assert told == ["published", "claimed", "succeeded"]


def test_what_the_stable_api_has_no_command_for_says_so(strict: AnyClient) -> None:
    strict.init()
    findings = {finding.check: finding for finding in strict.diagnose()}
    assert findings["version"].level is Level.OK
    assert "MongoDB 6.0" in findings["version"].message
    assert not [finding for finding in findings.values() if finding.level is Level.FAIL]
    unseen = {check for check, finding in findings.items() if "outside of the Stable API" in finding.message}
    assert unseen == {"rights", "server status"}
    with pytest.raises(NotInStableApi, match="without strict"):
        strict.init(roles=True)


def test_wait_of_a_strict_client_follows_the_task_rather_than_reading_it_again_and_again(
    mongo_uri: str, database_name: str
) -> None:
    with (
        open_client("sync", mongo_uri, database_name, **STRICT) as client,
        open_store(mongo_uri, database_name) as store,
    ):
        client.publish("mail", key="k")
        run_id = claim(store, "mail:k")
        waiter = Client(client.source, database=database_name)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(waiter.wait("mail", "k", timeout=40)))
        thread.start()
        streams: list[dict[str, Any]] = [
            {"$currentOp": {"idleCursors": True}},
            {"$match": {"ns": f"{database_name}.tasks"}},
        ]
        eventually(
            lambda: [op for op in store.client.admin.aggregate(streams) if "$changeStream" in str(op)],
            message="a change stream",
        )
        succeed(store, "mail:k", run_id, 7)
        thread.join()
        assert found[0].returns == 7


def test_strict_client_gathers_calls(strict: AnyClient) -> None:
    strict.init()
    for arguments in ({"debounce": DAY}, {"collect": True}, {"if_running": "again"}, {"window": DAY}):
        key = next(iter(arguments))
        assert strict.publish("mail", {"n": 1}, key=key, **arguments).created
        assert strict.publish("mail", {"n": 2}, key=key, **arguments).updated is (key != "window")
    strict.cancel("mail", "window")
    assert strict.publish("mail", {"n": 3}, key="window", window=DAY).updated
