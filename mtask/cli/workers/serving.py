"""Starts what `mtask-worker` was asked for: a worker in this process, or what runs and restarts one or several."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import typer

from mtask.app.app import load_app
from mtask.cli import interrupts
from mtask.cli.workers.reloader import Reloader
from mtask.cli.workers.supervisor import Supervisor, end_with_parent, with_uri, worker_command
from mtask.defaults import DEFAULT_DATABASE
from mtask.errors import InvalidInput
from mtask.features.callbacks.allowed import read_options
from mtask.features.encryption.settings import read_encryption
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.logs.options import read_options as read_log_options
from mtask.kernel.document.identity import check_text
from mtask.kernel.driver import connect
from mtask.kernel.worker.process.log import fields, logger, start_logging
from mtask.kernel.worker.process.runtime import exit_now, handle_ends, run_job
from mtask.kernel.worker.process.systemd import VARIABLES, Service, service_of
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from mtask.settings import Settings, read_settings, read_systemd

_MAX_PROCESSES = 1000
#: The longest shutdown timeout: a day, in seconds. A longer one is surely a mistake.
_MAX_TIMEOUT = 86_400
#: The number of new objects between two garbage collections. Python's default, 700, costs a tenth of a busy worker's
#: time.
_GC_THRESHOLD = 10_000
#: The threads that the event loop may have beside one for each handler: the driver looks host names up there. asyncio
#: would have fewer than there are handlers.
_MORE_THREADS = 32
#: The time that idle threads have to end, in seconds.
_THREADS_GRACE = 1.0

#: The settings that are no flags which the processes of a supervisor share. Whoever may list processes reads flags.
_OF_EACH = frozenset({"uri", "worker_id", "health_file", "metrics_port"})
#: The variables that differ between the processes of a supervisor.
_OF_ONE_PROCESS = frozenset({"MTASK_WORKER_ID", "MTASK_HEALTH_FILE"}) | VARIABLES


def start(given: Mapping[str, Any], *, parent: int | None = None) -> None:
    """Run with the settings that were given as flags; the environment and `.env` set the others.

    `parent`: the process that runs this one, and restarts it. This process ends with it.
    """
    settings = read_settings().model_copy(update=given)
    if settings.app is None:
        raise InvalidInput("name the app: mtask worker package.module:app", field="app")
    if not 1 <= settings.processes <= _MAX_PROCESSES:
        raise InvalidInput(f"--processes {settings.processes}: use 1 to {_MAX_PROCESSES}.", field="processes")
    if settings.burst:
        _check_burst(settings)
    start_logging(settings.log_level, settings.log_format)
    if parent is not None:
        end_with_parent(parent)
    elif settings.reload:
        raise typer.Exit(_reload(given))
    loaded = load_app(settings.app)
    options = _options(settings)
    _check_metrics(settings)
    if settings.processes > 1:
        Worker(loaded, options)  # raises an error for wrong options, before any process starts
        raise typer.Exit(_supervise(settings, options))
    worker = Worker(loaded, options)
    with _metrics(settings, worker):
        _serve(worker, options.concurrency)


def _check_burst(settings: Settings) -> None:
    if settings.reload:
        raise InvalidInput("--burst ends by itself, and --reload goes on: use one of them.", field="burst")
    if settings.concurrency == 0:
        raise InvalidInput("--burst with --concurrency 0 runs nothing: use 1 or more.", field="concurrency")


def _check_metrics(settings: Settings) -> None:
    if settings.metrics_port is not None:
        from mtask.features.metrics import serving  # needs the extra `metrics`

        serving.check_extra("--metrics-port")
        for port in {settings.metrics_port, _port_of(settings.metrics_port, settings.processes - 1)}:
            serving.check_address(settings.metrics_host, port)


def _port_of(first: int, index: int) -> int:
    """Return the port of a process; 0: any free one."""
    return first + index if first else 0


@contextmanager
def _metrics(settings: Settings, worker: Worker) -> Iterator[None]:
    """Serve the metrics of this worker during the block, if there is a port for them."""
    if settings.metrics_port is None:
        yield
        return
    from mtask.features.metrics import prometheus as exposition
    from mtask.features.metrics import serving

    def make() -> bytes:
        slots = {worker.worker_id: worker.slots()}
        return exposition.text_of([*exposition.of_tally(worker.tally), exposition.of_slots(slots)])

    host, names = settings.metrics_host, (settings.metrics_allow_hosts or "").split(",")
    allowed = [name.strip() for name in names if name.strip()]
    with serving.serving(host, settings.metrics_port, make, exposition.CONTENT_TYPE, allowed) as port:
        logger.info("metrics served", extra=fields(host=host, port=port))
        yield


def _options(settings: Settings) -> WorkerOptions:
    if not 0 <= settings.shutdown_timeout <= _MAX_TIMEOUT:  # also false for a NaN
        raise InvalidInput(
            f"--shutdown-timeout {settings.shutdown_timeout:g}: use 0 to {_MAX_TIMEOUT} seconds.",
            field="shutdown_timeout",
        )
    uri = settings.uri
    if uri == "local":
        from mtask.local import start  # needs the extra `local`

        uri = start(settings.local_folder, mongod=settings.mongod).uri
    queues = None
    if settings.queues is not None:
        queues = [check_text("queue", part.strip()) for part in settings.queues.split(",")]
    return WorkerOptions(
        uri=uri,
        database=connect.database_of(uri, settings.database, DEFAULT_DATABASE),
        queues=queues,
        concurrency=settings.concurrency,
        burst=settings.burst,
        hands_on=not settings.reload,
        scheduler=settings.scheduler and not settings.burst,
        worker_id=settings.worker_id,
        shutdown_timeout=timedelta(seconds=settings.shutdown_timeout),
        hard_exit=exit_now,
        features=_features(settings),
        health_file=settings.health_file,
        service=_service(),
        encryption=read_encryption(
            settings.encryption_key_file,
            settings.encryption_key_vault,
            settings.encryption_queues,
            settings.encryption_tenants,
        ),
        executors=ExecutorOptions(
            settings.app,
            settings.isolation,  # type: ignore[arg-type]  # checked there
            settings.executors,
            settings.max_runs_per_executor,
            settings.max_executor_memory,
        ),
        logs=read_log_options(settings.log_format, settings.keep_logs, settings.keep_logs_days),
    )


def _service() -> Service | None:
    told = read_systemd()
    return service_of(told.notify_socket, told.watchdog_usec, told.watchdog_pid, os.getpid())


def _features(settings: Settings) -> list[object]:
    if settings.callbacks is None:
        return []
    secrets = settings.callback_secrets, settings.callback_secret_file
    return [read_options(settings.callbacks, settings.callback_networks, *secrets)]


def _reload(given: Mapping[str, Any]) -> int:
    # The worker reads the environment and `.env` itself: `.env` may have changed.
    flags = {name: value for name, value in given.items() if name not in ("app", "uri")}
    named = [given["app"]] if "app" in given else []
    command = worker_command([*named, *_supervised(), *_flags({**flags, "reload": True})])
    environment = with_uri(os.environ, given["uri"]) if "uri" in given else os.environ
    return Reloader(command, environment, Path.cwd()).run()


def _supervised() -> list[str]:
    return ["--supervised", str(os.getpid())]


def _flags(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of these settings. Those that are None are left out."""
    for name, value in told.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}={value}"


