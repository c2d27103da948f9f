"""`mtask workers`, `stop-worker` and `set-worker`."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from mtask.cli import failures, values
from mtask.cli.context import Cli
from mtask.cli.options import commands
from mtask.cli.output import Column, clean, lasting, listing, status_text
from mtask.client.sync import Client
from mtask.doctor.explain import is_paused
from mtask.errors import InvalidInput, WorkerError
from mtask.kernel.document.task import WorkerDocument
from mtask.search.findings import listed

_POLL_SECONDS = 0.2
RESET = "reset"
WorkerArgument = Annotated[str, typer.Argument(metavar="ID", help="The worker's id.", show_default=False)]


class WorkerStillThere(WorkerError):
    """The worker has not stopped within the timeout."""

    exit_code = failures.WAIT_TIMEOUT

    def __init__(self, worker_id: str, timeout: timedelta) -> None:
        super().__init__(
            f"worker {worker_id!r} has not stopped after {timeout.total_seconds():g} s. It finishes its runs "
            "within its --shutdown-timeout; `mtask workers` shows its state."
        )
        self.worker_id = worker_id
        self.timeout = timeout


def workers(
    cli: Cli,
    all_workers: Annotated[
        bool, typer.Option("--all", "-a", help="Also list workers that are gone but still on record.")
    ] = False,
) -> None:
    """List the workers with their status, host, runs, queues and names."""
    client = cli.client(reads_only=True)
    now = client.server_time()
    found = client.workers(live_only=not all_workers)
    if cli.is_json:
        cli.json([worker_document(worker, now) for worker in found])
        return
    if not found:
        hint = "" if all_workers else "; --all lists those on record"
        cli.notice(f"no worker is live in database {client.database_name!r}{hint}")
        return
    columns = (
        Column("STATUS"),
        Column("WORKER", is_id=True),
        Column("HOST", leaves=4),
        Column("PID", right=True, leaves=5),
        Column("SINCE", leaves=3),
        Column("BEAT", leaves=2),
        Column("RUNS", right=True, leaves=1),
        Column("QUEUES", wraps=True),
        Column("NAMES", wraps=True),
        Column("NO HANDLER", wraps=True),
    )
    cli.say(*listing(columns, [_row(worker, now) for worker in found], cli.out.width))


def _row(worker: WorkerDocument, now: datetime) -> list[str | Text]:
    return [
        status_text(state(worker, now)),
        worker.worker_id,
        worker.host,
        str(worker.pid),
        lasting(now - worker.started_time),
        lasting(max(now - worker.heartbeat_time, timedelta(0))),
        f"{worker.running_cnt}/{worker.concurrency}",
        listed(worker.queues, 10),
        listed(worker.names, 10),
        Text(clean(listed(worker.unserved_names, 10)), style="yellow"),
    ]


def state(worker: WorkerDocument, now: datetime) -> str:
    """Return the worker's status for people. "gone" means that the heartbeat of the worker has expired."""
    if not worker.is_live(now):
        return "stopped" if worker.status == "stopped" else "gone"
    if worker.control.stop and worker.status != "stopping":
        return "stopping"
    return "paused" if is_paused(worker) and worker.status != "stopping" else str(worker.status)


def worker_document(worker: WorkerDocument, now: datetime) -> dict[str, Any]:
    """Return the worker's document, with two fields from the server's clock: is_live and heartbeat_age_ms."""
    age = max(now - worker.heartbeat_time, timedelta(0))
    return {
        **worker.model_dump(by_alias=True),
        "is_live": worker.is_live(now),
        "heartbeat_age_ms": round(age / timedelta(milliseconds=1)),
    }


def stop_worker(
    cli: Cli,
    worker_id: WorkerArgument,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Return only when it has stopped.")] = False,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", "-t", metavar="DURATION", help="With --wait: give up after this time, with exit code 6."
        ),
    ] = "60s",
) -> None:
    """Ask a worker to stop.

    The worker claims no more tasks, finishes or hands back its runs, and ends.
    """
    limit = values.duration(timeout, "timeout")
    client = cli.client()
    worker = client.stop_worker(worker_id)
    if wait:
        _await_stop(client, worker, limit)
    document = {"worker_id": worker_id, "stop_requested": True, "stopped": wait}
    cli.answer(document, f"{'stopped' if wait else 'asked to stop'}  {clean(worker_id)}")


def _await_stop(client: Client, worker: WorkerDocument, limit: timedelta) -> None:
    deadline = time.monotonic() + limit.total_seconds()
    while any(there.incarnation == worker.incarnation for there in client.workers()):
        if time.monotonic() >= deadline:
            raise WorkerStillThere(worker.worker_id, limit)
        time.sleep(_POLL_SECONDS)


def set_worker(
    cli: Cli,
    worker_id: WorkerArgument,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            "-c",
            metavar="NUMBER|reset",
            help="Number of handlers at once: 0 pauses it, 'reset' restores the number that it started with.",
            show_default=False,
        ),
    ],
) -> None:
    """Change the number of handlers that a running worker may run at once."""
    worker = cli.client().set_worker(worker_id, concurrency=_concurrency(concurrency))
    asked = worker.control.concurrency
    remark = (
        "back to the number that it started with"
        if asked is None
        else "paused"
        if asked == 0
        else f"up to {asked} runs"
    )
    document = {"worker_id": worker_id, "concurrency": asked}
    cli.answer(document, f"set  {clean(worker_id)}: {remark}, from its next heartbeat on")


def _concurrency(text: str) -> int | None:
    if text.strip().lower() == RESET:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(
            f"--concurrency {text!r}: use a whole number, 0 to pause, or 'reset'.", field="concurrency"
        ) from None


register = commands("Workers", {"workers": workers, "stop-worker": stop_worker, "set-worker": set_worker})
