"""Systemd: learns from the worker itself when it is ready, whether it lives, and that it stops.

A unit with `Type=notify` waits for the worker to be ready. With `WatchdogSec` systemd ends a worker that shows no sign
of life, and starts another. Each message is one datagram of lines NAME=VALUE, as sd_notify(3) has it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from time import monotonic

from mtask.health import Health
from mtask.kernel.document.status import WorkerStatus
from mtask.kernel.worker.process.log import fields, logger, told

#: The signs of life in each period of the watchdog. One of them may be late.
_SIGNS = 3
#: The time limit for a message, in seconds. Systemd reads at once, unless the machine is overloaded.
_WAIT = 1.0
#: What the environment of a service holds for this process alone. A child process must not speak in its name.
VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


@dataclass(frozen=True, slots=True)
class Service:
    """The service that this process is to systemd."""

    #: The path of systemd's socket, or "@" and the name of an abstract one.
    address: str
    #: The time after which systemd ends a process that shows no sign of life, in seconds. None: it does not watch.
    watchdog: float | None = None

    @property
    def interval(self) -> float | None:
        """The longest time between two signs of life, in seconds; None: none are wanted."""
        return None if self.watchdog is None else self.watchdog / _SIGNS

    def tell(self, **values: str) -> None:
        """Send a message. An error is logged: the worker works without systemd as well."""
        message = "".join(f"{name}={value}\n" for name, value in values.items())
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.settimeout(_WAIT)
                line.sendto(message.encode(), address)
        except OSError as error:
            logger.error("systemd not told", extra=fields(socket=self.address, reason=told(error)))


def service_of(
    notify_socket: str | None, watchdog_usec: int | None, watchdog_pid: int | None, pid: int
) -> Service | None:
    """Return the service that the process with this pid is; None: systemd did not start it, or asks for no messages.

    The other arguments are the variables of these names in the environment.
    """
    if notify_socket is None:
        return None
    is_watched = watchdog_usec is not None and watchdog_pid in (None, pid)
    return Service(notify_socket, watchdog_usec / 1e6 if is_watched and watchdog_usec else None)


class ServiceWitness:
    """Tells systemd what the pulse of this worker shows."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_ready = self._is_stopping = False

    def see(self, health: Health) -> None:
        """Tell a sign of life, and what `systemctl status` is to show."""
        values = {"STATUS": health.not_ready(monotonic()) or "takes tasks"}
        if not self._is_ready and health.status == WorkerStatus.RUNNING:
            self._is_ready = True
            values["READY"] = "1"
        if not self._is_stopping and health.status in (WorkerStatus.STOPPING, WorkerStatus.STOPPED):
            self._is_stopping = True
            values["STOPPING"] = "1"
        if self._service.watchdog is not None:
            values["WATCHDOG"] = "1"
        self._service.tell(**values)

    def end(self) -> None:
        """Do nothing: systemd sees the end of the process itself."""