def _supervise(settings: Settings, options: WorkerOptions) -> int:
    told = settings.model_copy(update={"processes": 1, "database": options.database})
    same = {name: getattr(told, name) for name in Settings.flags() if name not in _OF_EACH}
    shared = [settings.app or "", *_supervised(), *_flags(same)]
    own: list[list[str]] = [[] for _ in range(settings.processes)]
    for index, flags_of_one in enumerate(own):
        if settings.worker_id:
            flags_of_one += ["--worker-id", f"{settings.worker_id}-{index}"]
        if settings.health_file is not None:
            flags_of_one += ["--health-file", f"{settings.health_file}.{index}"]
        if settings.metrics_port is not None:
            flags_of_one += [f"--metrics-port={_port_of(settings.metrics_port, index)}"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ONE_PROCESS}
    commands = [worker_command([*shared, *ids]) for ids in own]
    return Supervisor(commands, with_uri(environment, options.uri), options.service).run()


def _serve(worker: Worker, concurrency: int) -> None:
    # The watchdog of systemd ends a process with SIGABRT. Then the log shows what each thread was doing.
    with suppress(RuntimeError, OSError):  # a process may have no such stream
        faulthandler.enable()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    with asyncio.Runner() as runner:
        with interrupts.taking_over():
            handle_ends(lambda got, _frame: worker.stop(signal.Signals(got).name))
        loop, threads = runner.get_loop(), ThreadPoolExecutor(concurrency + _MORE_THREADS, "asyncio")
        loop.set_default_executor(threads)
        run_job(loop, worker.run())
        # What still runs in the loop's own threads is a call of a handler. The end of the loop would wait for it.
        threads.shutdown(wait=False, cancel_futures=True)
        if worker.has_stuck_threads or _are_threads_left():
            exit_now()  # the worker has handed back the runs in those threads


def _are_threads_left() -> bool:
    """Whether a thread goes on for which Python would wait at its exit. Idle threads of pools have time to end."""
    until = monotonic() + _THREADS_GRACE
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, until - monotonic()))
            if thread.is_alive():
                return True
    return False
