"""context.transaction(): an effect that happens exactly once, or leaves no trace."""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mtask.errors import ResultLost, WaitTimeout
from mtask.kernel.document.options import TaskOptions
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, Document, eventually, fail_command
from tests.mongo import Client as Mongo
from tests.security import is_secure
from tests.workers import Event, Stage, WorkerProcess, end_of, milliseconds, runs_of

APP = "tests.acceptance.faults_app:app"
#: A lease soon over, and a retry at once.
SHORT: TaskOptions = {"ping_interval": 0.4, "worker_timeout": 2.5, "retry_delay": 0}
#: A lease that no slow machine lets lapse: for whoever comes after the one that is to lose its own.
LONG: TaskOptions = {"worker_timeout": 60}

KINDS = ("deposit", "deposit_plain_gated")


@pytest.fixture(autouse=True)
def abandoned_transactions_end_soon(mongo_session_client: Mongo) -> Iterator[None]:
    """Have the server abort what a killed worker left open after 5 s, not 60: dropping the database waits for it."""
    before = limit_transactions(mongo_session_client, 5)
    yield
    limit_transactions(mongo_session_client, before)


def limit_transactions(mongo: Mongo, seconds: int) -> int:
    """Have the server abort transactions that are begun from now on after so long; return what it was before."""
    was: int = mongo.admin.command({"setParameter": 1, "transactionLifetimeLimitSeconds": seconds})["was"]
    return was


def start(stage: Stage, worker_id: str, *flags: str) -> WorkerProcess:
    worker = stage.launch(worker_id, *flags, app=APP)
    stage.wait_running(worker)
    return worker


def prepared(stage: Stage) -> Stage:
    """Have the collection of the effects: made beforehand, a transaction need not make it."""
    stage.mongo[stage.database].create_collection("effects")
    return stage


def effects(stage: Stage, handler: str = "") -> list[Document]:
    """Return the effects of all tasks, or of this handler's task."""
    return list(stage.mongo[stage.database]["effects"].find({"task_id": f"{handler}:t"} if handler else {}))


def params(stage: Stage, **more: Any) -> dict[str, Any]:
    return {"database": stage.database, **more}


def ended(stage: Stage, task_id: str, worker_id: str) -> bool:
    """Whether the handler has been ended there, one way or the other, before it came to its own end."""
    events = [event.event for event in stage.events.all(task_id=task_id, worker_id=worker_id)]
    assert "end" not in events
    return "cancelled" in events or "raised" in events


def frozen_amid_writes(stage: Stage) -> tuple[WorkerProcess, list[Event]]:
    """Freeze a worker between the writes and the commits of its runs, until another one has written for each, too.

    Return the frozen worker and what it has written.
    """
    prepared(stage)
    frozen = start(stage, "A")
    for handler in KINDS:
        stage.client.publish(handler, params(stage, gate=stage.gate()), key="t", **SHORT)
    written = [event for handler in KINDS for event in stage.events.wait("written", task_id=f"{handler}:t")]
    frozen.pause()
    for handler in KINDS:
        stage.client.update_option(handler, "t", **LONG)
    start(stage, "B")
    for handler in KINDS:
        stage.events.wait("written", task_id=f"{handler}:t", worker_id="B")
    return frozen, written


def test_worker_that_lost_its_lease_commits_nothing_and_the_effect_is_there_exactly_once(stage: Stage) -> None:
    frozen, written = frozen_amid_writes(stage)
    stage.open_gate()
    documents = [stage.wait_returns(event.task_id) for event in written]
    frozen.resume()
    for event in written:
        eventually(lambda task_id=event.task_id: ended(stage, task_id, "A"), PATIENCE, "the first handler's end")  # type: ignore[misc]

    for handler, event, document in zip(KINDS, written, documents, strict=True):
        first, second = runs_of(document)
        assert (first["worker_id"], first["status"], first["run_id"]) == ("A", "TIMEOUT", event.run_id)
        assert (second["worker_id"], second["status"], second["returns"]) == ("B", "SUCCESS", "B")
        assert [effect["run_id"] for effect in effects(stage, handler)] == [second["run_id"]]
        after = stage.client.publish(handler, params(stage), key="after")
        stage.wait_returns(after.task_id)
        assert [effect["run_id"] for effect in effects(stage, handler)] == [second["run_id"]], "still"
        assert runs_of(stage.document(event.task_id)) == [first, second]


