"""The bridge from Celery on a real server: options, retries, canvases, schedules, results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from mtask import Client, Task, TaskFailed, TaskNotFound
from mtask.contrib.celery import (
    AsyncResult,
    Celery,
    NotMapped,
    chain,
    chord,
    crontab,
    exceptions,
    group,
    shared_task,
    signature,
)
from mtask.contrib.celery.exceptions import TaskRevokedError
from mtask.testing.bench import Bench


class Order(BaseModel):
    number: int


class Shop:
    """An app with some tasks, and what they have seen."""

    def __init__(self) -> None:
        self.app = Celery("shop")
        self.seen: list[Any] = []
        self.begun = threading.Event()

        @self.app.task
        def add(x: int, y: int) -> int:
            return x + y

        @self.app.task
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        @self.app.task(max_retries=0)
        def fragile(x: int) -> int:
            self.seen.append(("fragile", x))
            if ("mended",) not in self.seen:
                raise ValueError("broken")
            return x

        @self.app.task(bind=True, max_retries=2, default_retry_delay=7)
        def again(task: Any, until: int, **how: Any) -> int:
            self.seen.append(task.request.retries)
            if task.request.retries < until:
                raise task.retry(**how)
            return int(task.request.retries)

        @self.app.task(bind=True)
        def waits(task: Any) -> None:
            self.begun.set()
            while not task.context.is_cancelled:
                self.begun.wait(0.01)

        self.add, self.total, self.fragile, self.again, self.waits = add, total, fragile, again, waits


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def bench(shop: Shop, mongo_uri: str, database_name: str) -> Iterator[Bench]:
    """Return a bench of the app, whose client publishes the app's tasks."""
    made = Bench(shop.app.mtask, mongo_uri, database_name)
    shop.app.client = made.client
    with made.client:
        yield made


def test_options_of_a_task_are_stored_and_handed_on(mongo_uri: str, database_name: str) -> None:
    app = Celery("shop", task_routes={"shop.mail.*": {"queue": "mail", "priority": 3}}, task_default_queue="rest")
    app.conf.result_expires = 3600

    @app.task(name="shop.mail.send", max_retries=None, default_retry_delay=9, acks_late=True, compression="gzip")
    def send(to: str) -> str:
        return to

    @app.task(queue="own", priority=7, time_limit=20)
    def own(to: Any) -> None: ...

    with Client(mongo_uri, database=database_name) as client:
        app.client = client
        routed, plain = (client.get(*each.id.split(":")) for each in (send.delay("a"), own.delay(to=1)))
        assert (routed.queue, routed.params, plain.queue) == ("mail", {"to": "a"}, "own")
        option = routed.task_option
        assert (option.priority, option.max_unexpected_retries, option.unexpected_retry_delay_ms) == (3, -1, 9000)
        assert (option.retain_success_ms, option.retain_fail_ms) == (3_600_000, 3_600_000)
        assert (plain.task_option.priority, plain.task_option.run_timeout_ms) == (7, 20_000)
        assert app.mtask.handlers["shop.mail.send"].on_exception == "fail"
        assert [name for name, each in app.mtask.handlers.items() if each.isolation == "process"] == [own.name]
        assert send.apply_async(("b",), queue="third").id.startswith("shop.mail.send:")
        assert client.count(queue="third") == 1
    with pytest.raises(NotMapped, match=r"task_routes.*set it where the app is made"):
        app.conf.task_routes = {}


