"""What clients do with a flow that exists: read it, list it, wait for it, cancel it, retry it, and remove its steps."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from mtask import Client, Flow, WaitTimeout
from mtask.client import requests
from mtask.client.requests import WaitPolicy
from mtask.errors import DependencyFailed, DependencyMissing, FlowNotFound, FlowWaitTimeout, InvalidInput, TaskRunning
from mtask.features.flows import change as operating
from mtask.features.flows import publish
from mtask.features.flows import read as reading
from mtask.features.flows import requests as flow_requests
from mtask.features.flows import retention as flow_retention
from mtask.features.flows import settle as settling
from mtask.kernel.document.options import TaskOption
from mtask.kernel.document.status import FINAL_STATUSES
from mtask.kernel.driver.operation import Call, Operation
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.statements.outbox import OwedTask
from mtask.parts.relays import RELAYS
from tests.clients import AnyClient, claim, fail, meanwhile, succeed
from tests.explaining import examined_by, only
from tests.integration import stores
from tests.mongo import Client as Mongo
from tests.mongo import eventually, streams

NAME = "work"


@pytest.fixture
def store(mongo: Mongo, database_name: str) -> SyncStore:
    return stores.ready_store(mongo, database_name)


def published(client: AnyClient | Client, key: str = "f", *, fail_fast: bool = False) -> None:
    """Publish a → b → c, and a clean-up after b that runs also after failures."""
    flow = Flow(key, max_retries=0, fail_fast=fail_fast)
    a = flow.add("a", NAME, {"secret": "x" * 1000})
    b = flow.add("b", NAME, after=[a])
    flow.add("c", NAME, after=[b])
    flow.add("clean", NAME, after=[b], on_failed="run")
    assert client.publish_flow(flow).created


def task_id(step: str, key: str = "f") -> str:
    return f"{NAME}:{key}/{step}"


def end(store: SyncStore, step: str, *, fails: bool = False) -> None:
    """Run the step to its end, and tell the other steps."""
    run_id = claim(store, task_id(step))
    if fails:
        fail(store, task_id(step), run_id)
    else:
        succeed(store, task_id(step), run_id, "x" * 1000)
    store.run(settling.settle_all([task_id(step)]))


def statuses(client: AnyClient | Client) -> dict[str, str]:
    return {step.step: step.status for step in client.flow("f").steps}


# --- read and list --------------------------------------------------------------------------------------------


def test_a_flow_is_read_with_its_steps_in_order(client: AnyClient, store: SyncStore) -> None:
    published(client)
    end(store, "a")
    run_id = claim(store, task_id("b"))
    found = client.flow("f")
    assert [step.step for step in found.steps] == ["a", "b", "c", "clean"]
    assert found.counts == {"WAITING": 2, "RUNNING": 1, "SUCCESS": 1}
    assert (found.ended_cnt, found.progress, found.is_ended, found.end_time) == (1, 0.25, False, None)
    assert found.head == task_id("a")
    b = found["b"]
    assert (b.task_id, b.status, b.after, b.on_failed) == (task_id("b"), "RUNNING", (task_id("a"),), "cancel")
    assert b.run is not None
    assert (b.run.worker_id, b.run.attempt, b.run.status) == ("worker-1", 1, "RUNNING")
    assert found.now is not None
    assert b.release_time is not None
    assert b.run.claim_time is not None
    assert b.release_time <= b.run.claim_time <= found.now
    assert (found["c"].held_by, found["c"].release_time, found["clean"].on_failed) == (task_id("b"), None, "run")
    fail(store, task_id("b"), run_id, "no luck")
    store.run(settling.settle_all([task_id("b")]))
    found = client.flow("f")
    assert (found["b"].reason, found["c"].held_by) == ("no luck", task_id("b"))
    assert task_id("b") in (found["c"].reason or "")
    assert [step.step for step in found.failed] == ["b", "c"]
    end(store, "clean")
    found = client.flow("f")
    assert (found.is_ended, found.progress) == (True, 1.0)
    assert found.end_time == found["clean"].finish_time
    with pytest.raises(KeyError):
        found["nothing"]
    with pytest.raises(FlowNotFound, match="there is no flow 'g'") as caught:
        client.flow("g")
    assert (caught.value.key, caught.value.exit_code) == ("g", 4)
    with pytest.raises(InvalidInput):
        client.flow("")


def test_a_flow_has_not_ended_before_all_ends_are_told(store: SyncStore, reader: Client) -> None:
    flow = Flow("f")
    flow.add("a", NAME)
    reader.publish_flow(flow)
    fail(store, task_id("a"), claim(store, task_id("a")), final=True)
    found = reader.flow("f")
    assert (found.progress, found.is_ended, found.end_time) == (1.0, False, None)
    with pytest.raises(FlowWaitTimeout, match="task work:f/a is FAIL"):
        reader.wait_flow("f", timeout=0)
    store.run(settling.settle_all([task_id("a")]))
    assert reader.flow("f").is_ended


def test_a_read_of_a_flow_sends_no_params_and_no_returns(store: SyncStore, reader: Client) -> None:
    published(reader)
    end(store, "a")
    rows, examined = examined_by(store, reading.steps("f"))
    assert "xxx" not in str(rows)
    assert sum(each.documents for each in examined) == 4


def test_a_malformed_step_does_not_hide_the_flow(store: SyncStore, reader: Client) -> None:
    published(reader)
    odd = {
        "task_state.worker_states": 7,
        "owed_tasks": "no",
        "flow.after": None,
        "task_state.reason": 3,
        "flow.step": 5,
    }
    store.tasks.with_options().database.command(
        "update", "tasks", updates=[{"q": {"_id": task_id("b")}, "u": {"$set": odd}}], bypassDocumentValidation=True
    )
    found = reader.flow("f")
    assert len(found.steps) == 4
    odd_step = found[task_id("b")]
    assert (odd_step.run, odd_step.after, odd_step.reason) == (None, (), None)


@pytest.mark.fresh_database  # a malformed task of another test would have made the index one of arrays, for good
def test_flows_are_listed_newest_first_with_counts(client: AnyClient, store: SyncStore) -> None:
    for key in ("import/1", "import/2", "export/1", "import.x"):
        published(client, key)
    client.publish(NAME, key="plain")
    client.cancel_flow("import/2", everything=True)
    rows = client.flows()
    assert [row.key for row in rows] == ["import.x", "export/1", "import/2", "import/1"]
    assert (rows[0].counts, rows[0].step_cnt, rows[0].ended_cnt, rows[0].is_ended) == (
        {"WAITING": 3, "INIT": 1}, 4, 0, False,
    )  # fmt: skip
    assert (rows[2].counts, rows[2].is_ended, rows[2].head) == ({"CANCELED": 4}, True, task_id("a", "import/2"))
    assert [row.key for row in client.flows(prefix="import/", limit=1)] == ["import/2"]
    assert client.flows(prefix="nothing\0") == []
    with pytest.raises(InvalidInput):
        client.flows(limit=-1)
    with pytest.raises(InvalidInput):
        client.flows(prefix=7)
    _, examined = examined_by(store, flow_requests.every("import/", 2))
    assert all("COLLSCAN" not in each.stages for each in examined)
    assert examined[-1].documents == 0  # the counts come from the index alone


# --- wait -----------------------------------------------------------------------------------------------------


def test_a_wait_follows_the_flow_on_one_stream(client: AnyClient, store: SyncStore, mongo: Mongo) -> None:
    key = "f (*)\0\n"
    flow = Flow(key)
    last = flow.add("0", NAME)
    for number in range(1, 4):
        last = flow.add(str(number), NAME, after=[last])
    client.publish_flow(flow)
    seen: list[int] = []
    others = streams(mongo, store.database.name)  # a test before may have had this database

    def work() -> None:
        eventually(lambda: streams(mongo, store.database.name) == others + 1, message="the wait follows the flow")
        for number in range(4):
            step = task_id(str(number), key)
            succeed(store, step, claim(store, step))
            store.run(settling.settle_all([step]))
            seen.append(streams(mongo, store.database.name))

    with meanwhile(work):
        found = client.wait_flow(key, timeout=60)
    assert (found.is_ended, found.counts) == (True, {"SUCCESS": 4})
    assert max(seen) == others + 1
    eventually(lambda: streams(mongo, store.database.name) == others, message="the stream is closed")


def test_a_wait_looks_again_only_when_the_watched_step_has_ended(
    client: AnyClient, store: SyncStore, mongo: Mongo, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow("f")
    steps = [flow.add(f"{number:03}", NAME) for number in range(100)]
    flow.add("end", NAME, after=steps)
    client.publish_flow(flow)
    looks: list[str] = []
    look = reading.first_open
    monkeypatch.setattr(reading, "first_open", lambda key: looks.append(key) or look(key))  # type: ignore[func-returns-value]
    before_the_stream: list[int] = []

    def work() -> None:
        eventually(lambda: streams(mongo, store.database.name) == 1, message="the wait follows the flow")
        before_the_stream.append(len(looks))
        for number in range(100):
            step = task_id(f"{number:03}")
            succeed(store, step, claim(store, step))
        store.run(settling.settle_all([task_id(f"{number:03}") for number in range(100)]))
        end(store, "end")

    with meanwhile(work):
        assert client.wait_flow("f", timeout=60).is_ended
    assert len(looks) - before_the_stream[0] < 10


def test_a_wait_gives_up_or_learns_that_there_is_no_flow(client: AnyClient) -> None:
    published(client)
    with pytest.raises(FlowWaitTimeout, match="flow 'f' has not ended after 0 s: task work:f/") as caught:
        client.wait_flow("f", timeout=0)
    assert isinstance(caught.value, WaitTimeout)
    assert (caught.value.key, caught.value.status, caught.value.exit_code) == ("f", "WAITING", 6)
    with pytest.raises(FlowNotFound):
        client.wait_flow("g", timeout=0)
    with pytest.raises(InvalidInput):
        client.wait_flow("f", timeout=-1)


def test_a_wait_goes_on_by_reading_if_it_may_not_follow_events(
    client: AnyClient, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(client)
    monkeypatch.setattr(WaitPolicy, "patience", lambda self, elapsed: None)
    with meanwhile(lambda: client_free_cancel(store)):
        assert client.wait_flow("f", timeout=30).counts == {"CANCELED": 4}


def client_free_cancel(store: SyncStore) -> None:
    store.run(operating.cancel("f", RELAYS, everything=True))


# --- cancel ---------------------------------------------------------------------------------------------------


def test_cancel_ends_all_but_the_clean_up(client: AnyClient, store: SyncStore) -> None:
    published(client)
    changed = client.cancel_flow("f")
    assert sorted(changed.task_ids) == [task_id("a"), task_id("b"), task_id("c")]
    assert (changed.key, changed.counts) == ("f", {"CANCELED": 3, "INIT": 1})
    assert statuses(client) == {"a": "CANCELED", "b": "CANCELED", "c": "CANCELED", "clean": "INIT"}
    again = client.cancel_flow("f")  # as if the reply to the first had been lost
    assert (again.task_ids, again.counts) == ([], changed.counts)
    assert statuses(client)["clean"] == "INIT"
    everything = client.cancel_flow("f", everything=True)
    assert (everything.task_ids, everything.counts) == ([task_id("clean")], {"CANCELED": 4})
    assert client.flow("f").is_ended
    with pytest.raises(FlowNotFound):
        client.cancel_flow("g")


def test_cancel_asks_running_steps_to_end(client: AnyClient, store: SyncStore) -> None:
    published(client)
    end(store, "a")
    run_id = claim(store, task_id("b"))
    client.cancel_flow("f")
    found = client.flow("f")
    assert (found["b"].status, found["b"].cancel_requested) == ("RUNNING", True)
    assert (found["c"].status, found["clean"].status) == ("CANCELED", "WAITING")
    succeed(store, task_id("b"), run_id)
    store.run(settling.settle_all([task_id("b")]))
    assert statuses(client) == {"a": "SUCCESS", "b": "SUCCESS", "c": "CANCELED", "clean": "INIT"}


def test_a_first_step_is_no_clean_up(client: AnyClient) -> None:
    flow = Flow("f")
    flow.add("a", NAME, on_failed="run")
    client.publish_flow(flow)
    assert client.cancel_flow("f").counts == {"CANCELED": 1}


def test_no_retry_of_another_step_revives_what_a_user_canceled(client: AnyClient, store: SyncStore) -> None:
    published(client)
    client.cancel_flow("f")
    client.retry(NAME, "f/a")
    assert statuses(client) == {"a": "INIT", "b": "CANCELED", "c": "CANCELED", "clean": "INIT"}
    end(store, "a")
    assert statuses(client)["b"] == "CANCELED"
    assert client.retry(NAME, "f/b").status == "INIT"


def test_cancel_owns_the_ends_that_others_settled_meanwhile(
    store: SyncStore, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process settles a's cancel, and so ends b and c, before the call comes to them."""
    published(reader)
    change = operating.change_all
    passes: list[Any] = []

    def slowly(matched: Any, *further: Any) -> Any:
        if not passes:
            passes.append(None)
            changed = yield from change({**matched, "_id": task_id("a")}, *further)
            store.run(settling.settle_all([task_id("a")]))
            assert reader.flow("f")["c"].held_by == task_id("b")
            return changed
        return (yield from change(matched, *further))

    monkeypatch.setattr(operating, "change_all", slowly)
    changed = reader.cancel_flow("f")
    assert sorted(changed.task_ids) == [task_id("a"), task_id("b"), task_id("c")]
    reader.retry(NAME, "f/a")
    assert statuses(reader) == {"a": "INIT", "b": "CANCELED", "c": "CANCELED", "clean": "INIT"}