def test_worker_that_wakes_up_before_the_other_committed_commits_nothing_either(stage: Stage) -> None:
    frozen, _ = frozen_amid_writes(stage)
    frozen.resume()  # both are now between their writes and their commits
    stage.open_gate()
    for handler in KINDS:
        document = stage.wait_status(f"{handler}:t", "SUCCESS")
        stage.events.wait("end", task_id=f"{handler}:t")

        succeeded = [run for run in runs_of(document) if run["status"] == "SUCCESS"]
        assert len(succeeded) == 1
        assert [effect["run_id"] for effect in effects(stage, handler)] == [succeeded[0]["run_id"]]
        assert all(run["status"] == "TIMEOUT" for run in runs_of(document) if run["worker_id"] == "A")


@pytest.mark.parametrize("handler", KINDS)
def test_worker_killed_between_its_write_and_its_commit_leaves_no_trace_and_the_retry_leaves_one(
    stage: Stage, handler: str, report: Report
) -> None:
    prepared(stage)
    killed = start(stage, "A")
    task = stage.client.publish(handler, params(stage, die_on_attempts=[1]), key="t", **SHORT)
    assert killed.wait() == -9
    assert stage.events.all("written", task_id=task.task_id), "it had written"
    assert effects(stage) == [], "and left no trace"
    start(stage, "B")

    document = stage.wait_status(task.task_id, "SUCCESS")

    first, second = runs_of(document)
    assert (first["status"], second["status"]) == ("TIMEOUT", "SUCCESS")
    assert second["claim_time"] >= first["ping_expire_time"], "never before the lease lapsed"
    assert [(effect["run_id"], effect["worker_id"]) for effect in effects(stage)] == [(second["run_id"], "B")]
    report(
        f"claim after the killed worker's lease lapsed, {handler}, ms",
        milliseconds(second["claim_time"] - first["ping_expire_time"]),
    )


def test_task_is_rescued_at_once_from_a_transaction_that_a_killed_worker_left_open(
    stage: Stage, report: Report
) -> None:
    """MTASK_TEST_KILLS=20: kill that many workers, and demand the rescue within the promised 500 ms."""
    limit_transactions(stage.mongo, 60)  # the server itself ends none of them in time
    prepared(stage)
    asked = os.environ.get("MTASK_TEST_KILLS")
    rescuer = start(stage, "rescuer", "--concurrency", "0")
    delays: list[float] = []
    while len(delays) < int(asked or 3):
        delays += kill_in_transactions(stage, range(len(delays), min(len(delays) + 4, int(asked or 3))))

    # Asserted on any machine: not even once did a claim run into the open transaction.
    assert "held up" not in rescuer.log
    if not is_secure():  # where a new connection's handshake may take as long as a claim waits for its answer
        assert "claim unanswered" not in rescuer.log
    median, last = statistics.median(delays), sorted(delays)[math.ceil(0.99 * len(delays)) - 1]
    report("rescue from an open transaction after the lapse, ms: kills, median, p99", (len(delays), median, last))
    if asked:
        assert last <= 500


