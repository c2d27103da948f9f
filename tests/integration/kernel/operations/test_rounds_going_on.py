"""Tasks that go on as another task, in several rounds, and under keys that other tasks have."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest

from mtask import Client, Flow, Next
from mtask.features.flows import publish
from mtask.features.flows import settle as settling
from mtask.kernel.document.status import RunStatus
from mtask.kernel.document.task import StoredTask
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements.finish import Outcome
from tests.clients import claim
from tests.mongo import eventually

Document = dict[str, Any]


def document(store: SyncStore, task_id: str) -> Document:
    found = store.tasks.find_one({"_id": task_id})
    assert found is not None
    return found


def end(store: SyncStore, task_id: str, following: Next | None = None, *, run_id: str | None = None) -> Outcome:
    """End the task's run as SUCCESS, and publish what it owes; return the outcome."""
    held = run_id or claim(store, task_id)
    owed = None
    if following is not None:
        owed = following.prepare(StoredTask.model_validate(document(store, task_id)), run_id=held)
    outcome = Outcome(task_id, held, RunStatus.SUCCESS, following.returns if following else None, next=owed)
    assert store.run(claims.finish([outcome])) == {held}
    store.run(settling.settle_all([task_id]))
    return outcome


def test_a_bulk_removal_publishes_first_what_a_task_still_owes(store: SyncStore, client: Client) -> None:
    client.publish("read", key="k")
    held = claim(store, "read:k")
    owed = Next("store", {"n": 1}).prepare(StoredTask.model_validate(document(store, "read:k")), run_id=held)
    store.run(claims.finish([Outcome("read:k", held, RunStatus.SUCCESS, next=owed)]))
    assert client.run_bulk(client.plan_bulk("remove", name="read").plan).done_cnt == 1
    assert [*nexts(store).values()] == [{"n": 1}]


def nexts(store: SyncStore, name: str = "store") -> dict[str, Any]:
    return {each["key"]: each["params"] for each in store.tasks.find({"name": name})}


def is_past(client: Client, instant: datetime) -> bool:
    return client.server_time() > instant


@pytest.mark.parametrize(
    "more",
    [
        {"if_running": "again"},
        {"collect": True},
        {"window": 0.001},
        {"if_exists": "update", "clean_success": True},
    ],
    ids=["again", "collect", "window", "republished"],
)
def test_each_round_goes_on_once(client: Client, store: SyncStore, more: Document) -> None:
    for number in (1, 2, 3):
        client.publish("work", {"v": number}, key="k", **more)
        outcome = end(store, "work:k", Next("store", {"v": number}))
        assert store.run(claims.finish([outcome])) == {outcome.run_id}, "the reply was lost, and the finish is repeated"
        store.run(settling.settle_all(["work:k"]))
        ended = client.get("work", "k").task_state.finish_time
        assert ended is not None
        over = ended + timedelta(milliseconds=2)
        eventually(partial(is_past, client, over), 20, "the window is over")
    assert nexts(store) == {
        "@work:k/next-1": {"v": 1},
        "@work:k/next-1-round-2": {"v": 2},
        "@work:k/next-1-round-3": {"v": 3},
    }
    # A rerun is no round that goes on.
    client.rerun("work", "k")
    end(store, "work:k", Next("store", {"v": 4}))
    assert len(nexts(store)) == 3


def test_a_round_that_waits_goes_on_after_the_one_before(client: Client, store: SyncStore) -> None:
    client.publish("work", 1, key="k", if_running="again")
    run_id = claim(store, "work:k")
    client.publish("work", 2, key="k", if_running="again")
    end(store, "work:k", Next("store", 1, returns="of 1"), run_id=run_id)
    assert "next_id" not in document(store, "work:k")["task_state"], "the next round has not gone on"
    end(store, "work:k", Next("store", 2, returns="of 2"))
    # Each next task gets what its own round returned.
    for key, returned in (("@work:k/next-1", "of 1"), ("@work:k/next-1-round-2", "of 2")):
        chain = document(store, f"store:{key}")["chain"]
        [row] = store.run(publish.result_of_run(chain["before"], chain["run_id"]))
        assert row["returns"] == returned


