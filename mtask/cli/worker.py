"""`mtask-worker`: one worker process, or several under a supervisor."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from mtask.cli import failures
from mtask.errors import MtaskError

_HELP = """Run tasks: find due tasks, claim them, call their handlers, write the results.

APP is package.module:app, an mtask.App with handlers. On SIGTERM, SIGINT or SIGHUP the worker claims nothing more,
finishes its runs within --shutdown-timeout, hands back the rest and exits with 0. A second signal ends it at once.

Each flag can be set in the environment (MTASK_URI, MTASK_CONCURRENCY, ...) or in .env; flags win.

Exit codes: 0 stopped in order, 2 wrong usage, 3 database not usable, 5 worker_id in use, 1 any other error.
"""

cli = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from mtask.version import __version__

        typer.echo(f"mtask {__version__}")
        raise typer.Exit


@cli.command(help=_HELP)
def main(
    app: Annotated[str | None, typer.Argument(help="package.module:app", show_default=False)] = None,
    queues: Annotated[str | None, typer.Option(help="Queues to serve, comma-separated. [those of the app]")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Handlers that run at once; 0 starts paused. [100]")] = None,
    worker_id: Annotated[
        str | None, typer.Option("--worker-id", "--id", help="Id of this worker. [host, pid, random part]")
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(
            help="MongoDB URI, or 'local' for the embedded mongod. Put a URI with a password into MTASK_URI: every "
            "user of the machine can read command lines."
        ),
    ] = None,
    database: Annotated[str | None, typer.Option(help="Database. [the URI's, else mtask]")] = None,
    processes: Annotated[int | None, typer.Option(help="Worker processes, restarted when they die. [1]")] = None,
    isolation: Annotated[
        str | None,
        typer.Option(help="Where sync handlers run that do not say it: in a thread, or in a child process. [thread]"),
    ] = None,
    executors: Annotated[
        int | None, typer.Option(help="Child processes for isolated handlers, started when needed. [the cores]")
    ] = None,
    max_runs_per_executor: Annotated[
        int | None, typer.Option(help="Runs after which a child process is replaced. [no limit]")
    ] = None,
    max_executor_memory: Annotated[
        int | None, typer.Option(help="Memory at which a child process is killed, in MiB. [no limit]")
    ] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Time for running tasks on SIGTERM, in seconds. [30]")
    ] = None,
    scheduler: Annotated[
        bool | None, typer.Option("--scheduler/--no-scheduler", help="Whether this worker fires schedules. [yes]")
    ] = None,
    callbacks: Annotated[
        str | None,
        typer.Option(
            help="Deliver callbacks to these hosts, comma-separated: hooks.example.com, *.example.com:8443, "
            "http://10.0.0.5:8080, or * for all with https. [no callbacks]"
        ),
    ] = None,
    callback_networks: Annotated[
        str | None,
        typer.Option(help="Networks that callbacks may reach although they are not public: 10.0.0.0/8. [none]"),
    ] = None,
    callback_secret_file: Annotated[
        Path | None,
        typer.Option(
            help='File with the secrets that sign callbacks: {"default": "whsec_..."}. Else '
            "MTASK_CALLBACK_SECRETS holds them."
        ),
    ] = None,
    health_file: Annotated[
        Path | None,
        typer.Option(help="File that tells mtask-health of this worker; with --processes, FILE.0 and so on. [none]"),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Serve this worker's metrics on this port; 0 = any free one. With --processes, each process takes the "
            "next port. [no metrics]"
        ),
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address of the metrics' port. [127.0.0.1]")] = None,
    metrics_allow_hosts: Annotated[
        str | None,
        typer.Option(help="Further names in the header Host that the metrics' port answers, comma-separated. [none]"),
    ] = None,
    encryption_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the master key of encrypted tasks: 96 bytes, or base64. [no encryption]"),
    ] = None,
    encryption_key_vault: Annotated[
        str | None, typer.Option(help="Collection of the data keys: DATABASE.COLLECTION. [mtask_keys.keys]")
    ] = None,
    encryption_queues: Annotated[
        str | None, typer.Option(help="Queues whose tasks must be encrypted, comma-separated. [all with a data key]")
    ] = None,
    encryption_tenants: Annotated[
        str | None, typer.Option(help="Tenants whose tasks must be encrypted. [all with a data key]")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR. [INFO]")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Lines of the log as text, or as JSON objects: text or json. [text]")
    ] = None,
    keep_logs: Annotated[
        int | None,
        typer.Option(help="Lines of each run that are kept in the database, the last ones; see mtask logs. [none]"),
    ] = None,
    keep_logs_days: Annotated[float | None, typer.Option(help="Days for which these lines are kept. [7]")] = None,
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Start the worker."""
    given = {
        "app": app,
        "queues": queues,
        "concurrency": concurrency,
        "worker_id": worker_id,
        "uri": uri,
        "database": database,
        "isolation": isolation,
        "executors": executors,
        "max_runs_per_executor": max_runs_per_executor,
        "max_executor_memory": max_executor_memory,
        "processes": processes,
        "shutdown_timeout": shutdown_timeout,
        "scheduler": scheduler,
        "callbacks": callbacks,
        "callback_networks": callback_networks,
        "callback_secret_file": callback_secret_file,
        "health_file": health_file,
        "metrics_port": metrics_port,
        "metrics_allow_hosts": metrics_allow_hosts,
        "metrics_host": metrics_host,
        "encryption_key_file": encryption_key_file,
        "encryption_key_vault": encryption_key_vault,
        "encryption_queues": encryption_queues,
        "encryption_tenants": encryption_tenants,
        "log_level": log_level,
        "log_format": log_format,
        "keep_logs": keep_logs,
        "keep_logs_days": keep_logs_days,
    }
    # Neither help nor the version needs a worker. What an import makes stays, so a collection of garbage amid it finds
    # nothing: those were a tenth of its time.
    gc.disable()
    try:
        from mtask.cli.workers import serving
    finally:
        gc.enable()

    serving.start({name: value for name, value in given.items() if value is not None}, is_supervised=supervised)


def run() -> None:
    """Run `mtask-worker`. For an error of mtask, print the error's message and exit with the error's exit code."""
    try:
        cli(prog_name="mtask-worker", standalone_mode=True)
    except MtaskError as error:
        from mtask.cli.output import clean  # no other path of a worker prints with rich
        from mtask.kernel.driver.errors import scrubbed

        lines = "\n".join(clean(line) for line in scrubbed(str(error)).splitlines())
        print(f"mtask-worker: {lines}", file=sys.stderr)  # noqa: T201 a command prints
        sys.exit(error.exit_code)
    finally:
        failures.leave_lost()


if __name__ == "__main__":
    run()
