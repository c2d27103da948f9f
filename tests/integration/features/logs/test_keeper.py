"""Kept logs on a real worker: which lines, how many writes, and what becomes of them without a database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mtask import App, Context
from mtask.errors import TaskNotFound
from mtask.features.isolation.options import ExecutorOptions
from mtask.features.logs import operations as run_logs
from mtask.features.logs import worker as keeping
from mtask.features.logs.options import LogOptions
from mtask.features.logs.rules import MAX_BYTES, RunLog
from mtask.features.logs.worker import GrowingLog, LogKeeper, line_of
from mtask.kernel.driver.stores import SyncStore
from mtask.logs import FIELDS, RUN, RunMarks
from tests.integration.app import traced
from tests.integration.worker_harness import Bench, Working
from tests.mongo import Client as Mongo
from tests.mongo import until

log = logging.getLogger("shop")
KEEP = LogOptions(keep=5)


@pytest.fixture(autouse=True)
def root_takes_info() -> Iterator[None]:
    """Let the root logger pass lines on from INFO, as `mtask-worker` does."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    yield
    root.setLevel(before)


def keeper_of(bench: Bench) -> LogKeeper:
    keeper = bench.worker.parts.features.keeper
    assert keeper is not None
    return keeper


async def logs(bench: Bench, name: str, key: str, count: int = 1) -> list[RunLog]:
    """Wait until so many runs have their last lines stored."""

    async def found() -> list[RunLog]:
        kept = await bench.client.logs(name, key)
        return kept if len(kept) >= count and all(one.is_over for one in kept) else []

    return await until(found, message=f"logs of {name}:{key}")


def messages(kept: RunLog) -> list[str]:
    return [line.message for line in kept.lines]


async def test_the_last_lines_of_coroutines_threads_and_failures_are_kept_each_with_its_run(
    working: Working, database_name: str, mongo: Mongo
) -> None:
    app = App()

    @app.task
    async def count(context: Context, to: int) -> None:
        for number in range(to):
            log.info("line %d", number)
            await asyncio.sleep(0)
        if context.attempt == 1 and to == 9:
            raise ValueError("at mongodb://u:secret@h/")

    @app.task
    def threaded(to: int) -> None:
        for number in range(to):
            log.warning("thread %d", number)

    @app.task
    async def silent() -> None: ...

    async with working(app, logs=KEEP) as bench:
        await bench.client.publish(count, {"to": 9}, key="a", retry_delay=0)
        await bench.client.publish(count, {"to": 2}, key="b")
        await bench.client.publish(threaded, {"to": 3}, key="c")
        await bench.client.publish(silent, key="d")
        first, second = await logs(bench, "count", "a", 2)
        assert (first.attempt, second.attempt) == (1, 2)
        assert messages(second) == [f"line {number}" for number in range(4, 9)]
        assert (second.first, second.task_id, second.worker_id) == (4, "count:a", "w1")
        # The worker's own line about the failure is a line of the run.
        assert messages(first)[:4] == [f"line {number}" for number in range(5, 9)]
        assert first.lines[-1].exception is not None
        assert "ValueError: at mongodb://***@h/" in first.lines[-1].exception
        assert "secret" not in str(first)
        [other] = await logs(bench, "count", "b")
        assert (messages(other), other.first) == (["line 0", "line 1"], 0)
        [threads] = await logs(bench, "threaded", "c")
        assert [(line.level, line.message) for line in threads.lines] == [
            ("WARNING", f"thread {number}") for number in range(3)
        ]
        [only] = await bench.client.logs("count", "a", run_id=second.run_id)
        assert only == second
        await bench.status("silent:d", "SUCCESS")
        assert await bench.client.logs("silent", "d") == []
        with pytest.raises(TaskNotFound):
            await bench.client.logs("silent", "nobody")
        stored = mongo[database_name]["logs"].find_one({"_id": second.run_id})
        assert stored is not None
        assert stored["expire_time"] - stored["update_time"] == timedelta(days=7)


