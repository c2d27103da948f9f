"""mtask.testing: an app's tasks in this process, until nothing is left to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import timedelta

import pytest

from mtask import App, Context, Flow, Next
from mtask.errors import ScheduleNotFound
from mtask.testing import Bench, Stuck, bench


@pytest.fixture
def app() -> App:
    made = App()

    @made.schedule("0 3 * * *", params={"kind": "nightly"})
    @made.task
    async def report(kind: str) -> str:
        return f"{kind} reported"

    @made.task(retry_delay=60)
    def flaky(context: Context) -> int:
        if context.attempt < 3:
            raise ValueError("not yet")
        return context.attempt

    @made.task(max_retries=0)
    async def forever() -> None:
        await asyncio.Event().wait()

    return made


@pytest.fixture
def made(app: App, mongo_uri: str) -> Iterator[Bench]:
    with bench(app, uri=mongo_uri) as found:
        yield found


def test_what_is_due_is_run_until_nothing_is(made: Bench) -> None:
    made.client.publish("report", {"kind": "sales"}, key="1")
    made.client.publish("report", {"kind": "costs"}, key="2", delay=timedelta(hours=5))
    assert [task.key for task in made.run()] == ["1"]
    assert made.client.get("report", "1").returns == "sales reported"
    assert made.run() == []


def test_time_passes_for_what_is_delayed_and_for_retries(made: Bench) -> None:
    made.client.publish("report", {"kind": "costs"}, key="later", delay=timedelta(hours=5))
    assert made.advance(timedelta(hours=4)) == []
    assert [task.key for task in made.advance(timedelta(hours=1))] == ["later"]
    made.client.publish("flaky", key="f")
    assert made.run() == []
    assert made.client.get("flaky", "f").task_state.failed_cnt == 1
    assert made.advance() == []
    assert [task.returns for task in made.advance()] == [3]
    assert made.advance() == []


def test_a_schedule_is_fired_by_hand(made: Bench) -> None:
    assert [task.returns for task in made.fire("report")] == ["nightly reported"]
    with pytest.raises(ScheduleNotFound):
        made.fire("nightly")


def test_what_cannot_end_is_told_with_its_reason(made: Bench) -> None:
    made.client.publish("unknown", key="1")
    with pytest.raises(Stuck, match=r"unknown:1.*handler") as caught:
        made.run(timeout=1.0)
    assert list(caught.value.reasons) == ["unknown:1"]


def test_a_handler_that_does_not_end_is_told(made: Bench) -> None:
    made.client.publish("forever", key="1")
    with pytest.raises(Stuck, match="forever:1"):
        made.run(timeout=0.5)


def test_each_bench_has_a_database_of_its_own(app: App, mongo_uri: str) -> None:
    with bench(app, uri=mongo_uri) as one, bench(app, uri=mongo_uri) as other:
        one.client.publish("report", {"kind": "sales"}, key="1")
        assert other.client.count() == 0


def test_children_next_tasks_and_delayed_steps_run_to_the_end(mongo_uri: str) -> None:
    app = App()

    @app.task
    async def split(context: Context) -> None:
        await context.add_child("now", later)
        await context.add_child("hour", later, delay=timedelta(hours=1))

    @app.task
    def later() -> Next:
        return Next(last, delay=timedelta(days=1), returns=1)

    @app.task
    def last(context: Context) -> int:
        [(step, value)] = context.results()
        assert step == "later"
        return int(value) + 1

    @app.task
    def total(context: Context) -> int:
        return sum(int(value) for _, value in context.results() if value)

    with bench(app, uri=mongo_uri) as made:
        flow = Flow("f")
        flow.add("total", total, after=[flow.add("split", split)], delay=timedelta(minutes=1))
        made.client.publish_flow(flow)
        assert {task.key for task in made.run()} == {"f/split", "f/now"}
        assert [task.key for task in made.advance()] == ["f/hour"]
        assert made.client.get(total, "f/total").status == "WAITING"
        assert {task.key for task in made.advance(timedelta(days=1))} == {"f/now/next-1", "f/hour/next-1"}
        assert made.client.get(total, "f/total").status == "INIT"
        assert [task.returns for task in made.advance()] == [6]


def test_time_passes_for_calls_that_gather(mongo_uri: str) -> None:
    app = App()

    @app.task
    def index(number: int) -> int:
        return number

    @app.task
    def digest(calls: list[int]) -> int:
        return sum(calls)

    with bench(app, uri=mongo_uri) as made:
        for number in (1, 2):
            made.client.publish(index, {"number": number}, key="k", debounce=3600, max_wait=5400)
            made.client.publish(digest, number, key="k", collect=True, debounce=3600)
        assert made.run() == []
        made.advance(timedelta(minutes=50))
        made.client.publish(index, {"number": 3}, key="k", debounce=3600, max_wait=5400)
        assert [task.returns for task in made.advance(timedelta(minutes=11))] == [3]
        assert [task.returns for task in made.advance(timedelta(minutes=30))] == [3], "max_wait has passed"
        assert made.client.publish(index, {"number": 4}, key="k", window=7200).updated is False
        made.advance(timedelta(hours=2))
        assert made.client.publish(index, {"number": 4}, key="k", window=7200).updated
        assert [task.returns for task in made.run()] == [4]


def test_isolated_handlers_run_in_this_process(mongo_uri: str) -> None:
    app = App()
    pids: list[int] = []

    @app.task(isolation="process")
    def isolated() -> None:
        pids.append(os.getpid())

    with bench(app, uri=mongo_uri) as made:
        made.client.publish("isolated", key="1")
        made.run()
    assert pids == [os.getpid()]
