"""The bare loop in several processes. Each has the tasks of some buckets, as workers that share a backlog have them.

Run as a module, this is one of these processes: it reads the ids, and says when it is ready and when it is done.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from benchmarks.measuring import raw
from benchmarks.measuring.counters import Cost
from benchmarks.measuring.draining import Backlog, bare_tasks, cost_of
from benchmarks.measuring.fleet import ROOT
from benchmarks.measuring.server import NotMeasured, Scratch, Server
from mtask.kernel.document.identity import bucket_of

_READY, _GO, _DONE = "ready", "go", "done"
#: The longest time for which a process may take to end, in seconds.
_PATIENCE = 30.0


def parts_of(ids: Sequence[str], count: int) -> list[list[str]]:
    """Divide these tasks among `count` processes, by their buckets."""
    parts: list[list[str]] = [[] for _ in range(count)]
    for task_id in ids:
        parts[bucket_of(task_id) % count].append(task_id)
    return parts


def drain_apart(server: Server, scratch: Scratch, backlog: Backlog, processes: int) -> Cost:
    """Drain a backlog by the bare loop in this number of processes, which begin together."""
    with _started(scratch, parts_of(backlog.ids, processes)) as started:
        with server.metered([process.pid for process in started]) as meter:
            for process in started:
                _tell(process, _GO)
            for process in started:
                _await(process, _DONE)
        return cost_of(scratch, backlog, meter)


@contextmanager
def _started(scratch: Scratch, parts: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a process for each part. Each is ready at the begin of the block, and ends at its end."""
    command = [sys.executable, "-m", "benchmarks.measuring.bare", scratch.uri, scratch.name]
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    started = [subprocess.Popen(command, text=True, **given) for _ in parts]
    try:
        for process, ids in zip(started, parts, strict=True):
            _tell(process, json.dumps(ids))
        for process in started:
            _await(process, _READY)
        yield started
    finally:
        for process in started:
            process.communicate(timeout=_PATIENCE)  # the end of its input ends it


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    print(line, file=process.stdin, flush=True)


def _await(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != word:
        raise NotMeasured(f"A process of the bare loop ended before it was {word}.")


async def _live(uri: str, database: str, lines: IO[str]) -> None:
    ids: list[str] = json.loads(lines.readline())
    async with bare_tasks(uri, database) as tasks:
        print(_READY, flush=True)
        if lines.readline().strip() == _GO:
            await raw.drain(tasks, ids)
            print(_DONE, flush=True)
            lines.read()  # its CPU can be read until then


if __name__ == "__main__":
    asyncio.run(_live(sys.argv[1], sys.argv[2], sys.stdin))