async def test_lines_cost_few_writes_and_a_run_without_lines_none(
    working: Working, database_name: str, mongo: Mongo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 runs that end together, with 1,000 lines, take a few writes, whatever the speed of the machine."""
    app, gate = App(), asyncio.Event()
    monkeypatch.setattr(keeping, "EVERY", 3600.0)

    @app.task
    async def talk(number: int) -> None:
        for _ in range(10 if number else 0):
            log.info("said")
        await gate.wait()

    async with working(app, logs=KEEP, concurrency=150) as bench:
        for number in range(100):
            await bench.client.publish(talk, {"number": number}, key=str(number))
        await until(lambda: bench.count("RUNNING") == 100, message="all run")
        keeper = keeper_of(bench)
        assert keeper.write_cnt == 0, "no line has been written yet"
        monkeypatch.setattr(keeping, "AFTER_END", 0.5)
        gate.set()
        collection = mongo[database_name]["logs"]
        await until(lambda: collection.count_documents({"is_over": True}) == 99, message="kept")
        runs_per_write = 99 / keeper.write_cnt
        assert runs_per_write > 3, keeper.write_cnt
        assert collection.count_documents({}) == 99


async def test_lines_of_a_run_that_goes_on_are_there_after_a_while_and_follow_in_order(
    working: Working, database_name: str, mongo: Mongo, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, gate = App(), asyncio.Event()
    monkeypatch.setattr(keeping, "EVERY", 0.05)

    @app.task
    async def slow() -> None:
        log.info("before")
        await gate.wait()
        log.info("after")

    async with working(app, logs=KEEP) as bench:
        await bench.client.publish(slow, key="1", tenant="acme")
        [kept] = await until(lambda: bench.client.logs("slow", "acme:1"), message="lines of a run that goes on")
        assert (messages(kept), kept.is_over) == (["before"], False)
        gate.set()
        [kept] = await logs(bench, "slow", "acme:1")
        assert (messages(kept), kept.begin_time < kept.update_time) == (["before", "after"], True)
        assert mongo[database_name]["logs"].find_one({}, {"_id": 0, "tenant": 1}) == {"tenant": "acme"}


async def test_lines_are_bounded_in_bytes(working: Working) -> None:
    app = App()

    @app.task
    def verbose() -> None:
        for number in range(200):
            log.info("%d %s", number, "é" * 3000)

    async with working(app, logs=LogOptions(keep=10_000)) as bench:
        await bench.client.publish(verbose, key="1")
        [kept] = await logs(bench, "verbose", "1")
        size = sum(len(line.message.encode()) for line in kept.lines)
        assert MAX_BYTES * 0.9 < size < MAX_BYTES
        assert kept.first + len(kept.lines) == 200


async def test_lines_of_executors_are_kept_also_those_before_a_kill(
    working: Working, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    monkeypatch.setattr(keeping, "EVERY", 0.05)
    executors = ExecutorOptions("tests.integration.app.traced:app", count=1)

    async def last_lines(bench: Bench) -> Any:
        kept = await bench.client.logs("chatter", "2")
        return kept[0] if kept and messages(kept[0])[-1] == "line 29" else None

    async with working(traced.app, executors=executors, logs=KEEP) as bench:
        await bench.client.publish("apart", key="1")
        [kept] = await logs(bench, "apart", "1")
        assert messages(kept) == ["apart, attempt 1"]
        await bench.client.publish("chatter", {"lines": 30, "folder": str(tmp_path)}, key="2", ping_interval=0.1)
        kept = await until(lambda: last_lines(bench), message="lines of the handler that goes on")
        assert messages(kept) == [f"line {number}" for number in range(25, 30)]
        assert (kept.first, kept.is_over) == (25, False)
        await bench.client.cancel("chatter", "2")  # the handler does not look: its process is killed
        [kept] = await logs(bench, "chatter", "2")
        assert messages(kept)[0] == "line 25"


async def test_without_a_database_lines_wait_up_to_a_bound_and_runs_are_not_disturbed(
    working: Working,
    database_name: str,
    mongo: Mongo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App()
    monkeypatch.setattr(keeping, "MAX_WAITING_BYTES", 20_000)
    monkeypatch.setattr(keeping, "PAUSE", 0.05)
    monkeypatch.setattr(keeping, "MAX_PAUSE", 0.1)

    @app.task
    async def talk(number: int) -> None:
        log.info("%d %s", number, "x" * 900)

    async with working(app, logs=KEEP) as bench:
        with failing_logs(bench):
            for number in range(60):
                await bench.client.publish(talk, {"number": number}, key=str(number))
            await until(lambda: bench.count("SUCCESS") == 60, message="all ran")
            await until(lambda: "dropped" in caplog.text, message="said so")
        await until(lambda: mongo[database_name]["logs"].count_documents({}) >= 15, message="the rest is kept")
        keeper = keeper_of(bench)
        lines = mongo[database_name]["logs"]
        await until(lambda: keeper.dropped_cnt == 60 - lines.count_documents({}), message="all written or dropped")
        assert keeper.dropped_cnt > 0
    said = [record for record in caplog.records if "dropped" in record.message]
    assert sum(vars(record)[FIELDS]["lines"] for record in said) > 0


@contextmanager
def failing_logs(bench: Bench) -> Iterator[None]:
    """Make the worker's writes to the collection of logs fail."""
    where = {"failCommands": ["update"], "appName": bench.app_name, "namespace": f"{bench.database}.logs"}
    data = {**where, "errorCode": 91}
    bench.mongo.admin.command("configureFailPoint", "failCommand", mode="alwaysOn", data=data)
    try:
        yield
    finally:
        bench.mongo.admin.command("configureFailPoint", "failCommand", mode="off")


async def test_a_stop_writes_the_last_lines_and_no_line_outside_of_a_run_is_kept(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App()
    monkeypatch.setattr(keeping, "EVERY", 3600.0)
    monkeypatch.setattr(keeping, "AFTER_END", 3600.0)
    seen: list[Any] = []

    @app.task
    async def endless() -> None:
        log.info("begun")
        seen.append(RUN.get())
        await asyncio.Event().wait()

    async with working(app, logs=KEEP) as bench:
        await bench.client.publish(endless, key="1")
        await until(lambda: seen, message="it runs")
        log.info("outside")
        bench.worker.stop()
        bench.worker.stop()
        await bench.life
        [kept] = await bench.client.logs("endless", "1")
        assert (messages(kept)[0], kept.is_over) == ("begun", True)
        assert "outside" not in messages(kept)
    assert RUN.get() is None
    assert not any(isinstance(one, keeping.RunLogHandler) for one in logging.getLogger().handlers)


def test_an_older_write_that_arrives_late_changes_nothing_and_hostile_text_is_stored(store: SyncStore) -> None:
    marks = RunMarks("mail", "1", "r1", 1)
    growing = GrowingLog(marks, 10, lambda _: None)
    growing.add(line_of(record_of("a\x00b\ud800c\x1b[2J")))
    early = growing.taken("w1")
    growing.add(line_of(record_of("%d", "no number")))
    growing.end()
    store.run(run_logs.make_ready())
    for lines in (early, growing.taken("w1"), early):
        store.run(run_logs.write([lines], timedelta(days=1)))
    [found] = store.run(run_logs.of_task("mail:1", None))
    said = [line["message"] for line in found["lines"]]
    assert said == ["a\x00b?c\x1b[2J", "'%d' (its arguments cannot be shown: TypeError)"]
    assert found["is_over"]


def record_of(message: str, *arguments: Any) -> logging.LogRecord:
    return logging.LogRecord("shop", logging.INFO, __file__, 1, message, arguments, None)