def test_cancel_owns_a_step_that_fail_fast_has_asked_to_stop(store: SyncStore, reader: Client) -> None:
    flow = Flow("f", fail_fast=True, max_retries=0)
    flow.add("a", NAME)
    flow.add("b", NAME)
    reader.publish_flow(flow)
    run_id = claim(store, task_id("b"))
    end(store, "a", fails=True)
    found = reader.flow("f")["b"]
    assert (found.cancel_requested, found.held_by) == (True, task_id("a"))
    assert reader.cancel_flow("f").task_ids == [task_id("b")]
    assert reader.flow("f")["b"].held_by is None
    assert reader.cancel_flow("f").task_ids == []
    fail(store, task_id("b"), run_id)
    store.run(settling.settle_all([task_id("b")]))
    reader.retry(NAME, "f/a")
    assert statuses(reader) == {"a": "INIT", "b": "CANCELED"}


def test_cancel_of_many_steps_is_one_update_a_batch(
    store: SyncStore, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating, "BATCH", 10)
    flow = Flow("f")
    steps = [flow.add(f"{number}", NAME) for number in range(35)]
    flow.add("end", NAME, after=steps)
    reader.publish_flow(flow)
    changed = reader.cancel_flow("f")
    assert (len(changed.task_ids), changed.counts) == (36, {"CANCELED": 36})
    reopened = reader.retry_flow("f")
    assert (len(reopened.task_ids), reopened.counts) == (36, {"WAITING": 1, "INIT": 35})


