"""Real `mtask-worker` processes that live for one measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.measuring.app import FOLDER_VARIABLE, TELL_CLAIMS, claims_path, starts_in
from benchmarks.measuring.counted import TELL_COMMANDS, commands_path
from benchmarks.measuring.server import NotMeasured, Scratch, Server, wait_quiet, wait_until
from mtask.settings import Settings

ROOT = Path(__file__).parents[2]
APP = "benchmarks.measuring.app:app"
DEFAULT_CONCURRENCY: int = Settings.model_fields["concurrency"].default
_START_PATIENCE = 120.0
_STOP_PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Claims:
    """The numbers of claims won, and of claims lost to others or sent too late."""

    won: int
    lost: int

    def __sub__(self, earlier: Claims) -> Claims:
        return Claims(self.won - earlier.won, self.lost - earlier.lost)

    @property
    def attempted(self) -> int:
        """All claims that reached the database."""
        return self.won + self.lost


class Process:
    """One Python process with a log, in a folder of its own, where no `.env` of the user has an effect."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self._log = folder / f"{name}.log"
        self.name = name
        # Without the user's MTASK_ variables: the defaults are measured.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MTASK_")}
        path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                env={**inherited, "PYTHONPATH": path, FOLDER_VARIABLE: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def check(self) -> None:
        """Raise NotMeasured if it has ended."""
        code = self._process.poll()
        if code is not None:
            tail = self._log.read_text(errors="replace")[-2_000:]
            raise NotMeasured(f"{self.name} ended with {code} before it should. The end of its log:\n{tail}")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ask it to stop, and wait for its end."""
        self.send(signal.SIGTERM)
        self.end()

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self.send(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Wait for its end; kill it if that takes too long."""
        try:
            self._process.wait(_STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Fleet:
    """Workers on one database; a context manager that opens when they are ready and idle.

    With `is_held_back` they claim nothing until `release`. Everything else is the default of `mtask-worker`.
    """

    def __init__(
        self,
        server: Server,
        scratch: Scratch,
        workers: int = 1,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        is_held_back: bool = False,
        more_flags: Sequence[str] = (),
        app: str = APP,
    ) -> None:
        self._scratch = scratch
        self._concurrency = concurrency
        self.folder = Path(tempfile.mkdtemp(dir=server.folder))
        flags = ["--shutdown-timeout", "1", *more_flags]
        if is_held_back or concurrency != DEFAULT_CONCURRENCY:
            flags += ["--concurrency", "0" if is_held_back else str(concurrency)]
        shared = ["mtask.cli.worker", app, "--uri", scratch.uri, "--database", scratch.name, *flags]
        self._count = workers
        self._command = shared
        self._workers: list[Process] = []

    def __enter__(self) -> Self:
        try:
            for number in range(self._count):
                name = f"w{number + 1}"
                self._workers.append(Process(name, self.folder, *self._command, "--worker-id", name))
            wait_until(self._are_running, _START_PATIENCE, f"{self._count} workers running", interval=0.05)
            wait_quiet(self.pids)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in self._workers]

    def check(self) -> None:
        """Raise NotMeasured if a worker has ended."""
        for worker in self._workers:
            worker.check()

    @property
    def worker_ids(self) -> list[str]:
        """The workers' ids, in the order of `pids`."""
        return [worker.name for worker in self._workers]

    def release(self, worker_ids: Iterable[str] | None = None) -> None:
        """Let these workers, or all, claim from now on, as `mtask set-worker --concurrency` does for one worker."""
        chosen = {} if worker_ids is None else {"_id": {"$in": list(worker_ids)}}
        self._scratch.workers.update_many(chosen, {"$set": {"control.concurrency": self._concurrency}})

    def kill(self, worker_id: str) -> None:
        """End this worker by SIGKILL. It belongs to the fleet no longer."""
        worker = next(worker for worker in self._workers if worker.name == worker_id)
        self._workers.remove(worker)
        worker.kill()

    def hold_back(self) -> None:
        """Let all workers claim nothing until `release`."""
        self._scratch.workers.update_many({}, {"$set": {"control.concurrency": 0}})
        held_back = {"status": "running", "concurrency": 0}
        wait_until(
            lambda: self._scratch.workers.count_documents(held_back) == self._count, 30.0, "the workers held back"
        )

    def starts(self) -> dict[str, float]:
        """Return the starts that handlers noted, by key."""
        return starts_in(self.folder)

    def claims(self) -> Claims:
        """Ask all workers for the numbers of claims they have won and lost so far."""
        counted = self._told(TELL_CLAIMS, claims_path)
        return Claims(sum(counts["won"] for counts in counted), sum(counts["lost"] for counts in counted))

    def commands(self) -> dict[str, int]:
        """Ask all workers for the number of commands that each has sent so far. Their app must be that of `counted`."""
        counted = self._told(TELL_COMMANDS, commands_path)
        return {worker_id: counts["sent"] for worker_id, counts in zip(self.worker_ids, counted, strict=True)}

    def _told(self, number: signal.Signals, path_of: Callable[[Path, int], Path]) -> list[dict[str, Any]]:
        """Send this signal to all workers, and return what each of them then writes into its file."""
        paths = [path_of(self.folder, pid) for pid in self.pids]
        for path in paths:
            path.unlink(missing_ok=True)
        for worker in self._workers:
            worker.send(number)
        wait_until(lambda: all(path.exists() for path in paths), 10.0, "the workers' own counts")
        return [json.loads(path.read_text()) for path in paths]

    def _are_running(self) -> bool:
        self.check()
        return self._scratch.workers.count_documents({"status": "running"}) == self._count

    def _stop(self) -> None:
        for worker in self._workers:
            worker.send(signal.SIGTERM)
        for worker in self._workers:
            worker.end()
