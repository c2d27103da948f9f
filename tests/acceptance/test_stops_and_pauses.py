"""A stop in order hands back what it cannot finish, remotely too; a pause claims nothing."""

from __future__ import annotations

import signal
from time import monotonic
from typing import Any

import pytest

from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, Document, eventually
from tests.workers import Stage, milliseconds, runs_of

#: A run that was counted at all would end such a task as FAIL.
NO_RETRY: dict[str, Any] = {"max_retries": 0}


def wait_worker_status(stage: Stage, worker_id: str, status: str) -> None:
    def has_status() -> bool:
        found = stage.worker_document(worker_id)
        return found is not None and found["status"] == status

    eventually(has_status, PATIENCE, f"{worker_id} {status}")


def assert_handed_back(document: Document, worker_ids: tuple[str, str]) -> None:
    first, second = runs_of(document)
    assert (first["status"], second["status"]) == ("CANCELED", "SUCCESS")
    assert (first["worker_id"], second["worker_id"]) == worker_ids
    assert "handed back: the worker stopped" in first["fail_reason"]
    assert second["claim_time"] >= first["fail_time"]
    assert document["task_state"]["failed_cnt"] == 0


@pytest.mark.parametrize(("handler", "number"), [("hold", signal.SIGTERM), ("hold_plain", signal.SIGINT)])
def test_stopped_worker_hands_its_long_task_back_and_another_claims_it_at_once_not_counted(
    stage: Stage, report: Report, handler: str, number: signal.Signals
) -> None:
    stopped = stage.start("A", "--shutdown-timeout", "0.2")
    task_id = stage.client.publish(handler, {"gate": stage.gate()}, key="long", **NO_RETRY).task_id
    stage.wait_run(task_id, "A")
    stage.start("B")

    asked = monotonic()
    stopped.send(number)
    stage.wait_run(task_id, "B")
    started = stage.events.starts(task_id, "B")[0]
    report(
        f"{number.name} to start elsewhere, {handler}, timeout 200 ms, ms", round(1000 * (started.monotonic - asked))
    )
    assert stopped.wait() == 0
    stage.open_gate()

    document = stage.wait_status(task_id, "SUCCESS")
    assert_handed_back(document, ("A", "B"))
    first, second = runs_of(document)
    assert [event.event for event in stage.events.all(task_id=task_id, worker_id="A")] == ["start", "cancelled"]
    report(
        f"handed back to re-claimed, {handler}, {number.name}, ms",
        milliseconds(second["claim_time"] - first["fail_time"]),
    )
    wait_worker_status(stage, "A", "stopped")


def test_stopping_worker_finishes_what_it_holds_and_claims_nothing_more(stage: Stage) -> None:
    stopped = stage.start("A")
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="long").task_id
    stage.wait_run(task_id, "A")

    stopped.terminate()
    wait_worker_status(stage, "A", "stopping")
    late = stage.client.publish("noop", key="late").task_id
    assert stopped.is_alive
    stage.open_gate()
    assert stopped.wait() == 0

    document = stage.document(task_id)
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "SUCCESS")]
    assert runs_of(stage.document(late)) == []
    stage.start("B")
    stage.wait_status(late, "SUCCESS")


def test_second_signal_stops_at_once_and_what_ran_is_handed_back(stage: Stage, report: Report) -> None:
    stopped = stage.start("A", "--shutdown-timeout", "600")
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="long", **NO_RETRY).task_id
    stage.wait_run(task_id, "A")
    stopped.terminate()
    wait_worker_status(stage, "A", "stopping")
    assert runs_of(stage.document(task_id))[0]["status"] == "RUNNING"

    asked = monotonic()
    stopped.terminate()
    assert stopped.wait() == 0
    report("second SIGTERM to the process's end, ms", round(1000 * (monotonic() - asked)))
    assert runs_of(stage.document(task_id))[0]["status"] == "CANCELED"
    stage.start("B")
    stage.open_gate()
    assert_handed_back(stage.wait_status(task_id, "SUCCESS"), ("A", "B"))


@pytest.mark.parametrize("handler", ["hold_deaf", "hold_uncancellable", "hold_blocking"])
def test_handler_that_does_not_end_when_told_does_not_hold_up_the_stop(
    stage: Stage, report: Report, handler: str
) -> None:
    stopped = stage.start("A", "--shutdown-timeout", "0.2")
    task_id = stage.client.publish(handler, {"gate": stage.gate()}, key="stuck", **NO_RETRY).task_id
    stage.wait_run(task_id, "A")
    stage.start("B")

    asked = monotonic()
    stopped.terminate()
    assert stopped.wait() == 0
    report(f"SIGTERM to the end of a worker with {handler}, s", round(monotonic() - asked, 1))
    stage.open_gate()
    assert_handed_back(stage.wait_status(task_id, "SUCCESS"), ("A", "B"))