def kill_in_transactions(stage: Stage, numbers: range) -> list[float]:
    """Kill a worker between its SUCCESS and its commit for each number; return how late the rescues came, in ms."""
    stage.client.set_worker("rescuer", concurrency=0)
    victims = [stage.launch(f"victim-{number}", "--concurrency", "1", app=APP) for number in numbers]
    for victim in victims:
        stage.wait_running(victim)
    tasks = [
        stage.client.publish(
            "deposit_and_die_plain" if number % 2 else "deposit_and_die",
            params(stage),
            key=f"{number}",
            specific_worker_ids=[f"victim-{number}", "rescuer"],
            # Long enough for all of them to be dead, and the rescuer to be told, before the first lease lapses.
            ping_interval=1,
            worker_timeout=8,
        )
        for number in numbers
    ]
    for victim in victims:
        assert victim.wait() == -signal.SIGKILL, victim.log
    stage.client.set_worker("rescuer", concurrency=10)
    delays = []
    for task in tasks:
        document = stage.wait_status(task.task_id, "SUCCESS")
        killed, rescued = runs_of(document)
        assert (killed["status"], rescued["status"]) == ("TIMEOUT", "SUCCESS")
        assert killed["session_id"] != rescued["session_id"]
        assert [e["run_id"] for e in effects(stage) if e["task_id"] == task.task_id] == [rescued["run_id"]]
        delays.append(milliseconds(rescued["claim_time"] - killed["ping_expire_time"]))
    assert min(delays) >= 0, "never before the lease lapsed"
    return delays


def test_handler_that_raises_in_its_transaction_leaves_no_trace_and_the_retry_leaves_one(stage: Stage) -> None:
    prepared(stage)
    start(stage, "A")
    for handler in KINDS:
        stage.client.publish(handler, params(stage, fail_on_attempts=[1, 2]), key="t", retry_delay=0.3)

    for handler in KINDS:
        document = stage.wait_status(f"{handler}:t", "SUCCESS")
        assert len(stage.events.all("raised", task_id=f"{handler}:t")) == 2
        runs = runs_of(document)
        assert [run["status"] for run in runs] == ["FAIL", "FAIL", "SUCCESS"]
        assert [run["fail_reason"].split(" (")[0] for run in runs[:2]] == [
            "RuntimeError: attempt 1",
            "RuntimeError: attempt 2",
        ]
        assert [effect["run_id"] for effect in effects(stage, handler)] == [runs[2]["run_id"]]
        assert document["task_state"]["failed_cnt"] == 2


def test_handler_that_fails_for_good_in_its_transaction_never_leaves_a_trace(stage: Stage) -> None:
    prepared(stage)
    start(stage, "A")
    once: TaskOptions = {"max_retries": 1, "retry_delay": 0}
    for handler in KINDS:
        stage.client.publish(handler, params(stage, fail_on_attempts=[1, 2]), key="t", **once)

    for handler in KINDS:
        assert [run["status"] for run in runs_of(stage.wait_status(f"{handler}:t", "FAIL"))] == ["FAIL", "FAIL"]
    assert effects(stage) == []


def test_ping_interval_shorter_than_the_transaction_does_not_abort_it(stage: Stage) -> None:
    prepared(stage)
    start(stage, "A")
    lease: TaskOptions = {"ping_interval": 0.1, "worker_timeout": 30}
    for handler in KINDS:
        stage.client.publish(handler, params(stage, gate=stage.gate()), key="t", **lease)
    written = {handler: stage.events.wait("written", task_id=f"{handler}:t") for handler in KINDS}
    # Ten ping intervals, by the server's clock.
    begin = stage.server_now()
    eventually(lambda: (stage.server_now() - begin).total_seconds() > 1.0, PATIENCE)

    stage.open_gate()
    for handler, (event,) in written.items():
        document = stage.wait_status(f"{handler}:t", "SUCCESS")
        (run,) = runs_of(document)
        assert run["run_id"] == event.run_id
        assert (end_of(run) - run["claim_time"]).total_seconds() > 1.0
        assert [effect["run_id"] for effect in effects(stage, handler)] == [run["run_id"]]
        assert document["task_state"]["failed_cnt"] == 0


def test_value_returned_after_the_transaction_is_stored(stage: Stage) -> None:
    prepared(stage)
    start(stage, "A")
    for handler in KINDS:
        stage.client.publish(handler, params(stage), key="t")

    for handler in KINDS:
        assert stage.client.result(handler, "t", timeout=PATIENCE) == "A"
        document = stage.document(f"{handler}:t")
        (run,) = runs_of(document)
        assert (run["status"], run["returns"]) == ("SUCCESS", "A")
        assert document["task_state"]["status"] == "SUCCESS"
        assert len(effects(stage, handler)) == 1


