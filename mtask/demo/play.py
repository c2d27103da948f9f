"""The course of the demo: publish twice, kill a worker while it holds tasks, and see its tasks preempted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

from mtask import Client, Published, TaskSpec
from mtask.cli.workers.supervisor import with_uri, worker_command
from mtask.demo.app import SourceFile, Totals, count, count_file, unreadable
from mtask.demo.database import DemoDatabase, existing_database, kept_database, served_page, temporary_database
from mtask.demo.display import Publication, Summary, rate_of
from mtask.demo.watch import WORKING, Kill, Scene, Watch, WorkerRow, outcome_of
from mtask.errors import WorkerError

#: The length of the pause in some tasks. It is long enough for the kill to fall into it, and shorter than the lease.
PAUSE = timedelta(milliseconds=1200)
START_TIMEOUT = timedelta(seconds=60)
#: Time limit of one command of the database. It is long, because other programs may keep the machine busy, too.
CALL_TIMEOUT = timedelta(seconds=60)
STALL_TIMEOUT = timedelta(seconds=60)
_LOOK_INTERVAL = 0.1
_BATCH = 1000
#: _KILL_LEFT: the work that may be left for the workers when one is killed, in seconds. It is so little that slots are
#: free when the leases lapse. _KILL_PART: the part of the tasks that must have begun before the kill.
_KILL_LEFT = 1.2
_KILL_PART = 0.5
_FEWEST_PAUSES, _ONE_IN = 12, 50


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments with which the demo runs once."""

    folder: Path
    files: list[SourceFile]
    workers: int = 3
    concurrency: int = 16
    kill: bool = True
    keep: bool = False
    uri: str | None = None
    database: str | None = None
    mongod: Path | None = None
    web: bool = False  #: whether the web page shows the demo's database
    stays: bool = False  #: whether workers and page stay after the work, until Ctrl-C

    def opened(self) -> AbstractContextManager[DemoDatabase]:
        """Return the context manager that opens the demo's database."""
        if self.uri is not None:
            return existing_database(self.uri, self.database, keep=self.keep)
        return kept_database(self.mongod) if self.keep else temporary_database(self.mongod)


