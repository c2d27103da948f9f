"""Whatever handlers and documents do: the worker goes on, the state says clearly what happened, and
other tasks are not disturbed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtask import TaskSpec
from mtask.client.views import StatRow
from mtask.kernel.document.options import TaskOptions
from tests.acceptance.conftest import Report
from tests.acceptance.faults_app import RAISED, UNSTORABLE
from tests.faults.malformed import good, malformed
from tests.mongo import PATIENCE, Document, eventually
from tests.workers import Stage, WorkerProcess, end_of, runs_of

APP = "tests.acceptance.faults_app:app"
OTHER_APP = "tests.acceptance.faults_app:other_app"
#: Two scans, at least: what a worker would do again and again shows by then.
TWO_SCANS = 11.0
#: Found at most this often in that time from an idle worker, scans, heartbeats and reads of the stream in all.
IDLE_COMMANDS = 25


def start(stage: Stage, worker_id: str, *flags: str, app: str = APP) -> WorkerProcess:
    worker = stage.launch(worker_id, *flags, app=app)
    stage.wait_running(worker)
    return worker


def assert_works(stage: Stage, worker: WorkerProcess, key: str = "afterwards") -> None:
    """The worker is the process that it was, and runs what comes."""
    pid = worker.pid
    published = stage.client.publish("noop", {"value": key}, key=key)
    run = runs_of(stage.wait_status(published.task_id, "SUCCESS"))[0]
    assert run["returns"] == key
    assert worker.is_alive
    assert stage.events.starts(published.task_id)[0].pid == pid


@contextmanager
def profiled(stage: Stage) -> Iterator[None]:
    """Let the server write down every command on this database, and forget those of before."""
    database = stage.mongo[stage.database]
    database.drop_collection("system.profile")
    database.command("profile", 2)
    try:
        yield
    finally:
        database.command("profile", 0)


def commands_of(stage: Stage, worker_id: str) -> list[str]:
    """Return what the worker asked of the database while it was profiled."""
    found = stage.mongo[stage.database]["system.profile"].find({"appName": f"mtask-worker:{worker_id}"})
    return [f"{entry['op']} {entry['ns']} {next(iter(entry.get('command', {'?': 0})))}" for entry in found]


# --- handlers ---------------------------------------------------------------------------------------------------


def test_handler_that_raises_anything_at_all_fails_with_the_reason_and_the_worker_goes_on(stage: Stage) -> None:
    worker = start(stage, "A")
    every = [(handler, kind) for handler in ("raises", "raises_plain") for kind in RAISED]
    specs = [TaskSpec(handler, {"kind": kind}, key=kind, max_retries=0) for handler, kind in every]
    stage.client.publish_many([*specs, *(TaskSpec("noop", key=f"beside/{number}") for number in range(20))])

    for handler, kind in every:
        document = stage.wait_status(f"{handler}:{kind}", "FAIL")
        (run,) = runs_of(document)
        assert run["status"] == "FAIL"
        raised = kind.split()[0]
        # A coroutine turns StopIteration into a RuntimeError that names it.
        assert raised in run["fail_reason"] or raised.endswith("Iteration"), run["fail_reason"]
        assert len(run["fail_reason"]) <= 3000
    assert max(map(len, worker.log.splitlines())) < 200_000, "the 10 MB are not in the log"
    for number in range(20):
        stage.wait_status(f"noop:beside/{number}", "SUCCESS")
    assert_works(stage, worker)


def test_handler_that_calls_sys_exit_fails_and_its_process_stays(stage: Stage) -> None:
    worker = start(stage, "A")
    beside = stage.client.publish("hold", {"gate": stage.gate()}, key="beside")
    stage.wait_run(beside.task_id, "A")

    for handler in ("raise_exit", "raise_exit_plain"):
        stage.client.publish(handler, key="exit", max_retries=1, retry_delay=0.1)

        runs = runs_of(stage.wait_status(f"{handler}:exit", "FAIL"))
        assert [run["status"] for run in runs] == ["FAIL", "FAIL"]
        assert all("SystemExit: 3" in run["fail_reason"] for run in runs)
    stage.open_gate()
    assert len(runs_of(stage.wait_status(beside.task_id, "SUCCESS"))) == 1
    assert_works(stage, worker)


def test_task_that_a_handler_left_behind_calls_sys_exit_and_the_worker_goes_on(stage: Stage) -> None:
    worker = start(stage, "A")
    beside = stage.client.publish("hold", {"gate": stage.gate()}, key="beside")
    stage.wait_run(beside.task_id, "A")

    left = stage.client.publish("leave_a_task_that_exits", {"delay": 0.1}, key="left")

    stage.wait_status(left.task_id, "SUCCESS")
    eventually(lambda: "tried to exit the process" in worker.log, PATIENCE, "the exit in the log")
    stage.open_gate()
    assert len(runs_of(stage.wait_status(beside.task_id, "SUCCESS"))) == 1
    assert_works(stage, worker)


@pytest.mark.parametrize("where", ["", "_isolated"], ids=["in the worker", "in an executor"])
def test_handler_that_seizes_the_event_loop_ends_neither_the_worker_nor_other_runs(stage: Stage, where: str) -> None:
    worker = start(stage, "A", "--executors", "1")
    beside = stage.client.publish("hold", {"gate": stage.gate()}, key="beside")
    stage.wait_run(beside.task_id, "A")

    for handler, told in (("stops_the_loop", "stopped"), ("cancels_all", "only its own")):
        for key in "12":  # the executor goes on, too
            seizing = stage.client.publish(f"{handler}{where}", key=key, max_retries=0)
            (run,) = runs_of(stage.wait_status(seizing.task_id, "SUCCESS"))
            assert run["returns"] == told
    stage.open_gate()
    assert len(runs_of(stage.wait_status(beside.task_id, "SUCCESS"))) == 1
    assert_works(stage, worker)
    worker.terminate()
    assert worker.wait() == 0


def test_handler_that_blocks_the_event_loop_past_the_lease_keeps_it_and_no_one_else_takes_the_task(
    stage: Stage,
) -> None:
    stage.start("A")
    lease: TaskOptions = {"ping_interval": 0.5, "worker_timeout": 2.5}
    blocking = stage.client.publish("block", {"seconds": 4.0}, key="blocking", **lease)
    first = stage.wait_run(blocking.task_id, "A")
    stage.start("B")

    document = stage.wait_status(blocking.task_id, "SUCCESS")

    (run,) = runs_of(document)
    assert run["run_id"] == first["run_id"]
    assert run["returns"] == "A"
    assert document["task_state"]["failed_cnt"] == 0
    assert (end_of(run) - run["claim_time"]).total_seconds() > 3.9, "it did hold it for longer than the lease"
    assert len(stage.events.starts(blocking.task_id)) == 1


def test_handler_that_blocks_the_event_loop_is_named_in_the_log_while_it_blocks(stage: Stage) -> None:
    worker = start(stage, "A")

    def told(at: str) -> list[str]:
        return [one for one in worker.log.splitlines() if "event loop is blocked" in one and at in one]

    for handler, at in (("hold_blocking", "in hold_blocking"), ("blocks_beside", "in block_for")):
        task_id = stage.client.publish(handler, {"gate": stage.gate(handler)}, key="1").task_id
        (line,) = eventually(partial(told, at))
        assert " WARNING " in line
        if handler == "hold_blocking":
            assert f"task={task_id} " in line
        stage.open_gate(handler)
        stage.wait_status(task_id, "SUCCESS")
    assert_works(stage, worker)


def test_handler_that_returns_what_bson_cannot_hold_fails_with_that_reason_and_is_not_tried_again(stage: Stage) -> None:
    worker = start(stage, "A")
    every = [(handler, kind) for handler in ("returns", "returns_plain") for kind in UNSTORABLE]
    specs = [TaskSpec(handler, {"kind": kind}, key=kind, retry_delay=0) for handler, kind in every]
    stage.client.publish_many([*specs, *(TaskSpec("noop", {"value": n}, key=f"beside/{n}") for n in range(20))])

    for handler, kind in every:
        (run,) = runs_of(stage.wait_status(f"{handler}:{kind}", "FAIL"))
        assert run["fail_reason"].startswith("the handler's return value"), run["fail_reason"]
        assert ("too large" in run["fail_reason"]) == (kind == "17 MB"), run["fail_reason"]
        assert "returns" not in run
    for number in range(20):
        (run,) = runs_of(stage.wait_status(f"noop:beside/{number}", "SUCCESS"))
        assert run["returns"] == number, "what was written in the same group is not disturbed"
    assert_works(stage, worker)


def test_task_without_a_handler_stays_init_and_a_worker_that_has_it_later_runs_it(stage: Stage) -> None:
    missing = stage.client.publish("only_here", key="before")
    worker = start(stage, "A")
    also = stage.client.publish("only_here", key="during")
    specs = [TaskSpec("noop", key=f"beside/{number}") for number in range(50)]
    stage.client.publish_many(specs)
    for spec in specs:
        stage.wait_status(f"noop:{spec.key}", "SUCCESS")

    def names() -> Any:
        document = stage.worker_document("A")
        return document is not None and document["unserved_names"]

    assert eventually(names, PATIENCE, "the name among unserved_names") == ["only_here"]
    for published in (missing, also):
        state = stage.document(published.task_id)["task_state"]
        assert (state["status"], state["worker_states"], state["failed_cnt"]) == ("INIT", [], 0)
    assert worker.log.count("no handler here") == 1, "said once, not per task"

    start(stage, "B", app=OTHER_APP)
    for published in (missing, also):
        (run,) = runs_of(stage.wait_status(published.task_id, "SUCCESS"))
        assert run["returns"] == "B"
    assert_works(stage, worker)


def test_worker_tells_the_names_that_it_has_no_handler_for_also_when_the_tasks_waited_for_it(stage: Stage) -> None:
    stage.client.publish("only_here", key="waited")
    start(stage, "A")

    def names() -> Any:
        document = stage.worker_document("A")
        return document is not None and document["unserved_names"]

    assert eventually(names, PATIENCE, "the name among unserved_names") == ["only_here"]
    assert stage.document("only_here:waited")["task_state"]["status"] == "INIT"


_WRONG_PARAMS: list[tuple[Any, str]] = [
    ({"number": "many"}, "number"),
    ({}, "number"),
    ({"number": 1, "nubmer": 2}, "nubmer"),
    ([1, 2], "mapping"),
    ("text", "mapping"),
    (None, "number"),
]


def test_params_that_do_not_validate_are_a_final_failure_and_never_run(stage: Stage) -> None:
    without = good("without", name="add")
    del without["params"]
    stage.set_up()
    insert(stage, [without])
    for number, (params, _) in enumerate(_WRONG_PARAMS):
        stage.client.publish("add", params, key=f"{number}", retry_delay=0)
    worker = start(stage, "A")

    said = {f"add:{number}": said for number, (_, said) in enumerate(_WRONG_PARAMS)} | {"add:without": "number"}
    for task_id, what in said.items():
        (run,) = runs_of(stage.wait_status(task_id, "FAIL"))
        assert what in run["fail_reason"], task_id
    assert stage.events.all() == []
    assert_works(stage, worker)


# --- documents --------------------------------------------------------------------------------------------------


def insert(stage: Stage, documents: Sequence[Document]) -> None:
    tasks = stage.mongo[stage.database].get_collection("tasks")
    tasks.insert_many(list(documents), ordered=False, bypass_document_validation=True)


def assert_failed_clearly(stage: Stage, kinds: Mapping[str, tuple[Document, str]]) -> None:
    """Each of these documents is FAIL, with a reason that names the field, and no batch query finds it any more."""
    tasks = stage.client.tasks  # reads dates beyond Python's years, too
    ids = {kind: document["_id"] for kind, (document, _) in kinds.items()}

    def left() -> list[str]:
        failed = tasks.find({"_id": {"$in": list(ids.values())}, "task_state.status": "FAIL"}, {"_id": 1})
        done = [document["_id"] for document in failed]
        return [kind for kind, task_id in ids.items() if task_id not in done]

    try:
        eventually(lambda: not left(), PATIENCE)
    except AssertionError:
        states = {kind: tasks.find_one({"_id": ids[kind]}, {"task_state": 1, "name": 1}) for kind in left()}
        raise AssertionError(f"not FAIL: {states}") from None
    wrong = {}
    for kind, (document, field) in kinds.items():
        state = tasks.find_one({"_id": document["_id"]}, {"task_state": 1})["task_state"]  # type: ignore[index]
        reason = state["worker_states"][-1].get("fail_reason") or ""
        if "malformed document" not in reason or field.rpartition(".")[2] not in reason:
            wrong[kind] = reason
        if "next_preempt_time" in state or "finish_time" not in state:
            wrong[kind] = str(state)
    assert not wrong


def assert_left_alone(stage: Stage, worker: WorkerProcess, report: Report) -> None:
    """The worker comes to rest: it asks the database for no more than an idle worker does, and logs nothing."""
    for _ in range(4):  # on a busy machine it takes longer to examine them all
        logged = worker.log
        with profiled(stage):
            time.sleep(TWO_SCANS)  # what must not happen has no condition to wait for
        commands = commands_of(stage, worker.worker_id or "")
        if len(commands) < IDLE_COMMANDS and worker.log == logged:
            break
    report(f"commands in {TWO_SCANS:g} s after malformed documents", len(commands))
    assert len(commands) < IDLE_COMMANDS, Counter(commands)
    assert worker.log == logged
    for document, _ in malformed().values():
        if "task" in str(document.get("_id")):
            assert logged.count(f"task={document['_id']} ") <= 1


def test_malformed_documents_written_while_a_worker_runs_fail_clearly_and_disturb_nothing(
    stage: Stage, report: Report
) -> None:
    worker = start(stage, "A")
    kinds = malformed()
    insert(stage, [document for document, _ in kinds.values()])

    assert_failed_clearly(stage, kinds)
    assert_works(stage, worker)
    assert_left_alone(stage, worker, report)
    assert {event.task_id for event in stage.events.starts()} == {"noop:afterwards"}, "none of them was run"


def test_malformed_documents_that_waited_for_the_worker_fail_clearly_and_disturb_nothing(stage: Stage) -> None:
    stage.set_up()
    kinds = malformed()
    insert(stage, [document for document, _ in kinds.values()])
    worker = start(stage, "A")

    assert_failed_clearly(stage, kinds)
    assert_works(stage, worker)
    assert {event.task_id for event in stage.events.starts()} == {"noop:afterwards"}, "none of them was run"


def test_malformed_documents_among_many_good_ones_fail_clearly_and_every_good_one_runs_once(
    stage: Stage, report: Report
) -> None:
    stage.set_up()
    kinds = malformed()
    wrong = [document for document, _ in kinds.values()]
    right = [good(f"right/{number}", params={"value": number}) for number in range(500)]
    step = len(right) // len(wrong)
    mixed = []
    for place, document in enumerate(wrong):
        mixed += [*right[place * step : (place + 1) * step], document]
    mixed += right[len(wrong) * step :]
    insert(stage, mixed)
    began = time.monotonic()
    workers = [start(stage, worker_id) for worker_id in ("A", "B")]

    def done() -> bool:
        return stage.client.count(name="noop", status="SUCCESS") >= len(right)

    eventually(done, PATIENCE, "all good tasks done")
    report("500 good tasks among malformed ones, s", round(time.monotonic() - began, 2))
    assert_failed_clearly(stage, kinds)
    starts = Counter(event.task_id for event in stage.events.starts())
    assert starts == Counter({document["_id"]: 1 for document in right})
    assert all(worker.is_alive for worker in workers)


def test_malformed_document_with_a_lapsed_run_that_nobody_here_serves_stops_no_scan(
    stage: Stage, report: Report
) -> None:
    stage.set_up()
    lapsed = {
        "run_id": "lapsed",
        "worker_id": "gone",
        "attempt": 1,
        "status": "RUNNING",
        "claim_time": good("x")["task_state"]["create_time"],
        "ping_expire_time": good("x")["task_state"]["create_time"],
    }
    document = good("lapsed", name="only_here")
    document["task_state"] |= {"status": "RUNNING", "failed_cnt": "none", "worker_states": [lapsed]}
    well = good("lapsed-too", name="only_here")
    well["task_state"] |= {"status": "RUNNING", "worker_states": [lapsed | {"run_id": "lapsed-too"}]}
    insert(stage, [document, well])

    worker = start(stage, "A")

    state = stage.wait_status("only_here:lapsed", "FAIL")["task_state"]
    assert "failed_cnt" in state["worker_states"][-1]["fail_reason"]
    state = stage.wait_status("only_here:lapsed-too", "INIT")["task_state"]
    assert [run["status"] for run in state["worker_states"]] == ["TIMEOUT"]
    assert_works(stage, worker)


_LONG = pytest.mark.long


@pytest.mark.parametrize(
    "damage",
    # Without a state no batch query finds it: a look that comes once a minute does.
    ["task_option", "failed_cnt", *(pytest.param(each, marks=_LONG) for each in ("task_state", "worker_states"))],
)
def test_document_broken_by_hand_while_it_runs_costs_no_other_task_its_lease(stage: Stage, damage: str) -> None:
    worker = start(stage, "A")
    lease: TaskOptions = {"ping_interval": 0.3, "worker_timeout": 3}
    keys = [f"held/{number}" for number in range(5)]
    gates = {key: stage.gate() for key in keys} | {keys[0]: stage.gate("of the broken one")}
    stage.client.publish_many([TaskSpec("hold", {"gate": gates[key]}, key=key, **lease) for key in keys])
    runs = {key: stage.wait_run(f"hold:{key}", "A") for key in keys}
    path = damage if damage.startswith("task") else f"task_state.{damage}"
    stage.mongo[stage.database].get_collection("tasks").update_one(
        {"_id": "hold:held/0"}, {"$set": {path: "broken"}}, bypass_document_validation=True
    )

    def extended() -> bool:
        """Every other lease has been moved to behind where it stood, by more than its length."""
        ahead = stage.server_now().timestamp()
        return all(
            runs_of(stage.document(f"hold:{key}"))[0]["ping_expire_time"].timestamp()
            > runs[key]["ping_expire_time"].timestamp() + 3.0
            and runs_of(stage.document(f"hold:{key}"))[0]["ping_expire_time"].timestamp() > ahead
            for key in keys[1:]
        )

    eventually(extended, PATIENCE, "the other leases are kept alive")
    stage.open_gate()
    for key in keys[1:]:
        (run,) = runs_of(stage.wait_status(f"hold:{key}", "SUCCESS"))
        assert run["run_id"] == runs[key]["run_id"]
    assert_works(stage, worker)
    if damage == "task_option":
        # Options count from the next claim: the run goes on, and what it did stands.
        Path(gates[keys[0]]).touch()
        (run,) = runs_of(stage.wait_status("hold:held/0", "SUCCESS"))
        assert run["run_id"] == runs[keys[0]]["run_id"]
    else:
        document = stage.wait_document("hold:held/0", is_failed, "FAIL")
        assert damage in str(runs_of(document)[-1]["fail_reason"])
        stage.events.wait("cancelled", task_id="hold:held/0")
    assert worker.log.count("pinger failed") == 0


def is_failed(document: Document) -> bool:
    state = document["task_state"]
    return isinstance(state, dict) and state.get("status") == "FAIL"


def test_statistics_and_search_live_with_malformed_documents(stage: Stage) -> None:
    stage.set_up()
    insert(stage, [document for document, _ in malformed().values()])
    start(stage, "A")
    assert_failed_clearly(stage, malformed())

    rows = stage.client.stats()
    assert all(isinstance(row, StatRow) for row in rows)
