"""Handlers that die or do not end fail with the cause, and disturb nobody else."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.acceptance.conftest import Report
from tests.integration.features.isolation.bench import APP, is_alive
from tests.mongo import eventually
from tests.workers import Stage, WorkerProcess, runs_of

ONCE: dict[str, Any] = {"max_retries": 0}
OTHERS = 50


def start(stage: Stage, *flags: str, worker_id: str = "A") -> WorkerProcess:
    worker = stage.launch(worker_id, *flags, app=APP)
    stage.wait_running(worker)
    return worker


def noted(stage: Stage, name: str) -> str:
    path = stage.folder / name
    eventually(path.exists, message=f"noted: {name}")
    return path.read_text()


def children(pid: int) -> list[int]:
    """Return the processes that this process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def executors(worker: WorkerProcess) -> list[int]:
    return [pid for pid in children(worker.pid) if is_alive(pid) and b"isolation.child" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def params(stage: Stage, how: str) -> dict[str, str]:
    return {"folder": str(stage.folder), "how": how}


@pytest.mark.parametrize(
    ("name", "how", "cause"),
    [
        ("die", "SIGSEGV", "executor killed by SIGSEGV"),
        pytest.param("die", "exit", "executor exited with code 3", marks=pytest.mark.long),
        pytest.param("die", "memory", "executor ended above its 150 MiB of memory", marks=pytest.mark.long),
        pytest.param(
            "stuck", "spins in C", "the run took longer than run_timeout_ms (1000 ms)", marks=pytest.mark.long
        ),
        pytest.param(
            "stuck", "ignores SIGTERM", "the run took longer than run_timeout_ms (1000 ms)", marks=pytest.mark.long
        ),
        ("stuck", "forks", "the run took longer than run_timeout_ms (1000 ms)"),
    ],
)
def test_a_handler_that_dies_or_is_stuck_fails_with_the_cause_and_disturbs_nobody(
    stage: Stage, report: Report, name: str, how: str, cause: str
) -> None:
    worker = start(stage, "--executors", "2", "--max-executor-memory", "150")
    folder = {"folder": str(stage.folder)}
    others = [stage.client.publish("hold_here", folder, key=f"{number}").task_id for number in range(OTHERS - 1)]
    beside = stage.client.publish("hold", folder, key="beside").task_id
    pid_beside = int(noted(stage, "started-beside"))
    limit: dict[str, Any] = {"run_timeout": 1} if name == "stuck" else {}
    task_id = stage.client.publish(name, params(stage, how), key="1", **limit, **ONCE).task_id
    pid = int(noted(stage, "started-1"))
    began = stage.server_now()

    (run,) = runs_of(stage.wait_status(task_id, "FAIL"))
    assert run["fail_reason"] == cause
    report(f"{how}, FAIL after, ms", round((run["fail_time"] - began).total_seconds() * 1000))
    started = [int(child) for child in noted(stage, "children-1").split()] if how != "memory" and (
        name == "die" or how == "forks"
    ) else []  # fmt: skip
    eventually(lambda: not any(map(is_alive, [pid, *started])), message="the executor and its children are gone")
    eventually(lambda: len(executors(worker)) == 2, message="the executor is replaced")

    (stage.folder / "gate").touch()
    for other in [*others, beside]:
        (run,) = runs_of(stage.wait_status(other, "SUCCESS"))
        assert run["worker_id"] == "A"
    assert run["returns"] == pid_beside
    worker.terminate()
    assert worker.wait() == 0
    assert "Traceback" not in worker.log


@pytest.mark.long
def test_a_canceled_handler_that_never_looks_is_gone(stage: Stage, report: Report) -> None:
    start(stage, "--executors", "1")
    task_id = stage.client.publish("stuck", params(stage, "never looks"), key="1").task_id
    pid = int(noted(stage, "started-1"))
    began = monotonic()
    stage.client.cancel("stuck", "1")
    eventually(lambda: not is_alive(pid), message="gone")
    report("canceled handler gone after, s", round(monotonic() - began, 2))
    stage.wait_status(task_id, "CANCELED")


def test_an_executor_of_a_frozen_worker_ends_soon_after_the_lease(stage: Stage, report: Report) -> None:
    worker = start(stage, "--executors", "1")
    lease: dict[str, Any] = {"ping_interval": 0.3, "worker_timeout": 1.5, "retry_delay": 0}
    stage.client.publish("stuck", params(stage, "never looks"), key="1", **lease)
    pid = int(noted(stage, "started-1"))
    worker.pause()
    began = monotonic()
    eventually(lambda: not is_alive(pid), message="gone, though its worker cannot end it")
    report("handler of a frozen worker gone after, s", round(monotonic() - began, 2))
    worker.resume()
    eventually(lambda: len(runs_of(stage.document("stuck:1"))) == 2, message="the worker serves on, and tries again")
    assert runs_of(stage.document("stuck:1"))[0]["status"] == "TIMEOUT"


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(how, marks=pytest.mark.long) for how in ("never looks", "spins in C", "ignores SIGTERM")), "forks"],
)
def test_executors_end_with_a_worker_that_is_killed(stage: Stage, report: Report, how: str) -> None:
    worker = start(stage, "--executors", "2")
    lease = {"ping_interval": 0.3, "worker_timeout": 1.5, "retry_delay": 0}
    stage.client.publish("stuck", params(stage, how), key="1", **lease)  # type: ignore[call-overload]
    stage.client.publish("hold", {"folder": str(stage.folder)}, key="2", **lease)  # type: ignore[call-overload]
    pids = [int(noted(stage, "started-1")), int(noted(stage, "started-2"))]
    if how == "forks":
        pids += map(int, noted(stage, "children-1").split())
    began = monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, pids)), message="the executors are gone")
    report(f"killed worker, {how}: executors gone after, ms", round((monotonic() - began) * 1000))

    (stage.folder / "gate").touch()
    start(stage, worker_id="B")
    # Earlier ones may have been handed back, because executors start slowly on a slow machine.
    *_, killed, last = runs_of(stage.wait_status("hold:2", "SUCCESS"))
    assert (killed["status"], killed["worker_id"], last["worker_id"]) == ("TIMEOUT", "A", "B")


