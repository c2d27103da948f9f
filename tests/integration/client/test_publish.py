"""Publishing through each kind of client: identity, options, time, params, batches; and what is refused."""

from __future__ import annotations

import dataclasses
import enum
import math
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from bson import Decimal128, ObjectId
from pydantic import BaseModel

from mtask import App, Client, Context, Published, RunStatus, TaskExists, TaskSpec
from mtask.errors import InvalidInput, InvalidKey, InvalidName, InvalidOption, InvalidParams, UnknownOption
from tests.clients import AnyClient, claim, open_store, server_now, succeed
from tests.mongo import Client as Mongo

app = App()


@app.task(queue="mail", max_retries=5, run_timeout=60)
async def send_email(context: Context, to: str, subject: str = "hello") -> None: ...


@pytest.fixture
def sync_client(mongo_uri: str, database_name: str) -> Iterator[Client]:
    with Client(mongo_uri, database=database_name) as opened:
        yield opened


# --- one task ---------------------------------------------------------------------------------------------


def test_published_task_is_the_whole_document(client: AnyClient, mongo: Mongo) -> None:
    before = server_now(mongo)
    assert client.publish("send_email", {"to": "a@b.c"}, key="welcome/42") == Published(
        "send_email:welcome/42", created=True, updated=False
    )
    document = mongo[client.client.database_name]["tasks"].find_one()
    assert document is not None
    state = document["task_state"]
    assert before <= state["create_time"] <= server_now(mongo)
    assert document == {
        "_id": "send_email:welcome/42",
        "name": "send_email",
        "key": "welcome/42",
        "queue": "default",
        "params": {"to": "a@b.c"},
        "task_option": {
            "priority": 0,
            "concurrent_worker_cnt": 1,
            "ping_interval_ms": 30000,
            "worker_timeout_ms": 60000,
            "specific_worker_ids": [],
            "max_unexpected_retries": 3,
            "unexpected_retry_delay_ms": 10000,
            "retry_backoff": 1.0,
            "retry_max_delay_ms": None,
            "retry_scope": "task",
            "run_timeout_ms": None,
            "retain_success_ms": None,
            "retain_fail_ms": None,
        },
        "task_state": {
            "status": "INIT",
            "create_time": state["create_time"],
            "next_preempt_time": state["create_time"],
            "failed_cnt": 0,
            "cancel_requested": False,
            "worker_states": [],
        },
        "schema_version": 1,
    }


def test_registered_function_brings_its_name_queue_and_options(client: AnyClient) -> None:
    client.publish(send_email, {"to": "a@b.c"}, key="k", max_retries=7)
    task = client.get(send_email, "k")
    assert (task.name, task.queue) == ("send_email", "mail")
    assert (task.task_option.max_unexpected_retries, task.task_option.run_timeout_ms) == (7, 60_000)


def test_options_take_a_timedelta(client: AnyClient) -> None:
    client.publish("a", key="k", worker_timeout=timedelta(minutes=2), retain_success=timedelta(days=1))
    option = client.get("a", "k").task_option
    assert (option.worker_timeout_ms, option.retain_success_ms) == (120_000, 86_400_000)


def test_tasks_without_a_key_get_fresh_ones_that_sort_by_time(client: AnyClient) -> None:
    ids = [client.publish("a").task_id for _ in range(3)]
    assert len(set(ids)) == 3
    moments = [task_id.removeprefix("a:")[:12] for task_id in ids]
    assert moments == sorted(moments)


@pytest.mark.parametrize("key", ["a:b:c", "päß/字", " ", "$ref.x", "x" * 512, "é" * 256, "line\nbreak"], ids=ascii)
def test_key_is_any_text_up_to_512_bytes(sync_client: Client, key: str) -> None:
    assert sync_client.publish("a.b-c/d_1", key=key).task_id == f"a.b-c/d_1:{key}"
    assert sync_client.get("a.b-c/d_1", key).key == key


# --- time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [timedelta(minutes=5), 300, 300.0], ids=repr)
def test_delay_counts_from_the_servers_now(client: AnyClient, mongo: Mongo, delay: timedelta | float) -> None:
    before = server_now(mongo)
    client.publish("a", key="one", delay=delay)
    client.publish_many([TaskSpec("a", key="many", delay=delay)])
    after = server_now(mongo)
    for key in ("one", "many"):
        state = client.get("a", key).task_state
        assert state.start_time is not None
        assert before + timedelta(minutes=5) <= state.start_time <= after + timedelta(minutes=5)
        assert state.next_preempt_time == state.start_time


