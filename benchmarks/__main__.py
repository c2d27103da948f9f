"""The command line: `python -m benchmarks BENCHMARK`."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.cases import (
    backlog,
    drain,
    encryption,
    flows,
    health,
    idle,
    isolation,
    latency,
    limits,
    metrics,
    payload,
    peers,
    publish,
    purge,
    scale,
    start,
    tracing,
    web,
)
from benchmarks.measuring.server import Server, open_server
from benchmarks.options import DEFAULT_FOLDER, DEFAULT_RUNS, Options
from benchmarks.report import files
from benchmarks.report.figures import Result
from benchmarks.report.table import table
from mtask.cli import failures, output
from mtask.cli.output import console
from mtask.errors import InvalidInput
from mtask.kernel.driver.errors import translated
from mtask.local.node import SMALLEST_CACHE_MB

Measure = Callable[[Server, Options], Result]

BENCHMARKS: dict[str, Measure] = {
    "publish": publish.measure,
    "drain": drain.measure,
    "latency": latency.measure,
    "scale": scale.measure,
    "flows": flows.measure,
    "idle": idle.measure,
    "payload": payload.measure,
    "backlog": backlog.measure,
    "purge": purge.measure,
    "isolation": isolation.measure,
    "tracing": tracing.measure,
    "encryption": encryption.measure,
    "web": web.measure,
    "start": start.measure,
    "metrics": metrics.measure,
    "limits": limits.measure,
    "health": health.measure,
}
_USUAL_TASKS = {
    "publish": publish.TASKS,
    "drain": drain.TASKS,
    "latency": latency.TASKS,
    "scale": scale.TASKS,
    "flows": flows.TASKS,
    "idle": idle.TASKS,
    "payload": payload.TASKS,
    "backlog": backlog.TASKS,
    "purge": purge.TASKS,
    "isolation": isolation.TASKS,
    "tracing": tracing.TASKS,
    "encryption": encryption.TASKS,
    "web": web.TASKS,
    "start": start.TASKS,
}
_CACHE_MB = 1024
_MOST_WORKERS = 100
_DEBUG = "--debug"

_HELP = """Measure mtask against the raw ceiling: the same database work by bare PyMongo calls, in turn and in one run.

Each benchmark prints a table and leaves JSON and pictures in the folder. It never passes or fails by the
clock. The table shows the target beside each figure that has one.
"""
_EPILOG = (
    "Each measurement creates a database, mtask_benchmark_…, and drops it afterwards. The server should have nothing "
    "else to do, and the user must be allowed to run serverStatus.\n\n"
    "Exit codes: 0 measured, 2 bad input, 3 the database or the embedded mongod, 1 anything else."
)

app = typer.Typer(
    name="benchmarks",
    help=_HELP,
    epilog=_EPILOG,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(slots=True)
class Shared:
    """The flags that every benchmark takes."""

    uri: str | None
    folder: Path
    cache_mb: int


Uri = Annotated[
    str | None,
    typer.Option(
        "--uri", metavar="URI", help="MongoDB URI of a replica set. Else an embedded mongod.", show_default=False
    ),
]
Runs = Annotated[int, typer.Option("--runs", metavar="NUMBER", help="Runs of each side.", min=1)]
Folder = Annotated[Path, typer.Option("--folder", metavar="PATH", help="Folder for JSON and pictures.")]
Cache = Annotated[
    int, typer.Option("--cache-mb", metavar="MB", help="Cache of the embedded mongod.", min=SMALLEST_CACHE_MB)
]
Debug = Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of an error.")]


def _tasks(text: str) -> object:
    return typer.Option("--tasks", metavar="NUMBER", help=text, min=1, show_default=False)


def _rate(usual: float, what: str = "Tasks published") -> object:
    return typer.Option("--rate", metavar="NUMBER", help=f"{what} a second. [{usual:g}]", min=0.1, show_default=False)


def _workers(text: str) -> object:
    return typer.Option("--workers", metavar="NUMBER", help=text, min=1, max=_MOST_WORKERS, show_default=False)


Finished = Annotated[int, typer.Option("--finished", metavar="NUMBER", help="Tasks in it that are done.", min=0)]
Delayed = Annotated[int, typer.Option("--delayed", metavar="NUMBER", help="Tasks in it that are due tomorrow.", min=0)]
Purged = Annotated[int, typer.Option("--purged", metavar="NUMBER", help="Tasks that the purge removes.", min=1)]
Window = Annotated[
    float,
    typer.Option("--window", metavar="SECONDS", help="Seconds that a quiet process is observed, each run.", min=0.5),
]
Held = Annotated[
    int, typer.Option("--held", metavar="NUMBER", help="Tasks running at once in one worker.", min=1, max=10_000)
]
Size = Annotated[
    int,
    typer.Option("--size", metavar="BYTES", help="Size of params and of returns.", min=1, max=1_000_000),
]
_USUAL = Options()


@app.command("publish")
def _publish(
    tasks: Annotated[int | None, _tasks(f"Tasks by publish_many; a twentieth singly. [{publish.TASKS:,}]")] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """publish_many against insert_many; single publishes against insert_one, sync and async."""
    _run({"publish": Options(runs, tasks)}, Shared(uri, folder, cache_mb))


@app.command("drain")
def _drain(
    tasks: Annotated[int | None, _tasks(f"Tasks that wait. [{drain.TASKS:,}]")] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """One worker takes a backlog, against bare grouped claims and finishes; async and sync handlers."""
    _run({"drain": Options(runs, tasks)}, Shared(uri, folder, cache_mb))


@app.command("latency")
def _latency(
    tasks: Annotated[int | None, _tasks(f"Tasks a run. [{latency.TASKS:,}]")] = None,
    rate: Annotated[float | None, _rate(latency.RATE)] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """From the publish call to the handler's start, against insert, change stream event and find_one_and_update."""
    _run({"latency": Options(runs, tasks, rate)}, Shared(uri, folder, cache_mb))


