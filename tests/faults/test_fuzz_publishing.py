"""Params, options, keys, names, queues and times of every kind: refused with what is wrong, or stored as they are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pytest
from bson import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from mtask import Client, Task, TaskSpec
from mtask.errors import InvalidInput, InvalidKey, InvalidName, InvalidOption, InvalidParams, MtaskError, TaskNotFound
from mtask.kernel.document.options import STORED_NAMES, TaskOption, option_of
from mtask.kernel.document.task import StoredTask
from mtask.kernel.document.values import storable
from mtask.kernel.driver.stores import CODEC
from tests.faults import fuzzing
from tests.faults.fuzzing import LIMIT, fuzz

pytestmark = pytest.mark.timeout(LIMIT)
#: A message that is longer does not help: it repeats what was given.
_MAX_MESSAGE = 1000
#: In a field at the top of a document, the server puts its own time in the place of this one.
_SERVERS_OWN = Timestamp(0, 0)


def _encoded(value: Any) -> bytes:
    return bson.encode({"": value}, codec_options=CODEC)


def _stored(client: Client, task_id: str) -> dict[str, Any]:
    found = client.tasks.find_one({"_id": task_id})
    assert found is not None
    StoredTask.model_validate(found)  # no worker quarantines it
    return found


def _told(error: MtaskError, *names: str) -> None:
    """See that the error can be read, and names what is wrong."""
    message = str(error)
    assert 0 < len(message) < _MAX_MESSAGE
    assert any(name in message for name in names), (message, names)


# --- params -----------------------------------------------------------------------------------------------


@fuzz(30)
@given(params=fuzzing.anything.filter(lambda drawn: drawn != _SERVERS_OWN), in_bulk=st.booleans())
def test_params_are_stored_as_they_are_or_refused_by_name(client: Client, params: Any, in_bulk: bool) -> None:
    spec = TaskSpec("fuzz", params)
    try:
        task_id = spec.prepare().task_id
        spec.key = task_id.partition(":")[2]
        if in_bulk:
            (result,) = client.publish_many([spec])
        else:
            result = client.publish("fuzz", params, key=spec.key)
    except InvalidParams as error:
        _told(error, "params of 'fuzz'")
        return
    assert result.task_id == task_id
    assert _encoded(_stored(client, task_id)["params"]) == _encoded(storable(params))


@st.composite
def _hidden(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """Draw params that hold one value which BSON cannot, and the way to it."""
    value = draw(st.sampled_from([object(), 2**70, "\ud800", {3: 1}, timedelta(1), 1 + 2j]))
    path: list[str] = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            before = draw(st.lists(fuzzing.scalars, max_size=2))
            path.insert(0, str(len(before)))
            value = [*before, value, "behind"]
        else:
            name = draw(st.sampled_from(["a", "to", "_x"]))
            path.insert(0, name)
            value = {"before": None, name: value, "behind": 1}
    return value, path


@fuzz(20)
@given(hidden=_hidden())
def test_part_of_the_params_that_cannot_be_stored_is_named(hidden: tuple[Any, list[str]]) -> None:
    params, path = hidden
    if isinstance(params, dict) or path:
        with pytest.raises(InvalidParams) as caught:
            TaskSpec("fuzz", params).prepare()
        _told(caught.value, f"params of 'fuzz': {'.'.join(path)} cannot be stored")


# --- options ----------------------------------------------------------------------------------------------

_durations = st.one_of(
    st.integers(-1, 100), st.floats(-0.1, 100), st.timedeltas(), st.sampled_from([0, 1, 315_360_000, timedelta(days=1)])
)
_plausible: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.integers(-(10**9) - 1, 10**9 + 1),
    "concurrent_worker_cnt": st.integers(0, 1001),
    "specific_worker_ids": st.lists(st.one_of(st.sampled_from(["a", "b", "c d", "$x", "a:b"]), fuzzing.any_texts)),
    "max_retries": st.one_of(st.integers(-2, 5), st.integers(-2, 1_000_001)),
    "retry_backoff": st.one_of(st.floats(0.5, 1001), st.sampled_from([1, 2, 1.0, 1000])),
    "retry_scope": st.sampled_from(["task", "worker", "Task", "galaxy"]),
}
_known_options = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(_plausible.get(name, _durations), _plausible.get(name, _durations), st.none(), fuzzing.anything)
        for name in STORED_NAMES
    },
)
_own_arguments = frozenset({
    "task", "params", "key", "queue", "start_time", "delay", "lookup", "if_exists", "clean_failed", "clean_success",
    "not_update_running", "session", "self", "specs",
})  # fmt: skip
_unknown_names = st.one_of(
    st.sampled_from(["prioritty", "retries", "PRIORITY", "priority ", "timeout", "worker_ids"]), fuzzing.any_texts
).filter(lambda name: name not in _own_arguments)
_options = st.one_of(
    _known_options,
    _known_options,
    st.tuples(_known_options, st.dictionaries(_unknown_names, fuzzing.anything, max_size=1)).map(
        lambda pair: {**pair[0], **pair[1]}
    ),
)


def _refused_for(error: InvalidOption, options: dict[str, Any]) -> None:
    """See that the error names an option that was given, or the other one of a pair."""
    assert error.option in {*options, "worker_timeout"}
    _told(error, error.option, ascii(error.option)[1:-1][:60], repr(error.option)[1:60])


@fuzz(40)
@given(options=_options, how=st.sampled_from(["publish", "publish_many", "update_option"]))
def test_options_are_refused_by_name_or_stored_so_that_every_side_takes_them(
    client: Client, options: dict[str, Any], how: str
) -> None:
    task_id = client.publish("fuzz").task_id
    key = task_id.partition(":")[2]
    try:
        if how == "publish":
            client.publish("fuzz", key=key, if_exists="update", **options)
        elif how == "publish_many":
            client.remove("fuzz", key)
            client.publish_many([TaskSpec("fuzz", key=key, **options)])
        else:
            client.update_option("fuzz", key, **options)
    except InvalidOption as error:
        _refused_for(error, options)
    except InvalidInput:
        if options or how != "update_option":  # to change nothing is a mistake
            raise
    else:
        stored = _stored(client, task_id)["task_option"]
        assert TaskOption.model_validate(stored) == option_of({}, options)
        assert {type(stored[name]) for name in stored if name.endswith("_ms")} <= {int, bson.Int64, type(None)}


# --- names, keys, queues, times ---------------------------------------------------------------------------


@fuzz(30)
@given(key=st.one_of(fuzzing.any_texts, st.text(min_size=100, max_size=600), fuzzing.anything))
def test_key_is_refused_clearly_or_finds_its_task_everywhere(client: Client, key: Any) -> None:
    if key is None:  # asks for a fresh one
        return
    try:
        task_id = client.publish("fuzz", {"a": 1}, key=key).task_id
    except InvalidKey as error:
        _told(error, "is not a key")
        for request in (client.get, client.cancel, client.retry, client.rerun, client.remove):
            with pytest.raises(InvalidKey):
                request("fuzz", key)
        return
    assert task_id == f"fuzz:{key}"
    assert client.publish_many([TaskSpec("fuzz", key=key)]) == [client.publish("fuzz", key=key)]
    assert client.get("fuzz", key).key == key
    assert [task.id for task in client.find(key=key)] == [task_id]
    assert client.inspect(task_id).task is not None
    assert client.update_option("fuzz", key, priority=5).task_option.priority == 5
    assert client.cancel("fuzz", key).status == "CANCELED"
    assert client.wait("fuzz", key, timeout=0).status == "CANCELED"
    assert client.retry("fuzz", key).status == "INIT"
    assert client.remove("fuzz", key)
    with pytest.raises(TaskNotFound):
        client.get("fuzz", key)


@fuzz(20)
@given(name=st.one_of(fuzzing.any_texts, st.from_regex(r"[A-Za-z0-9_./-]{1,20}", fullmatch=True), fuzzing.anything))
def test_name_is_refused_clearly_or_finds_its_task(client: Client, name: Any) -> None:
    try:
        task_id = client.publish(name, key="k").task_id
    except InvalidName as error:
        _told(error, "is not a task name")
    except InvalidInput as error:
        assert not isinstance(name, str)
        _told(error, "is no task")
    else:
        assert client.get(name, "k").id == task_id == f"{name}:k"
        assert task_id in [task.id for task in client.find(name=name)]


@fuzz(20)
@given(queue=st.one_of(fuzzing.any_texts, fuzzing.anything))
def test_queue_is_refused_clearly_or_finds_its_task(client: Client, queue: Any) -> None:
    try:
        task_id = client.publish("fuzz", queue=queue).task_id
    except InvalidInput as error:
        _told(error, "queue")
    else:
        assert client.get("fuzz", task_id.partition(":")[2]).queue == ("default" if queue is None else queue)
        assert task_id in [task.id for task in client.find(queue="default" if queue is None else queue)]


_times = st.one_of(
    st.datetimes(timezones=st.one_of(st.timezones(), st.just(UTC))), fuzzing.instants, st.datetimes(), fuzzing.anything
)
_delays = st.one_of(st.floats(), st.timedeltas(), st.integers(), fuzzing.anything)


@fuzz(30)
@given(start_time=_times, delay=_delays, which=st.sampled_from(["start_time", "delay", "both"]), in_bulk=st.booleans())
def test_start_time_and_delay_are_refused_clearly_or_stored(
    client: Client, start_time: Any, delay: Any, which: str, in_bulk: bool
) -> None:
    asked = {"start_time": start_time, "delay": delay}
    given_times = asked if which == "both" else {which: asked[which]}
    try:
        if in_bulk:
            (result,) = client.publish_many([TaskSpec("fuzz", **given_times)])
            assert not isinstance(result, Exception)
        else:
            result = client.publish("fuzz", **given_times)
    except InvalidInput as error:
        _told(error, "start_time", "delay")
        return
    task = Task.model_validate(_stored(client, result.task_id))
    if isinstance(given_times.get("start_time"), datetime) and task.task_state.start_time is not None:
        assert abs(task.task_state.start_time - start_time) < timedelta(milliseconds=1)
    assert task.task_state.next_preempt_time == (task.task_state.start_time or task.task_state.create_time)
    client.remove("fuzz", task.key)


# --- what is searched and asked ---------------------------------------------------------------------------


@fuzz(30)
@given(
    criteria=st.fixed_dictionaries(
        {},
        optional={
            field: st.one_of(fuzzing.any_texts, st.lists(fuzzing.any_texts, max_size=3), fuzzing.anything)
            for field in ("status", "name", "queue", "key", "worker_id")
        },
    ),
    limit=st.one_of(st.integers(0, 5), fuzzing.anything),
)
def test_search_answers_or_names_what_it_cannot_search_by(client: Client, criteria: dict[str, Any], limit: Any) -> None:
    try:
        found = client.find(**criteria, limit=limit)
    except InvalidInput as error:
        _told(error, *criteria, "limit", "is no status")
    else:
        assert all(isinstance(task, Task) for task in found)


def test_search_takes_what_can_be_read_only_once(client: Client) -> None:
    task_id = client.publish("fuzz", key="k").task_id
    assert [task.id for task in client.find(name=(name for name in ["fuzz"]))] == [task_id]  # type: ignore[call-overload]


@fuzz(20)
@given(value=fuzzing.anything)
def test_other_arguments_are_refused_by_name(client: Client, value: Any) -> None:
    requests: dict[str, Any] = {
        "if_exists": lambda: client.publish("fuzz", if_exists=value),
        "worker_id": lambda: client.stop_worker(value),
        "concurrency": lambda: client.set_worker("nobody", concurrency=value),
        "timeout": lambda: client.wait("fuzz", "absent", timeout=value),
        "database": lambda: Client("mongodb://127.0.0.1:9", database=value).close(),
    }
    for name, request in requests.items():
        try:
            request()
        except MtaskError as error:
            _told(error, name, "there is no", "not a database name")