# --- retry ----------------------------------------------------------------------------------------------------


def test_retry_opens_all_failed_steps_again(client: AnyClient, store: SyncStore) -> None:
    published(client)
    end(store, "a")
    end(store, "b", fails=True)
    end(store, "clean")
    assert statuses(client) == {"a": "SUCCESS", "b": "FAIL", "c": "CANCELED", "clean": "SUCCESS"}
    changed = client.retry_flow("f")
    assert sorted(changed.task_ids) == [task_id("b"), task_id("c")]
    assert changed.counts == {"WAITING": 1, "INIT": 1, "SUCCESS": 2}
    assert statuses(client) == {"a": "SUCCESS", "b": "INIT", "c": "WAITING", "clean": "SUCCESS"}
    end(store, "b")
    end(store, "c")
    assert client.flow("f").counts == {"SUCCESS": 4}
    assert client.retry_flow("f").task_ids == []
    with pytest.raises(FlowNotFound):
        client.retry_flow("g")


def test_retry_of_the_flow_opens_what_a_user_canceled(client: AnyClient, store: SyncStore) -> None:
    published(client)
    client.cancel(NAME, "f/b")
    client.cancel_flow("f", everything=True)
    assert client.flow("f").counts == {"CANCELED": 4}
    assert client.retry_flow("f").counts == {"WAITING": 3, "INIT": 1}, (
        "the clean-up waits again, though it was released"
    )
    for step in ("a", "b", "c", "clean"):
        end(store, step)
    assert client.flow("f").counts == {"SUCCESS": 4}