@pytest.mark.parametrize("handler", ["deposit_and_die_after", "deposit_and_die_after_plain"])
def test_value_of_a_worker_killed_between_its_commit_and_its_return_is_told_to_be_lost(
    stage: Stage, handler: str
) -> None:
    prepared(stage)
    killed = start(stage, "A")
    task = stage.client.publish(handler, params(stage), key="t")
    assert killed.wait() == -9
    (run,) = runs_of(stage.wait_status(task.task_id, "SUCCESS"))
    assert run["returns_owed_by"]
    with pytest.raises(WaitTimeout):
        stage.client.result(handler, "t", timeout=0.2)
    start(stage, "A")  # so everybody knows that the former one is dead

    with pytest.raises(ResultLost, match="died or stopped"):
        stage.client.result(handler, "t", timeout=PATIENCE)

    (lost,) = runs_of(stage.document(task.task_id))
    assert (lost["run_id"], lost["status"], lost["returns"]) == (run["run_id"], "SUCCESS", None)
    assert [effect["run_id"] for effect in effects(stage)] == [run["run_id"]], "its effect stays, once"


def test_lease_lost_before_the_transaction_begins_writes_nothing(stage: Stage) -> None:
    prepared(stage)
    frozen = start(stage, "A")
    task = stage.client.publish("deposit_late", {"database": stage.database, "gate": stage.gate()}, key="t", **SHORT)
    first = stage.wait_run(task.task_id, "A")
    frozen.pause()
    stage.client.update_option("deposit_late", "t", **LONG)
    start(stage, "B")
    stage.wait_run(task.task_id, "B")
    stage.open_gate()

    frozen.resume()
    document = stage.wait_status(task.task_id, "SUCCESS")

    timed_out, succeeded = runs_of(document)
    assert (timed_out["run_id"], timed_out["status"]) == (first["run_id"], "TIMEOUT")
    assert [effect["run_id"] for effect in effects(stage)] == [succeeded["run_id"]]
    assert succeeded["worker_id"] == "B"


def test_two_workers_of_one_task_each_commit_once_and_conflicts_are_not_counted(stage: Stage, report: Report) -> None:
    prepared(stage)
    start(stage, "A")
    start(stage, "B")
    task = stage.client.publish(
        "deposit",
        params(stage, seconds=1.0),
        key="t",
        concurrent_worker_cnt=2,
        max_retries=0,
        ping_interval=0.4,
        worker_timeout=20,
    )

    document = stage.wait_status(task.task_id, "SUCCESS", timeout=60)

    succeeded = {run["worker_id"]: run["run_id"] for run in runs_of(document) if run["status"] == "SUCCESS"}
    assert sorted(succeeded) == ["A", "B"]
    assert sorted(effect["run_id"] for effect in effects(stage)) == sorted(succeeded.values())
    conflicts = [run for run in runs_of(document) if run["status"] != "SUCCESS"]
    assert all(run["status"] == "CANCELED" for run in conflicts)
    assert document["task_state"]["failed_cnt"] == 0
    report("conflicts of two workers in transactions of 1 s on one task", len(conflicts))


def test_second_worker_that_comes_into_the_first_ones_transaction_does_not_keep_both_from_ever_committing(
    stage: Stage, report: Report
) -> None:
    prepared(stage)
    start(stage, "A")
    paused = start(stage, "B", "--concurrency", "0")
    task = stage.client.publish(
        "deposit",
        params(stage, seconds=1.0),
        key="t",
        concurrent_worker_cnt=2,
        max_retries=0,
        ping_interval=0.4,
        worker_timeout=20,
    )
    stage.events.wait("written", task_id=task.task_id, worker_id="A")
    stage.client.set_worker("B", concurrency=10)

    document = stage.wait_status(task.task_id, "SUCCESS", timeout=60)

    succeeded = {run["worker_id"]: run["run_id"] for run in runs_of(document) if run["status"] == "SUCCESS"}
    assert sorted(succeeded) == ["A", "B"]
    assert sorted(effect["run_id"] for effect in effects(stage)) == sorted(succeeded.values())
    assert document["task_state"]["failed_cnt"] == 0
    assert paused.is_alive
    report("conflicts of two workers whose transactions overlap by a part", len(runs_of(document)) - 2)
    took = document["task_state"]["finish_time"] - document["task_state"]["create_time"]
    report("two overlapping transactions of 1 s on one task took, ms", milliseconds(took))