def test_start_time_of_any_time_zone_is_stored_as_that_instant(client: AnyClient) -> None:
    start = datetime(2040, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    client.publish("a", key="k", start_time=start)
    stored = client.get("a", "k").task_state.start_time
    assert stored == start
    assert stored.tzinfo is UTC


def test_start_time_in_the_past_is_due_at_once(sync_client: Client, mongo_uri: str) -> None:
    sync_client.publish("a", key="k", start_time=datetime(1990, 1, 1, tzinfo=UTC))
    with open_store(mongo_uri, sync_client.database_name) as store:
        claim(store, "a:k")


def test_start_time_at_the_end_of_time_is_stored(sync_client: Client) -> None:
    sync_client.publish("a", key="k", start_time=datetime.max.replace(tzinfo=UTC))
    start = sync_client.get("a", "k").task_state.start_time
    assert start is not None
    assert start.year == 9999


# --- params -----------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


class Address(BaseModel):
    street: str
    lines: tuple[int, ...] = (1, 2)


@dataclasses.dataclass
class Order:
    number: int
    address: Address


UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")
OBJECT_ID = ObjectId("0123456789abcdef01234567")


@pytest.mark.parametrize(
    ("params", "stored"),
    [
        (None, None),
        (["a", 1, 2.5, True], ["a", 1, 2.5, True]),
        ("$$NOW", "$$NOW"),
        ({"$set": {"$x": "$y"}, "a.b": 1, "": 2}, {"$set": {"$x": "$y"}, "a.b": 1, "": 2}),
        ({"color": Color.RED, "set": frozenset([1])}, {"color": "red", "set": [1]}),
        (Order(7, Address(street="s")), {"number": 7, "address": {"street": "s", "lines": [1, 2]}}),
        ({"uuid": UUID, "id": OBJECT_ID}, {"uuid": UUID, "id": OBJECT_ID}),
        (Decimal128("1.10"), Decimal128("1.10")),
        (b"\x00\xff", b"\x00\xff"),
        (2**63 - 1, 2**63 - 1),
        (datetime(2030, 1, 1, 5, tzinfo=timezone(timedelta(hours=5))), datetime(2030, 1, 1, tzinfo=UTC)),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_params_come_back_as_they_were(sync_client: Client, mongo_uri: str, params: Any, stored: Any) -> None:
    sync_client.publish("a", params, key="one")
    sync_client.publish_many([TaskSpec("a", params, key="many")])
    sync_client.publish("a", key="updated")
    sync_client.publish("a", params, key="updated", if_exists="update")
    with open_store(mongo_uri, sync_client.database_name) as store:
        for key in ("one", "many", "updated"):
            succeed(store, f"a:{key}", claim(store, f"a:{key}"), stored if isinstance(stored, dict) else None)
            task = sync_client.get("a", key)
            assert task.params == stored
            assert isinstance(task.params, type(stored))
            assert [run.status for run in task.runs] == [RunStatus.SUCCESS]


def test_dates_and_uuids_come_back_the_same_through_each_client(client: AnyClient) -> None:
    params = {"uuid": UUID, "time": datetime(2030, 1, 1, tzinfo=UTC)}
    client.publish("a", params, key="k")
    assert client.get("a", "k").params == params
    assert client.find()[0].params == params


def hold_themselves() -> list[Any]:
    params: list[Any] = []
    params.append(params)
    return params


def nested(levels: int) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for _ in range(levels):
        params = {"inner": params}
    return params


def test_arguments_of_the_handler_that_are_given_as_options_are_explained(client: AnyClient) -> None:
    wanted = r"'to' is an argument of the handler, and no option: give all arguments as one mapping, publish\(.*'to'"
    with pytest.raises(InvalidParams, match=wanted):
        client.publish(send_email, to="ann", key="k")
    assert client.count() == 0


class Parcel(BaseModel):
    order_id: int
    note: str = ""


@app.task
def pack(params: Parcel) -> None: ...


def test_fields_of_the_object_that_a_handler_takes_are_explained(client: AnyClient) -> None:
    wanted = (
        r"'order_id' is a field of the handler's argument 'params', .* publish\(pack, {'params': {'order_id': ...}}\)"
    )
    with pytest.raises(InvalidParams, match=wanted):
        client.publish(pack, order_id=1)
    with pytest.raises(InvalidParams, match=r"\(expected params: {order_id, note}\)"):
        client.publish(pack, {"order_id": 1})
    assert client.publish(pack, {"params": {"order_id": 1}}).created


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (object(), "cannot be stored as BSON"),
        (Decimal("1.1"), "cannot be stored as BSON"),
        (date(2030, 1, 1), "cannot be stored as BSON"),
        (timedelta(1), "cannot be stored as BSON"),
        (2**63, "cannot be stored as BSON"),
        ({1: 2}, "cannot be stored as BSON"),
        ({"a\0b": 1}, "cannot be stored as BSON"),
        ("\ud800", "cannot be stored as BSON"),
        (nested(100), "nested more than 100 levels deep"),
        (nested(100_000), "nested too deeply"),
        (hold_themselves(), "hold themselves"),
        ("x" * 15_800_000, "exceed 15 MB: store them elsewhere"),
        (b"x" * 60_000_000, "exceed 15 MB: store them elsewhere"),
    ],
    ids=range(13),
)
def test_params_that_cannot_be_stored_are_refused_before_anything_is_written(
    sync_client: Client, params: Any, message: str
) -> None:
    good = TaskSpec("a", key="good")
    for attempt in (
        lambda: sync_client.publish("send_sms", params, key="k"),
        lambda: sync_client.publish_many([good, TaskSpec("send_sms", params, key="k")]),
    ):
        with pytest.raises(InvalidParams, match=message) as raised:
            attempt()
        assert raised.value.task_name == "send_sms"
        assert len(str(raised.value)) < 500
    assert sync_client.count() == 0


def test_params_of_15_megabytes_and_100_levels_can_be_published_run_and_finished(
    sync_client: Client, mongo_uri: str
) -> None:
    sync_client.publish("a", "x" * (15 * 2**20 - 100), key="large")
    sync_client.publish("a", nested(99), key="deep")
    with open_store(mongo_uri, sync_client.database_name) as store:
        for key in ("large", "deep"):
            succeed(store, f"a:{key}", claim(store, f"a:{key}"), "done")
            assert sync_client.get("a", key).returns == "done"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "to: Field required"),
        ({"to": 3}, "to: Input should be a valid string"),
        ({"to": "a", "cc": "b"}, "cc: Extra inputs are not permitted"),
        ([1], "give a mapping of to, subject"),
    ],
    ids=str,
)
def test_params_that_do_not_fit_the_handler_are_refused_at_publish(
    client: AnyClient, params: Any, message: str
) -> None:
    with pytest.raises(InvalidParams, match=message):
        client.publish(send_email, params, key="k")
    assert client.count() == 0


