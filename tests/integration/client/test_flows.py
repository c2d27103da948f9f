"""Publishing flows with each kind of client: all or nothing, once for each key, and clear errors before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtask import Client, Flow
from mtask.errors import (
    DependencyFailed,
    FlowConflict,
    InvalidFlow,
    InvalidInput,
    InvalidOption,
    InvalidParams,
    TaskRunning,
    WorkersTooOld,
)
from mtask.features.flows import client as flows
from mtask.kernel.driver.stores import SyncStore
from tests import clients
from tests.clients import AnyClient, Kind, open_client
from tests.integration import stores
from tests.mongo import Client as Mongo
from tests.mongo import fail_command


@pytest.fixture(params=["sync", "asyncio", pytest.param("motor", marks=pytest.mark.long)])
def any_client(request: pytest.FixtureRequest, mongo_uri: str, database_name: str) -> Iterator[AnyClient]:
    kind: Kind = request.param
    with open_client(kind, mongo_uri, database_name) as opened:
        opened.init()
        yield opened


def diamond(key: str = "f") -> Flow:
    flow = Flow(key, priority=5)
    top = flow.add("top", "work", {"n": 1})
    sides = [flow.add(name, "work", after=[top], on_failed="run", priority=7) for name in ("left", "right")]
    flow.add("bottom", "work", after=sides, delay=60)
    return flow


def test_a_flow_is_published_once_and_whole(any_client: AnyClient, reader: Client) -> None:
    first = any_client.publish_flow(diamond())
    assert (first.created, first.differs) == (True, False)
    assert first.task_ids == [f"work:f/{step}" for step in ("top", "left", "right", "bottom")]
    before = list(reader.tasks.find().sort("_id"))
    again = any_client.publish_flow(diamond())
    assert (again.created, again.differs) == (False, False)
    other = diamond()
    other.add("more", "work")
    assert any_client.publish_flow(other).differs
    assert list(reader.tasks.find().sort("_id")) == before
    top, bottom = reader.get("work", "f/top"), reader.get("work", "f/bottom")
    assert (top.status, bottom.status) == ("INIT", "WAITING")
    assert top.flow is not None
    assert (top.flow.head, top.flow.release_time) == ("f", top.task_state.create_time)
    assert bottom.flow is not None
    assert bottom.flow.after == ["work:f/left", "work:f/right"]
    assert bottom.flow.held_by in bottom.flow.after
    assert (bottom.flow.delay_ms, bottom.task_state.start_time) == (60_000, None)
    assert (top.task_option.priority, reader.get("work", "f/left").task_option.priority) == (5, 7)


def test_a_flow_exists_exactly_if_the_callers_writes_do(any_client: AnyClient, reader: Client) -> None:
    class Undone(Exception):
        pass

    def fail(session: Any) -> None:
        raise Undone

    with pytest.raises(Undone):
        any_client.in_transaction(lambda s: any_client.client.publish_flow(diamond(), session=s), fail)
    assert reader.tasks.count_documents({}) == 0
    (published,) = any_client.in_transaction(lambda s: any_client.client.publish_flow(diamond(), session=s))
    assert published.created
    assert reader.tasks.count_documents({}) == 4


def test_many_publishers_at_once_publish_it_once(mongo_uri: str, database_name: str, reader: Client) -> None:
    reader.init()

    def publish(number: int) -> bool:
        with Client(mongo_uri, database=database_name, check=False) as own:
            return own.publish_flow(diamond()).created

    with ThreadPoolExecutor(8) as executor:
        created = list(executor.map(publish, range(8)))
    assert sorted(created) == [False] * 7 + [True]
    assert reader.tasks.count_documents({}) == 4


def test_a_task_with_the_id_of_a_step_is_a_conflict(any_client: AnyClient, reader: Client) -> None:
    reader.publish("work", key="f/left")
    with pytest.raises(FlowConflict, match="work:f/left") as caught:
        any_client.publish_flow(diamond())
    assert caught.value.task_ids == ("work:f/left",)
    assert reader.tasks.count_documents({}) == 1


def test_an_old_worker_would_spoil_it(any_client: AnyClient, reader: Client, store: SyncStore) -> None:
    stores.register(store, "old", ["work"])
    store.database.workers.update_one({"_id": "old"}, {"$unset": {"schema_revision": 1}})
    with pytest.raises(WorkersTooOld, match="old") as caught:
        any_client.publish_flow(diamond())
    assert caught.value.worker_ids == ("old",)
    assert reader.tasks.count_documents({}) == 0
    stores.register(store, "new", ["work"])
    store.database.workers.delete_one({"_id": "old"})
    assert any_client.publish_flow(diamond()).created


def circle() -> Flow:
    flow = Flow("f")
    flow.add("start", "work")
    flow.add("a", "work", after=["b", "start"])
    flow.add("b", "work", after=["a"])
    return flow


def crowd(steps: int, *, edges: int = 0) -> Flow:
    flow = Flow("f")
    names = [flow.add(str(number), "work") for number in range(steps)]
    for number in range(edges):
        flow.add(f"after-{number}", "work", after=names)
    return flow


def with_step(**step: Any) -> Flow:
    flow = Flow("f")
    flow.add("a", "work")
    flow.add(**{"step": "b", "task": "work", **step})
    return flow


_WRONG: dict[str, tuple[Callable[[], Any], type[InvalidInput], str]] = {
    "empty": (lambda: Flow("f"), InvalidFlow, "no steps"),
    "circle": (circle, InvalidFlow, "in a circle: 'a', 'b'"),
    "unknown dependency": (lambda: with_step(after=["c"]), InvalidFlow, "'c', which is no step"),
    "dependency twice": (lambda: with_step(after=["a", "a"]), InvalidFlow, "names a dependency twice"),
    "step twice": (lambda: with_step(step="a"), InvalidFlow, "was added already"),
    "slash": (lambda: with_step(step="a/b"), InvalidFlow, "without a slash"),
    "no text": (lambda: with_step(step=7), InvalidFlow, "7 is no step"),
    "on_failed": (lambda: with_step(on_failed="ignore"), InvalidFlow, '"cancel", "run" or "fail"'),
    "one dependency": (lambda: with_step(after="a"), InvalidFlow, "is a list of steps"),
    "dependency of a type": (lambda: with_step(after=[7]), InvalidFlow, "comes after a int"),
    "of another flow": (lambda: with_step(after=[Flow("g").add("a", "work")]), InvalidFlow, "in the same flow"),
    "too many steps": (lambda: crowd(10_001), InvalidFlow, "10001 steps, and 10000 are the most"),
    "too many edges": (lambda: crowd(5_001, edges=20), InvalidFlow, "100020 dependencies, and 100000 are the most"),
    "bad option": (lambda: with_step(priority="high"), InvalidOption, "priority"),
    "bad params": (lambda: with_step(params=object()), InvalidParams, "cannot be stored"),
    "no flow": (lambda: "f", InvalidFlow, "give a Flow"),
    "no key": (lambda: Flow(""), InvalidInput, "key"),
}


@pytest.mark.parametrize("wrong", _WRONG)
def test_a_wrong_flow_is_refused_before_anything_is_written(reader: Client, wrong: str) -> None:
    make, error, message = _WRONG[wrong]
    with pytest.raises(error, match=message):
        reader.publish_flow(make())
    assert reader.tasks.count_documents({}) == 0


def test_dependencies_of_more_than_four_megabytes_are_refused(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "MAX_AFTER_BYTES", 7)
    with pytest.raises(InvalidFlow, match="exceed 4 MB"):
        reader.publish_flow(with_step(after=["a"]))


def test_what_a_client_changes_is_told_at_once(any_client: AnyClient, reader: Client, store: SyncStore) -> None:
    any_client.publish_flow(circle_free())
    any_client.cancel("work", "f/a")
    assert statuses(reader) == {"a": "CANCELED", "b": "CANCELED", "c": "CANCELED"}
    with pytest.raises(DependencyFailed, match="'work:f/b', which failed") as caught:
        any_client.retry("work", "f/c")
    assert caught.value.dependency == "work:f/b"
    any_client.retry("work", "f/a")
    assert statuses(reader) == {"a": "INIT", "b": "WAITING", "c": "WAITING"}
    assert any_client.cancel("work", "f/b").status == "CANCELED"
    assert any_client.retry("work", "f/b").status == "WAITING"
    assert statuses(reader) == {"a": "INIT", "b": "WAITING", "c": "WAITING"}
    clients.claim(store, "work:f/a")
    with pytest.raises(TaskRunning):
        any_client.remove("work", "f/a")
    assert any_client.remove("work", "f/b") is True
    assert any_client.remove("work", "f/b") is False
    assert statuses(reader) == {"a": "RUNNING", "c": "CANCELED"}


def circle_free() -> Flow:
    flow = Flow("f")
    flow.add("a", "work")
    flow.add("b", "work", after=["a"])
    flow.add("c", "work", after=["b"])
    return flow


def statuses(reader: Client) -> dict[str, str]:
    found = reader.tasks.find({}).sort("_id")
    return {document["flow"]["step"]: document["task_state"]["status"] for document in found}


def test_a_purge_leaves_the_tasks_of_flows(reader: Client) -> None:
    reader.publish_flow(circle_free())
    reader.publish("work", key="plain")
    reader.cancel("work", "f/a")
    reader.cancel("work", "plain")
    assert reader.purge() == 1
    assert reader.tasks.count_documents({}) == 3


@pytest.mark.parametrize("code", [257, 388])
def test_a_flow_that_no_transaction_can_hold_is_refused_whole(
    reader: Client, mongo: Mongo, database_name: str, mongo_uri: str, code: int
) -> None:
    reader.init()
    app_name = f"flows-{database_name}"
    with (
        open_client("sync", mongo_uri, database_name, appname=app_name) as publisher,
        fail_command(mongo, "insert", error_code=code, app_name=app_name),
        pytest.raises(InvalidFlow, match="no room for so much in one transaction"),
    ):
        publisher.publish_flow(diamond())
    assert reader.count() == 0
