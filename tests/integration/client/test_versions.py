"""Changes that are made only if the task still is as the caller read it, and retries with other params."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtask import App, Client, Task, TaskNotFound
from mtask.errors import InvalidInput, InvalidParams, PreconditionFailed, TaskNotFinished
from mtask.kernel.document.task import MAX_FORMER_BYTES, MAX_FORMER_PARAMS
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations import change as queries
from mtask.kernel.operations import claim as claims
from mtask.kernel.statements import filters
from tests.clients import AnyClient, claim, fail, succeed

PARAMS: list[Any] = [None, 1, 1.5, "é", [1, {"a": None}], {"$x": 1, "b": [[]]}, {"a": 2**60}, float("nan"), b"\0"]


def failed(client: Any, store: SyncStore, params: Any = None, key: str = "k") -> Task:
    client.publish("a", params, key=key, max_retries=0)
    fail(store, f"a:{key}", claim(store, f"a:{key}"), "no luck")
    found: Task = client.get("a", key)
    assert found.status == "FAIL"
    return found


@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_the_tag_that_was_read_lets_each_change_through(client: AnyClient, store: SyncStore, params: Any) -> None:
    found = failed(client, store, params)
    found = client.update_option("a", "k", priority=3, if_match=client.etag(found))
    found = client.retry("a", "k", if_match=client.etag(found))
    assert found.status == "INIT"
    found = client.cancel("a", "k", if_match=client.etag(found))
    assert found.status == "CANCELED"
    found = client.rerun("a", "k", if_match=client.etag(found))
    assert client.remove("a", "k", if_match=client.etag(found)) is True
    with pytest.raises(TaskNotFound):
        client.remove("a", "k", if_match=client.etag(found))


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "cancel": lambda client, tag: client.cancel("a", "k", if_match=tag),
    "retry": lambda client, tag: client.retry("a", "k", if_match=tag),
    "rerun": lambda client, tag: client.rerun("a", "k", if_match=tag),
    "update": lambda client, tag: client.update_option("a", "k", priority=9, if_match=tag),
    "remove": lambda client, tag: client.remove("a", "k", if_match=tag),
}
each = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@each
def test_an_earlier_tag_changes_nothing(client: AnyClient, store: SyncStore, change: Callable[[Any, str], Any]) -> None:
    tag = client.etag(failed(client, store))
    client.update_option("a", "k", priority=3)
    before = store.tasks.find_one({"_id": "a:k"})
    for wrong in (tag, "", "\ud800", "*"):
        with pytest.raises(PreconditionFailed) as refused:
            change(client, wrong)
        assert refused.value.task_id == "a:k"
    assert store.tasks.find_one({"_id": "a:k"}) == before
    with pytest.raises(InvalidInput):
        change(client, 7)  # type: ignore[arg-type]


@each
@pytest.mark.parametrize("field", ["params", "option", "run"])
def test_a_change_between_the_read_and_the_write_is_seen_by_the_write(
    client: AnyClient, store: SyncStore, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, str], Any], field: str
) -> None:
    if client.kind != "sync":
        pytest.skip("the operation is the same for each kind")
    tag = client.etag(failed(client, store))
    read = queries.get
    changes: dict[str, dict[str, Any]] = {
        "params": {"params": 2},
        "option": {"task_option.priority": 3},
        "run": {"task_state.worker_states.0.run_id": "another"},
    }
    between = {"$set": changes[field]}

    def reading(task_id: str) -> Any:
        document = yield from read(task_id)
        store.tasks.update_one({"_id": task_id}, between)
        return document

    monkeypatch.setattr(queries, "get", reading)
    with pytest.raises(PreconditionFailed):
        change(client, tag)
    left = store.tasks.find_one({"_id": "a:k"})
    assert left is not None
    assert left["task_state"]["status"] == "FAIL"
    assert not left["task_state"]["cancel_requested"]


def test_pings_leave_the_tag_as_it_is_and_a_claim_does_not(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k")
    first = client.etag(client.get("a", "k"))
    run_id = claim(store, "a:k")
    held, stored = client.get("a", "k"), store.tasks.find_one({"_id": "a:k"})
    assert stored is not None
    assert client.etag(held) != first
    store.run(claims.ping({run_id: "a:k"}, 120_000))
    pinged = client.get("a", "k")
    assert pinged.runs[0].ping_expire_time > held.runs[0].ping_expire_time
    assert client.etag(pinged) == client.etag(held)
    assert store.tasks.count_documents({"_id": "a:k", **filters.unchanged(stored)}) == 1
    assert client.cancel("a", "k", if_match=client.etag(held)).task_state.cancel_requested
    with pytest.raises(TaskNotFinished):
        client.retry("a", "k", if_match=client.etag(client.get("a", "k")))


def test_a_retry_with_other_params_keeps_the_newest_former_ones(client: AnyClient, store: SyncStore) -> None:
    failed(client, store, {"n": 0})
    for number in range(1, 8):
        opened = client.retry("a", "k", params={"n": number})
        assert (opened.status, opened.params) == ("INIT", {"n": number})
        fail(store, "a:k", claim(store, "a:k"), "no luck")
    found = client.get("a", "k")
    assert [former.params["n"] for former in found.former_params] == [6, 5, 4, 3, 2][:MAX_FORMER_PARAMS]
    times = [former.until for former in found.former_params]
    assert times == sorted(times, reverse=True)
    # The same params once more are no change, and neither is a retry that names none.
    client.retry("a", "k", params={"n": 7})
    client.cancel("a", "k")
    assert client.retry("a", "k").former_params == found.former_params
    succeed(store, "a:k", claim(store, "a:k"), None)
    assert client.get("a", "k").former_params == found.former_params


def test_former_params_have_a_size_and_none_may_be_the_params(client: AnyClient, store: SyncStore) -> None:
    failed(client, store, "x" * (MAX_FORMER_BYTES - 1_000))
    assert len(client.retry("a", "k", params="small").former_params) == 1
    client.cancel("a", "k")
    assert client.retry("a", "k", params="y" * 2_000).former_params[0].params == "small"
    client.cancel("a", "k")
    kept = client.retry("a", "k", params=None)
    assert [former.params for former in kept.former_params] == ["y" * 2_000, "small"]
    assert kept.params is None
    client.cancel("a", "k")
    client.retry("a", "k", params="z" * (2 * MAX_FORMER_BYTES))
    client.cancel("a", "k")
    # Params that are larger than all that is kept push out the others: no gap hides among those that stay.
    assert client.retry("a", "k", params=1).former_params == []


def test_params_that_do_not_fit_the_handler_are_refused(mongo_uri: str, database_name: str, store: SyncStore) -> None:
    app = App()

    @app.task(name="a")
    def handler(n: int) -> None: ...

    with Client(mongo_uri, database=database_name) as client:
        failed(client, store, {"n": 1})
        for wrong in ({"n": "x"}, None, {"n": object()}):
            with pytest.raises(InvalidParams):
                client.retry(handler, "k", params=wrong)
        assert client.get("a", "k").status == "FAIL"
        assert client.retry(handler, "k", params={"n": 2}).params == {"n": 2}