# --- what is refused --------------------------------------------------------------------------------------

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 that is the mistake


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"start_time": NAIVE}, InvalidInput, "no time zone: give an aware datetime"),
        ({"start_time": "tomorrow"}, InvalidInput, "start_time is a datetime, not str"),
        ({"start_time": date(2030, 1, 1)}, InvalidInput, "start_time is a datetime, not date"),
        (
            {"start_time": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1},
            InvalidInput,
            "give start_time or delay, not both",
        ),
        ({"delay": -1}, InvalidInput, "delay -1 s lies outside of 0 to 10 years"),
        ({"delay": timedelta(days=4000)}, InvalidInput, "lies outside of 0 to 10 years"),
        ({"delay": math.nan}, InvalidInput, "delay nan is no length of time"),
        ({"delay": math.inf}, InvalidInput, "delay inf is no length of time"),
        ({"delay": "5"}, InvalidInput, "delay is a timedelta or seconds, not str"),
        ({"delay": True}, InvalidInput, "delay is a timedelta or seconds, not bool"),
        ({"key": ""}, InvalidKey, "it is empty"),
        ({"key": "x" * 513}, InvalidKey, "it has 513 bytes"),
        ({"key": "é" * 257}, InvalidKey, "it has 514 bytes"),
        ({"key": 42}, InvalidKey, "it is int, not text"),
        ({"key": "\ud800"}, InvalidKey, "lone surrogate"),
        ({"task": ""}, InvalidName, "it is empty"),
        ({"task": "send:email"}, InvalidName, "is not a task name"),
        ({"task": "send email"}, InvalidName, "is not a task name"),
        ({"task": "ä"}, InvalidName, "is not a task name"),
        ({"task": "a\n"}, InvalidName, "is not a task name"),
        ({"task": "a" * 257}, InvalidName, "too long"),
        ({"task": print}, InvalidInput, "is no task: give its name, or a function registered with @app.task"),
        ({"task": None}, InvalidInput, "None is no task"),
        ({"queue": ""}, InvalidInput, "queue '': use non-empty printable text"),
        ({"queue": "a,b"}, InvalidInput, "a comma separates entries"),
        ({"if_exists": "replace"}, InvalidInput, '"keep", "update" or "reject", not \'replace\''),
        ({"if_exists": "reject", "clean_failed": True}, InvalidInput, "leaves an existing task alone"),
        ({"prioritty": 5}, UnknownOption, "did you mean 'priority'"),
        ({"max_retry": 5}, UnknownOption, "did you mean 'max_retries'"),
        ({"priority": True}, InvalidOption, "option priority: use a whole number"),
        ({"priority": "5"}, InvalidOption, "option priority: use a whole number"),
        ({"concurrent_worker_cnt": 0}, InvalidOption, "greater than or equal to 1"),
        ({"concurrent_worker_cnt": 1001}, InvalidOption, "less than or equal to 1000"),
        ({"worker_timeout": 30}, InvalidOption, r"worker_timeout \(30 s\) must exceed ping_interval \(30 s\)"),
        ({"max_retries": -2}, InvalidOption, "option max_retries"),
        ({"retry_scope": "process"}, InvalidOption, "retry_scope"),
        ({"specific_worker_ids": ["a", "a"]}, InvalidOption, "name each worker once"),
        ({"specific_worker_ids": ["a"], "concurrent_worker_cnt": 2}, InvalidOption, "allows only 1"),
    ],
    ids=lambda value: ascii(value)[:60] if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_with_what_is_wrong_and_nothing_is_written(
    sync_client: Client, arguments: dict[str, Any], error: type[InvalidInput], message: str
) -> None:
    with pytest.raises(error, match=message):
        sync_client.publish(**{"task": "a", "key": "k"} | arguments)
    policy = {name: arguments[name] for name in ("if_exists", "clean_failed") if name in arguments}
    spec = {name: value for name, value in arguments.items() if name not in policy}
    specs = [TaskSpec("a", key="good"), TaskSpec(**{"task": "a", "key": "k"} | spec)]
    with pytest.raises(error, match=message):
        sync_client.publish_many(specs, **policy)
    assert sync_client.count() == 0


