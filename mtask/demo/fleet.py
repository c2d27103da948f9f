"""Starts, kills and stops the worker processes of the demo. No process is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import IO, Self

from mtask.cli.workers.supervisor import with_uri, worker_command
from mtask.errors import WorkerError

APP = "mtask.demo.app:app"
STOP_TIMEOUT = timedelta(seconds=5)
_SHUTDOWN_SECONDS = 2
_SHOWN_BYTES = 2000


class DemoFailed(WorkerError):
    """The demo cannot continue."""


class WorkerProcess:
    """One `mtask-worker` process."""

    def __init__(self, worker_id: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.worker_id = worker_id
        self.is_killed = False
        # The log file has no name in the file system. So nobody has to remove it, however this process ends.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            # Python's own folder contains no modules and no .env file of the user.
            cwd=sys.prefix,
            env=environment,
            # Ctrl-C reaches only the demo's own process. The demo then stops its workers.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.process.poll()

    @property
    def status(self) -> str:
        """The state of the process in words."""
        if self.is_killed:
            return "killed"
        code = self.exit_code
        return "running" if code is None else "stopped" if code == 0 else f"exit code {code}"

    def log_tail(self) -> str:
        """Return the end of the process's log."""
        self._output.seek(0, 2)
        self._output.seek(max(0, self._output.tell() - _SHOWN_BYTES))
        return self._output.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process as a crash would: with SIGKILL."""
        self.is_killed = True
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Wait until the process has ended. If it has not ended after STOP_TIMEOUT, kill it."""
        try:
            self.process.wait(STOP_TIMEOUT.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            self._output.close()


class Fleet:
    """Worker processes on one database. At the end of the `with` block, all of them are stopped."""

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
        """Start `count` workers."""
        for number in range(1, count + 1):
            worker_id = f"worker-{number}"
            self.workers.append(WorkerProcess(worker_id, self._command(worker_id), with_uri(os.environ, self._uri)))

    def _command(self, worker_id: str) -> list[str]:
        # All settings but the URI are flags, so that the user's environment has no influence. With --supervised, a
        # worker ends when the demo's process ends.
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
        """Raise DemoFailed if a worker that the demo did not kill has ended."""
        for worker in self.workers:
            if not worker.is_killed and worker.exit_code is not None:
                raise DemoFailed(
                    f"{worker.worker_id} (pid {worker.pid}) ended with exit code {worker.exit_code}, though it was "
                    f"not killed. The end of its log:\n{worker.log_tail() or '(empty)'}"
                )

    def stop(self) -> None:
        """Stop all workers, and wait until they have ended."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.close()