def test_options_of_a_call_are_stored(shop: Shop, bench: Bench) -> None:
    eta = datetime.fromisoformat("2040-01-01T12:00:00")  # of the time zone of the app
    made = [
        shop.add.apply_async((1, 2), eta=eta, priority=9, queue="other", time_limit=5, serializer="json"),
        shop.add.apply_async([1], {"y": 2}, countdown=60, task_id="one", link=None, retry=True),
        shop.add.apply_async((3, 4), task_id=f"{shop.add.name}:one"),
    ]
    first, second, third = (bench.client.get(shop.add.name, each.id.partition(":")[2]) for each in made)
    assert (first.task_option.priority, first.queue, first.task_option.run_timeout_ms) == (9, "other", 5000)
    assert first.task_state.start_time == eta.replace(tzinfo=UTC)
    assert (second.key, second.params) == ("one", {"x": 1, "y": 2})
    assert second.task_state.start_time is not None
    waits = second.task_state.start_time - second.task_state.create_time
    assert timedelta(seconds=59) < waits <= timedelta(seconds=61)
    assert (third.key, third.params) == ("one", {"x": 1, "y": 2})  # once for each key
    with pytest.raises(TypeError, match=r"add\(\) missing a required argument: 'y'"):
        shop.add.delay(1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        shop.add.delay(1, 2, z=3)
    with pytest.raises(NotMapped, match=r"other\.service: .*give kwargs="):
        shop.app.send_task("other.service", (1,))
    sent = shop.app.send_task("other.service", kwargs={"x": 1}, task_id="x")
    assert (sent.id, sent.state) == ("other.service:x", "PENDING")
    assert bench.client.get("other.service", "x").params == {"x": 1}


def wait_of(task: Task) -> timedelta:
    """Return the time between the last failure of a task and its next try."""
    run = task.runs[-1]
    assert run.retry_time is not None
    assert run.fail_time is not None
    return run.retry_time - run.fail_time


def test_retries_count_and_wait_as_asked(shop: Shop, bench: Bench) -> None:
    made = [
        shop.again.delay(2),
        shop.again.delay(9),
        shop.again.delay(9, countdown=0),
        shop.again.delay(1, countdown=99),
    ]
    bench.run()
    states = [bench.client.get(*each.id.split(":")) for each in made]
    assert [each.state for each in made] == ["RETRY", "RETRY", "FAILURE", "RETRY"]
    assert [round(wait_of(states[place]).total_seconds()) for place in (0, 1, 3)] == [7, 7, 99]
    assert states[2].task_state.failed_cnt == 3
    assert "MaxRetriesExceededError: Can't retry" in str(states[2].fail_reason)
    for _ in range(4):
        bench.advance()
    assert [each.state for each in made] == ["SUCCESS", "FAILURE", "FAILURE", "SUCCESS"]
    assert made[0].get() == 2
    assert sorted(shop.seen) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_retry_raises_its_own_error_at_the_end_and_takes_no_other_arguments(bench: Bench, shop: Shop) -> None:
    @shop.app.task(bind=True, max_retries=1)
    def asks(task: Any, x: int, mode: str) -> None:
        if mode == "same":
            task.retry(args=(x, mode), exc=KeyError("own"), countdown=0)
        if mode == "other":
            task.retry(args=(x + 1, mode))
        if mode == "more":
            task.retry(max_retries=5)
        task.retry(queue="slow")

    @shop.app.task(autoretry_for=(OSError,), dont_autoretry_for=(FileNotFoundError,), retry_kwargs={"max_retries": 1})
    def opens(path: str) -> None:
        raise FileNotFoundError(path) if path == "gone" else OSError(path)

    assert shop.app.mtask.handlers[opens.name].options["max_unexpected_retries"] == 1
    made = {mode: asks.delay(1, mode) for mode in ("same", "other", "more", "queue")}
    opened = [opens.delay("gone"), opens.delay("shut")]
    bench.run()
    said = {mode: str(result.result) for mode, result in made.items()}
    assert "KeyError: 'own'" in said["same"]
    assert "retry with other arguments" in said["other"]
    assert "retry(max_retries=5)" in said["more"]
    assert "the option 'queue' of retry" in said["queue"]
    assert [each.state for each in opened] == ["FAILURE", "RETRY"]
    bench.advance()
    assert [each.state for each in opened] == ["FAILURE", "FAILURE"]
    assert asks.max_retries == 1


def test_canvases_hand_results_on_as_in_celery(shop: Shop, bench: Bench) -> None:
    add, total = shop.add, shop.total
    inner = chain(add.s(1, 1), add.s(1))
    made = {
        "chain": chain(add.s(1, 2), add.s(3), add.si(1, 1), add.s(5)).delay(),
        "nested": chord([inner, group(add.s(1, 1), add.s(2, 2)), add.s(0, 0)])(total.s()),
        "middle": (add.s(1, 2) | group(add.s(1), add.s(2)) | total.s() | add.s(100)).delay(),
        "partial": group(add.s(1), add.s(2)).delay(10),
        "empty": chord([], total.s()).delay(),
        "by name": chain(signature(add.name, (1, 2)), signature(total.name, ([5],), immutable=True)).delay(),
        "call": add.s(1)(2),
    }
    bench.run()
    found = {name: each if name == "call" else each.get(timeout=5) for name, each in made.items()}
    expected = {"chain": 7, "nested": 9, "middle": 109, "partial": [11, 12], "empty": 0, "by name": 5, "call": 3}
    assert found == expected
    assert made["middle"].parent.parent.results[1].get() == 5
    assert made["middle"].parent.parent.parent.get() == 3
    assert (made["partial"].completed_count(), made["partial"].waiting()) == (2, False)
    with pytest.raises(NotMapped, match="'task_id' of task"):
        chain(add.s(1, 2).set(task_id="x"), add.s(1)).delay()
    assert bench.client.flows(prefix="celery/", limit=0)
    assert group().delay().get() == []


def test_failed_parts_of_canvases_stop_what_needs_them(shop: Shop, bench: Bench) -> None:
    add, total, fragile = shop.add, shop.total, shop.fragile
    rest = chain(fragile.s(1), add.s(2), add.s(3)).delay()
    body = (group(add.s(1, 1), fragile.s(5)) | total.s()).delay()
    bench.run()
    assert [rest.parent.parent.state, rest.parent.state, rest.state] == ["FAILURE", "REVOKED", "REVOKED"]
    assert (body.state, body.parent.failed(), body.parent.successful()) == ("FAILURE", True, False)
    with pytest.raises(TaskRevokedError):
        rest.get(timeout=5)
    with pytest.raises(TaskFailed, match="broken"):
        body.parent.get(timeout=5)
    assert isinstance(body.get(timeout=5, propagate=False), TaskFailed)
    shop.seen.append(("mended",))
    for result in (rest.parent.parent, body.parent[1]):
        bench.client.retry(*result.id.split(":"))
    bench.run()
    assert (rest.get(timeout=5), body.get(timeout=5)) == (6, 7)


def test_beat_schedule_publishes_tasks(mongo_uri: str, database_name: str) -> None:
    app = Celery("shop", timezone="Europe/Berlin")

    @app.task
    def report(day: str, kind: str = "short") -> str:
        return f"{day} {kind}"

    @app.task(queue="mail")
    def other() -> None: ...

    app.conf.beat_schedule = {
        "days": {
            "task": report.name,
            "schedule": crontab("0", "3", day_of_month="1-7", day_of_week="mon"),
            "args": ["x"],
        },
        "often": {
            "task": report.name,
            "schedule": timedelta(seconds=30),
            "kwargs": {"day": "y"},
            "options": {"queue": "mail", "priority": 4},
        },
    }
    app.add_periodic_task(10.0, report.s("z", kind="long"), name="last")
    bench = Bench(app.mtask, mongo_uri, database_name)
    with bench.client:
        fired = {name: bench.fire(name)[0] for name in ("days", "often", "last")}
        assert {name: task.returns for name, task in fired.items()} == {
            "days": "x short",
            "often": "y short",
            "last": "z long",
        }
        assert (fired["often"].queue, fired["often"].task_option.priority) == ("mail", 4)
        local = fired["days"].key.partition("/")[2]
        assert datetime.fromisoformat(local).weekday() in (0, 6)  # in UTC, Monday at 3:00 of Berlin
    for entry, match in (
        ({"task": "nobody", "schedule": 30}, r"include=\[\.\.\.\]"),
        ({"task": report.name, "schedule": "soon", "args": ["x"]}, "write seconds, a timedelta or crontab"),
        ({"task": report.name, "schedule": 30, "args": ["x"], "options": {"countdown": 3}}, "own instant"),
        ({"task": report.name, "schedule": 30, "relative": True, "args": ["x"]}, "'relative'"),
    ):
        app.conf.beat_schedule = {"wrong": entry}
        with pytest.raises(NotMapped, match=match):
            _ = app.mtask


def test_revoked_task_does_not_start_and_a_running_one_is_ended_on_request(shop: Shop, bench: Bench) -> None:
    waiting = shop.add.apply_async((1, 2), countdown=3600)
    shop.app.control.revoke([waiting.id])
    running = shop.waits.delay()

    def revoke() -> None:
        assert shop.begun.wait(30)
        running.revoke()
        asked.append((running.state, bench.client.get(*running.id.split(":")).task_state.cancel_requested))
        shop.app.control.revoke(running.id, terminate=True)

    asked: list[tuple[str, bool]] = []
    other = threading.Thread(target=revoke)
    other.start()
    bench.run()
    other.join()
    assert asked == [("STARTED", False)]
    assert (running.state, waiting.state, waiting.date_done is not None) == ("REVOKED", "REVOKED", True)
    assert isinstance(waiting.result, TaskRevokedError)
    with pytest.raises(TaskNotFound):
        shop.app.control.revoke(f"{shop.add.name}:nobody")
    with pytest.raises(exceptions.TimeoutError):
        shop.add.apply_async((1, 2), countdown=3600).get(timeout=0)
    assert AsyncResult(f"{shop.add.name}:nobody").state == "PENDING"


def test_bound_task_knows_its_run_and_reports_progress(shop: Shop, bench: Bench) -> None:
    @shop.app.task(bind=True, pydantic=True)
    def tells(task: Any, order: Order, context: int, *, note: str | None = None) -> list[Any]:
        task.context.progress(0.5, "half")
        shop.seen.append((task.request.id, task.request.called_directly, task.name))
        return [task.request.kwargs["order"], order.number, context, note, task.request.delivery_info["routing_key"]]

    result = tells.apply_async((Order(number=7), 3), task_id="one")
    bench.run()
    assert result.get(timeout=5) == [{"number": 7}, 7, 3, None, "default"]
    assert shop.seen == [(result.id, False, tells.name)]
    assert tells.request.called_directly
    with pytest.raises(NotMapped, match="headers"):
        _ = tells.request.headers
    with pytest.raises(RuntimeError, match="only while a worker runs"):
        _ = tells.context


@shared_task(bind=True, name="test_bridge.everywhere", max_retries=1)
def everywhere(self: Any, x: int) -> int:
    if self.request.is_eager and self.request.retries == 0 and x == 1:
        raise self.retry(countdown=99)
    if x == 2:
        raise ValueError("two")
    return int(x + self.request.retries)


def test_eager_tasks_run_at_once_without_a_server() -> None:
    app = Celery("eager", task_always_eager=True)

    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    @app.task
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    assert (everywhere.delay(5).get(), everywhere.delay(1).get()) == (5, 2)
    failed = everywhere.delay(2)
    assert (failed.state, failed.failed(), failed.get(propagate=False).args) == ("FAILURE", True, ("two",))
    with pytest.raises(ValueError, match="two"):
        failed.get()
    assert (add.s(1, 2) | group(add.s(1), add.s(2)) | total.s()).delay().get() == 9
    stopped = (everywhere.s(2) | add.s(1) | add.s(2)).delay()
    assert (stopped.failed(), str(stopped.result)) == (True, "two")
    with pytest.raises(NotMapped, match="headers"):
        add.apply_async((1, 2), headers={"a": 1})
    app.conf.task_eager_propagates = True
    with pytest.raises(ValueError, match="two"):
        everywhere.delay(2)
    assert add(1, 2) == 3