def test_several_executors_have_one_engine(stage: Stage) -> None:
    worker = start(stage, "--executors", "2")
    folder = {"folder": str(stage.folder)}
    for number in range(2):
        stage.client.publish("hold", folder, key=f"{number}")
    pids = {noted(stage, f"started-{number}") for number in range(2)}
    assert len(pids) == 2
    every: list[dict[str, Any]] = [
        {"$currentOp": {"allUsers": True, "idleConnections": True, "idleCursors": True}},
        {"$match": {"appName": "mtask-worker:A"}},
    ]

    def streams() -> int:
        found = stage.mongo.admin.aggregate(every)
        return sum("$changeStream" in str(one.get("cursor", {}).get("originatingCommand", "")) for one in found)

    # Between two reads of the stream, the server may show none for a moment.
    assert eventually(streams, message="a change stream") == 1
    (stage.folder / "gate").touch()
    for number in range(2):
        stage.wait_status(f"hold:{number}", "SUCCESS")
    worker.terminate()
    assert worker.wait() == 0
    assert not any(map(is_alive, map(int, pids)))


def test_lines_of_a_handler_are_in_the_log_of_the_worker(stage: Stage) -> None:
    worker = start(stage, "--isolation", "process")
    task_id = stage.client.publish("raises", {"kind": "error"}, key="1", **ONCE).task_id
    (run,) = runs_of(stage.wait_status(task_id, "FAIL"))
    assert run["fail_reason"].startswith("ValueError: a bad value")
    eventually(lambda: f"handler failed task={task_id} run={run['run_id']}" in worker.log, message="logged")
    assert "about to fail" in worker.log


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--isolation", "fork"), 'use "thread" or "process"'),
        (("--executors", "0"), "use 1 to 1000"),
        (("--max-executor-memory", "1"), "use 64 or more"),
        (("--max-runs-per-executor", "0"), "use 1 or more"),
    ],
)
def test_wrong_flags_are_refused(stage: Stage, flags: tuple[str, ...], said: str) -> None:
    worker = stage.launch("A", *flags, app=APP)
    assert worker.wait() == 2
    assert said in worker.log


def test_a_supervisor_passes_the_flags_on(stage: Stage) -> None:
    worker = stage.launch(None, "--processes", "2", "--isolation", "process", "--executors", "1", app=APP)
    task_id = stage.client.publish("thread_or_not", key="1").task_id
    pid = runs_of(stage.wait_status(task_id, "SUCCESS"))[-1]["returns"]
    own = children(worker.pid)
    assert pid not in own
    assert pid in [child for one in own for child in children(one)]