@app.command("scale")
def _scale(
    tasks: Annotated[int | None, _tasks(f"Tasks that wait. [{scale.TASKS:,}]")] = None,
    workers: Annotated[int | None, _workers("The most workers, of 1, 2 and 4.")] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """1, 2 and 4 worker processes on one backlog: throughput, claims lost to others, CPU of the database."""
    _run({"scale": Options(runs, tasks, workers=workers)}, Shared(uri, folder, cache_mb))


@app.command("flows")
def _flows(
    tasks: Annotated[int | None, _tasks(f"Tasks for which one step waits. [{flows.TASKS:,}]")] = None,
    workers: Annotated[int | None, _workers(f"Worker processes. [{flows.WORKERS}]")] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Fan-in: the children of one parent, and the dependencies of one step, against the same tasks without a flow."""
    _run({"flows": Options(runs, tasks, workers=workers)}, Shared(uri, folder, cache_mb))


@app.command("backlog")
def _backlog(
    tasks: Annotated[int | None, _tasks(f"Tasks that are drained, each run. [{backlog.TASKS:,}]")] = None,
    finished: Finished = _USUAL.finished,
    delayed: Delayed = _USUAL.delayed,
    rate: Annotated[float | None, _rate(backlog.RATE)] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Drain and latency in a collection full of finished and delayed tasks, against an empty one."""
    options = Options(runs, tasks, rate, finished=finished, delayed=delayed)
    _run({"backlog": options}, Shared(uri, folder, cache_mb))


@app.command("purge")
def _purge(
    tasks: Annotated[int | None, _tasks(f"Tasks that are drained, each run. [{purge.TASKS:,}]")] = None,
    purged: Purged = _USUAL.purged,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Drain during a purge of many finished tasks, against the same drain without the purge."""
    _run({"purge": Options(runs, tasks, purged=purged)}, Shared(uri, folder, cache_mb))


@app.command("isolation")
def _isolation(
    tasks: Annotated[int | None, _tasks(f"Tasks of a handler that does nothing. [{isolation.TASKS:,}]")] = None,
    rate: Annotated[float | None, _rate(isolation.RATE)] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Handlers in executors, against the same in threads: with work for the processor, without, and the latency."""
    _run({"isolation": Options(runs, tasks, rate)}, Shared(uri, folder, cache_mb))


@app.command("tracing")
def _tracing(
    tasks: Annotated[int | None, _tasks(f"Tasks of each drain. [{tracing.TASKS:,}]")] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Drain without tracing, with an SDK that samples nothing, and with one that samples all."""
    _run({"tracing": Options(runs, tasks)}, Shared(uri, folder, cache_mb))


@app.command("web")
def _web(
    tasks: Annotated[int | None, _tasks(f"Tasks drained, each run; a hundredth posted. [{web.TASKS:,}]")] = None,
    finished: Finished = _USUAL.finished,
    delayed: Delayed = _USUAL.delayed,
    rate: Annotated[float | None, _rate(web.RATE, "Requests sent")] = None,
    window: Window = _USUAL.window,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """POST against publish; each page and list of a large collection beside a drain; 200 viewers of one stream."""
    options = Options(runs, tasks, rate, finished=finished, delayed=delayed, window=window)
    _run({"web": options}, Shared(uri, folder, cache_mb))


@app.command("idle")
def _idle(
    tasks: Annotated[int | None, _tasks(f"Tasks a run, one at a time. [{idle.TASKS:,}]")] = None,
    rate: Annotated[float | None, _rate(idle.RATE)] = None,
    workers: Annotated[int | None, _workers(f"Worker processes. [{idle.WORKERS}]")] = None,
    window: Window = _USUAL.window,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Many idle workers and one task at a time: claim attempts, latency, commands a second of an idle worker."""
    options = Options(runs, tasks, rate, workers, window=window)
    _run({"idle": options}, Shared(uri, folder, cache_mb))


@app.command("payload")
def _payload(
    tasks: Annotated[int | None, _tasks(f"Tasks with large params and returns. [{payload.TASKS:,}]")] = None,
    held: Held = _USUAL.held,
    window: Window = _USUAL.window,
    size: Size = _USUAL.size,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """A thousand leases at once: CPU of the pings. And large params and returns, against the same by bare calls."""
    _run({"payload": Options(runs, tasks, held=held, window=window, size=size)}, Shared(uri, folder, cache_mb))


@app.command("encryption")
def _encryption(
    tasks: Annotated[int | None, _tasks(f"Tasks that wait. [{encryption.TASKS:,}]")] = None,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Drain a backlog whose params and returns are encrypted, against the same backlog, readable."""
    _run({"encryption": Options(runs, tasks)}, Shared(uri, folder, cache_mb))


@app.command("metrics")
def _metrics(
    finished: Finished = _USUAL.finished,
    delayed: Delayed = 0,
    rate: Annotated[float | None, _rate(metrics.RATE, "Scrapes")] = None,
    window: Window = metrics.WINDOW,
    uri: Uri = None,
    runs: Runs = metrics.RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Scrapes of `mtask metrics` in a large collection: what the server and the process take, over whole rounds."""
    options = Options(runs, rate=rate, finished=finished, delayed=delayed, window=window)
    _run({"metrics": options}, Shared(uri, folder, cache_mb))


@app.command("limits")
def _limits(
    tasks: Annotated[int | None, _tasks(f"Starts of each rate, and tasks of each drain. [{limits.TASKS:,}]")] = None,
    rate: Annotated[float | None, _rate(limits.RATE, "Starts that the queue allows")] = None,
    workers: Annotated[int | None, _workers(f"Worker processes beside one. [{limits.WORKERS}]")] = None,
    kills: Annotated[
        int, typer.Option("--kills", metavar="NUMBER", help="Workers killed beside each limit.", min=1)
    ] = _USUAL.kills,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="A,B", help=f"Only these of {', '.join(limits.PARTS)}.", show_default=False),
    ] = None,
    window: Window = _USUAL.window,
    uri: Uri = None,
    runs: Runs = limits.RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """A queue with limits: the rate held, the pace, an idle worker beside it, the rescue from a killed worker."""
    options = Options(runs, tasks, rate, workers, window=window, kills=kills, only=limits.chosen(only))
    _run({"limits": options}, Shared(uri, folder, cache_mb))


@app.command("health")
def _health(
    clients: Annotated[
        int, typer.Option("--clients", metavar="NUMBER", help="Clients that send large bodies.", min=1, max=500)
    ] = _USUAL.clients,
    rate: Annotated[float | None, _rate(health.RATE, "Requests sent")] = None,
    window: Window = health.WINDOW,
    uri: Uri = None,
    runs: Runs = health.RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """/healthz of the web server while clients send the largest bodies that it takes."""
    _run({"health": Options(runs, rate=rate, clients=clients, window=window)}, Shared(uri, folder, cache_mb))


@app.command("start")
def _start(
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """Import, version, help, completion and a worker's first claim, against Python alone and PyMongo with Pydantic."""
    _run({"start": Options(runs)}, Shared(uri, folder, cache_mb))


@app.command("peers")
def _peers(
    tasks: Annotated[int | None, _tasks(f"Tasks of each drain; a tenth singly. [{peers.TASKS:,}]")] = None,
    names: Annotated[
        str | None,
        typer.Option("--peers", metavar="A,B", help="Only these peers, beside mtask.", show_default=False),
    ] = None,
    runs: Annotated[int, typer.Option("--runs", metavar="NUMBER", help="Runs of each peer.", min=1)] = peers.RUNS,
    window: Annotated[
        float, typer.Option("--window", metavar="SECONDS", help="Seconds of the paced tasks, and of idling.", min=1.0)
    ] = 4.0,
    longest: Annotated[
        float, typer.Option("--longest", metavar="SECONDS", help="A slower drain is cut off after this.", min=1.0)
    ] = 10.0,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="Wait this long for a dead worker's tasks.", min=1.0)
    ] = 15.0,
    lease: Annotated[
        int, typer.Option("--lease", metavar="SECONDS", help="Lease in the lasting settings.", min=2, max=60)
    ] = 6,
    has_kills: Annotated[bool, typer.Option("--kills/--no-kills", help="Also kill workers and servers.")] = True,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """mtask beside Celery, Dramatiq, Procrastinate, RQ, arq, Agenda, keuss, mongodb-queue and BullMQ."""
    from benchmarks.peers import report
    from benchmarks.peers.trials import Sizes

    chosen = peers.chosen(names)
    folder = files.make_folder(folder)
    sizes = Sizes(peers.TASKS if tasks is None else tasks, longest, window, patience, lease)
    out, err = console(sys.stdout, no_color=False), console(sys.stderr, no_color=False)
    with _progress(out if out.is_terminal else err) as say, peers.open_servers(cache_mb, say) as servers:
        comparison = peers.measure(chosen, servers, sizes, runs, say, has_kills=has_kills)
    # Written first: a run takes long, and what is printed can be read again.
    paths = report.write(comparison, files.environment(comparison.servers.get("MongoDB", "")), folder)
    out.print(report.tables(comparison))
    out.print(f"written: {', '.join(str(path) for path in paths)}", soft_wrap=True)


@app.command("all")
def _all(
    tasks: Annotated[int | None, _tasks("The most tasks of each benchmark.")] = None,
    finished: Finished = _USUAL.finished,
    delayed: Delayed = _USUAL.delayed,
    purged: Purged = _USUAL.purged,
    workers: Annotated[int | None, _workers(f"Idle workers, and the most for scale. [{idle.WORKERS}]")] = None,
    held: Held = _USUAL.held,
    window: Window = _USUAL.window,
    size: Size = _USUAL.size,
    uri: Uri = None,
    runs: Runs = DEFAULT_RUNS,
    folder: Folder = DEFAULT_FOLDER,
    cache_mb: Cache = _CACHE_MB,
    debug: Debug = False,
) -> None:
    """All benchmarks but `health`, `limits`, `metrics` and `peers`, one after the other, on one server."""
    sizes: dict[str, Any] = {"finished": finished, "delayed": delayed, "purged": purged, "held": held, "size": size}
    options = Options(runs, workers=workers, window=window, **sizes)
    counts = {name: usual if tasks is None else min(tasks, usual) for name, usual in _USUAL_TASKS.items()}
    _run({name: replace(options, tasks=count) for name, count in counts.items()}, Shared(uri, folder, cache_mb))


def _run(wanted: Mapping[str, Options], shared: Shared) -> None:
    """Measure these benchmarks, print a table of each, and write the report."""
    folder = files.make_folder(shared.folder)
    if shared.uri is not None and not shared.uri.strip():
        raise InvalidInput("--uri is empty: give a MongoDB URI, or leave it out for an embedded mongod.", field="uri")
    out, err = console(sys.stdout, no_color=False), console(sys.stderr, no_color=False)
    results, paths = [], []
    # On a terminal, progress and tables use one console, because they share its last line.
    with _progress(out if out.is_terminal else err) as say, open_server(shared.uri, shared.cache_mb, say) as server:
        around = files.environment(server.version)
        # The garbage collector skips everything imported so far, also during measurements.
        gc.collect()
        gc.freeze()
        for name, options in wanted.items():
            result = BENCHMARKS[name](server, options)
            results.append(result)
            out.print(table(result, out.width))
            out.print()
            paths += files.write(result, around, folder)  # now, in case a later one fails
    if len(results) > 1:
        paths += files.write_together(results, around, folder)
    out.print(f"written: {', '.join(str(path) for path in paths)}", soft_wrap=True)


@contextmanager
def _progress(screen: Console) -> Iterator[Callable[[str], None]]:
    """Show the progress: on one line of a terminal, otherwise on a line for each step."""
    if not screen.is_terminal:
        yield lambda text: screen.print(text, style="bright_black", soft_wrap=True)
        return
    # Drawn rarely, so that it takes no CPU from the measurement.
    with screen.status("", refresh_per_second=1) as status:
        yield lambda text: status.update(text)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as SIGINT does, so that databases, workers and mongod are removed."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _interruptible():
            app(given or ["--help"], prog_name="python -m benchmarks", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return failures.INTERRUPTED
    except Exception as error:
        return output.report(translated(_first(error)), as_json=False, no_color=False, debug=_DEBUG in given)
    return failures.OK


def _first(error: Exception) -> Exception:
    """Return the first error of several concurrent calls."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