def test_a_chain_keeps_the_round_in_its_keys(client: Client, store: SyncStore) -> None:
    client.publish("work", key="k", if_running="again")
    end(store, "work:k", Next("work"))
    client.publish("work", key="k", if_running="again")
    end(store, "work:k", Next("work"))
    end(store, "work:k/next-1-round-2", Next("work"))
    end(store, "work:k/next-1", Next("work"))
    client.publish("work", key="k/next-1", if_exists="update", clean_success=True)
    end(store, "work:k/next-1", Next("work"))
    keys = {"k", "k/next-1", "k/next-1-round-2", "k/next-2", "k/next-2-round-2", "k/next-2-round-2-of-1"}
    assert set(nexts(store, "work")) == keys


def test_a_step_that_is_published_anew_goes_on_anew(client: Client, store: SyncStore) -> None:
    flow = Flow("f")
    flow.add("a", "work")
    client.publish_flow(flow)
    end(store, "work:f/a", Next("store", 1))
    client.publish("work", key="f/a", if_exists="update", clean_success=True)
    end(store, "work:f/a", Next("store", 2))
    assert nexts(store) == {"f/a/next-1": 1, "f/a/next-1-round-2": 2}
    assert document(store, "store:f/a/next-1-round-2")["flow"]["step"] == "a/next-1-round-2"


def test_two_tasks_of_one_key_go_on_under_one_name(client: Client, store: SyncStore) -> None:
    for name in ("resize", "transcode", "notify"):
        client.publish(name, key="7")
        end(store, f"{name}:7", Next("notify", name))
    keys = {"@resize:7/next-1": "resize", "@transcode:7/next-1": "transcode", "7/next-1": "notify", "7": None}
    assert nexts(store, "notify") == keys


def test_a_next_task_whose_id_is_taken_is_noted(
    client: Client, store: SyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    client.publish("work", key="k")
    end(store, "work:k", Next("store", 1))
    client.remove("work", "k")
    assert not caplog.records
    client.publish("work", key="k")
    end(store, "work:k", Next("store", 2))
    assert nexts(store) == {"@work:k/next-1": 1}
    found = document(store, "work:k")
    assert found["task_state"]["unpublished"] == ["store:@work:k/next-1"]
    assert not {"owed_tasks", "owed_since"} & {*found}, "it is settled"
    assert [record.message for record in caplog.records] == ["not published: another task has the id"]


def test_a_next_task_that_another_process_has_published_is_not_noted(client: Client, store: SyncStore) -> None:
    client.publish("work", key="k")
    owed = Next("store").prepare(StoredTask.model_validate(document(store, "work:k")))
    store.run(claims.finish([Outcome("work:k", claim(store, "work:k"), RunStatus.SUCCESS, next=owed)]))
    store.tasks.insert_one(document(store, "work:k")["owed_tasks"][0])
    store.run(settling.settle_all(["work:k"]))
    assert "unpublished" not in document(store, "work:k")["task_state"]


def test_only_the_last_round_keeps_what_it_returned(client: Client, store: SyncStore) -> None:
    for number in range(4):
        client.publish("work", number, key="k", if_running="again")
        run_id = claim(store, "work:k")
        outcome = Outcome("work:k", run_id, RunStatus.SUCCESS, f"of {number}")
        assert store.run(claims.finish([outcome])) == {run_id}
    runs = document(store, "work:k")["task_state"]["worker_states"]
    assert [run.get("returns") for run in runs] == [None, None, "of 2", "of 3"]


def test_options_are_changed_for_the_round_that_waits_too(client: Client, store: SyncStore) -> None:
    client.publish("work", 1, key="k", if_running="again", priority=1)
    run_id = claim(store, "work:k")
    client.publish("work", 2, key="k", if_running="again", priority=2, max_retries=9)
    client.update_option("work", "k", specific_worker_ids=["w9"])
    assert document(store, "work:k")["task_option"]["priority"] == 1
    end(store, "work:k", run_id=run_id)
    option = document(store, "work:k")["task_option"]
    assert (option["priority"], option["max_unexpected_retries"], option["specific_worker_ids"]) == (2, 9, ["w9"])


def test_a_plain_publish_drops_the_older_round_that_waits(client: Client, store: SyncStore) -> None:
    client.publish("work", 1, key="k", if_running="again")
    run_id = claim(store, "work:k")
    client.publish("work", 2, key="k", if_running="again")
    client.publish("work", 3, key="k", if_exists="update")
    assert "again" not in document(store, "work:k")
    end(store, "work:k", run_id=run_id)
    found = document(store, "work:k")
    assert (found["task_state"]["status"], found["params"]) == ("SUCCESS", 3)
