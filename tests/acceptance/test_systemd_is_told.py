"""What real worker processes tell systemd. A socket of the test stands for systemd's, and gets the same datagrams."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from uuid import uuid4

import pytest

from mtask.local import ReplicaSet
from tests.mongo import eventually
from tests.workers import Stage, open_stage

#: How long systemd waits for a sign of life here, in seconds.
WATCHDOG = 3.0


@dataclass(frozen=True, slots=True)
class Message:
    """One datagram, and the process that sent it."""

    pid: int
    values: dict[str, str]
    at: float


class Systemd:
    """Takes the messages of services."""

    def __init__(self) -> None:
        # An abstract name: the path of a test's folder may be longer than that of a socket can be.
        self.address = f"@mtask-test-{uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{self.address[1:]}")
        self.messages: list[Message] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a service that is watched."""
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": f"{WATCHDOG * 1e6:.0f}"}

    def _listen(self) -> None:
        while True:
            data, credentials, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
            if not data:
                return
            pid = struct.unpack("3i", credentials[0][2])[0]
            values = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.messages.append(Message(pid, values, monotonic()))

    def close(self) -> None:
        """Take no more."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", f"\0{self.address[1:]}")
        self._thread.join()
        self._socket.close()

    def told(self, name: str) -> list[Message]:
        """Return the messages that give this name a value."""
        return [message for message in self.messages if name in message.values]

    def would_end(self) -> bool:
        """Whether the watchdog of systemd would end the process now."""
        return monotonic() - self.told("WATCHDOG")[-1].at > WATCHDOG


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    with closing(Systemd()) as made:
        yield made


def test_service_is_ready_when_it_takes_tasks_and_says_that_it_stops(stage: Stage, systemd: Systemd) -> None:
    worker = stage.start("A", environment=systemd.environment)
    [ready] = eventually(lambda: systemd.told("READY"), message="ready")
    assert ready.values == {"STATUS": "takes tasks", "READY": "1", "WATCHDOG": "1"}
    before = systemd.messages[: systemd.messages.index(ready)]
    assert {message.values["STATUS"] for message in before} == {"its status is ready, not running"}

    # It goes on to show that it lives while a run of it keeps it from ending.
    stage.client.publish("hold", {"gate": stage.gate()}, key="1")
    stage.events.wait("start")
    worker.terminate()
    [stopping] = eventually(lambda: systemd.told("STOPPING"), message="stopping")
    eventually(lambda: systemd.told("WATCHDOG")[-1].at > stopping.at, message="a sign of life")
    stage.open_gate()
    assert worker.wait() == 0
    assert systemd.told("STOPPING") == [stopping]
    assert {message.pid for message in systemd.messages} == {worker.pid}


def test_blocked_worker_shows_no_sign_of_life_and_the_watchdogs_signal_shows_the_handler(
    stage: Stage, systemd: Systemd
) -> None:
    worker = stage.start("A", environment=systemd.environment)
    eventually(lambda: len(systemd.told("WATCHDOG")) > 3, message="signs of life")
    stage.client.publish("hold_blocking", {"gate": stage.gate()}, key="1")
    eventually(systemd.would_end, message="no sign of life")

    worker.send(signal.SIGABRT)  # as systemd does then
    assert worker.wait() == -signal.SIGABRT
    assert "in hold_blocking" in worker.log


def test_service_whose_database_is_away_lives_and_says_so(
    single_set: ReplicaSet, database_name: str, tmp_path: Path, systemd: Systemd
) -> None:
    with open_stage(single_set.uri, database_name, tmp_path) as stage:
        worker = stage.start("A", environment=systemd.environment)
        eventually(lambda: systemd.told("READY"), message="ready")
        [node] = single_set.nodes
        single_set.kill(node)

        def says_so() -> bool:
            return systemd.messages[-1].values["STATUS"].startswith("the database has not answered for")

        eventually(says_so, message="the database is away")
        assert not systemd.would_end()
        single_set.restart(node)
        eventually(lambda: systemd.messages[-1].values["STATUS"] == "takes tasks", message="it takes tasks again")
        assert worker.is_alive


def test_only_the_supervisor_of_several_processes_is_the_service(stage: Stage, systemd: Systemd) -> None:
    worker = stage.launch("A", "--processes", "2", "--shutdown-timeout", "5", environment=systemd.environment)
    eventually(lambda: len(stage.client.workers()) == 2 and len(systemd.told("WATCHDOG")) > 3, message="all work")
    assert systemd.messages[-1].values == {"STATUS": "2 of 2 processes live", "READY": "1", "WATCHDOG": "1"}
    worker.terminate()
    assert worker.wait() == 0
    assert systemd.told("STOPPING")
    assert {message.pid for message in systemd.messages} == {worker.pid}


def test_wrong_variable_of_systemd_ends_the_start_with_a_clear_error(stage: Stage, systemd: Systemd) -> None:
    refused = stage.launch("A", environment={**systemd.environment, "WATCHDOG_USEC": "soon"})
    assert refused.wait() == 2
    assert "WATCHDOG_USEC='soon'" in refused.log
    assert "Traceback" not in refused.log


def test_worker_works_without_the_socket_that_it_should_tell(stage: Stage) -> None:
    worker = stage.start("A", environment={"NOTIFY_SOCKET": str(stage.folder / "absent")})
    stage.client.publish("noop", key="1")
    stage.events.wait("end")
    assert "systemd not told" in worker.log
    worker.terminate()
    assert worker.wait() == 0
