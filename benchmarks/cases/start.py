"""start: the processes of mtask until they answer, and a worker until its first handler begins."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mtask
from benchmarks.measuring.app import starts_in
from benchmarks.measuring.counters import cpu_of
from benchmarks.measuring.fleet import APP, ROOT, Process
from benchmarks.measuring.server import NotMeasured, Server, wait_until
from benchmarks.options import Options
from benchmarks.report.figures import RAW, Figure, Result, Target, compared, turns

TASKS = 1  #: first claims, each run
BARE = "python -c pass"
DRIVERS = "import pymongo, pydantic"
CLAIM = "mtask-worker: first claim"
_PATIENCE = 60.0
_COMPLETION = {
    "_MTASK_COMPLETE": "complete_bash",
    "COMP_WORDS": "mtask publish --pr",
    "COMP_CWORD": "2",
}
_MTASK, _WORKER = ("-m", "mtask.cli.main"), ("-m", "mtask.cli.worker")
#: The starts, with their arguments for Python and their environment.
STARTS: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    BARE: (("-c", "pass"), {}),
    DRIVERS: (("-c", "import pymongo, pydantic"), {}),
    "import mtask": (("-c", "import mtask"), {}),
    "from mtask import App, Client": (("-c", "from mtask import App, Client"), {}),
    "mtask --version": ((*_MTASK, "--version"), {}),
    "mtask --help": ((*_MTASK, "--help"), {}),
    "completion of a flag": (_MTASK, _COMPLETION),
    "mtask-worker --version": ((*_WORKER, "--version"), {}),
}
_TARGETS = {"completion of a flag": Target.at_most(4.0)}


def measure(server: Server, options: Options) -> Result:
    """Start each process in turn."""
    walls: dict[str, list[float]] = {name: [] for name in (*STARTS, CLAIM)}
    cpus: dict[str, list[float]] = {name: [] for name in (*STARTS, CLAIM)}
    for run in range(options.runs):
        for name in turns(list(walls), run):
            server.say(f"start: run {run + 1} of {options.runs}, {name}")
            wall, cpu = _first_claim(server) if name == CLAIM else _started(name)
            walls[name].append(wall)
            cpus[name].append(cpu)
    return Result(
        "start",
        "processes from their start to their answer",
        [*_figures("time", walls), *_figures("CPU", cpus)],
        {"runs": options.runs},
        samples={name: values for name, values in walls.items() if name in (BARE, DRIVERS, CLAIM)},
        notes=[
            f"Compared with `{BARE}`; a client and a worker with `{DRIVERS}`.",
            "The first claim is counted from the start of the process to the first line of the handler.",
        ],
    )


def _figures(what: str, found: Mapping[str, list[float]]) -> list[Figure]:
    heavy = ("from mtask import App, Client", CLAIM)
    return [
        compared(
            f"{name}: {what}",
            "ms",
            values,
            found[DRIVERS if name in heavy else BARE],
            _TARGETS.get(name),
            against_name=f"{RAW}: {DRIVERS if name in heavy else BARE}",
        )
        for name, values in found.items()
        if name != BARE
    ]


def _started(name: str) -> tuple[float, float]:
    """Return the time and the CPU of a process that ends by itself, in ms."""
    arguments, more = STARTS[name]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MTASK_", "_MTASK_", "COMP_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **more, "PYTHONPATH": path},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        timeout=_PATIENCE,
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode != 0:
        raise NotMeasured(f"{name} ended with {ended.returncode}:\n{ended.stderr[-2_000:].decode(errors='replace')}")
    return 1e3 * wall, 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def _has_begun(worker: Process, folder: Path) -> bool:
    worker.check()
    return bool(starts_in(folder))


def _first_claim(server: Server) -> tuple[float, float]:
    """Return the time and the CPU of a worker until its first handler begins, in ms."""
    folder = Path(tempfile.mkdtemp(dir=server.folder))
    with server.scratch() as scratch:
        with mtask.Client(scratch.uri, database=scratch.name) as client:
            client.publish("note", key="first")
        began = time.monotonic()
        where = ("--uri", scratch.uri, "--database", scratch.name, "--shutdown-timeout", "1")
        worker = Process("first", folder, "mtask.cli.worker", APP, *where)
        try:
            wait_until(partial(_has_begun, worker, folder), _PATIENCE, "the first claim", interval=0.005)
            return 1e3 * (starts_in(folder)["first"] - began), 1e3 * cpu_of([worker.pid])
        finally:
            worker.stop()
