"""Tasks are stored with lookups, found by them, and read in part."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from bson import ObjectId

from mtask import App, Client, Published, TaskFields, TaskNotFound, TaskSpec
from mtask.errors import HandlerError, InvalidInput, InvalidLookup, SchemaMismatch
from mtask.kernel.driver.indexes import LOOKUP_INDEX
from mtask.kernel.driver.stores import SyncStore
from tests.clients import AnyClient, claim, fail, server_now, succeed
from tests.mongo import eventually
from tests.replies import counting

INSTANT = datetime(2026, 3, 2, 12, 0, 0, 123_000, tzinfo=UTC)


class Colour(Enum):
    RED = "red"


def ids(found: list[Any]) -> list[str]:
    return [task.id for task in found]


def lookup_of(client: AnyClient, task_id: str) -> Any:
    name, key = task_id.split(":")
    document = client.get(name, key).model_dump(exclude_unset=True)
    return document.get("lookup")


# --- publish ----------------------------------------------------------------------------------------------


def test_lookups_are_stored_as_pairs_and_lists_are_exploded(client: AnyClient) -> None:
    client.publish("a", key="k", lookup={"user_id": 7, "tags": ["x", "y", "x"]})
    pairs = [{"k": "user_id", "v": 7}, {"k": "tags", "v": "x"}, {"k": "tags", "v": "y"}]
    assert lookup_of(client, "a:k") == pairs
    assert client.get("a", "k").lookups == {"user_id": [7], "tags": ["x", "y"]}
    assert ids(client.find(lookup={"user_id": 7})) == ["a:k"]
    assert client.find(lookup={"user_id": "x"}) == client.find(lookup={"tags": 7}) == [], "of one pair, k and v"


@pytest.mark.parametrize("given", [None, {}, {"tags": []}])
def test_task_without_lookups_has_no_such_field(client: AnyClient, store: SyncStore, given: Any) -> None:
    client.publish("a", key="k", lookup=given)
    client.publish_many([TaskSpec("a", key="many", lookup=given)])
    for document in store.tasks.find({}):
        assert "lookup" not in document
    assert client.get("a", "k").lookups == {}


VALUES = [
    "text",
    "",
    7,
    -(2**63),
    1.5,
    True,
    INSTANT,
    UUID(int=7),
    ObjectId("0123456789abcdef01234567"),
    "$name",
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_each_kind_of_scalar_is_found_again(client: AnyClient, value: Any) -> None:
    client.publish("a", key="k", lookup={"of": value})
    client.publish_many([TaskSpec("a", key="many", lookup={"of": value})])
    client.publish("a", key="other", lookup={"of": "another"})
    assert sorted(ids(client.find(lookup={"of": value}))) == ["a:k", "a:many"]
    assert client.count(lookup={"of": value}) == 2
    assert client.find(lookup={"by": value}) == []


def test_enums_and_sets_are_stored_as_their_values(client: AnyClient) -> None:
    client.publish("a", key="k", lookup={"colour": Colour.RED, "tags": {"x"}})
    assert ids(client.find(lookup={"colour": "red", "tags": "x"})) == ["a:k"]
    assert client.count(lookup={"colour": Colour.RED}) == 1


def test_true_and_one_are_two_values(client: AnyClient) -> None:
    client.publish("a", key="k", lookup={"of": [True, 1, 1.0]})
    assert lookup_of(client, "a:k") == [{"k": "of", "v": True}, {"k": "of", "v": 1.0}]


WRONG: list[tuple[Any, str]] = [
    ({"user id": 7}, r"lookup 'user id' is no name: use 1 to 64 letters"),
    ({"": 7}, "lookup '' is no name"),
    ({7: 7}, "lookup 7 is no name"),
    ({"a" * 65: 7}, "is no name"),
    ({"$of": 7}, "is no name"),
    ({"user_id": None}, "lookup 'user_id' has no value: leave the name out"),
    ({"user_id": {"deep": 1}}, "lookup 'user_id' is dict, and a value is a scalar"),
    ({"user_id": [[1]]}, "is list, and a value is a scalar or a list of scalars"),
    ({"user_id": [1, None]}, "has no value"),
    ({"user_id": b"7"}, "is bytes, and a value"),
    ({"user_id": 2**63}, "beyond 64 bits"),
    ({"user_id": float("nan")}, "is nan, which equals nothing"),
    ({"at": datetime(2026, 1, 1)}, "has no time zone"),  # noqa: DTZ001 the point
    ({"user_id": "a" * 513}, "has 513 characters, and 512 fit"),
    ({"user_id": "\ud800"}, "lone surrogate"),
    ({"tags": list(range(33))}, "lookup: these are 33 values, and a task has at most 32"),
    ([("user_id", 7)], "lookup: give a mapping of names to values, not list"),
]


@pytest.mark.parametrize(("lookup", "message"), WRONG, ids=str)
def test_bad_lookups_are_refused_before_anything_is_written(client: AnyClient, lookup: Any, message: str) -> None:
    with pytest.raises(InvalidLookup, match=message) as raised:
        client.publish("a", key="k", lookup=lookup)
    assert raised.value.field == "lookup"
    with pytest.raises(InvalidLookup, match=message):
        client.publish_many([TaskSpec("a", key="good"), TaskSpec("a", key="bad", lookup=lookup)])
    with pytest.raises(InvalidLookup, match=message):
        client.find(lookup=lookup)
    assert client.count() == 0


def test_update_replaces_the_lookups_and_keep_leaves_them(client: AnyClient) -> None:
    client.publish("a", key="k", lookup={"user_id": 7, "tags": ["x", "y"]})
    client.publish("a", key="k", lookup={"user_id": 8})
    assert client.count(lookup={"user_id": 7}) == 1
    client.publish("a", key="k", lookup={"user_id": 8}, if_exists="update")
    assert [client.count(lookup={"user_id": user}) for user in (7, 8)] == [0, 1]
    assert client.count(lookup={"tags": "x"}) == 0
    client.publish("a", key="k", if_exists="update")
    assert client.count(lookup={"user_id": 8}) == 0
    assert client.get("a", "k").lookup is None


def test_lookups_stay_while_a_task_runs_and_is_run_again(client: AnyClient, store: SyncStore) -> None:
    client.publish("a", key="k", lookup={"user_id": 7}, max_retries=0)
    fail(store, "a:k", claim(store, "a:k"))
    client.retry("a", "k")
    succeed(store, "a:k", claim(store, "a:k"), 1)
    client.rerun("a", "k")
    client.update_option("a", "k", priority=3)
    client.cancel("a", "k")
    assert ids(client.find(lookup={"user_id": 7}, status="CANCELED")) == ["a:k"]


def test_lookups_published_in_a_transaction_are_there_if_it_commits(client: AnyClient) -> None:
    client.count()
    one = lambda session: client.client.publish("a", key="one", lookup={"user_id": 7}, session=session)  # noqa: E731
    many = lambda session: client.client.publish_many(  # noqa: E731
        [TaskSpec("a", key="many", lookup={"user_id": 7})], session=session
    )
    client.in_transaction(one, many)
    assert sorted(ids(client.find(lookup={"user_id": 7}))) == ["a:many", "a:one"]


# --- taken from the params ----------------------------------------------------------------------------------

app = App()


@app.task(lookup=["user_id", "tags"])
def charge(user_id: int, amount: float = 0, tags: list[str] | None = None) -> None: ...


@app.task(lookup=["order"])
def ship(order: str) -> None: ...


@app.task(lookup=["anything"])
def loose(**others: Any) -> None: ...


def test_handler_takes_its_lookups_from_the_params(client: AnyClient) -> None:
    client.publish(charge, {"user_id": 7, "tags": ["x", "y"]}, key="1")
    client.publish_many([TaskSpec(charge, {"user_id": 7}, key="2"), TaskSpec(ship, "A1", key="3")])
    client.publish(loose, {"anything": 1, "more": 2}, key="4")
    assert sorted(ids(client.find(lookup={"user_id": 7}))) == ["charge:1", "charge:2"]
    assert ids(client.find(lookup={"tags": "y"})) == ["charge:1"]
    assert ids(client.find(lookup={"order": "A1"})) == ["ship:3"]
    assert ids(client.find(lookup={"anything": 1})) == ["loose:4"]


def test_lookup_of_a_publish_goes_before_that_of_the_params(client: AnyClient) -> None:
    client.publish(charge, {"user_id": 7, "tags": ["x"]}, key="1", lookup={"user_id": 8, "more": 1})
    assert client.get("charge", "1").lookups == {"user_id": [8], "tags": ["x"], "more": [1]}


def test_middleware_around_a_publish_can_add_lookups(mongo_uri: str, database_name: str) -> None:
    tenants = App()

    @tenants.middleware("publish")
    def of_tenant(spec: TaskSpec) -> Iterator[None]:
        spec.lookup = {**(spec.lookup or {}), "tenant": "t1"}
        yield

    with Client(mongo_uri, database=database_name, middleware=tenants.around.publish) as client:
        given = {"user_id": 7}
        client.publish("a", key="1", lookup=given)
        client.publish_many([TaskSpec("a", key="2", lookup=given), TaskSpec("a", key="3")])
        assert sorted(ids(client.find(lookup={"tenant": "t1"}))) == ["a:1", "a:2", "a:3"]
        assert sorted(ids(client.find(lookup={"tenant": "t1", "user_id": 7}))) == ["a:1", "a:2"]
        assert given == {"user_id": 7}


def test_param_that_is_no_scalar_is_refused_as_a_lookup(client: AnyClient) -> None:
    with pytest.raises(InvalidLookup, match="lookup 'anything' is dict"):
        client.publish(loose, {"anything": {"deep": 1}})


@pytest.mark.parametrize(
    ("lookup", "message"),
    [
        ("user_id", r'lookup is a list of parameters, such as \["user_id"\]'),
        (["nobody"], "lookup 'nobody' is no parameter of it: its parameters are user_id"),
        (["user id"], "is no name"),
        ([7], "is no name"),
    ],
)
def test_handler_with_bad_lookups_is_refused(lookup: Any, message: str) -> None:
    with pytest.raises(HandlerError, match=message):

        @App().task(lookup=lookup)
        def wrong(user_id: int) -> None: ...


# --- find ---------------------------------------------------------------------------------------------------


def publish_in_order(client: AnyClient, store: SyncStore, *keys: str, **given: Any) -> None:
    for key in keys:
        before = server_now(store)
        eventually(lambda before=before: server_now(store) > before)  # type: ignore[misc]
        client.publish("a", key=key, **given)


def test_lookups_are_joined_with_the_other_criteria_newest_first(client: AnyClient, store: SyncStore) -> None:
    publish_in_order(client, store, "1", "2", "3", lookup={"user_id": 7, "tags": ["x", "y"]})
    client.publish("b", key="4", queue="mail", lookup={"user_id": 7, "tags": "z"})
    client.publish("b", key="5", lookup={"user_id": 8, "tags": "x"})
    succeed(store, "a:2", claim(store, "a:2", "w1"))
    user = {"user_id": 7}
    assert ids(client.find(lookup=user, name="a")) == ["a:3", "a:2", "a:1"]
    assert ids(client.find(lookup=user, limit=2)) == ["b:4", "a:3"]
    assert ids(client.find(lookup=user, status="SUCCESS")) == ids(client.find(lookup=user, worker_id="w1")) == ["a:2"]
    assert ids(client.find(lookup=user, status=["SUCCESS", "INIT"], queue="mail")) == ["b:4"]
    assert ids(client.find(lookup=user, key=["1", "4"])) == ["b:4", "a:1"]
    assert ids(client.find(lookup={"user_id": [7, 8], "tags": "x"}, name="b")) == ["b:5"]
    assert ids(client.find(lookup={"tags": ["y", "z"]})) == ["b:4", "a:3", "a:2", "a:1"]
    assert client.find(lookup={"user_id": 8, "tags": "z"}) == client.find(lookup={"tags": []}) == []
    assert (client.count(lookup=user), client.count(lookup=user, status="INIT", name="a")) == (4, 2)
    assert len(client.find(lookup={})) == client.count(lookup={}) == 5


def test_pages_follow_each_other_without_gap_or_double(client: AnyClient, store: SyncStore) -> None:
    specs = [TaskSpec("a", key=f"{n:02}", lookup={"user_id": 7}) for n in range(20)]
    client.publish_many(specs)  # of one instant
    publish_in_order(client, store, "x", "y", lookup={"user_id": 7})
    for criteria in ({"lookup": {"user_id": 7}}, {"name": "a"}, {"status": "INIT"}, {}):
        whole = ids(client.find(**criteria, limit=0))
        assert whole[:2] == ["a:y", "a:x"]
        assert len(whole) == 22
        for more in ({}, {"fields": ["status"]}):
            pages: list[Any] = client.find(**criteria, **more, limit=6)
            while page := client.find(**criteria, **more, limit=6, after=pages[-1]):
                pages += page
            assert ids(pages) == whole
    assert ids(client.find(after="a:y", limit=1)) == ids(client.find(after=("a", "y"), limit=1)) == ["a:x"]
    assert client.find(after=whole[-1]) == []


def test_page_after_a_task_that_is_gone_is_an_error_that_names_it(client: AnyClient) -> None:
    with pytest.raises(TaskNotFound, match="a:gone"):
        client.find(after="a:gone")
    with pytest.raises(InvalidInput, match="a task id is NAME:KEY"):
        client.find(after="gone")
    with pytest.raises(InvalidInput, match="7 names no task"):
        client.find(after=7)


def test_find_without_the_index_says_what_to_do(client: AnyClient, store: SyncStore) -> None:
    client.count()
    store.tasks.drop_index(LOOKUP_INDEX)
    for ask in (client.find, client.count):
        with pytest.raises(SchemaMismatch, match=r"the index mtask_lookup is missing\. Run `mtask init`"):
            ask(lookup={"user_id": 7})
    client.init()
    assert client.find(lookup={"user_id": 7}) == []


# --- fields -------------------------------------------------------------------------------------------------


@pytest.fixture
def done(client: AnyClient, store: SyncStore) -> str:
    """Give a task that failed, then succeeded."""
    client.publish("a", {"user_id": 7, "big": "x" * 1000, "items": [{"n": 1}, {"n": 2}]}, key="k", lookup={"u": 7},
                   retry_delay=0)  # fmt: skip
    fail(store, "a:k", claim(store, "a:k"), "no luck")
    succeed(store, "a:k", claim(store, "a:k"), {"sum": 3})
    return "a:k"


def test_partial_read_gives_the_fields_that_were_asked_for(client: AnyClient, done: str) -> None:
    asked = [
        "status", "returns", "returns.sum", "fail_reason", "params.user_id", "params.items.n", "params.nothing",
        "task_option.priority", "queue", "lookup", "expire_time",
    ]  # fmt: skip
    (row,) = client.find(lookup={"u": 7}, fields=asked)
    assert isinstance(row, TaskFields)
    assert (row.id, row.name, row.key) == (done, "a", "k")
    assert row.create_time == client.get("a", "k").task_state.create_time
    assert dict(row) == {
        "status": "SUCCESS",
        "returns": {"sum": 3},
        "returns.sum": 3,
        "fail_reason": "no luck",
        "params.user_id": 7,
        "params.items.n": [1, 2],
        "params.nothing": None,
        "task_option.priority": 0,
        "queue": "default",
        "lookup": [{"k": "u", "v": 7}],
        "expire_time": None,
    }
    assert list(row) == asked
    with pytest.raises(KeyError):
        row["params"]
    task = client.get("a", "k")
    (row,) = client.find(fields=["runs", "task_state", "_id"])
    assert [run["run_id"] for run in row["runs"]] == [run.run_id for run in task.runs]
    assert row["task_state"]["status"] == "SUCCESS"
    assert row["_id"] == done


def test_returns_of_an_earlier_round_are_not_sent(client: AnyClient, done: str) -> None:
    client.rerun("a", "k")
    (row,) = client.find(fields=["returns"])
    assert row["returns"] is client.get("a", "k").returns is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("returns", "fields is a list of fields"),
        ([], "ask for 1 to 100 fields, not 0"),
        ([f"params.f{n}" for n in range(101)], "not 101"),
        ([7], "a field is text, not int"),
        (["params."], r"write a path such as params\.user_id"),
        (["$params"], "write a path"),
        (["params.$where"], "write a path"),
        (["params.\ud800"], "lone surrogate"),
        (["create_time"], r"a task has no field 'create_time': did you mean 'task_state\.create_time'\?"),
        (["reason"], r"did you mean 'fail_reason'\?$"),
        (["retuns"], r"did you mean 'returns' or 'runs'\? A param is params\.retuns\.$"),
        (["user_id"], r"did you mean '_id'\? A param is params\.user_id\."),
        (["status_of"], r"did you mean 'status'\? A param"),
        (["nosuch"], r"'nosuch': use status, returns, fail_reason, .{,80}, or another field of the document"),
    ],
    ids=str,
)
def test_bad_fields_are_refused(client: AnyClient, fields: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as raised:
        client.find(fields=fields)
    assert raised.value.field == "fields"
    with pytest.raises(InvalidInput, match=message):
        client.get_many(["a:k"], fields=fields)


def test_partial_read_of_a_malformed_document_gives_what_is_there(client: AnyClient, store: SyncStore) -> None:
    client.count()
    broken = {"_id": "a:bad", "name": "a", "key": "bad", "task_state": {"worker_states": 5}, "schema_version": 1}
    raw = store.database.get_collection("tasks")
    raw.insert_one(broken, bypass_document_validation=True)
    raw.insert_one({**broken, "_id": 7}, bypass_document_validation=True)
    (row,) = client.find(name="a", fields=["status", "returns", "fail_reason", "runs"])
    assert dict(row) == {"status": None, "returns": None, "fail_reason": None, "runs": 5}
    assert row.create_time is None
    with pytest.raises(InvalidInput, match="a:bad has no create_time"):
        client.find(after=row)


# --- several by id ------------------------------------------------------------------------------------------


def test_get_many_tells_which_tasks_are_not_there(client: AnyClient, store: SyncStore) -> None:
    published = client.publish_many([TaskSpec("a", {"n": n}, key=f"{n}") for n in range(3)])
    raw = store.database.get_collection("tasks")
    broken = {"_id": "a:bad", "name": "a", "key": "bad", "schema_version": 1}
    raw.insert_one(broken, bypass_document_validation=True)
    found = client.get_many([published[2], "a:gone", ("a", "0"), client.get("a", "1"), "a:bad", published[2]])
    assert list(found.tasks) == ["a:2", "a:0", "a:1"]
    assert [task.params["n"] for task in found.tasks.values()] == [2, 0, 1]
    assert found.missing == ["a:gone"]
    assert list(found.malformed) == ["a:bad"]
    some = client.get_many(["a:1", "a:gone"], fields=["params.n"])
    assert {task_id: row["params.n"] for task_id, row in some.tasks.items()} == {"a:1": 1}
    assert (some.missing, some.malformed) == (["a:gone"], {})
    assert client.get_many([]).tasks == {}


def test_get_many_reads_thousands(client: AnyClient) -> None:
    published: list[Published] = client.publish_many([TaskSpec("a", key=f"{n}") for n in range(2_500)])
    found = client.get_many([*published, "a:gone"], fields=["status"])
    assert list(found.tasks) == [one.task_id for one in published]
    assert found.missing == ["a:gone"]


@pytest.mark.parametrize("given", ["a:k", 7, [7], [("a",)]], ids=repr)
def test_get_many_refuses_what_names_no_task(client: AnyClient, given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"give a list of tasks|names no task"):
        client.get_many(given)


def test_partial_reads_send_only_the_fields_that_were_asked_for(mongo_uri: str, database_name: str) -> None:

    with counting(mongo_uri) as (source, replies), Client(source, database=database_name) as client:
        big, count = "x" * 20_000, 50
        specs = [TaskSpec("a", {"user_id": n, "big": big}, key=f"{n:02}", lookup={"u": 7}) for n in range(count)]
        published = client.publish_many(specs)
        whole = replies.of(lambda: client.find(lookup={"u": 7}))
        some = replies.of(lambda: client.find(lookup={"u": 7}, fields=["params.user_id", "status"]))
        many = replies.of(lambda: client.get_many(published, fields=["params.user_id"]))
    assert whole > count * len(big)
    assert some < 200 + count * 100  # an _id, an instant, a number and a status
    assert many < 200 + count * 80


def test_schedule_gives_its_tasks_their_lookups(client: AnyClient) -> None:
    added = client.add_schedule("digest", "report", timedelta(hours=1), lookup={"user_id": 7, "tags": ["x"]})
    assert [entry.model_dump() for entry in added.lookup] == [{"k": "user_id", "v": 7}, {"k": "tags", "v": "x"}]
    same = client.add_schedule("digest", "report", timedelta(hours=1), lookup={"user_id": 7, "tags": ["x"]})
    assert same.revision == added.revision
    changed = client.add_schedule("digest", "report", timedelta(hours=1))
    assert changed.lookup is None
    assert changed.revision > added.revision
