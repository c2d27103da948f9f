"""A process that a handler forks can be terminated, and a closed terminal stops a worker."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from mtask.kernel.document.options import TaskOptions
from tests.acceptance.app import EVENTS_VARIABLE
from tests.mongo import PATIENCE
from tests.workers import APP, ROOT, Stage, runs_of

FORKING = "tests.acceptance.forking_app:app"
ONCE: TaskOptions = {"max_retries": 0}


@pytest.mark.parametrize("where", ["on_the_loop", "in_a_thread", "in_an_executor"])
def test_process_that_a_handler_forks_has_default_signals_from_its_first_instant(stage: Stage, where: str) -> None:
    worker = stage.launch("A", "--executors", "1", app=FORKING)
    stage.wait_running(worker)
    told = stage.client.publish(where, {"is_hasty": False}, key="told", **ONCE).task_id
    (run,) = runs_of(stage.wait_status(told, "SUCCESS"))
    assert run["returns"] == [True, -1, -15], "SIGTERM has its default, no descriptor wakes the parent, SIGTERM ends it"

    hasty = stage.client.publish(where, {"is_hasty": True}, key="hasty", **ONCE).task_id
    (run,) = runs_of(stage.wait_status(hasty, "SUCCESS"))
    assert run["returns"] == [-15], "a signal that came before the child had its own handlers is not lost"
    worker.terminate()
    assert worker.wait() == 0, "the worker itself still handles its signals"


def test_process_that_a_handler_forks_ends_with_the_step_of_its_handler(stage: Stage) -> None:
    worker = stage.launch("A", app=FORKING)
    stage.wait_running(worker)
    for where, codes in (("forks_in_a_thread", [0, 3, 1]), ("forks_on_the_loop", [0, 3, 1, 0])):
        forked = stage.client.publish(where, key="forks", **ONCE).task_id
        (run,) = runs_of(stage.wait_status(forked, "SUCCESS"))
        assert run["returns"] == codes, where
    assert "ValueError: raises" in worker.log
    worker.terminate()
    assert worker.wait() == 0


@contextmanager
def terminal(stage: Stage, *flags: str, before: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a worker in a terminal; yield its process and the far end of the terminal, which closes it."""
    far, near = os.openpty()
    command = [sys.executable, "-m", "mtask.cli.worker", APP, "--worker-id", "A", "--shutdown-timeout", "0.2"]
    process = subprocess.Popen(
        [*before, *command, "--database", stage.database, *flags],
        stdin=near,
        stdout=near,
        stderr=near,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        cwd=stage.folder,  # nohup writes a file there
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MTASK_URI": stage.worker_uri,
            EVENTS_VARIABLE: str(stage.events.path),
        },
    )
    os.close(near)
    try:
        yield process, far
    finally:
        process.kill()
        process.wait(PATIENCE)


def held(stage: Stage, worker_id: str) -> str:
    """Publish a task that goes on until the gate opens; return its id once this worker runs it."""
    task_id = stage.client.publish("hold", {"gate": stage.gate()}, key="held", specific_worker_ids=[worker_id]).task_id
    stage.wait_run(task_id, worker_id)
    return task_id


@pytest.mark.parametrize(("flags", "worker_id"), [((), "A"), (("--processes", "2"), "A-0")])
def test_worker_whose_terminal_is_closed_hands_its_runs_back(
    stage: Stage, flags: Sequence[str], worker_id: str
) -> None:
    with terminal(stage, *flags) as (process, far):
        task_id = held(stage, worker_id)
        os.close(far)
        assert process.wait(PATIENCE) == 0
    state = stage.document(task_id)["task_state"]
    assert (state["status"], state["failed_cnt"]) == ("INIT", 0)
    assert [run["status"] for run in state["worker_states"]] == ["CANCELED"]
    ended = stage.worker_document(worker_id)
    assert ended is not None
    assert ended["status"] == "stopped"


def test_worker_under_nohup_goes_on_without_its_terminal(stage: Stage) -> None:
    with terminal(stage, before=["nohup"]) as (process, far):
        task_id = held(stage, "A")
        status = Path(f"/proc/{process.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored & 1 << (signal.SIGHUP - 1), "as nohup has it"
        os.close(far)
        stage.open_gate()
        assert [run["status"] for run in runs_of(stage.wait_status(task_id, "SUCCESS"))] == ["SUCCESS"]
        stage.wait_status(stage.client.publish("noop", key="afterwards").task_id, "SUCCESS")


# --- before the start -----------------------------------------------------------------------------------------


def starting(app: str, *flags: str) -> subprocess.Popen[str]:
    """Start a worker that gets no further than its test lets it."""
    command = [sys.executable, "-m", "mtask.cli.worker", app, "--worker-id", "A", *flags]
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=ROOT, **piped)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("flags", [(), ("--processes", "2")], ids=["worker", "supervisor"])
def test_signal_while_the_app_is_imported_ends_the_process_in_order(
    stage: Stage, number: signal.Signals, flags: Sequence[str]
) -> None:
    where = ("--uri", stage.worker_uri, "--database", stage.database)
    with starting("tests.acceptance.slow_app:app", *where, *flags) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(number)
            assert process.wait(PATIENCE) == 0
            _, err = process.communicate()
        finally:
            process.kill()
    assert err == ""
    assert stage.worker_document("A") is None


def test_signal_while_the_database_is_silent_ends_the_worker_in_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        # The driver would wait for an answer for longer than the test.
        waits = f"connectTimeoutMS={round(4_000 * PATIENCE)}&serverSelectionTimeoutMS={round(4_000 * PATIENCE)}"
        uri = f"mongodb://127.0.0.1:{server.getsockname()[1]}/?{waits}"
        with starting("tests.acceptance.app:app", "--uri", uri) as process:
            try:
                with server.accept()[0]:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(PATIENCE) == 0
                    _, err = process.communicate()
            finally:
                process.kill()
    assert "worker stopped before its start" in err
    assert "Traceback" not in err
