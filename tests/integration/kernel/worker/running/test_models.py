"""A worker makes the model of a claimed task only when something reads it, and no later than that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from mtask import App, Context, TaskSpec
from mtask.app.middleware import FinishCall, RunCall
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import StoredTask, Task
from tests.integration.worker_harness import Bench, Working

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


class Point(BaseModel):
    """A param with a model of its own."""

    x: int


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the claimed tasks whose models were made."""
    ids: list[str] = []
    validate = StoredTask.model_validate

    def noting(document: Any, *args: Any, **kwargs: Any) -> StoredTask:
        task = validate(document, *args, **kwargs)
        if task.runs:
            ids.append(task.id)
        return task

    monkeypatch.setattr(StoredTask, "model_validate", noting)
    return ids


async def _run(bench: Bench, name: str, params: Any, count: int) -> None:
    """Run tasks: one alone is claimed by another statement than several."""
    keys = [str(number) for number in range(count)]
    await bench.client.publish_many([TaskSpec(name, params, key=key) for key in keys])
    for key in keys:
        await bench.status(f"{name}:{key}", "SUCCESS")


@pytest.mark.parametrize("count", [1, 3])
async def test_usual_handlers_have_no_model_made(working: Working, made: list[str], count: int) -> None:
    app, seen = App(), []

    @app.task
    async def nothing() -> None:
        pass

    @app.task
    async def typed(point: Point, at: datetime, tags: list[str]) -> dict[str, Any]:
        seen.append((point, at, tags))
        return {"at": at}

    @app.task
    async def about(context: Context) -> tuple[str, int]:
        context.progress(0.5)
        return context.run_id, context.attempt

    @app.task
    def in_a_thread(text: str) -> str:
        return text

    async with working(app) as bench:
        await _run(bench, "nothing", None, count)
        await _run(bench, "typed", {"point": {"x": 1}, "at": MOMENT, "tags": ["a"]}, count)
        await _run(bench, "about", {}, count)
        await _run(bench, "in_a_thread", {"text": "x"}, count)
        assert made == []
        assert seen == [(Point(x=1), MOMENT, ["a"])] * count


@pytest.mark.parametrize("count", [1, 3])
async def test_task_that_is_read_is_the_one_that_was_claimed(working: Working, made: list[str], count: int) -> None:
    app = App()
    tasks: dict[str, list[Task]] = {"later": [], "in_threads": []}

    @app.task
    async def later(context: Context, at: datetime) -> None:
        await asyncio.sleep(0)
        tasks["later"].append(context.task)

    @app.task
    def in_threads(context: Context, at: datetime) -> None:
        tasks["in_threads"].append(context.task)

    async with working(app) as bench:
        for name in ("later", "in_threads"):
            made.clear()
            await _run(bench, name, {"at": MOMENT}, count)
            assert sorted(made) == sorted(f"{name}:{key}" for key in range(count))
        for task in [*tasks["later"], *tasks["in_threads"]]:
            stored = bench.state(task.id)
            (run,) = stored["worker_states"]
            assert task.params == {"at": MOMENT}
            assert task.task_state.create_time == stored["create_time"]
            assert task.task_state.create_time.tzinfo is not None
            assert task.status is TaskStatus.RUNNING
            assert (task.runs[0].run_id, task.runs[0].claim_time) == (run["run_id"], run["claim_time"])


async def test_params_that_middleware_changes_in_place_are_those_of_the_handler(working: Working) -> None:
    app, seen, ends = App(), [], []

    @app.middleware
    def richer(call: RunCall) -> Iterator[None]:
        call.task.params["more"] = True
        yield

    @app.middleware("finish")
    def watching(call: FinishCall) -> Iterator[None]:
        ends.append((call.task.id, call.task.params))
        yield

    @app.task
    async def work(**params: Any) -> None:
        seen.append(params)

    async with working(app) as bench:
        await _run(bench, "work", {"at": MOMENT}, 1)
        expected = {"at": MOMENT, "more": True}
        assert seen == [expected]
        assert ends == [("work:0", expected)]