def test_tasks_whose_transactions_write_one_document_all_count_once(stage: Stage, report: Report) -> None:
    counters = stage.mongo[stage.database]["counters"]
    counters.insert_one({"_id": "shared", "value": 0})
    start(stage, "A")
    start(stage, "B")
    for number in range(10):
        stage.client.publish("count_up", {"database": stage.database, "seconds": 0.05}, key=f"{number}", max_retries=0)

    documents = [stage.wait_status(f"count_up:{number}", "SUCCESS", timeout=60) for number in range(10)]

    found = counters.find_one({"_id": "shared"})
    assert found is not None
    assert found["value"] == 10
    runs = [run for document in documents for run in runs_of(document)]
    assert sorted(run["status"] for run in runs if run["status"] != "SUCCESS") == ["CANCELED"] * (len(runs) - 10)
    report("conflicts of 10 tasks that write one document", len(runs) - 10)


def test_open_transaction_of_a_service_on_one_task_holds_back_no_other(stage: Stage, report: Report) -> None:
    limit_transactions(stage.mongo, 60)  # it stays open while five tasks are run, however slow the machine
    start(stage, "A")
    held = stage.client.publish("noop", key="held", delay=0.5)
    with stage.mongo.start_session() as session, session.start_transaction():
        tasks = stage.mongo[stage.database]["tasks"]
        tasks.update_one({"_id": held.task_id}, {"$set": {"params": {"value": "changed"}}}, session=session)
        eventually(is_claiming(stage), PATIENCE, "the claim that waits for the transaction")
        for number in range(5):
            others = stage.client.publish("noop", key=f"{number}")
            run = runs_of(stage.wait_status(others.task_id, "SUCCESS"))[0]
        report(
            "claim beside one that waits for a transaction, ms",
            milliseconds(run["claim_time"] - stage.document(others.task_id)["task_state"]["create_time"]),
        )
        assert not runs_of(stage.document(held.task_id)), "the transaction was still open"

    (run,) = runs_of(stage.wait_status(held.task_id, "SUCCESS"))
    assert run["returns"] == "changed"


def test_commit_whose_worker_is_killed_on_the_way_stands_wholly_or_not_at_all(stage: Stage) -> None:
    prepared(stage)
    killed = start(stage, "A")
    with fail_command(stage.mongo, "commitTransaction", block_ms=1500, app_name="mtask-worker:A"):
        task = stage.client.publish("deposit", params(stage), key="t", **SHORT)
        stage.events.wait("written", task_id=task.task_id)
        commits = eventually(is_committing(stage), PATIENCE, "the commit reached the server")
        assert commits
        killed.kill()
    start(stage, "B")

    document = stage.wait_status(task.task_id, "SUCCESS")

    succeeded = [run["run_id"] for run in runs_of(document) if run["status"] == "SUCCESS"]
    assert len(succeeded) == 1
    assert [effect["run_id"] for effect in effects(stage)] == succeeded


def is_claiming(stage: Stage) -> Callable[[], bool]:
    def look() -> bool:
        wanted = {"command.findAndModify": "tasks", "appName": "mtask-worker:A"}
        pipeline: list[Document] = [{"$currentOp": {"allUsers": True}}, {"$match": wanted}]
        return bool(list(stage.mongo.admin.aggregate(pipeline)))

    return look


def is_committing(stage: Stage) -> Callable[[], bool]:
    def look() -> bool:
        pipeline: list[Document] = [
            {"$currentOp": {"allUsers": True}},
            {"$match": {"command.commitTransaction": {"$exists": True}}},
        ]
        return any(op.get("appName") == "mtask-worker:A" for op in stage.mongo.admin.aggregate(pipeline))

    return look