def each_sent(store: SyncStore, operation: Operation[Any]) -> Iterator[Call]:
    """Each call of the operation, after it was sent and before the next one: the place for another process's writes."""
    answer: Any = None
    while True:
        try:
            call = operation.send(answer)
        except StopIteration:
            return
        answer = store.run(only(call))
        yield call


def test_retry_of_a_flow_holds_when_another_settles_between_its_batches(
    store: SyncStore, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process decides on c before b is open again, and cancels it; b's settling opens it once more."""
    published(reader)
    end(store, "a")
    end(store, "b", fails=True)
    monkeypatch.setattr(operating, "BATCH", 1)
    settled: list[str] = []
    for call in each_sent(store, operating.retry("f", RELAYS)):
        if call.method == "update_many" and not settled:
            open_now = [step.step for step in reader.flow("f").steps if not step.is_ended and step.step != "clean"]
            settled += open_now
            store.run(settling.settle_all([task_id(step) for step in open_now]))
    assert settled in (["b"], ["c"])
    assert statuses(reader) == {"a": "SUCCESS", "b": "INIT", "c": "WAITING", "clean": "INIT"}


def test_failed_clean_up_waits_again_for_the_dependency_that_is_retried_with_it(
    store: SyncStore, reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does whoever settles the steps in between, and also where its own clean-up has failed, too."""
    flow = Flow("f", max_retries=0)
    book = flow.add("book", NAME)
    flow.add("settle", NAME, after=[book], on_failed="run")
    flow.add("tell", NAME, after=["settle"], on_failed="run")
    reader.publish_flow(flow)
    steps = ("book", "settle", "tell")
    for step in steps:
        end(store, step, fails=True)
    assert reader.flow("f").counts == {"FAIL": 3}
    monkeypatch.setattr(operating, "BATCH", 1)
    for call in each_sent(store, operating.retry("f", RELAYS)):
        if call.method == "update_many":
            store.run(settling.settle_all([task_id(step) for step in steps]))
            assert statuses(reader)["settle"] != "INIT"
            assert statuses(reader)["tell"] != "INIT"
    assert statuses(reader) == {"book": "INIT", "settle": "WAITING", "tell": "WAITING"}
    end(store, "book")
    assert statuses(reader) == {"book": "SUCCESS", "settle": "INIT", "tell": "WAITING"}
    end(store, "settle", fails=True)
    assert statuses(reader)["tell"] == "INIT"
    end(store, "tell")
    assert reader.retry_flow("f").counts == {"INIT": 1, "SUCCESS": 2}


def test_bulk_retry_of_a_flow_lets_its_clean_up_wait_again(client: AnyClient, store: SyncStore) -> None:
    published(client)
    end(store, "a", fails=True)
    end(store, "clean", fails=True)
    assert statuses(client) == {"a": "FAIL", "b": "CANCELED", "c": "CANCELED", "clean": "FAIL"}
    done = client.run_bulk(client.plan_bulk("retry", key_prefix="f/").plan)
    assert (done.done_cnt, done.left_cnt) == (4, 0)
    assert statuses(client) == {"a": "INIT", "b": "WAITING", "c": "WAITING", "clean": "WAITING"}


@pytest.mark.parametrize("how", ["retry", "rerun", "retry_flow", "bulk"])
def test_step_that_runs_again_waits_for_a_dependency_that_runs_now(
    client: AnyClient, store: SyncStore, how: str
) -> None:
    published(client)
    end(store, "a")
    end(store, "b")
    end(store, "c", fails=True)
    end(store, "clean", fails=how != "rerun")
    client.rerun(NAME, "f/b")
    run_id = claim(store, task_id("b"))
    if how == "retry_flow":
        client.retry_flow("f")
    elif how == "bulk":
        client.run_bulk(client.plan_bulk("retry", key_prefix="f/").plan)
    else:
        for step in ("c", "clean"):
            assert getattr(client, how)(NAME, f"f/{step}").status == "WAITING"
    assert statuses(client) == {"a": "SUCCESS", "b": "RUNNING", "c": "WAITING", "clean": "WAITING"}
    fail(store, task_id("b"), run_id)
    store.run(settling.settle_all([task_id("b")]))
    assert statuses(client) == {"a": "SUCCESS", "b": "FAIL", "c": "CANCELED", "clean": "INIT"}


def test_step_that_runs_again_waits_for_what_its_dependency_has_added(store: SyncStore, reader: Client) -> None:
    published(reader)
    end(store, "a")
    end(store, "b")
    for step in ("c", "clean"):
        end(store, step, fails=True)
    reader.rerun(NAME, "f/b")
    run_id = claim(store, task_id("b"))
    part = {"key": "f", "step": "child", "after": [], "on_failed": "cancel", "ancestors": [task_id("b")]}
    fixed = {"_id": task_id("child"), "name": NAME, "key": "f/child", "queue": "default", "params": None}
    child = OwedTask({**fixed, "task_option": TaskOption().stored(), "flow": part})
    store.run(publish.add(task_id("b"), run_id, [child], lambda: True, RELAYS))
    succeed(store, task_id("b"), run_id)
    store.run(settling.settle_all([task_id("b")]))
    assert reader.retry(NAME, "f/c").status == "WAITING"
    reader.retry_flow("f")
    open_now = {"child": "INIT", "c": "WAITING", "clean": "WAITING"}
    assert statuses(reader) == {"a": "SUCCESS", "b": "SUCCESS", **open_now}
    end(store, "child")
    assert {statuses(reader)[step] for step in ("c", "clean")} == {"INIT"}


@pytest.mark.parametrize("whole", [False, True])
def test_dependency_that_ends_while_a_step_is_retried_releases_it(
    store: SyncStore, reader: Client, whole: bool
) -> None:
    """It ends after the call has read it as open, and before the step waits for it."""
    published(reader)
    end(store, "a")
    end(store, "b")
    end(store, "c", fails=True)
    end(store, "clean")
    reader.rerun(NAME, "f/b")
    again = operating.retry("f", RELAYS) if whole else requests.run_again(NAME, task_id("c"), everything=False)
    for call in each_sent(store, again):
        read_b = call.method == "command" and task_id("b") in str(call)
        if read_b and statuses(reader)["b"] == "INIT":
            assert statuses(reader)["c"] == "FAIL"
            end(store, "b")
    assert statuses(reader) == {"a": "SUCCESS", "b": "SUCCESS", "c": "INIT", "clean": "SUCCESS"}


def test_retry_of_one_step_names_the_dependency_that_failed(client: AnyClient, store: SyncStore) -> None:
    published(client)
    end(store, "a", fails=True)
    with pytest.raises(DependencyFailed, match="it depends on 'work:f/b'") as caught:
        client.retry(NAME, "f/c")
    assert (caught.value.dependency, caught.value.exit_code) == (task_id("b"), 5)


# --- remove and keep ------------------------------------------------------------------------------------------


def test_a_removed_step_counts_as_canceled(client: AnyClient, store: SyncStore) -> None:
    published(client)
    end(store, "a")
    run_id = claim(store, task_id("b"))
    with pytest.raises(TaskRunning):
        client.remove(NAME, "f/b")
    fail(store, task_id("b"), run_id)
    store.run(settling.settle_all([task_id("b")]))
    assert client.remove(NAME, "f/b")
    assert statuses(client) == {"a": "SUCCESS", "c": "CANCELED", "clean": "INIT"}
    with pytest.raises(DependencyMissing, match="work:f/b"):
        client.retry_flow("f")
    assert statuses(client)["c"] == "CANCELED"


def test_step_does_not_run_again_without_the_results_of_its_dependencies(client: AnyClient, store: SyncStore) -> None:
    """The retention of successes is over, and a step that failed is still kept."""
    published(client)
    end(store, "a")
    end(store, "b", fails=True)
    end(store, "clean", fails=True)
    store.tasks.delete_one({"_id": task_id("a")})
    with pytest.raises(DependencyMissing) as caught:
        client.retry_flow("f")
    assert (caught.value.task_id, caught.value.dependencies) == (task_id("b"), (task_id("a"),))
    for act in (client.retry, client.rerun):
        with pytest.raises(DependencyMissing, match="work:f/a"):
            act(NAME, "f/b")
    # Of a bulk change, those are left that cannot run.
    done = client.run_bulk(client.plan_bulk("retry", key_prefix="f/").plan)
    assert (done.done_cnt, done.left_cnt) == (2, 1)
    assert statuses(client) == {"b": "FAIL", "c": "CANCELED", "clean": "INIT"}


def test_a_step_is_not_removed_while_it_owes_others_something(store: SyncStore, reader: Client) -> None:
    published(reader)
    store.run(queries.cancel(task_id("a")))
    assert not store.run(queries.remove_step(task_id("a")))
    store.run(settling.settle_all([task_id("a")]))
    assert store.run(queries.remove_step(task_id("a")))


def test_a_flow_whose_first_step_is_removed_gets_another_first_step(client: AnyClient, store: SyncStore) -> None:
    published(client)
    assert client.remove(NAME, "f/a")
    found = client.flow("f")
    assert found.head is not None
    assert [row.key for row in client.flows()] == ["f"]
    client.cancel_flow("f", everything=True)
    assert store.run(flow_retention.end_flows()) == 1
    for step in ("b", "c", "clean"):
        assert client.remove(NAME, f"f/{step}")
    assert client.flows() == []


def test_a_flow_whose_first_step_has_expired_gets_another_when_a_step_runs_again(
    store: SyncStore, reader: Client
) -> None:
    published(reader)
    reader.cancel_flow("f", everything=True)
    assert store.run(flow_retention.end_flows()) == 1
    store.tasks.delete_one({"_id": task_id("a")})
    assert reader.flow("f").head is None
    reader.retry(NAME, "f/clean")
    assert reader.flow("f").head is not None
    assert store.run(flow_retention.end_flows()) == 0
    reader.cancel_flow("f", everything=True)
    assert store.run(flow_retention.end_flows()) == 1


def test_keep_leaves_the_steps_of_flows(store: SyncStore, reader: Client) -> None:
    published(reader)
    reader.cancel_flow("f", everything=True)
    reader.publish(NAME, key="plain")
    reader.cancel(NAME, "plain")
    store.run(queries.prepare_keep())
    assert store.run(queries.remove_older("default", sorted(FINAL_STATUSES), 0)) >= 1
    assert len(reader.flow("f").steps) == 4
    assert reader.purge(older_than=timedelta(0)) == 0
    assert reader.count() == 4
