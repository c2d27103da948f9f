"""A lease that is kept, one that lapses with its worker, and one that a frozen worker comes back to."""

from __future__ import annotations

from datetime import datetime, timedelta
from time import monotonic
from typing import Any

import pytest
from bson import Timestamp

from mtask.kernel.document.options import TaskOptions
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, Document, eventually
from tests.workers import Event, Stage, milliseconds, runs_of

LEASE: dict[str, Any] = {"ping_interval": 1, "worker_timeout": 2.5, "retry_delay": 0}
#: A lease that no slow machine lets lapse: for whoever comes after the one that is to lose its own.
LONG: TaskOptions = {"worker_timeout": 60}
#: Ten times what a quiet machine shows at most.
GENEROUS = timedelta(seconds=5)


def test_six_second_task_outlives_its_lease_of_two_and_a_half_and_nobody_else_claims(
    stage: Stage, report: Report
) -> None:
    stage.start_all("ABC")
    begin = stage.mongo.admin.command("hello")["operationTime"]
    task_id = stage.client.publish("sleep", {"seconds": 6.0}, key="long", **LEASE).task_id
    first = stage.wait_run(task_id)

    document = stage.wait_status(task_id, "SUCCESS")

    leases = pinged_leases(stage, task_id, begin)
    (run,) = runs_of(document)
    assert leases == sorted(leases), "a lease never moves back"
    assert (run["worker_id"], run["run_id"]) == (first["worker_id"], first["run_id"])
    assert run["success_time"] - run["claim_time"] >= timedelta(seconds=6)
    assert len(leases) >= 3, "six seconds, a ping each second"
    assert run["success_time"] < leases[-1], "it was held to its end"
    assert len(stage.events.starts(task_id)) == 1
    report("pings of a 6 s run with a ping each second", len(leases))


def test_killed_workers_run_is_preempted_by_another_soon_after_its_lease_and_never_before(
    stage: Stage, report: Report
) -> None:
    workers = {worker.worker_id: worker for worker in stage.start_all("ABC")}
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="orphaned", **LEASE).task_id
    victim = stage.wait_run(task_id)["worker_id"]
    # In mid-run: its first ping has been sent, so it is not the claim's lease that lapses.
    claimed = runs_of(stage.document(task_id))[0]["ping_expire_time"]
    stage.wait_document(task_id, lambda found: runs_of(found)[0]["ping_expire_time"] > claimed, "a ping")
    stage.kill(workers[victim])
    stage.client.update_option("hold", "orphaned", **LONG)
    lapse = runs_of(stage.document(task_id))[0]["ping_expire_time"]

    preempted = stage.wait_document(task_id, lambda found: len(runs_of(found)) > 1, "preempted")
    first, second = runs_of(preempted)
    late = second["claim_time"] - lapse
    assert first["ping_expire_time"] == lapse
    assert timedelta(0) <= late < GENEROUS
    assert (first["status"], first["worker_id"]) == ("TIMEOUT", victim)
    assert first["fail_time"] == second["claim_time"], "who preempts closes it"
    assert "lease lapsed" in first["fail_reason"]
    assert second["worker_id"] != victim
    assert preempted["task_state"]["failed_cnt"] == 1
    report("claim after the lapse of a killed worker's lease, ms", milliseconds(late))

    stage.open_gate()
    document = stage.wait_status(task_id, "SUCCESS")
    assert [run["status"] for run in runs_of(document)] == ["TIMEOUT", "SUCCESS"]
    assert [event.worker_id for event in stage.events.all("end", task_id=task_id)] == [second["worker_id"]]


def test_killed_workers_many_runs_are_all_preempted_after_their_leases_and_all_done(
    stage: Stage, report: Report
) -> None:
    victim = stage.start("A", "--concurrency", "30")
    task_ids = [
        stage.client.publish("hold", {"gate": stage.gate()}, key=f"{number}", **LEASE).task_id for number in range(30)
    ]
    stage.events.wait("start", len(task_ids), worker_id="A")
    stage.client.tasks.update_many({}, {"$set": {f"task_option.{name}": value for name, value in LONG.items()}})
    stage.start_all("BC", "--concurrency", "30")
    stage.kill(victim)
    stage.open_gate()

    late = []
    for task_id in task_ids:
        first, second = runs_of(stage.wait_status(task_id, "SUCCESS"))
        assert (first["status"], first["worker_id"], second["status"]) == ("TIMEOUT", "A", "SUCCESS")
        late.append(second["claim_time"] - first["ping_expire_time"])
    assert min(late) >= timedelta(0)
    assert max(late) < GENEROUS
    assert len(stage.events.all("end")) == len(task_ids)
    report("claim after the lapse, slowest of a killed worker's 30 runs, ms", milliseconds(max(late)))


@pytest.mark.parametrize("handler", ["hold", "hold_plain"])
def test_frozen_workers_handler_is_ended_when_it_wakes_and_the_other_workers_success_stands(
    stage: Stage, report: Report, handler: str
) -> None:
    frozen = stage.start("A")
    task_id = stage.client.publish(handler, {"gate": stage.gate()}, key="frozen", **LEASE).task_id
    stage.wait_run(task_id, "A")
    stage.start("B")
    frozen.pause()
    stage.client.update_option(handler, "frozen", **LONG)
    second = stage.wait_run(task_id, "B")
    assert second["claim_time"] >= runs_of(stage.document(task_id))[0]["ping_expire_time"]

    woken = monotonic()
    frozen.resume()
    ended = stage.events.wait("cancelled", task_id=task_id, worker_id="A")[0]
    report(f"waking to the handler's end, {handler}, ms", round(1000 * (ended.monotonic - woken), 1))
    stage.open_gate()

    document = stage.wait_status(task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "TIMEOUT"), ("B", "SUCCESS")]
    assert runs_of(document)[1]["returns"] == "B"
    assert [event.worker_id for event in stage.events.all("end", task_id=task_id)] == ["B"]
    assert_serves_on(stage, "A")
    assert stage.document(task_id) == document, "nothing was written into it afterwards"