class Play:
    """One run of the demo. It calls `notify` whenever the scene may have changed."""

    def __init__(self, plan: Plan, scene: Scene, notify: Callable[[], None]) -> None:
        self._plan = plan
        self._scene = scene
        self._notify = notify
        self._fleet: Fleet
        self._watch: Watch
        self._look_cost = 0.0

    def run(self) -> Summary:
        """Run the demo and return its summary; raise MtaskError. Without `keep`, nothing is left behind."""
        plan, scene = self._plan, self._scene
        scene.begin("starting MongoDB")
        self._notify()
        began = time.monotonic()
        with (
            plan.opened() as database,
            Client(database.uri, database=database.name, timeout=CALL_TIMEOUT) as client,
            ExitStack() as stack,
        ):
            client.init()
            self._watch = Watch(client)
            version, seconds = self._watch.server_version(), time.monotonic() - began
            self._did(f"MongoDB {version} {database.words}, ready in {seconds:.1f} s")
            if plan.web:
                self._did(f"the web page: {stack.enter_context(served_page(database))}")
            with Fleet(database.uri, database.name, plan.concurrency) as self._fleet:
                try:
                    self._fleet.start(plan.workers)
                    direct, seconds = self._count_directly()
                    self._await_workers()
                    publication = self._publish(client)
                    self._work(client)
                    if plan.web and plan.stays:
                        self._stay()
                finally:
                    scene.begin("stopping the workers")
            self._show_workers()
            scene.begin("adding up the tasks' results")
            self._notify()
            outcome = outcome_of(self._watch.documents())
            scene.begin("")
            return Summary(
                folder=plan.folder,
                database=database,
                publication=publication,
                workers=list(scene.workers),
                tasks=outcome.totals,
                direct=direct,
                direct_seconds=seconds,
                seconds=scene.elapsed,
                tasks_per_second=rate_of(outcome.create_time, outcome.finish_times),
                runs=outcome.runs,
                timeouts=outcome.timeouts,
                kill=scene.kill,
                rescues=list(scene.rescues),
            )

    def _did(self, words: str) -> None:
        self._scene.finish(words)
        self._notify()

    def _count_directly(self) -> tuple[Totals, float]:
        """Count all files in this process, without tasks, while the workers start."""
        files, totals, began = self._plan.files, Totals(), time.monotonic()
        for index, file in enumerate(files):
            if index % 20 == 0:
                self._scene.begin("counting directly, for comparison", (index, len(files)))
                self._notify()
            try:
                totals.add(file.key, count_file(file.path))
            except OSError as error:
                totals.fail(file.key, unreadable(error))
        seconds = time.monotonic() - began
        self._did(
            f"counted directly, for comparison: {len(files):,} files, {totals.bytes / 1e6:,.1f} MB in {seconds:.1f} s"
        )
        return totals, seconds

    def _await_workers(self) -> None:
        wanted = {worker.worker_id for worker in self._fleet.workers}
        self._scene.begin(f"starting {len(wanted)} workers")
        end = time.monotonic() + START_TIMEOUT.total_seconds()
        while (missing := wanted - self._watch.ready_workers()) and time.monotonic() < end:
            self._pause()
        if missing:
            raise DemoFailed(f"{', '.join(sorted(missing))} did not start within {START_TIMEOUT.total_seconds():g} s.")
        self._show_workers()
        self._did(f"{len(wanted)} mtask-worker processes, each with {self._plan.concurrency} tasks at a time")

    def _publish(self, client: Client) -> Publication:
        """Publish every task, and then all of them once more."""
        specs = self._specs()
        self._scene.work_began = began = time.monotonic()
        first = self._publish_all(client, specs, "publishing")
        seconds = time.monotonic() - began
        kept = len(specs) - first
        self._did(f"published {len(specs):,} tasks in {seconds:.1f} s: {first:,} created, {kept:,} kept")
        again = self._publish_all(client, specs, "publishing them once more")
        publication = Publication(first, kept, again, len(specs) - again, seconds)
        self._did(f"published them once more: {again:,} created, {publication.kept_again:,} kept")
        return publication

    def _publish_all(self, client: Client, specs: list[TaskSpec], words: str) -> int:
        created = 0
        for start in range(0, len(specs), _BATCH):
            self._scene.begin(words, (start, len(specs)))
            self._observe()
            results = client.publish_many(specs[start : start + _BATCH])
            created += sum(isinstance(result, Published) and result.created for result in results)
        return created

    def _specs(self) -> list[TaskSpec]:
        """Return a task for each file. Some tasks pause in their first try, so that the killed worker holds tasks."""
        files = self._plan.files
        step = max(1, min(_ONE_IN, len(files) // _FEWEST_PAUSES)) if self._plan.kill else len(files) + 1
        pause_ms = PAUSE // timedelta(milliseconds=1)
        return [
            TaskSpec(
                count,
                {"file": file.argument} | ({"pause_ms": pause_ms} if index % step == step // 2 else {}),
                key=file.key,
            )
            for index, file in enumerate(files)
        ]

    def _work(self, client: Client) -> None:
        """Watch until all tasks are finished; kill a worker meanwhile."""
        scene, total = self._scene, len(self._plan.files)
        scene.begin(WORKING)
        finished, moved = -1, time.monotonic()
        while scene.look.finished < total:
            self._observe()
            if self._plan.kill and scene.kill is None and self._is_time_to_kill():
                self._kill_one(client)
            if scene.look.finished != finished:
                finished, moved = scene.look.finished, time.monotonic()
            if time.monotonic() - moved > STALL_TIMEOUT.total_seconds():
                raise DemoFailed(
                    f"no task finished for {STALL_TIMEOUT.total_seconds():g} s: {total - finished} are left."
                )
            self._pause()
        scene.work_ended = time.monotonic()
        self._observe()

    def _stay(self) -> None:
        """Leave the page and the workers as they are until Ctrl-C. A worker may be stopped on the page meanwhile."""
        self._scene.begin("all tasks are done; the web page stays until you press Ctrl-C")
        with suppress(KeyboardInterrupt):
            while True:
                self._notify()
                time.sleep(_LOOK_INTERVAL)

    def _is_time_to_kill(self) -> bool:
        scene = self._scene
        left = scene.total - scene.look.begun
        return left <= scene.total * (1 - _KILL_PART) and left <= scene.rate * _KILL_LEFT

    def _kill_one(self, client: Client) -> None:
        # On a busy machine, every look may come too late in a pause. So when all tasks have begun, any worker that
        # holds tasks is killed.
        is_last_chance = self._scene.look.begun >= self._scene.total
        victim = self._watch.holder_in_a_pause(PAUSE, is_any_enough=is_last_chance)
        if victim is None:
            return
        worker = self._fleet.find(victim)
        worker.kill()
        self._scene.kill = Kill(victim, worker.pid, client.server_time())
        self._observe()

    def _observe(self) -> None:
        """Read the documents and the processes, and update the scene."""
        began = time.monotonic()
        self._fleet.check()
        scene = self._scene
        scene.see(self._watch.look())
        if scene.kill is not None:
            scene.rescues = self._watch.rescues(scene.kill.worker_id, scene.kill.time)
        self._show_workers()
        self._notify()
        self._look_cost = time.monotonic() - began

    def _pause(self) -> None:
        """Wait before the next look at the tasks. The looks take only a small part of the time."""
        self._fleet.check()
        self._notify()
        time.sleep(max(_LOOK_INTERVAL, 4 * self._look_cost))

    def _show_workers(self) -> None:
        look = self._scene.look
        self._scene.workers = [
            WorkerRow(
                worker.worker_id,
                worker.pid,
                worker.status,
                look.running(worker.worker_id),
                look.ended(worker.worker_id),
            )
            for worker in self._fleet.workers
        ]


# --- fleet -----------------------------------------------------------------------------------------------

# Starts, kills and stops the worker processes of the demo. No process is left behind.

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
                *(APP, "--supervised", str(os.getpid()), "--processes", "1", "--no-burst"),
                *("--queues", "demo", "--worker-id", worker_id),
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
