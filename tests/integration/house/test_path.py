"""The path of one task: how many files of mtask/ a publish enters, and a run from its event to its written end.

Who wants to understand the queue reads these files. So the numbers may only fall: whoever lowers one lowers it here.

`python -m tests.integration.house.test_path` lists the files, in the order in which they are first entered.

A file counts once a function of it is called or resumed, in any thread. Imports and the start do not count: a first
task warms up what is made once. Nor does what the worker does besides, such as heartbeats: only the files count that
each of several tasks enters.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pymongo import MongoClient

import mtask
from mtask import App, Client
from tests.integration.worker_harness import working_on
from tests.mongo import Client as Mongo

#: The most files that a publish enters, and a run.
PUBLISH, RUN = 13, 36
#: The tasks of which each must enter a file.
_TASKS = 5
_FOLDER = f"{Path(mtask.__file__).parent}/"

app = App()


@app.task
async def greet(name: str) -> str:
    """Run at once, so that nothing but the way of the task is seen."""
    return f"Hello, {name}."


class Entries:
    """The files of mtask/ that all threads enter, while it takes them down."""

    def __init__(self) -> None:
        self.call_cnt = 0
        self._seen: dict[str, None] | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take down what is called. The interpreter calls this."""
        if (seen := self._seen) is not None and event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            self.call_cnt += 1
            seen[frame.f_code.co_filename] = None

    @contextmanager
    def taken_down(self) -> Iterator[list[str]]:
        """Return a list that holds the files at the end of the block, in the order of their first entries."""
        files: list[str] = []
        seen: dict[str, None] = {}
        self._seen = seen
        try:
            yield files
        finally:
            self._seen = None
            files += [file.removeprefix(_FOLDER) for file in seen]

    async def rest(self) -> None:
        """Wait until nothing more is called. This asks no part of the worker: that would be an entry, too."""
        former_cnt = -1
        while former_cnt != self.call_cnt:
            former_cnt = self.call_cnt
            await asyncio.sleep(0.05)


@contextmanager
def profiled() -> Iterator[Entries]:
    """Profile this thread and all that are started in the block."""
    entries, former, former_of_others = Entries(), sys.getprofile(), threading.getprofile()
    threading.setprofile(entries)
    sys.setprofile(entries)
    try:
        yield entries
    finally:
        sys.setprofile(former)
        threading.setprofile(former_of_others)


def in_all(paths: list[list[str]]) -> list[str]:
    """Return the files that all but the first path hold. The first one warms up."""
    first, *others = paths[1:]
    return [file for file in first if all(file in other for other in others)]


def files_of_publish(uri: str, database: str) -> list[str]:
    """Return the files that a publish by the sync client enters."""
    paths = []
    with profiled() as entries, Client(uri, database=database) as client:
        for number in range(_TASKS + 1):
            with entries.taken_down() as files:
                client.publish("greet", {"name": "Ann"}, key=str(number))
            paths.append(files)
    return in_all(paths)


def files_of_run(uri: str, database: str, mongo: Mongo) -> list[str]:
    """Return the files that a worker enters, from the event of a simple task to its written end."""
    return asyncio.run(_files_of_run(uri, database, mongo))


async def _files_of_run(uri: str, database: str, mongo: Mongo) -> list[str]:
    paths = []
    with profiled() as entries:
        async with working_on(uri, database, mongo, app) as bench:
            bench.stop_scans()
            with Client(uri, database=database) as client:

                def publish(key: str) -> str:
                    sys.setprofile(None)  # the publish is no part of the run
                    return client.publish("greet", {"name": "Ann"}, key=key).task_id

                for number in range(_TASKS + 1):
                    with entries.taken_down() as files:
                        await bench.status(await asyncio.to_thread(publish, f"run {number}"), "SUCCESS")
                        await entries.rest()
                    paths.append(files)
    return in_all(paths)


def test_publish_enters_few_files(mongo_uri: str, database_name: str) -> None:
    files = files_of_publish(mongo_uri, database_name)
    assert len(files) <= PUBLISH, "\n".join(files)


def test_run_enters_few_files(mongo_uri: str, database_name: str, mongo: Mongo) -> None:
    files = files_of_run(mongo_uri, database_name, mongo)
    assert len(files) <= RUN, "\n".join(files)


def _main() -> None:
    from mtask.local import temporary

    with temporary() as server:
        mongo: MongoClient[dict[str, Any]] = MongoClient(server.uri, tz_aware=True)
        with mongo:
            for what, most, files in (
                ("publish", PUBLISH, files_of_publish(server.uri, f"test_{uuid.uuid4().hex}")),
                ("run", RUN, files_of_run(server.uri, f"test_{uuid.uuid4().hex}", mongo)),
            ):
                print(f"{what}: {len(files)} files, {most} at most", *files, sep="\n  ")


if __name__ == "__main__":
    _main()