@pytest.mark.parametrize("arguments", [{"delay": -1}, {"key": ""}, {"prioritty": 1}, {"start_time": NAIVE}], ids=str)
def test_bad_input_is_a_value_error_of_each_client(client: AnyClient, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        client.publish("a", **arguments)


# --- many -------------------------------------------------------------------------------------------------


def test_five_thousand_tasks_are_published_in_one_call_and_told_one_by_one(client: AnyClient) -> None:
    client.publish("a", {"n": "old"}, key="17")
    client.publish("a", {"n": "old"}, key="4999")
    specs = [TaskSpec("a", {"n": number}, key=str(number), priority=number % 10) for number in range(5000)]
    specs.insert(100, TaskSpec("a", {"n": "twice"}, key="5"))

    told = client.publish_many(specs)

    assert [each.task_id for each in told] == [f"a:{spec.key}" for spec in specs]
    assert [place for place, each in enumerate(told) if not each.created] == [17, 100, 5000]
    assert not any(each.updated for each in told)
    assert client.count(name="a") == 5000
    assert client.get("a", "5").params == {"n": 5}
    assert client.get("a", "17").params == {"n": "old"}
    task = client.get("a", "1234")
    assert (task.params, task.task_option.priority) == ({"n": 1234}, 4)
    assert not any(each.created for each in client.publish_many(specs))


def test_batch_with_update_changes_what_exists_and_the_last_of_one_key_wins(client: AnyClient) -> None:
    client.publish("a", {"n": "old"}, key="1")
    specs = [
        TaskSpec("a", {"n": 1}, key="1"),
        TaskSpec("a", {"n": 2}, key="2"),
        TaskSpec("a", {"n": 3}, key="2"),
        TaskSpec("a", {"n": 3}, key="2"),
    ]
    told = client.publish_many(specs, if_exists="update")
    assert [(each.created, each.updated) for each in told] == [
        (False, True),
        (True, False),
        (False, True),
        (False, False),
    ]
    assert [client.get("a", key).params["n"] for key in "12"] == [1, 3]


def test_batch_with_reject_tells_which_existed_and_publishes_the_rest(client: AnyClient) -> None:
    client.publish("a", key="1")
    told = client.publish_many([TaskSpec("a", key=key) for key in "1223"], if_exists="reject")
    assert [type(each) for each in told] == [TaskExists, Published, TaskExists, Published]
    assert [each.task_id for each in told] == ["a:1", "a:2", "a:2", "a:3"]


def test_batch_takes_any_iterable_and_an_empty_one_does_nothing(client: AnyClient) -> None:
    assert client.publish_many([]) == []
    assert len(client.publish_many(TaskSpec(send_email, {"to": str(n)}, key=str(n)) for n in range(3))) == 3
    assert {task.queue for task in client.find()} == {"mail"}


def test_bad_task_in_a_batch_is_named_by_its_place_and_nothing_is_published(client: AnyClient) -> None:
    with pytest.raises(InvalidKey) as raised:
        client.publish_many([TaskSpec("a", key="1"), TaskSpec("a", key="")])
    assert any("in task 1 of publish_many; nothing was published" in note for note in raised.value.__notes__)
    with pytest.raises(InvalidInput, match="task 0 is str, not a TaskSpec"):
        client.publish_many(["a"])
    assert client.count() == 0
