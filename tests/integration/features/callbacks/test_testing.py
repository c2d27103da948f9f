"""Callbacks with `mtask.testing`: what a receiver answers decides on the delivery."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from mtask import App, Task
from mtask.testing import Bench, CallbackReceiver, bench, verify


@pytest.fixture
def made(mongo_uri: str) -> Iterator[Bench]:
    app = App()

    @app.task
    async def report(kind: str = "plain") -> str:
        return kind

    with bench(app, uri=mongo_uri) as found:
        yield found


@pytest.fixture
def receiver() -> Iterator[CallbackReceiver]:
    with CallbackReceiver() as opened:
        yield opened


def delivery(made: Bench) -> Task:
    (found,) = made.client.find(name="mtask/callback")
    return found


def test_a_receiver_gets_what_it_can_verify(made: Bench, receiver: CallbackReceiver) -> None:
    made.client.publish("report", {"kind": "secret"}, key="k", callback={"url": receiver.url})
    made.run(callbacks=receiver)
    (got,) = receiver.wait(1)
    assert got.is_genuine
    assert verify(got.headers, got.body, receiver.secret) == got.event
    assert got.event["type"] == "task.success"
    assert "secret" not in got.body.decode()
    found = made.client.get("report", "k")
    told = got.event["data"]
    assert (told["task_id"], told["name"], told["key"], told["status"]) == ("report:k", "report", "k", "SUCCESS")
    assert abs(got.timestamp - made.client.server_time().timestamp()) < 60
    assert found.callback_owed == []
    assert delivery(made).returns == {"status": 204}


def test_without_a_receiver_no_delivery_runs(made: Bench, receiver: CallbackReceiver) -> None:
    made.client.publish("report", key="k", callback={"url": receiver.url})
    assert [task.id for task in made.run()] == ["report:k"]
    assert (delivery(made).status, receiver.received) == ("INIT", [])
    made.run(callbacks=receiver)
    assert len(receiver.received) == 1


@pytest.mark.parametrize(("status", "reason"), [(500, "answered 500"), (404, "answered 404"), (302, "redirects")])
def test_another_answer_is_a_failure_and_the_message_comes_again_under_the_same_id(
    status: int, reason: str, made: Bench, receiver: CallbackReceiver
) -> None:
    receiver.answer = lambda number: 200 if number == 3 else status
    receiver.answer_headers["Location"] = receiver.url
    made.client.publish("report", key="k", callback={"url": receiver.url})
    made.run(callbacks=receiver)
    assert delivery(made).status == "INIT"
    assert reason in (delivery(made).fail_reason or "")
    waits = delivery(made).runs[-1].retry_time
    assert waits is not None
    assert waits - made.client.server_time() < timedelta(seconds=11)
    made.advance(callbacks=receiver)
    made.advance(callbacks=receiver)
    assert delivery(made).status == "SUCCESS"
    got = receiver.received
    assert [one.status for one in got] == [status, status, 200]
    assert len({one.webhook_id for one in got}) == 1
    assert len({one.body for one in got}) == 1
    assert all(one.is_genuine for one in got)


def test_a_receiver_that_is_gone_is_asked_once(made: Bench, receiver: CallbackReceiver) -> None:
    receiver.answer = 410
    made.client.publish("report", key="k", callback={"url": receiver.url})
    made.run(callbacks=receiver)
    assert delivery(made).status == "FAIL"
    assert "wants no more messages" in (delivery(made).fail_reason or "")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://elsewhere.example/", "is none of the hosts"),
        ("http://127.0.0.1:1/", "is none of the hosts"),
    ],
)
def test_what_this_worker_may_not_call_is_not_called(
    url: str, reason: str, made: Bench, receiver: CallbackReceiver
) -> None:
    made.client.publish("report", key="k", callback={"url": url})
    made.run(callbacks=receiver)
    assert delivery(made).status == "INIT"
    assert reason in (delivery(made).fail_reason or "")


def test_a_secret_that_the_worker_does_not_know_sends_nothing(made: Bench, receiver: CallbackReceiver) -> None:
    made.client.publish("report", key="k", callback={"url": receiver.url, "secret": "unknown"})
    made.run(callbacks=receiver)
    assert "no secret 'unknown'" in (delivery(made).fail_reason or "")
    assert receiver.received == []


def test_slow_receivers_hold_up_no_other_task(made: Bench, receiver: CallbackReceiver) -> None:
    """The event loop goes on, and so do tasks, while a receiver lets a message wait."""
    receiver.answer = lambda number: time.sleep(1.0) or 200  # type: ignore[func-returns-value]
    for number in range(30):
        made.client.publish("report", key=f"slow/{number}", callback={"url": receiver.url})
    made.run(callbacks=receiver, concurrency=40)
    tasks: Any = made.client.find(name="report", limit=0)
    ended = [task.task_state.finish_time for task in tasks]
    told: Any = made.client.find(name="mtask/callback", status="SUCCESS", limit=0)
    assert max(task.task_state.finish_time for task in told) - max(ended) > timedelta(seconds=0.9)
    # More messages than the worker sends at once: the others are handed back, and no failure is counted.
    found = made.client.find(name="mtask/callback", limit=0)
    assert all(task.task_state.failed_cnt == 0 for task in found)
    for _ in range(20):
        if all(task.status == "SUCCESS" for task in made.client.find(name="mtask/callback", limit=0)):
            break
        made.advance(callbacks=receiver, concurrency=40)
    assert len({one.webhook_id for one in receiver.received}) == 30
