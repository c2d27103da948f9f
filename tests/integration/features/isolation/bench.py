"""A worker in the test process, whose isolated handlers run in real executors."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from mtask.features.isolation.options import ExecutorOptions
from mtask.features.isolation.pool import Executors
from tests.integration.features.isolation import isolated
from tests.integration.worker_harness import Bench, Document, Working
from tests.mongo import until

APP = "tests.integration.features.isolation.isolated:app"
#: What the fixture `isolating` is: `async with isolating(count=2, **options) as it`.
Isolating = Callable[..., AbstractAsyncContextManager["Isolated"]]


class Isolated:
    """The bench of a worker, its executors, and the folder in which handlers note what they do."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.folder = folder

    @property
    def executors(self) -> Executors:
        """The worker's executors."""
        found = self.bench.worker.parts.features.executors
        assert found is not None
        return found

    async def publish(self, name: str, key: str, params: Any = None, **options: Any) -> str:
        """Publish a task; return its id."""
        return (await self.bench.client.publish(name, params, key=key, **options)).task_id

    async def noted(self, name: str) -> str:
        """Wait until a handler has noted this; return the text."""
        path = self.folder / name
        await until(path.exists, message=f"noted: {name}")
        return path.read_text()

    async def started(self, task_id: str) -> int:
        """Wait until the handler of this task goes on; return the id of its process."""
        return int(await self.noted(f"started-{task_id.partition(':')[2]}"))

    def open_gate(self) -> None:
        """Let the handlers that wait go on."""
        (self.folder / "gate").touch()

    async def ended(self, task_id: str, status: str) -> Document:
        """Wait until the task has this status; return its last run."""
        state = await self.bench.status(task_id, status)
        run: Document = state["worker_states"][-1]
        return run

    async def exists(self, task_id: str) -> None:
        """Wait until this task is published."""
        await until(lambda: self.bench.tasks.find_one({"_id": task_id}), message=f"{task_id} published")

    async def gone(self, *pids: int) -> None:
        """Wait until these processes have ended."""
        await until(lambda: not any(map(is_alive, pids)), message=f"{pids} gone")


def is_alive(pid: int) -> bool:
    """Whether a process exists, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def isolating_by(working: Working, folder: Path, count: int = 2, **options: Any) -> AsyncIterator[Isolated]:
    """Run a worker with executors. Whatever the test does, none of them outlives it."""
    given = {name: options.pop(name) for name in ("isolation", "max_runs", "max_memory_mib") if name in options}
    executors = ExecutorOptions(APP, count=count, **given)
    root = str(Path(__file__).parents[4])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
    pids: set[int] = set()
    try:
        async with working(isolated.app, executors=executors, **options) as bench:
            made = Isolated(bench, folder)
            yield made
            pids = set(made.executors.pids)
            made.open_gate()
        await made.gone(*pids)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
