"""The worker processes of the demo: started, killed, stopped; none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import IO, Self

from mtask.errors import WorkerError
from mtask.worker.supervisor import with_uri, worker_command

APP = "mtask.demo.app:app"
STOP_TIMEOUT = timedelta(seconds=5)
_SHUTDOWN_SECONDS = 2
_SHOWN_BYTES = 2000


class DemoFailed(WorkerError):
    """The demo cannot go on."""


class WorkerProcess:
    """One `mtask-worker` process."""

    def __init__(self, worker_id: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.worker_id = worker_id
        self.is_killed = False
        # Without a name from the start: nothing to remove, however this process ends.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            # Where no module and no .env of the user lies.
            cwd=sys.prefix,
            env=environment,
            # Ctrl-C is for the demo, which then stops its workers.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, or None while it runs."""
        return self.process.poll()

    @property
    def status(self) -> str:
        """How it is, in a word or two."""
        if self.is_killed:
            return "killed"
        code = self.exit_code
        return "running" if code is None else "stopped" if code == 0 else f"exit code {code}"

    def said(self) -> str:
        """Return the end of what it logged."""
        self._output.seek(0, 2)
        self._output.seek(max(0, self._output.tell() - _SHOWN_BYTES))
        return self._output.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End it as a crash would: SIGKILL."""
        self.is_killed = True
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """See that it has ended, by force if need be."""
        try:
            self.process.wait(STOP_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            self._output.close()


class Fleet:
    """Some worker processes on one database. As a context manager it stops them all."""

    def __init__(self, uri: str, database: str, concurrency: int) -> None:
        self._uri = uri
        self._database = database
        self._concurrency = concurrency
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, count: int) -> None:
        """Start that many."""
        for number in range(1, count + 1):
            worker_id = f"worker-{number}"
            self.workers.append(WorkerProcess(worker_id, self._command(worker_id), with_uri(os.environ, self._uri)))

    def _command(self, worker_id: str) -> list[str]:
        # Every flag but the URI is given, so that the user's environment changes nothing.
        # Supervised: it ends with its parent.
        return worker_command(
            [
                *(APP, "--supervised", "--processes", "1", "--queues", "demo", "--worker-id", worker_id),
                *("--database", self._database, "--concurrency", str(self._concurrency)),
                *("--shutdown-timeout", str(_SHUTDOWN_SECONDS), "--log-level", "WARNING"),
            ]
        )

    def find(self, worker_id: str) -> WorkerProcess:
        """Return a worker's process."""
        return next(worker for worker in self.workers if worker.worker_id == worker_id)

    def check(self) -> None:
        """Raise DemoFailed when a worker ended that nobody killed."""
        for worker in self.workers:
            if not worker.is_killed and worker.exit_code is not None:
                raise DemoFailed(
                    f"{worker.worker_id} (pid {worker.pid}) ended with exit code {worker.exit_code}, and nobody had "
                    f"killed it. The end of its log:\n{worker.said() or '(empty)'}"
                )

    def stop(self) -> None:
        """Stop them all, and wait until they have ended."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.close()
