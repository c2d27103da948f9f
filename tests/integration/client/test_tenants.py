"""A client of a tenant: what it publishes and finds, through every call, with each kind of client."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mtask import App, AsyncClient, Client, Context, Flow, Next, TaskSpec
from mtask.database import setup
from mtask.errors import (
    FlowConflict,
    InvalidFlow,
    InvalidInput,
    InvalidKey,
    ScheduleExists,
    ScheduleNotFound,
    TaskExists,
    TaskNotFound,
    WorkersTooOld,
)
from mtask.features.flows import settle as settling
from mtask.features.flows.handler import Child
from mtask.features.schedules import client as scheduling
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations.publish import Published
from mtask.search import counts as counting
from mtask.search import due, walks
from mtask.search import lists as listing
from mtask.search.counts import Count
from mtask.testing.bench import Bench
from tests.clients import KINDS, AnyClient, Kind, claim, fail, open_client, succeed
from tests.integration.stores import register
from tests.integration.worker_harness import Working
from tests.mongo import Client as Mongo
from tests.mongo import until


def ids(found: list[Any]) -> list[str]:
    return sorted(task.id for task in found)


def _flow(key: str, *steps: str, tenant: str | None = None, fail_fast: bool = False) -> Flow:
    flow = Flow(key, tenant=tenant, fail_fast=fail_fast)
    for step in steps:
        flow.add(step, "task")
    return flow


@pytest.fixture
def client(mongo_uri: str, database_name: str) -> Iterator[Client]:
    with Client(mongo_uri, database=database_name) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_and_key_are_two_tasks_of_two_tenants(
    kind: Kind, mongo_uri: str, mongo: Mongo, database_name: str
) -> None:
    with open_client(kind, mongo_uri, database_name) as any_client:
        _publish_for_two(any_client)
        stored = {document["_id"]: document for document in mongo[database_name]["tasks"].find()}
        assert {task_id: document.get("tenant") for task_id, document in stored.items()} == {
            "task:acme:a": "acme",
            "task:beta:a": "beta",
            "task:a": None,
        }
        assert "tenant" not in stored["task:a"]
        of_acme = any_client.for_tenant("acme")
        assert of_acme.get("task", "a").id == of_acme.find()[0].id == "task:acme:a"


def _publish_for_two(any_client: AnyClient) -> None:
    for tenant in ("acme", "beta", None):
        made = any_client.publish("task", tenant, key="a", tenant=tenant)
        assert made.created
        again = any_client.publish("task", key="a", tenant=tenant)
        assert (again.created, again.task_id) == (False, made.task_id)


def test_client_of_a_tenant_means_its_tasks_in_every_call(client: Client, store: SyncStore) -> None:
    acme, beta = client.for_tenant("acme"), client.for_tenant("beta")
    for one in (acme, beta, client):
        one.publish("task", key="a", queue="q", lookup={"n": 1})
        one.publish_many([TaskSpec("task", key="b"), TaskSpec("other", key="c")])
    own = ["other:acme:c", "task:acme:a", "task:acme:b"]
    assert acme.tenant == "acme"
    assert ids(acme.find()) == ids(acme.find_page().tasks) == own
    assert ids(acme.find(key="a")) == ids(acme.find(lookup={"n": 1})) == ["task:acme:a"]
    assert ids(acme.find_page(key=["a", "zz"]).tasks) == ["task:acme:a"]
    assert ids(acme.find_page(key_prefix="b").tasks) == ["task:acme:b"]
    assert ids(acme.find_page(status="INIT", queue="default").tasks) == own[:1] + own[2:]
    assert [acme.count(), acme.count(name="task"), client.count()] == [3, 2, 9]
    assert [acme.count_up_to().count, acme.count_up_to(name="task").count, acme.count_up_to(key="a").count] == [3, 2, 1]
    assert acme.count_up_to(status="INIT", queue="q").count == 1
    assert sum(row.count for row in acme.stats()) == 3
    assert acme.get("task", "a").own_key == "a"
    assert acme.position("task", "a").task_id == "task:acme:a"
    assert list(acme.get_many([("task", "a"), "task:beta:a"]).tasks) == ["task:acme:a"]

    assert acme.cancel("task", "a").status == "CANCELED"
    assert beta.get("task", "a").status == "INIT"
    assert acme.retry("task", "a").status == "INIT"
    assert acme.update_option("task", "a", priority=5).task_option.priority == 5
    succeed(store, "task:acme:a", claim(store, "task:acme:a"), returns=7)
    assert acme.result("task", "a") == 7
    assert [task.id for task in acme.wait_all([("task", "a")])] == ["task:acme:a"]
    assert acme.rerun("task", "a").status == "INIT"
    assert acme.cancel("task", "a").status == "CANCELED"
    assert acme.purge(dry_run=True) == 1
    assert beta.purge(dry_run=True) == 0
    assert acme.purge() == 1
    with pytest.raises(TaskNotFound, match="task:acme:a"):
        acme.get("task", "a")
    assert acme.remove("task", "b")
    assert client.count() == 7


def test_pages_of_a_tenant_go_on_and_hold_all_its_tasks_in_each_order(client: Client) -> None:
    acme = client.for_tenant("acme")
    for number in range(7):
        acme.publish("task", key=str(number))
        client.publish("task", key=str(number))
    for wanted in ({}, {"status": "INIT"}, {"status": "CANCELED"}, {"name": "task"}):
        if wanted.get("status") == "CANCELED":
            for number in range(7):
                acme.cancel("task", str(number))
        found: list[str] = []
        cursor = None
        while True:
            page = acme.find_page(**wanted, limit=3, cursor=cursor)  # type: ignore[call-overload]
            found += [task.id for task in page.tasks]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert sorted(found) == [f"task:acme:{number}" for number in range(7)]


def test_bulk_change_of_a_tenant_reaches_its_tasks_alone(client: Client) -> None:
    acme, beta = client.for_tenant("acme"), client.for_tenant("beta")
    for one in (acme, beta):
        one.publish("task", key="a")
    planned = acme.plan_bulk("cancel", name="task")
    assert planned.count.count == 1
    with pytest.raises(InvalidInput, match="other rights"):
        beta.run_bulk(planned.plan)
    assert acme.run_bulk(planned.plan).done_cnt == 1
    assert [acme.get("task", "a").status, beta.get("task", "a").status] == ["CANCELED", "INIT"]
    assert (len(acme.bulks()), len(beta.bulks())) == (1, 0)


def test_events_of_a_tenant_tell_also_of_removed_tasks(client: Client) -> None:
    acme = client.for_tenant("acme")
    acme.init()
    with acme.events() as events, acme.events(name="task", key="b") as of_one:
        for tenant in ("beta", "acme", None):
            client.publish("task", key="a", tenant=tenant)
            client.publish("task", key="b", tenant=tenant)
            client.for_tenant(tenant or "none").remove("task", "a")
        told = [(event.kind.value, event.task_id) for event in (next(events) for _ in range(3))]
        assert told == [("published", "task:acme:a"), ("published", "task:acme:b"), ("removed", "task:acme:a")]
        assert next(of_one).task_id == "task:acme:b"


def test_flow_its_children_and_next_tasks_are_of_one_tenant(mongo_uri: str, database_name: str) -> None:
    app = App()

    @app.task
    async def first(context: Context) -> None:
        await context.add_children([Child("child", "last")])

    @app.task
    async def last(context: Context) -> Any:
        assert context.tenant == "acme"
        return None if context.task.chain else Next("last")

    bench = Bench(app, mongo_uri, database_name)
    with bench.client as client:
        acme = client.for_tenant("acme")
        flow = Flow("f")
        flow.add("one", "first")
        flow.add("two", "last", after=["one"])
        assert acme.publish_flow(flow).task_ids == ["first:acme:f/one", "last:acme:f/two"]
        assert not acme.publish_flow(_same_flow("f", "acme")).created
        client.publish("last", key="alone", tenant="acme")
        bench.run()
        assert {task.tenant for task in client.find()} == {"acme"}
        assert "last:acme:alone/next-1" in ids(acme.find())
        assert "last:acme:f/child" in ids(acme.find())
        assert acme.flow("f").is_ended
        assert [row.key for row in acme.flows()] == ["acme:f"]
        assert client.for_tenant("beta").flows() == []


def _same_flow(key: str, tenant: str) -> Flow:
    flow = Flow(key, tenant=tenant)
    flow.add("one", "first")
    flow.add("two", "last", after=["one"])
    return flow


@pytest.mark.parametrize(
    ("of_nobody", "taken", "key_taken"),
    [
        pytest.param(_flow("acme:f", "one"), (), True, id="a flow with the same first step"),
        pytest.param(_flow("acme:f", "uno"), (), True, id="a flow with another first step"),
        pytest.param("acme:f/one", ("task:acme:f/one",), False, id="a task with the id of the first step"),
        pytest.param("acme:f/two", ("task:acme:f/two",), False, id="a task with the id of another step"),
    ],
)
def test_flow_of_a_tenant_leaves_tasks_of_nobody_alone_and_says_so(
    mongo: Mongo, database_name: str, client: Client, of_nobody: Flow | str, taken: tuple[str, ...], key_taken: bool
) -> None:
    if isinstance(of_nobody, Flow):
        client.publish_flow(of_nobody)
    else:
        client.publish("task", key=of_nobody)
    stored = mongo[database_name]["tasks"]
    before = list(stored.find())
    acme = client.for_tenant("acme")
    for publisher, tenant in ((acme, None), (client, "acme"), (client.bound_to("acme"), "acme")):
        with pytest.raises(FlowConflict, match="not of the tenant 'acme'") as caught:
            publisher.publish_flow(_flow("f", "one", "two", tenant=tenant, fail_fast=True))
        assert caught.value.task_ids == taken
        assert ("flow of this key" in str(caught.value)) == key_taken
    assert list(stored.find()) == before


def test_failure_in_a_flow_cancels_no_step_of_another_tenant(client: Client, store: SyncStore) -> None:
    """An older mtask published flows of a tenant into those of nobody, and such flows are stored."""
    client.publish_flow(_flow("acme:f", "one"))
    client.publish_flow(_flow("g", "two", "three", tenant="acme", fail_fast=True))
    store.database.tasks.update_many({"tenant": "acme"}, {"$set": {"flow.key": "acme:f"}})
    fail(store, "task:acme:g/two", claim(store, "task:acme:g/two"), "wrong", final=True)
    store.run(settling.settle_all(["task:acme:g/two"]))
    assert client.get("task", "acme:g/three").status == "CANCELED"
    assert client.get("task", "acme:f/one").status == "INIT"


async def test_schedule_publishes_for_its_tenant(working: Working, client: Client) -> None:
    app = App()
    app.task(name="task")(lambda: None)
    acme = client.for_tenant("acme")
    made = acme.add_schedule("nightly", "task", datetime.now(UTC) - timedelta(seconds=1))
    assert (made.tenant, client.add_schedule("other", "task", timedelta(days=1)).tenant) == ("acme", None)
    assert [found.id for found in acme.schedules()] == ["nightly"]
    async with working(app) as bench:
        await until(lambda: bench.count("SUCCESS") == 1, message="fired and run")
    (task,) = acme.find()
    assert task.own_key.startswith("nightly/")
    assert (task.tenant, task.id) == ("acme", f"task:acme:{task.own_key}")


def test_schedule_is_seen_and_changed_by_its_tenant_alone(mongo: Mongo, database_name: str, client: Client) -> None:
    acme, beta = client.for_tenant("acme"), client.for_tenant("beta")
    hour = timedelta(hours=1)
    acme.add_schedule("digest", "task", hour, {"of": "acme"})
    client.add_schedule("general", "task", hour)
    stored = mongo[database_name]["schedules"]
    before = list(stored.find())
    for other, taken in ((beta, "digest"), (acme, "general")):
        assert taken not in [found.id for found in other.schedules()]
        for call in (other.get_schedule, other.pause_schedule, other.resume_schedule, other.next_firings):
            with pytest.raises(ScheduleNotFound):
                call(taken)
        assert not other.remove_schedule(taken)
        for if_exists in ("keep", "update", "reject"):
            with pytest.raises(ScheduleExists, match="Choose another id"):
                other.add_schedule(taken, "task", hour, if_exists=if_exists)
    for schedule_id, tenant in (("digest", "beta"), ("general", "acme")):
        with pytest.raises(ScheduleExists, match="not of the tenant"):
            client.add_schedule(schedule_id, "task", hour, tenant=tenant)
    assert list(stored.find()) == before
    changed = client.add_schedule("digest", "task", 2 * hour)
    assert (changed.tenant, str(changed.trigger)) == ("acme", "every 2h")
    assert client.pause_schedule("digest").tenant == "acme"
    assert acme.resume_schedule("digest").tenant == "acme"
    assert acme.remove_schedule("digest")


def test_declared_schedule_takes_over_none_of_a_tenant(client: Client, store: SyncStore) -> None:
    app = App()
    app.schedule("0 3 * * *", id="digest")(app.task(name="task")(lambda: None))
    made = client.for_tenant("acme").add_schedule("digest", "task", timedelta(hours=1))
    with pytest.raises(ScheduleExists, match="is a tenant's"):
        store.run(scheduling.put(app.schedules[0], "update", "app"))
    assert client.get_schedule("digest") == made


def test_calls_that_gather_and_callbacks_are_of_the_tenant(client: Client) -> None:
    acme = client.for_tenant("acme")
    acme.publish("task", {"n": 1}, key="a", debounce=60)
    acme.publish("task", {"n": 2}, key="a", debounce=60)
    found = acme.get("task", "a")
    assert (found.params, found.tenant) == ({"n": 2}, "acme")
    acme.publish("task", key="b", window=60)
    assert acme.get("task", "b").tenant == "acme"
    acme.publish("task", key="c", callback={"url": "https://hooks.example.com/x"})
    callback = acme.get("task", "c").callback
    assert callback is not None
    assert (callback.tenant, callback.secret) == ("acme", "acme/default")


def test_one_task_that_is_not_the_tenants_leaves_the_others_of_a_batch_theirs(client: Client) -> None:
    client.publish("task", key="acme:a")
    modes: tuple[dict[str, Any], ...] = (
        {},
        {"if_exists": "update"},
        {"if_running": "again"},
        {"debounce": 60},
        {"collect": True},
        {"window": 60},
    )
    for number, mode in enumerate(modes):
        specs = [TaskSpec("task", key=key) for key in (f"{number}", "a", f"{number}/b")]
        results = client.for_tenant("acme").publish_many(specs, **mode)
        told = [result.created if isinstance(result, Published) else type(result) for result in results]
        assert told == [True, TaskExists, True], mode


def test_wrong_tenants_and_keys_are_refused(client: Client) -> None:
    for call in (
        lambda: client.for_tenant("a:b"),
        lambda: client.publish("task", tenant="a b"),
        lambda: Flow("f", tenant=""),
        lambda: Client(client.tasks.database.client, tenant="é"),
    ):
        with pytest.raises(InvalidInput, match="use 1 to 64 letters"):
            call()
    with pytest.raises(InvalidKey, match="together with its tenant"):
        client.publish("task", key="k" * 510, tenant="acme")
    flow = Flow("f")
    flow.add("one", "task")
    flow.specs[0].tenant = "beta"
    with pytest.raises(InvalidFlow, match="another tenant"):
        client.for_tenant("acme").publish_flow(flow)
    assert client.count() == 0


def test_limits_of_tenants_wait_until_no_older_worker_is_live(
    client: Client, store: SyncStore, mongo: Mongo, database_name: str
) -> None:
    store.run(setup.ensure())
    register(store, "old", ["task"])
    mongo[database_name]["workers"].update_one({"_id": "old"}, {"$set": {"schema_revision": 6}})
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.limit(tenant="acme", concurrency=1, timeout=0),
        lambda: client.limit("default", tenant_rate=(1, 1), timeout=0),
        lambda: client.set_fair("default", timeout=0),
        lambda: client.pause(tenant="acme", timeout=0),
    )
    for call in calls:
        with pytest.raises(WorkersTooOld, match="limits and turns of tenants"):
            call()
    assert client.controls() == []


async def test_client_of_a_tenant_leaves_the_connection_open(mongo_uri: str, database_name: str) -> None:
    async with AsyncClient(mongo_uri, database=database_name) as client:
        async with client.for_tenant("acme") as acme:
            await acme.publish("task", key="a")
        assert (await client.find())[0].tenant == "acme"


def test_next_task_of_a_task_named_like_a_tenant_is_not_the_tenants(mongo_uri: str, database_name: str) -> None:
    app = App()

    @app.task(name="acme")
    async def first(context: Context) -> Any:
        return Next("last")

    @app.task
    async def last(context: Context) -> None:
        pass

    bench = Bench(app, mongo_uri, database_name)
    with bench.client as client:
        client.publish("acme", key="k")
        bench.run()
        assert ids(client.find()) == ["acme:k", "last:@acme:k/next-1"]
        acme = client.for_tenant("acme")
        assert acme.find() == []
        assert not acme.remove("last", "k/next-1")


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"key_prefix": "k"},
        {"lookup": {"who": 7}},
        {"status": "INIT"},
        {"status": "CANCELED"},
        {"status": ["INIT", "CANCELED"]},
    ],
)
@pytest.mark.parametrize("sorted_as_a_whole", [0, 10_000])
def test_cursors_of_a_tenant_tell_nothing_of_others_in_a_database_of_many_names(
    client: Client, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any], sorted_as_a_whole: int
) -> None:
    monkeypatch.setattr(due, "SORTED", sorted_as_a_whole)
    monkeypatch.setattr(listing, "STEPS", (4, 6))
    own = [TaskSpec("mine", key=f"k{number}", tenant="acme", lookup={"who": 7}) for number in range(9)]
    others = [
        TaskSpec(f"secret-{number:02}", key=f"k{number}", tenant=(None, "umbra")[number % 2], lookup={"who": 7})
        for number in range(walks.MOST + 1)
    ]
    for each in range(9):
        client.publish_many([*others[each * 6 : each * 6 + 6], own[each]])
    for name, key in (("mine", "acme:k1"), *((f"secret-{n:02}", f"umbra:k{n}") for n in range(1, 21, 2))):
        client.cancel(name, key)
    acme = client.bound_to("acme").for_tenant("acme")
    wanted = {task.id for task in acme.find(status=query.get("status"))}
    seen: list[str] = []
    cursors: list[str] = []
    cursor = None
    while True:
        page = acme.find_page(**query, limit=2, cursor=cursor)
        seen += [task.id for task in page.tasks]
        if (cursor := page.next_cursor) is None:
            break
        assert cursor not in cursors, "the list goes on"
        cursors.append(cursor)
    assert (len(seen), set(seen)) == (len(wanted), wanted)
    monkeypatch.setattr(counting, "DOCUMENTS", 20)
    monkeypatch.setattr(counting, "KEYS", 20)
    assert acme.count_up_to(**query) == Count(len(wanted)), "it does not tell how many others have"
    told = [base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode() for cursor in cursors]
    assert [text for text in told if "secret" in text or "umbra" in text] == []
