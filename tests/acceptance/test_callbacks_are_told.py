"""A receiver hears of the end of a task at least once, under one id, whatever dies and whoever is away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from mtask.search.findings import Level
from mtask.testing import CallbackReceiver
from tests.mongo import PATIENCE, eventually
from tests.workers import Stage, WorkerProcess

DYING = "tests.acceptance.dying_app:app"


@pytest.fixture
def receiver() -> Iterator[CallbackReceiver]:
    with CallbackReceiver() as opened:
        yield opened


def deliverer(stage: Stage, worker_id: str, receiver: CallbackReceiver, **given: Any) -> WorkerProcess:
    """Start a worker that delivers to this receiver."""
    environment = {"MTASK_CALLBACK_SECRETS": json.dumps({"default": receiver.secret}), **given.pop("environment", {})}
    flags = ("--callbacks", receiver.host, "--callback-networks", "127.0.0.0/8")
    worker = stage.launch(worker_id, *flags, environment=environment, **given)
    if not given:
        stage.wait_running(worker)
    return worker


def deliveries(stage: Stage) -> list[Any]:
    return list(stage.mongo[stage.database]["tasks"].find({"name": "mtask/callback"}))


def let_the_lease_lapse(stage: Stage, task_id: str) -> None:
    """The lease of a delivery is half a minute; the test does not wait for it."""
    past = {"$subtract": ["$$NOW", 60_000]}
    run = {"$mergeObjects": [{"$first": "$task_state.worker_states"}, {"ping_expire_time": past}]}
    moved = {"task_state.worker_states": [run], "task_state.next_preempt_time": past}
    stage.mongo[stage.database]["tasks"].update_one({"_id": task_id}, [{"$set": moved}])


@pytest.mark.parametrize("point", ["after the finish", "before the cross-off", "after the answer"])
def test_a_worker_that_dies_at_any_point_loses_no_callback(
    point: str, stage: Stage, receiver: CallbackReceiver
) -> None:
    stage.client.publish("noop", {"value": 5}, key="k", callback={"url": receiver.url})
    dying = deliverer(stage, "dying", receiver, app=DYING, environment={"MTASK_TEST_DIES": point})
    assert dying.wait() != 0
    assert stage.wait_status("noop:k", "SUCCESS")
    told_before = len(receiver.received)
    assert told_before == (point == "after the answer")
    for delivery in deliveries(stage):
        if delivery["task_state"]["status"] == "RUNNING":
            let_the_lease_lapse(stage, delivery["_id"])
    deliverer(stage, "living", receiver)
    got = receiver.wait(told_before + 1, timeout=PATIENCE)
    eventually(lambda: [one["task_state"]["status"] for one in deliveries(stage)] == ["SUCCESS"], PATIENCE)
    assert "callback_owed" not in stage.document("noop:k")
    assert len({one.webhook_id for one in got}) == 1
    assert len({one.body for one in got}) == 1
    assert all(one.is_genuine for one in got)
    assert got[0].event["type"] == "task.success"
    assert got[0].event["data"]["task_id"] == "noop:k"


def test_a_receiver_that_is_down_hears_of_it_when_it_is_up(stage: Stage) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    receiver = CallbackReceiver(port=port)
    receiver._server.socket.close()  # down: nobody listens on its port
    deliverer(stage, "W", receiver)
    stage.client.publish("fail_for_good", {"reason": "r"}, key="k", callback={"url": receiver.url, "on": ["FAIL"]})

    def failures() -> list[str]:
        return [run.get("fail_reason", "") for one in deliveries(stage) for run in one["task_state"]["worker_states"]]

    eventually(lambda: any("refused" in reason for reason in failures()), PATIENCE, "a failed try")
    with CallbackReceiver(receiver.secret, port=port) as up:
        (got,) = up.wait(1, timeout=PATIENCE)
        assert got.is_genuine
        assert got.event["data"]["status"] == "FAIL"
        stage.wait_status(f"mtask/callback:{got.webhook_id}", "SUCCESS")
    receiver._server.server_close()


def test_a_worker_that_was_not_told_to_deliver_leaves_it_to_another_and_the_doctor_tells(
    stage: Stage, receiver: CallbackReceiver
) -> None:
    stage.start("W")
    stage.client.publish("noop", key="k", callback={"url": receiver.url})
    eventually(lambda: len(deliveries(stage)) == 1, PATIENCE, "published")
    (found,) = [one for one in stage.client.diagnose() if one.check == "callbacks"]
    assert (found.level, "no live worker delivers callbacks" in found.message) == (Level.FAIL, True)
    assert "--callbacks" in (found.remedy or "")
    assert receiver.received == []
    deliverer(stage, "D", receiver)
    receiver.wait(1, timeout=PATIENCE)
    stage.wait_status(deliveries(stage)[0]["_id"], "SUCCESS")
    assert [one.level for one in stage.client.diagnose() if one.check == "callbacks"] == [Level.OK]


def test_many_ends_are_told_once_each_while_workers_are_killed(stage: Stage, receiver: CallbackReceiver) -> None:
    count = 60
    workers = [deliverer(stage, f"W{number}", receiver) for number in range(2)]
    lease: Any = {"ping_interval": 0.3, "worker_timeout": 1}
    for number in range(count):
        stage.client.publish("noop", key=str(number), callback={"url": receiver.url}, **lease)
        if number == count // 2:
            workers[0].kill()
    workers.append(deliverer(stage, "W2", receiver))

    def told() -> set[str]:
        return {one.event["data"]["task_id"] for one in receiver.received}

    def rescued() -> bool:
        for one in deliveries(stage):
            if one["task_state"]["status"] == "RUNNING" and one["task_state"]["worker_states"][-1]["worker_id"] == "W0":
                let_the_lease_lapse(stage, one["_id"])
        return told() == {f"noop:{number}" for number in range(count)}

    eventually(rescued, PATIENCE, "each end is told")
    ids = {one.event["data"]["task_id"]: set[str]() for one in receiver.received}
    for one in receiver.received:
        ids[one.event["data"]["task_id"]].add(one.webhook_id)
    assert all(len(several) == 1 for several in ids.values())
    assert len({next(iter(several)) for several in ids.values()}) == count