def test_worker_that_is_stopped_remotely_ends_and_others_go_on(stage: Stage, report: Report) -> None:
    workers = {worker.worker_id: worker for worker in stage.start_all("ABC", "--shutdown-timeout", "0.2")}
    task_ids = {
        worker_id: stage.client.publish(
            "hold", {"gate": stage.gate()}, key=worker_id, specific_worker_ids=[worker_id]
        ).task_id
        for worker_id in "ABC"
    }
    for worker_id, task_id in task_ids.items():
        stage.wait_run(task_id, worker_id)

    asked = monotonic()
    stage.client.stop_worker("A")
    assert workers["A"].wait() == 0
    report("remote stop to the process's end, timeout 200 ms, ms", round(1000 * (monotonic() - asked)))
    wait_worker_status(stage, "A", "stopped")
    assert workers["B"].is_alive
    assert workers["C"].is_alive
    assert runs_of(stage.document(task_ids["A"]))[0]["status"] == "CANCELED"
    for worker_id in "BC":
        assert runs_of(stage.document(task_ids[worker_id]))[0]["status"] == "RUNNING"

    stage.client.update_option("hold", "A", specific_worker_ids=["B"])
    stage.open_gate()
    assert_handed_back(stage.wait_status(task_ids["A"], "SUCCESS"), ("A", "B"))
    for worker_id in "BC":
        document = stage.wait_status(task_ids[worker_id], "SUCCESS")
        assert [run["worker_id"] for run in runs_of(document)] == [worker_id]
    assert sorted(worker.worker_id for worker in stage.client.workers()) == ["B", "C"]


def wait_concurrency(stage: Stage, worker_id: str, concurrency: int) -> None:
    def has_concurrency() -> bool:
        found = stage.worker_document(worker_id)
        return found is not None and found["concurrency"] == concurrency

    eventually(has_concurrency, PATIENCE, f"{worker_id} with concurrency {concurrency}")


def test_worker_with_concurrency_zero_claims_nothing_while_what_it_holds_goes_on_and_resumes(
    stage: Stage, report: Report
) -> None:
    stage.start("A", "--concurrency", "3")
    held = stage.client.publish(
        "hold", {"gate": stage.gate()}, key="held", ping_interval=0.2, worker_timeout=20
    ).task_id
    lease = stage.wait_run(held, "A")["ping_expire_time"]

    stage.client.set_worker("A", concurrency=0)
    wait_concurrency(stage, "A", 0)
    waiting = [stage.client.publish("noop", key=f"{number}").task_id for number in range(10)]
    stage.wait_heard("A")
    stage.wait_document(held, lambda found: runs_of(found)[0]["ping_expire_time"] > lease, "a ping while paused")
    stage.open_gate()
    stage.wait_status(held, "SUCCESS")  # a slot is free now, and still nothing is claimed
    stage.wait_heard("A")
    assert [runs_of(stage.document(task_id)) for task_id in waiting] == [[]] * len(waiting)

    resumed = monotonic()
    stage.client.set_worker("A", concurrency=None)
    for task_id in waiting:
        stage.wait_status(task_id, "SUCCESS")
    first = min(event.monotonic for event in stage.events.starts() if event.task_id in waiting)
    assert first >= resumed
    report("resumed to the first start, ms", round(1000 * (first - resumed), 1))
    wait_concurrency(stage, "A", 3)
    assert len(stage.events.starts()) == 1 + len(waiting)


def test_paused_worker_leaves_its_share_to_the_others(stage: Stage) -> None:
    stage.start_all("AB")
    stage.client.set_worker("A", concurrency=0)
    wait_concurrency(stage, "A", 0)

    task_ids = [stage.client.publish("noop", key=f"{number}").task_id for number in range(50)]
    for task_id in task_ids:
        assert [run["worker_id"] for run in runs_of(stage.wait_status(task_id, "SUCCESS"))] == ["B"]
    assert stage.events.starts(worker_id="A") == []


def test_worker_whose_concurrency_is_changed_holds_as_many_at_once(stage: Stage) -> None:
    stage.start("A", "--concurrency", "0")  # started paused
    task_ids = [stage.client.publish("hold", {"gate": stage.gate()}, key=f"{number}").task_id for number in range(6)]
    stage.wait_heard("A")
    assert stage.events.starts() == []

    stage.client.set_worker("A", concurrency=2)
    stage.events.wait("start", 2)
    stage.client.set_worker("A", concurrency=4)
    stage.events.wait("start", 4)
    wait_concurrency(stage, "A", 4)
    stage.client.set_worker("A", concurrency=1)  # what runs goes on; no more than one from now on
    wait_concurrency(stage, "A", 1)
    held = {event.task_id for event in stage.events.starts()}
    assert len(held) == 4
    stage.open_gate()

    for task_id in task_ids:
        document = stage.wait_status(task_id, "SUCCESS")
        assert [run["status"] for run in runs_of(document)] == ["SUCCESS"]
    # The next task is claimed while the ending of the last is being written: it is the handlers that do not overlap.
    moments = [event for event in stage.events.all() if event.task_id not in held]
    moments.sort(key=lambda event: event.monotonic)
    assert [event.event for event in moments] == ["start", "end", "start", "end"], "one after the other"


def test_worker_that_is_told_to_stop_while_it_starts_ends_in_order(stage: Stage) -> None:
    starting = stage.launch("A")
    eventually(lambda: stage.worker_document("A"), PATIENCE, "registered", interval=0.001)
    starting.terminate()

    assert starting.wait() == 0
    wait_worker_status(stage, "A", "stopped")
