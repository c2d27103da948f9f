"""What the backends of Django itself promise, and how their tests hold it: mtask's backend does the same."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.test.utils import override_settings

from mtask import Client, Fail
from mtask.contrib.django.api import (
    InvalidTask,
    Task,
    TaskResultDoesNotExist,
    TaskResultStatus,
    signals,
    task_backends,
)
from mtask.contrib.django.connections import client_of
from mtask.errors import TaskCanceled, TaskExists, TaskFailed, UnknownOption
from tests.integration.contrib.django.conftest import Running
from tests.integration.contrib.django.shop import tasks
from tests.integration.contrib.django.shop.tasking import task
from tests.integration.contrib.django.waiting import finished

pytestmark = pytest.mark.usefixtures("project")
PATH = "tests.integration.contrib.django.shop.tasks"
FIELDS = (
    "id", "status", "enqueued_at", "started_at", "finished_at", "last_attempted_at", "args", "kwargs", "backend",
    "errors", "worker_ids", "attempts", "is_finished",
)  # fmt: skip
TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


@pytest.fixture
def client(project: str) -> Client:
    """Return the client of the backend "default"."""
    target: Any = task_backends["default"]
    return client_of(target.target)


@contextmanager
def heard(name: str) -> Iterator[list[Any]]:
    """Collect what a signal of the tasks tells."""
    told: list[Any] = []

    def hear(*, task_result: Any, **_: Any) -> None:
        told.append((task_result.id, task_result.status, [error.exception_class_path for error in task_result.errors]))

    signal = getattr(signals, name)
    signal.connect(hear)
    try:
        yield told
    finally:
        signal.disconnect(hear)


# --- enqueue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [tasks.echo, tasks.echo_async], ids=["sync", "async"])
@pytest.mark.parametrize("by", ["task", "backend"])
def test_new_result_is_ready(declared: Any, by: str) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    later = declared.using(run_after=TOMORROW)
    result = later.enqueue(1, two=3) if by == "task" else task_backends["default"].enqueue(later, [1], {"two": 3})
    assert result.status is TaskResultStatus.READY
    assert not result.is_finished
    assert before <= result.enqueued_at <= datetime.now(UTC) + timedelta(seconds=1)
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    assert (result.args, result.kwargs, result.backend) == ([1], {"two": 3}, "default")
    assert (result.attempts, result.worker_ids, result.errors) == (0, [], [])
    assert result.task == later
    assert result.id.startswith(f"{PATH}.{declared.name}:")
    with pytest.raises(ValueError, match="not finished yet"):
        _ = result.return_value
    with pytest.raises(FrozenInstanceError):
        result.id = "other"


@pytest.mark.parametrize("declared", [tasks.echo, tasks.echo_async], ids=["sync", "async"])
async def test_new_result_is_ready_in_async_code(declared: Any) -> None:
    result = await declared.using(run_after=TOMORROW).aenqueue(1, two=3)
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [1], {"two": 3})
    found = await declared.aget_result(result.id)
    assert all(getattr(found, name) == getattr(result, name) for name in FIELDS)
    await result.arefresh()
    assert result.status is TaskResultStatus.READY


@pytest.mark.parametrize("field", FIELDS)
def test_result_that_is_read_equals_the_one_of_the_enqueue(field: str) -> None:
    result = tasks.echo.using(run_after=TOMORROW, priority=7, queue_name="mail").enqueue(1, a=(2, b"c"))
    found = tasks.echo.get_result(result.id)
    assert getattr(found, field) == getattr(result, field)
    assert (found.task.priority, found.task.queue_name, found.task.run_after) == (7, "mail", TOMORROW)
    result.refresh()
    assert getattr(found, field) == getattr(result, field)


def test_ids_are_unique() -> None:
    later = tasks.echo.using(run_after=TOMORROW)
    assert len({later.enqueue().id for _ in range(5)}) == 5


def test_enqueue_tells_its_signal(client: Client) -> None:
    with heard("task_enqueued") as told:
        result = tasks.echo.using(run_after=TOMORROW, key="signal").enqueue()
        tasks.echo.using(run_after=TOMORROW, key="signal").enqueue()
    assert told == [(result.id, TaskResultStatus.READY, [])]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        datetime.now(UTC),
        Decimal(1),
        uuid.UUID(int=7),
        b"\xff",
        [object()],
        {"deep": [{"in": object()}]},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("by", ["position", "name"])
def test_arguments_that_are_no_json_are_refused(client: Client, value: Any, by: str) -> None:
    before = client.count()
    with pytest.raises((TypeError, ValueError), match="Unsupported"):
        tasks.echo.enqueue(value) if by == "position" else tasks.echo.enqueue(value=value)
    assert client.count() == before


# --- what is refused at the declaration ----------------------------------------------------------------------


def takes_nothing() -> None:
    """Take no context."""


def takes_other(other: int, context: Any) -> None:
    """Take a context, and not first."""


def öffne() -> None:
    """Have a name that no task of mtask has."""


@pytest.mark.parametrize("changes", [{"priority": 101}, {"priority": -101}, {"priority": 1.5}])
def test_priority_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidTask, match="priority must be a whole number between -100 and 100"):
        tasks.echo.using(**changes)


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_priority_is_stored(client: Client, priority: int) -> None:
    result = tasks.echo.using(priority=priority, run_after=TOMORROW).enqueue()
    stored = client.get(*result.id.split(":"))
    assert stored.task_option.priority == priority


@pytest.mark.parametrize(("function", "given", "problem"), [
    (lambda: None, {}, "module level|must be nameable|not a task name"),
    (takes_nothing, {"takes_context": True}, "does not have a first argument of 'context'"),
    (takes_other, {"takes_context": True}, "does not have a first argument of 'context'"),
    (takes_nothing, {"queue_name": "unknown"}, "Queue 'unknown' is not valid"),
    (öffne, {}, "is not a task name"),
    (print, {}, "module level"),
])  # fmt: skip
def test_wrong_declaration_is_refused(function: Any, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidTask, match=problem):
        task(**given)(function)


def test_function_in_a_function_is_refused() -> None:
    def inside() -> None:
        pass

    with pytest.raises(InvalidTask, match="module level"):
        task(inside)


def test_queue_of_the_backend_is_stored(client: Client) -> None:
    result = tasks.mail.using(run_after=TOMORROW).enqueue("ann")
    stored = client.get(*result.id.split(":"))
    assert (stored.queue, stored.task_option.priority) == ("mail", 10)
    with pytest.raises(InvalidTask, match="Queue 'other' is not valid"):
        tasks.mail.using(queue_name="other")


@pytest.mark.parametrize("by", ["using", "enqueue"])
def test_unknown_option_is_refused_with_the_nearest(by: str) -> None:
    with pytest.raises((InvalidTask, UnknownOption), match="did you mean 'worker_timeout'"):
        tasks.echo.using(worker_timeouts=5)


def test_options_of_using_are_stored(client: Client) -> None:
    changed = tasks.stumble.using(max_retries=7, worker_timeout=90, run_after=TOMORROW)
    stored = client.get(*changed.enqueue("x", 0).id.split(":"))
    assert stored.task_option.max_unexpected_retries == 7
    assert stored.task_option.worker_timeout_ms == 90_000
    assert stored.task_option.unexpected_retry_delay_ms == 0  # as it is declared


def test_retries_of_a_task_whose_exceptions_are_final_are_refused() -> None:
    with pytest.raises(InvalidTask, match=r"its exceptions are final\. Declare its retries by @options below @task"):
        tasks.fail.using(max_retries=5)


# --- run_after -----------------------------------------------------------------------------------------------


def test_naive_instant_is_refused_with_time_zones() -> None:
    with pytest.raises(InvalidTask, match="run_after must be an aware datetime"):
        tasks.echo.using(run_after=datetime(2030, 1, 1))  # noqa: DTZ001 it is wrong on purpose


def test_naive_instant_is_of_the_current_zone_without_time_zones(client: Client) -> None:
    with override_settings(USE_TZ=False, TIME_ZONE="Europe/Berlin"):
        result = tasks.echo.using(run_after=datetime(2030, 1, 1, 12)).enqueue()  # noqa: DTZ001 Django's are so here
    stored = client.get(*result.id.split(":"))
    assert stored.task_state.start_time == datetime(2030, 1, 1, 11, tzinfo=UTC)


def test_task_waits_until_its_time(worker: Running) -> None:
    late = tasks.echo.using(run_after=TOMORROW).enqueue()
    early = tasks.echo.using(run_after=datetime.now(UTC) - timedelta(days=1)).enqueue(1)
    assert finished(early).return_value == [[1], {}]
    late.refresh()
    assert (late.status, late.attempts) == (TaskResultStatus.READY, 0)


# --- results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result_id", [
    "", ":", "a", "a:", ":a", f"{PATH}.echo:unknown", "unknown.path:k", "has blank:k", "ü:k", "a:" + 600 * "k",
    "1c36a205-3689-4abd-830e-14e297878976", "a:b:c", "\0:k", 5, None, uuid.UUID(int=7), b"a:b",
], ids=repr)  # fmt: skip
def test_odd_id_has_no_result(result_id: Any) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        tasks.echo.get_result(result_id)


async def test_unknown_id_has_no_result_in_async_code() -> None:
    with pytest.raises(TaskResultDoesNotExist):
        await tasks.echo.aget_result("unknown:k")


@pytest.mark.parametrize("name", [f"{PATH}.Order", f"{PATH}.missing", "another_service/task", "os.getcwd"])
def test_task_of_another_program_has_no_result(client: Client, name: str) -> None:
    with pytest.warns(UserWarning, match="no handler"):
        published = client.publish(name, {"a": 1}, delay=1000)
    with pytest.raises(TaskResultDoesNotExist, match="names no task of this project"):
        task_backends["default"].get_result(published.task_id)


async def test_result_of_another_task_does_not_match() -> None:
    result = await tasks.echo.using(run_after=TOMORROW).aenqueue()
    with pytest.raises(Exception, match="Task does not match"):
        await tasks.add.aget_result(result.id)
    with pytest.raises(Exception, match="Task does not match"):
        await asyncio.to_thread(tasks.add.get_result, result.id)
    assert (await asyncio.to_thread(task_backends["default"].get_result, result.id)).id == result.id


VALUES = {
    "none": None,
    "number": 5,
    "large": 2**62,
    "fraction": 1.5,
    "truth": True,
    "text": "ü \N{SNOWMAN} \0",
    "bytes": b"text",
    "list": [1, [2, {"three": 4}]],
    "tuple": (1, (2,)),
    "empty": {},
    "object": {"a": {"b": [None]}},
    "odd names": {"$set": 1, "a.b": 2, "": 3, "_id": 4},
    "expression": "$$NOW",
}


@pytest.mark.parametrize("declared", [tasks.echo, tasks.echo_async], ids=["sync", "async"])
@pytest.mark.parametrize("name", VALUES)
def test_value_arrives_and_returns_as_json(worker: Running, declared: Any, name: str) -> None:
    value = VALUES[name]
    json = {"bytes": "text", "tuple": [1, [2]]}.get(name, value)
    result = finished(declared.enqueue(value, named=value))
    assert result.status is TaskResultStatus.SUCCESSFUL
    assert (result.args, result.kwargs) == ([json], {"named": json})
    assert result.return_value == [[json], {"named": json}]
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert (result.attempts, result.worker_ids, result.errors) == (1, [worker.worker_id], [])


@pytest.mark.parametrize("name", ["args", "kwargs", "context", "params", "task", "function"])
def test_argument_may_have_any_name(worker: Running, name: str) -> None:
    assert finished(tasks.echo.enqueue(**{name: 1})).return_value == [[], {name: 1}]


@pytest.mark.parametrize(
    ("what", "value"),
    [("bytes", "text"), ("tuple", [1, [2]]), ("none", None), ("nested", {"a": [1.5, True]})],
)
def test_return_value_is_json(worker: Running, what: str, value: Any) -> None:
    assert finished(tasks.give.enqueue(what)).return_value == value


@pytest.mark.parametrize(
    "declared", [tasks.give_unserialisable, tasks.give_unserialisable_async], ids=["sync", "async"]
)
def test_return_value_that_is_no_json_fails(worker: Running, declared: Any) -> None:
    result = finished(declared.enqueue())
    assert result.status is TaskResultStatus.FAILED
    (error,) = result.errors
    assert error.exception_class is TypeError
    assert "Unsupported type" in error.traceback


def test_return_value_that_is_no_json_is_not_tried_again(worker: Running) -> None:
    result = finished(tasks.give_unserialisable_though_retried.enqueue())
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    assert tasks.seen.count("unserialisable") == 1


def test_return_value_that_is_too_large_fails(worker: Running) -> None:
    result = finished(tasks.echo.enqueue(2**63 - 1))
    assert result.return_value == [[2**63 - 1], {}]
    result = finished(tasks.add.enqueue(2**63 - 1, 1))
    assert result.errors[0].exception_class is TaskFailed
    assert "cannot be stored as BSON" in result.errors[0].traceback


@pytest.mark.parametrize(
    ("declared", "kind", "said"),
    [
        (tasks.fail, ValueError, "this task failed"),
        (tasks.fail_async, PermissionDenied, "not here"),
        (tasks.fail_from, ImproperlyConfigured, "this task failed"),
        (tasks.leave, SystemExit, "bye"),
        (tasks.interrupt, KeyboardInterrupt, "KeyboardInterrupt"),
        (tasks.give_up, Fail, "enough"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_exception_is_final_and_in_the_result(worker: Running, declared: Any, kind: type, said: str) -> None:
    result = finished(declared.enqueue())
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    assert result.finished_at >= result.started_at
    (error,) = result.errors
    assert error.exception_class is kind
    assert error.traceback.startswith("Traceback (most recent call last)")
    assert said in error.traceback
    assert "shop/tasks.py" in error.traceback
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert declared.get_result(result.id).errors == [error]


def test_class_that_cannot_be_imported_is_named(worker: Running) -> None:
    (error,) = finished(tasks.fail_by_local_class.enqueue()).errors
    assert error.exception_class_path == f"{PATH}.fail_by_local_class.<locals>.Local"
    with pytest.raises(ImportError):
        _ = error.exception_class


@pytest.mark.parametrize(
    ("given", "problem"), [(((),), "missing"), (((1, 2, 3),), "takes from 1 to 2"), (((1,), {"c": 3}), "unexpected")]
)
def test_call_that_does_not_fit_fails(worker: Running, given: Any, problem: str) -> None:
    args, kwargs = (*given, {})[:2]
    (error,) = finished(tasks.add.enqueue(*args, **kwargs)).errors
    assert error.exception_class is TypeError
    assert problem in error.traceback


def test_canceled_task_has_failed(client: Client) -> None:
    result = tasks.echo.using(run_after=TOMORROW).enqueue()
    client.cancel(*result.id.split(":"))
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 0)
    assert result.is_finished
    assert result.errors[0].exception_class is TaskCanceled


def test_task_that_runs_is_running(worker: Running) -> None:
    tasks.gate.clear()
    result = tasks.wait_for_gate.enqueue()
    try:
        while result.status is TaskResultStatus.READY:
            result.refresh()
        assert (result.status, result.worker_ids) == (TaskResultStatus.RUNNING, [worker.worker_id])
        assert result.started_at is not None
        assert result.finished_at is None
        with pytest.raises(ValueError, match="not finished yet"):
            _ = result.return_value
    finally:
        tasks.gate.set()
    assert finished(result).return_value == "through"


# --- context, retries, signals -------------------------------------------------------------------------------


def test_task_gets_its_context(worker: Running) -> None:
    result = finished(tasks.tell.enqueue(extra=5))
    assert result.return_value == {
        "attempt": 1,
        "id": result.id,
        "status": "RUNNING",
        "args": [],
        "kwargs": {"extra": 5},
        "workers": [worker.worker_id],
        "extra": 5,
        "run": 1,
    }
    assert finished(tasks.tell_async.enqueue()).return_value == [1, f"{PATH}.tell_async"]


def test_exception_of_a_task_with_retries_is_tried_again(worker: Running) -> None:
    with heard("task_started") as started, heard("task_finished") as ended:
        well = finished(tasks.stumble.enqueue("well", 2))
        ill = finished(tasks.stumble.enqueue("ill", 3))
    assert (well.return_value, well.attempts, ill.attempts) == ("well", 3, 3)
    assert ill.status is TaskResultStatus.FAILED
    assert [error.exception_class for error in ill.errors] == [ConnectionError]
    assert "ill 3" in ill.errors[0].traceback
    assert ill.last_attempted_at > ill.started_at
    assert [result_id for result_id, *_ in started] == [well.id] * 3 + [ill.id] * 3
    assert ended == [
        (well.id, TaskResultStatus.SUCCESSFUL, ["builtins.ConnectionError"]),
        (ill.id, TaskResultStatus.FAILED, ["builtins.ConnectionError"]),
    ]


def test_retry_is_no_end(worker: Running) -> None:
    with heard("task_finished") as ended:
        result = finished(tasks.again_later.enqueue("later"))
    assert (result.return_value, result.attempts) == ("well", 2)
    assert ended == [(result.id, TaskResultStatus.SUCCESSFUL, [])]


@pytest.mark.parametrize("declared", [tasks.fail, tasks.fail_async], ids=["sync", "async"])
def test_failure_tells_its_signal(worker: Running, declared: Any) -> None:
    with heard("task_finished") as ended:
        result = finished(declared.enqueue())
    assert ended == [(result.id, TaskResultStatus.FAILED, [result.errors[0].exception_class_path])]


def test_receiver_that_raises_changes_nothing(worker: Running) -> None:
    def trouble(**_: Any) -> None:
        raise RuntimeError("a receiver")

    signals.task_started.connect(trouble)
    signals.task_finished.connect(trouble)
    try:
        assert finished(tasks.add.enqueue(1)).return_value == 2
    finally:
        signals.task_started.disconnect(trouble)
        signals.task_finished.disconnect(trouble)


def test_plain_named_params_of_another_publisher_are_taken(worker: Running, client: Client) -> None:
    published = client.publish(f"{PATH}.add", {"a": 2, "b": 5})
    assert client.result(published.name, published.key, timeout=30) == 7
    result = tasks.add.get_result(published.task_id)
    assert (result.args, result.kwargs, result.return_value) == ([], {"a": 2, "b": 5}, 7)


# --- keys, using, calls --------------------------------------------------------------------------------------


def test_key_enqueues_once(worker: Running) -> None:
    first = tasks.add.using(key="once").enqueue(1)
    assert first.id == f"{PATH}.add:once"
    done = finished(first)
    second = tasks.add.using(key="once").enqueue(5)
    assert (second.id, second.return_value, second.args) == (first.id, 2, [1])
    assert second.enqueued_at == done.enqueued_at
    with pytest.raises(TaskExists):
        tasks.add.using(key="once", if_exists="reject").enqueue(5)


def test_key_updates_a_task_that_waits() -> None:
    later = tasks.add.using(key="update", run_after=TOMORROW)
    assert later.enqueue(1).args == [1]
    changed = later.using(if_exists="update", priority=3).enqueue(2)
    assert (changed.args, changed.task.priority) == ([2], 3)
    assert later.enqueue(3).args == [2]


def test_using_changes_a_copy() -> None:
    changed = tasks.add.using(priority=5).using(key="k").using(worker_timeout=70).using(queue_name="mail")
    is_task = isinstance(changed, Task)
    assert is_task
    assert (changed.priority, changed.key, changed.queue_name) == (5, "k", "mail")
    assert changed.options == {"worker_timeout": 70}
    assert (tasks.add.priority, tasks.add.key, tasks.add.queue_name, tasks.add.options) == (0, None, "default", {})
    assert changed.func is tasks.add.func
    assert hash(changed) != hash(tasks.add)
    with pytest.raises(FrozenInstanceError):
        changed.priority = 6


async def test_task_is_still_a_function() -> None:
    assert await tasks.add.acall(1, b=2) == 3
    assert await tasks.echo_async.acall(1) == [[1], {}]
    assert await asyncio.to_thread(tasks.echo_async.call, 1) == [[1], {}]
    assert (tasks.add.name, tasks.add.module_path) == ("add", f"{PATH}.add")


@pytest.mark.parametrize("what", ["defer", "async_task", "get_result", "priority"])
def test_backend_supports_everything(what: str) -> None:
    assert getattr(task_backends["default"], f"supports_{what}") is True
