"""The handlers of the benchmarks' workers, and the code by which such a worker reports its claims."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from benchmarks.measuring.spinning import spin
from mtask import App, Context
from mtask.parts.assembly import Worker

#: In a worker's environment: the folder for the notes of its handlers and its claimer.
FOLDER_VARIABLE = "MTASK_BENCHMARK_FOLDER"
STARTS = "starts.txt"
#: On this signal a worker writes the number of claims it has won and lost into a file.
TELL_CLAIMS = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1

app = App()
app.task(spin)


@app.task
async def noop() -> None:
    """Do nothing."""


@app.task
def sync_noop() -> None:
    """Do nothing, in a thread."""


@app.task
def sync_hold(seconds: float) -> None:
    """Run for this many seconds, in a thread."""
    time.sleep(seconds)


@app.task
def sync_note(context: Context) -> None:
    """Note the time of its start."""
    _starts.add(context.task.key, time.monotonic())


@app.task
async def echo(text: str) -> str:
    """Return the argument."""
    return text


@app.task
async def hold(seconds: float) -> None:
    """Run for this many seconds."""
    await asyncio.sleep(seconds)


@app.task
async def note(context: Context) -> None:
    """Note the time of its start."""
    _starts.add(context.task.key, time.monotonic())


@app.task
async def note_hold(context: Context, seconds: float) -> None:
    """Note the time of this run's start by its run_id, then run for this many seconds."""
    _starts.add(context.run_id, time.monotonic())
    await asyncio.sleep(seconds)


class Starts:
    """The file that says when handlers began, for all processes of one measurement."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: int | None = None

    def add(self, key: str, moment: float) -> None:
        """Note that the task with this key began at this instant of the system's monotonic clock."""
        if self._folder is None:
            return
        if self._file is None:
            self._file = os.open(self._folder / STARTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._file, f"{key} {moment!r}\n".encode())  # one short write: lines of different processes do not mix


def starts_in(folder: Path) -> dict[str, float]:
    """Return the starts noted so far, by key."""
    path = folder / STARTS
    return first_starts(path.read_text()) if path.exists() else {}


def first_starts(text: str) -> dict[str, float]:
    """Return the first start of each key; a last line that is still being written is left out."""
    found: dict[str, float] = {}
    for line in text.split("\n")[:-1]:
        key, _, moment = line.rpartition(" ")
        found[key] = min(float(moment), found.get(key, float(moment)))
    return found


def moments_in(folder: Path) -> list[float]:
    """Return all starts noted so far, the earliest first: a task that began twice has two."""
    path = folder / STARTS
    return moments_of(path.read_text()) if path.exists() else []


def moments_of(text: str) -> list[float]:
    """Return the instants of all starts, in order; a last line that is still being written is left out."""
    return sorted(float(line.rpartition(" ")[2]) for line in text.split("\n")[:-1])


def count_in(folder: Path) -> int:
    """Return the number of starts noted so far."""
    path = folder / STARTS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def claims_path(folder: Path, pid: int) -> Path:
    """Return the file of a worker's numbers of claims."""
    return folder / f"claims-{pid}.json"


def write_whole(path: Path, counts: Mapping[str, int]) -> None:
    """Write a file that others see only once it is complete."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(counts))
    draft.replace(path)


_folder = Path(os.environ[FOLDER_VARIABLE]) if FOLDER_VARIABLE in os.environ else None
_starts = Starts(_folder)
_workers: list[Worker] = []


def _attach(folder: Path) -> None:
    """End this worker with the process that started it, and make it answer TELL_CLAIMS."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    run = Worker.run

    async def known(worker: Worker) -> None:
        _workers.append(worker)
        await run(worker)

    # The engine counts its claims but does not report them. This runs once in a worker's life: no claim is slower.
    Worker.run = known  # type: ignore[method-assign, assignment]

    def tell(_number: int, _frame: FrameType | None) -> None:
        parts = [worker.parts for worker in _workers]
        counts = {"won": sum(p.adoption.won_cnt for p in parts), "lost": sum(p.sender.lost_cnt for p in parts)}
        write_whole(claims_path(folder, os.getpid()), counts)

    signal.signal(TELL_CLAIMS, tell)


if _folder is not None:
    _attach(_folder)
