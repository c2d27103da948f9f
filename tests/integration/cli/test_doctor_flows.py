"""`mtask doctor` finds flows that cannot end by themselves. Each was made by hand: clients and workers make none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mtask import Flow
from mtask.features.flows import doctor
from mtask.features.flows import settle as settling
from mtask.features.flows.read import orphans
from mtask.kernel.driver.stores import SyncStore
from tests.clients import claim, server_now, succeed
from tests.explaining import examined_by
from tests.integration import stores
from tests.integration.cli.commands import Commands, Ended, client_of


@pytest.fixture
def flow(mtask: Commands, store: SyncStore) -> None:
    """Publish a → b → c, with a live worker on record."""
    mtask.ok("init")
    stores.register(store, "w1", queues=["default"], names=["work"])
    made = Flow("f", retain_success=0)
    a = made.add("a", "work")
    b = made.add("b", "work", after=[a])
    made.add("c", "work", after=[b])
    with client_of(mtask) as client:
        client.publish_flow(made)


def change(store: SyncStore, step: str, **change: Any) -> None:
    """Change a document by hand, past the validator."""
    update = {"q": {"_id": f"work:f/{step}"}, "u": {f"${name}": value for name, value in change.items()}}
    store.database.command("update", "tasks", updates=[update], bypassDocumentValidation=True)


def found(ended: Ended) -> list[tuple[str, str, list[str]]]:
    rows = [row for row in ended.json["findings"] if row["check"] == "flows"]
    return [
        (row["level"], row["message"], row["fields"].get("task_ids") or row["fields"].get("keys", [])) for row in rows
    ]


def one(mtask: Commands) -> tuple[str, str, list[str]]:
    (finding,) = found(mtask("doctor", "--json"))
    return finding


@pytest.mark.usefixtures("flow")
def test_a_flow_that_can_end_is_well(mtask: Commands, store: SyncStore) -> None:
    ended = mtask("doctor", "--json")
    assert (ended.code, found(ended)) == (0, [("OK", "each can end by itself", [])])
    succeed(store, "work:f/a", claim(store, "work:f/a"))
    assert one(mtask)[0] == "OK"  # it is owed, and not for long


def test_without_flows_there_is_nothing_to_examine(mtask: Commands) -> None:
    mtask.ok("init")
    assert one(mtask) == ("OK", "there are none", [])


@pytest.mark.usefixtures("flow")
def test_a_waiting_step_whose_holder_was_removed(mtask: Commands, store: SyncStore) -> None:
    store.tasks.delete_one({"_id": "work:f/a"})
    ended = mtask("doctor", "--json")
    (gone, head) = found(ended)
    assert (gone[0], gone[2]) == ("WARN", ["work:f/b"])
    assert "a task that was removed by hand: 1 task, such as work:f/b" in gone[1]
    assert (head[0], head[2]) == ("WARN", ["f"])
    assert "the retention of the other steps never begins" in head[1]
    assert "Any live worker decides on it within a minute" in mtask("doctor").out.replace("\n", " ")
    store.run(settling.settle_all(store.run(settling.decide(store.run(orphans()))).further))  # as workers do
    with client_of(mtask) as client:
        assert client.flow("f").counts == {"CANCELED": 2}


@pytest.mark.usefixtures("flow")
def test_a_waiting_step_that_nobody_holds(mtask: Commands, store: SyncStore) -> None:
    change(store, "b", unset={"flow.held_by": 1})
    level, message, ids = one(mtask)
    assert (level, ids, "no task holds it" in message) == ("FAIL", ["work:f/b"], True)
    assert mtask("doctor").code == 7
    # What the remedy says makes it well.
    mtask.ok("cancel", "work:f/b")
    mtask.ok("retry", "work:f/b")
    assert one(mtask)[0] == "OK"
    with client_of(mtask) as client:
        assert client.flow("f").counts == {"WAITING": 2, "INIT": 1}


@pytest.mark.usefixtures("flow")
def test_a_waiting_step_whose_holder_has_ended_and_tells_nobody(mtask: Commands, store: SyncStore) -> None:
    succeed(store, "work:f/a", claim(store, "work:f/a"))
    change(store, "a", unset={"owed_since": 1})
    level, message, ids = one(mtask)
    assert (level, ids) == ("FAIL", ["work:f/b"])
    assert "WAITING for a task that has ended and tells nobody" in message
    assert "held by work:f/a (SUCCESS)" in message
    mtask.ok("cancel", "work:f/b")
    mtask.ok("retry", "work:f/b")
    assert one(mtask)[0] == "OK"
    with client_of(mtask) as client:
        assert client.flow("f").counts == {"WAITING": 1, "INIT": 1, "SUCCESS": 1}


@pytest.mark.usefixtures("flow")
def test_a_finding_that_has_passed_is_not_reported(store: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends, and releases the step, between the reads of the two: only a second search tells."""
    succeed(store, "work:f/a", claim(store, "work:f/a"))
    change(store, "a", unset={"owed_since": 1})
    search = doctor.find_ended_holders
    searched: list[object] = []

    def searching(among: Any, limit: int) -> Any:
        rows = yield from search(among, limit)
        searched.append(among)
        if len(searched) == 1:
            store.run(settling.decide(["work:f/b"]))
        return rows

    monkeypatch.setattr(doctor, "find_ended_holders", searching)
    assert store.run(doctor.with_ended_holder(20)) == []
    assert len(searched) == 2


@pytest.mark.usefixtures("flow")
def test_a_mark_that_is_older_than_a_minute(mtask: Commands, store: SyncStore) -> None:
    succeed(store, "work:f/a", claim(store, "work:f/a"))
    change(store, "a", set={"owed_since": server_now(store) - timedelta(seconds=61)})
    level, message, ids = one(mtask)
    assert (level, ids, "its dependents were not told" in message) == ("FAIL", ["work:f/a"], True)
    assert "no worker is live" not in message
    store.database.workers.delete_many({})
    assert "no worker is live" in one(mtask)[1]


@pytest.mark.usefixtures("flow")
def test_a_step_that_is_held_and_does_not_wait(mtask: Commands, store: SyncStore) -> None:
    change(store, "a", set={"flow.held_by": "work:f/b"})
    level, message, ids = one(mtask)
    assert (level, ids, message) == (
        "WARN",
        ["work:f/a"],
        "not WAITING, but another task holds it: 1 task, such as work:f/a",
    )


@pytest.mark.usefixtures("flow")
def test_an_old_worker_spoils_flows(mtask: Commands, store: SyncStore) -> None:
    stores.register(store, "old", ["work"])
    store.database.workers.update_one({"_id": "old"}, {"$unset": {"schema_revision": 1}})
    level, message, _ = one(mtask)
    assert (level, message) == ("FAIL", "live workers of an older mtask mark WAITING steps FAIL: old")


@pytest.mark.usefixtures("flow")
def test_plain_tasks_are_not_examined(mtask: Commands, store: SyncStore) -> None:
    with client_of(mtask) as client:
        for number in range(50):
            client.publish("work", key=f"plain-{number}")
    for search in (
        doctor.without_holder(20),
        doctor.with_ended_holder(20),
        doctor.held_though_released(20),
        doctor.owed_for(timedelta(0), 20),
        doctor.headless(20),
    ):
        _, examined = examined_by(store, search)
        for each in examined:
            assert each.documents <= 10, each
            assert "COLLSCAN" not in each.stages