@pytest.mark.parametrize(
    "handler",
    ["hold", *(pytest.param(each, marks=pytest.mark.long) for each in ("hold_plain", "hold_deaf")), "hold_blocking"],
)
def test_frozen_worker_whose_handler_comes_to_its_end_on_waking_cannot_write_its_result(
    stage: Stage, handler: str
) -> None:
    frozen = stage.start("A")
    task_id = stage.client.publish(handler, {"gate": stage.gate()}, key="frozen", **LEASE).task_id
    stage.wait_run(task_id, "A")
    stage.start("B")
    frozen.pause()
    stage.client.update_option(handler, "frozen", **LONG)
    stage.wait_run(task_id, "B")
    stage.open_gate()
    document = stage.wait_status(task_id, "SUCCESS")

    frozen.resume()  # the gate is open: its handler ends by itself, if it is not ended first
    eventually(lambda: len(ends(stage, task_id, "A")) == 1, PATIENCE, "the handler's end")
    assert_serves_on(stage, "A")

    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "TIMEOUT"), ("B", "SUCCESS")]
    assert runs_of(document)[1]["returns"] == "B"
    assert stage.document(task_id) == document, "nothing was written into it afterwards"


def test_ping_of_a_run_whose_lease_lapsed_on_the_server_is_refused_and_its_handler_ended(stage: Stage) -> None:
    stopping = stage.start("A", "--shutdown-timeout", "600")
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="lapsed", **LEASE).task_id
    stage.wait_run(task_id, "A")
    stage.start("B")
    stopping.terminate()  # it goes on with its run, and claims no other: so B rescues the task
    eventually(lambda: "worker stopping" in stopping.log, PATIENCE, "A claims no more")
    stage.client.update_option("hold", "lapsed", **LONG)
    lapse_now(stage, task_id)
    stage.wait_run(task_id, "B")

    # A knows of no lapse by its own clock: it is the server that refuses its next ping.
    stage.events.wait("cancelled", task_id=task_id, worker_id="A")
    stage.open_gate()
    document = stage.wait_status(task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "TIMEOUT"), ("B", "SUCCESS")]
    assert [event.worker_id for event in stage.events.all("end", task_id=task_id)] == ["B"]


def test_result_of_a_run_whose_lease_lapsed_on_the_server_is_refused(stage: Stage) -> None:
    former = stage.start("A")
    # No ping is due before the handler's end: it is the server that refuses the result.
    option: dict[str, Any] = {"ping_interval": 60, "worker_timeout": 90}
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="lapsed", **option).task_id
    stage.wait_run(task_id, "A")
    lapse_now(stage, task_id)
    stage.open_gate()

    stage.events.wait("end", task_id=task_id, worker_id="A")
    eventually(lambda: "result refused: the lease was lost" in former.log, PATIENCE, "the refusal in the log")
    assert [run["status"] for run in runs_of(stage.document(task_id))] != ["SUCCESS"]
    stage.start("B")
    document = stage.wait_status(task_id, "SUCCESS")
    assert [run["status"] for run in runs_of(document)] == ["TIMEOUT", "SUCCESS"]
    assert document["task_state"]["failed_cnt"] == 1


def pinged_leases(stage: Stage, task_id: str, since: Timestamp) -> list[datetime]:
    """Return where each ping of the task's first run moved its lease, by the server's own history of the document."""
    of_task: list[Document] = [{"$match": {"documentKey._id": task_id, "operationType": "update"}}]
    leases = []
    with stage.client.tasks.watch(of_task, start_at_operation_time=since) as changes:
        for change in changes:
            updated = change["updateDescription"]["updatedFields"]
            if "task_state.worker_states.0.ping_expire_time" in updated:
                leases.append(updated["task_state.worker_states.0.ping_expire_time"])
            if updated.get("task_state.status") == "SUCCESS":
                break
    return leases


def ends(stage: Stage, task_id: str, worker_id: str) -> list[Event]:
    noted = stage.events.all(task_id=task_id, worker_id=worker_id)
    return [event for event in noted if event.event in ("end", "cancelled", "raised")]


def lapse_now(stage: Stage, task_id: str) -> None:
    """Let the lease of the task's run lapse on the server, unknown to the worker that holds it.

    No stream tells the worker of a change that is marked with quiet_time.
    """
    now = stage.server_now()
    lapse = {"task_state.worker_states.0.ping_expire_time": now, "task_state.next_preempt_time": now}
    stage.client.tasks.update_one({"_id": task_id}, {"$set": {**lapse, "quiet_time": now}})


def assert_serves_on(stage: Stage, worker_id: str) -> None:
    sentinel = stage.client.publish("noop", key=f"sentinel/{worker_id}", specific_worker_ids=[worker_id])
    stage.wait_status(sentinel.task_id, "SUCCESS")
