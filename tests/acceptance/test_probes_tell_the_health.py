"""Probes of real worker processes: a frozen one is not alive; one whose database is away is alive and not ready."""

from __future__ import annotations

import signal
from pathlib import Path

from mtask.cli.health import main
from mtask.health import Health
from mtask.local import ReplicaSet
from tests.mongo import eventually
from tests.workers import Stage, open_stage


def is_alive(path: Path) -> bool:
    return main([str(path), "--max-age", "8"]) == 0


def is_ready(path: Path) -> bool:
    return main([str(path), "--ready", "--max-age", "60"]) == 0


def test_frozen_worker_is_not_alive_and_a_stopped_one_leaves_no_file(stage: Stage) -> None:
    path = stage.folder / "health"
    worker = stage.start("A", "--health-file", str(path))
    eventually(lambda: is_ready(path), message="ready")
    assert is_alive(path)

    worker.pause()
    eventually(lambda: not is_alive(path), message="not alive")
    worker.resume()
    eventually(lambda: is_alive(path), message="alive again")

    # A handler that keeps the event loop for itself: nothing else would show that the worker claims nothing.
    stage.client.publish("hold_blocking", {"gate": stage.gate()}, key="1")
    eventually(lambda: not is_alive(path), message="not alive")
    stage.open_gate()
    eventually(lambda: is_alive(path), message="alive again")

    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert not path.exists()
    assert not list(stage.folder.glob("health*"))


def test_worker_whose_database_is_away_is_alive_and_not_ready(
    single_set: ReplicaSet, database_name: str, tmp_path: Path
) -> None:
    with open_stage(single_set.uri, database_name, tmp_path) as stage:
        path = tmp_path / "health"
        worker = stage.start("A", "--health-file", str(path))
        eventually(lambda: is_ready(path), message="ready")
        [node] = single_set.nodes
        single_set.kill(node)
        eventually(lambda: not is_ready(path), message="not ready")
        assert is_alive(path)
        assert worker.is_alive
        single_set.restart(node)
        eventually(lambda: is_ready(path), message="ready again")
        assert is_alive(path)


def test_each_process_of_a_supervisor_has_a_health_file(stage: Stage) -> None:
    path = stage.folder / "health"
    (stage.folder / "health.7").write_text(Health("former", 1, "running", 0.0, 0.0, is_answered=True).dumped())
    # The environment names the file as well, as in the image.
    variables = {"MTASK_HEALTH_FILE": str(path)}
    worker = stage.launch("A", "--processes", "2", "--shutdown-timeout", "5", environment=variables)
    eventually(lambda: len(list(stage.folder.glob("health.?"))) == 2 and is_ready(path), message="both ready")
    worker.terminate()
    assert worker.wait() == 0
    assert not list(stage.folder.glob("health*"))


def test_health_file_that_cannot_be_written_ends_the_start_with_a_clear_error(stage: Stage) -> None:
    refused = stage.launch("A", "--health-file", "/proc/none/health")
    assert refused.wait() == 2
    assert "is no folder that this process may write into" in refused.log
    assert "Traceback" not in refused.log
