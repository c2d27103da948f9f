"""A worker_id belongs to one live process, and a supervisor keeps its processes running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from time import monotonic

import pytest

from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, Document, eventually
from tests.workers import Stage, WorkerProcess, runs_of


def assert_serves(stage: Stage, worker_id: str, key: str) -> None:
    sentinel = stage.client.publish("noop", key=key, specific_worker_ids=[worker_id])
    stage.wait_status(sentinel.task_id, "SUCCESS")


@pytest.mark.parametrize("state", ["working", "frozen"])
def test_worker_id_of_a_live_process_is_refused_to_another_with_a_clear_error(stage: Stage, state: str) -> None:
    first = stage.start("A")
    if state == "frozen":
        first.pause()

    second = stage.launch("A")
    assert second.wait() == 5
    assert f"worker_id 'A' is in use by process {first.pid}" in second.log
    assert "Choose another --worker-id or stop that process" in second.log
    assert "Traceback" not in second.log

    if state == "frozen":
        first.resume()
    assert_serves(stage, "A", "afterwards")
    assert stage.events.starts()[0].pid == first.pid


def test_of_several_processes_started_at_once_with_one_worker_id_one_works_and_all_others_are_refused(
    stage: Stage,
) -> None:
    contenders = [stage.launch("A") for _ in range(4)]
    eventually(lambda: sum(not worker.is_alive for worker in contenders) == 3, PATIENCE, "three ended")

    winner = next(worker for worker in contenders if worker.is_alive)
    stage.wait_running(winner)
    assert [worker.wait() for worker in contenders if worker is not winner] == [5, 5, 5]
    assert_serves(stage, "A", "afterwards")


def test_worker_id_of_a_killed_process_can_be_taken_at_once_and_its_run_by_its_lease_only(
    stage: Stage, report: Report
) -> None:
    killed = stage.start("A")
    lease = {"ping_interval": 0.5, "worker_timeout": 2, "retry_delay": 0}
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="held", **lease).task_id  # type: ignore[call-overload]
    stage.wait_run(task_id, "A")
    killed.kill()

    began = monotonic()
    stage.start("A")
    report("killed worker's id taken again, process start included, s", round(monotonic() - began, 2))
    stage.open_gate()
    first, second = runs_of(stage.wait_status(task_id, "SUCCESS"))
    assert (first["worker_id"], first["status"]) == ("A", "TIMEOUT")
    assert (second["worker_id"], second["status"]) == ("A", "SUCCESS")
    assert second["claim_time"] >= first["ping_expire_time"]


def test_worker_id_of_a_stopped_process_can_be_taken_at_once(stage: Stage) -> None:
    stopped = stage.start("A")
    stopped.terminate()
    assert stopped.wait() == 0

    stage.start("A")
    assert_serves(stage, "A", "afterwards")


class Crew:
    """A supervisor with two processes, and their documents."""

    def __init__(self, stage: Stage, *flags: str) -> None:
        self.stage = stage
        self.worker_ids = [f"S-{place}" for place in range(2)]
        self.supervisor: WorkerProcess = stage.launch("S", "--processes", "2", *flags)

    def wait_running(self, *other_than: int) -> dict[str, int]:
        """Wait until both work, in processes other than these; return their pids."""

        def pids() -> dict[str, int] | None:
            found: list[Document | None] = [self.stage.worker_document(worker_id) for worker_id in self.worker_ids]
            running = {f["_id"]: f["pid"] for f in found if f is not None and f["status"] == "running"}
            return running if len(running) == 2 and not set(running.values()) & set(other_than) else None

        running = eventually(pids, PATIENCE, "two processes running")
        assert running is not None
        return running

    def statuses(self) -> list[str]:
        found = [self.stage.worker_document(worker_id) for worker_id in self.worker_ids]
        return [document["status"] for document in found if document is not None]


def test_supervised_process_that_is_killed_is_started_again_under_its_worker_id_and_one_that_is_stopped_is_not(
    stage: Stage, report: Report
) -> None:
    crew = Crew(stage)
    former = crew.wait_running()
    assert set(crew.supervisor.pids()) == {crew.supervisor.pid, *former.values()}

    began = monotonic()
    os.kill(former["S-1"], signal.SIGKILL)
    running = crew.wait_running(former["S-1"])
    report("supervised process killed to its successor running, s", round(monotonic() - began, 2))
    assert running["S-0"] == former["S-0"], "the other goes on"
    assert_serves(stage, "S-1", "afterwards")
    assert stage.events.starts()[0].pid == running["S-1"]

    stage.client.stop_worker("S-1")
    eventually(lambda: running["S-1"] not in crew.supervisor.pids(), PATIENCE, "the process has ended")
    assert_serves(stage, "S-0", "to/0")
    assert set(crew.supervisor.pids()) == {crew.supervisor.pid, running["S-0"]}
    assert crew.statuses() == ["running", "stopped"]
    crew.supervisor.terminate()
    assert crew.supervisor.wait() == 0


def test_sigterm_to_the_supervisor_stops_all_its_processes_in_order(stage: Stage) -> None:
    crew = Crew(stage, "--shutdown-timeout", "0.2")
    crew.wait_running()
    task_ids = [
        stage.client.publish("hold", {"gate": stage.gate()}, key=worker_id, specific_worker_ids=[worker_id]).task_id
        for worker_id in crew.worker_ids
    ]
    for task_id in task_ids:
        stage.wait_run(task_id)

    crew.supervisor.terminate()
    assert crew.supervisor.wait() == 0
    assert crew.supervisor.pids() == []
    assert crew.statuses() == ["stopped"] * 2
    for task_id in task_ids:
        document = stage.document(task_id)
        assert [run["status"] for run in runs_of(document)] == ["CANCELED"]
        assert document["task_state"]["status"] == "INIT"
        assert document["task_state"]["failed_cnt"] == 0


def test_processes_whose_supervisor_is_killed_stop_by_themselves(stage: Stage) -> None:
    crew = Crew(stage, "--shutdown-timeout", "0.2")
    crew.wait_running()
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="long").task_id
    stage.wait_run(task_id)

    crew.supervisor.kill()
    eventually(lambda: not crew.supervisor.pids(), PATIENCE, "no process left")
    assert crew.statuses() == ["stopped"] * 2
    assert stage.document(task_id)["task_state"]["failed_cnt"] == 0
    assert stage.document(task_id)["task_state"]["status"] == "INIT"


@pytest.mark.long
def test_supervised_workers_give_up_where_there_was_no_database_from_the_start() -> None:
    command = [sys.executable, "-m", "mtask.cli.worker", "tests.acceptance.app:app", "--processes", "2"]
    done = subprocess.run(
        [*command, "--uri", "mongodb://127.0.0.1:1/"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "cannot be reached" in done.stderr
    assert "starting another" not in done.stderr
