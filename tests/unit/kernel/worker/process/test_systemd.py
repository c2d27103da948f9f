"""The service that a process is to systemd, as its environment tells."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from mtask.kernel.worker.process.systemd import Service, service_of

PID = 7


@pytest.mark.parametrize(("watchdog_pid", "watchdog"), [(None, 60.0), (PID, 60.0), (PID + 1, None)])
def test_only_the_process_that_systemd_names_is_watched(watchdog_pid: int | None, watchdog: float | None) -> None:
    assert service_of("/run/notify", 60_000_000, watchdog_pid, PID) == Service("/run/notify", watchdog)


def test_process_without_a_socket_is_no_service() -> None:
    assert service_of(None, 60_000_000, PID, PID) is None


def test_signs_of_life_come_several_times_in_each_period() -> None:
    assert Service("/run/notify", 60.0).interval == 20.0
    assert Service("/run/notify").interval is None


def test_message_reaches_a_socket_with_a_path() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        path = str(Path(folder, "notify"))
        systemd.bind(path)
        Service(path).tell(STATUS="takes tasks", READY="1")
        assert systemd.recv(100) == b"STATUS=takes tasks\nREADY=1\n"
