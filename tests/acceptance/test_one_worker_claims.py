"""Of twenty workers one claims; named workers only; and the claim, not the hint, decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from mtask import AsyncClient
from mtask.kernel.document.status import WorkerStatus
from mtask.parts.assembly import Worker
from mtask.parts.worker import WorkerOptions
from tests.acceptance import app as handlers
from tests.acceptance.conftest import Report
from tests.mongo import PATIENCE, until
from tests.workers import Stage, runs_of

TWENTY = [f"worker-{number}" for number in range(20)]


@asynccontextmanager
async def workers_here(stage: Stage, worker_ids: Sequence[str]) -> AsyncIterator[list[Worker]]:
    """Run workers in this process, and stop them in order at the end."""
    started = [
        Worker(handlers.app, WorkerOptions(stage.worker_uri, stage.database, concurrency=10, worker_id=worker_id))
        for worker_id in worker_ids
    ]
    jobs = [asyncio.create_task(worker.run()) for worker in started]
    try:

        async def all_run() -> bool:
            assert not any(job.done() for job in jobs), [job for job in jobs if job.done()]
            return all(worker.status is WorkerStatus.RUNNING for worker in started)

        await until(all_run, PATIENCE, "all workers running")
        yield started
    finally:
        for worker in started:
            worker.stop()
        await asyncio.wait_for(asyncio.gather(*jobs), PATIENCE)


@pytest.mark.long
def test_of_twenty_workers_exactly_one_claims_a_key(
    stage: Stage, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(handlers.EVENTS_VARIABLE, str(stage.events.path))
    keys = [f"one/{number}" for number in range(20)]

    async def scenario() -> int:
        client = AsyncClient(stage.uri, database=stage.database)
        try:
            async with workers_here(stage, TWENTY) as workers:
                for key in keys:  # each is seen by twenty idle workers
                    await client.publish("sleep", {"seconds": 0.05}, key=key)
                for key in keys:
                    await client.wait("sleep", key, timeout=PATIENCE)
            return sum(worker.parts.sender.lost_cnt for worker in workers)
        finally:
            await client.close()

    lost = asyncio.run(scenario())
    report("claims lost by 20 workers over 20 tasks", lost)
    for key in keys:
        document = stage.document(f"sleep:{key}")
        assert [run["status"] for run in runs_of(document)] == ["SUCCESS"]
        assert [event.worker_id for event in stage.events.starts(f"sleep:{key}")] == [runs_of(document)[0]["worker_id"]]


def test_of_twenty_workers_that_claim_at_the_same_instant_exactly_one_has_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Due for all at one instant that all know beforehand, and taken without regard to rank: the worst case.
    monkeypatch.setenv(handlers.EVENTS_VARIABLE, str(stage.events.path))
    monkeypatch.setattr("mtask.kernel.worker.discovery.ready.STAGGER", 0.0)
    monkeypatch.setattr("mtask.kernel.worker.discovery.fleet.Peers.rank", lambda *_: 0)

    async def scenario() -> int:
        client = AsyncClient(stage.uri, database=stage.database)
        try:
            async with workers_here(stage, TWENTY) as workers:
                await client.publish("noop", key="one", delay=timedelta(seconds=1))
                await client.wait("noop", "one", timeout=PATIENCE)
            # Stopped, they have all had their answers.
            return sum(worker.parts.sender.lost_cnt for worker in workers)
        finally:
            await client.close()

    lost = asyncio.run(scenario())
    # Twenty handshakes at once, with TLS and passwords, may outlast what a claim waits: it is read back, and not lost.
    read_back = sum("claim unanswered" in record.getMessage() for record in caplog.records)
    assert lost + read_back > 0, "several reached for it"
    assert len(runs_of(stage.document("noop:one"))) == 1
    assert len(stage.events.starts("noop:one")) == 1


def test_task_for_a_named_worker_is_never_run_by_others_and_runs_as_soon_as_that_worker_starts(
    stage: Stage, report: Report
) -> None:
    stage.start("A")  # it hears of the task by its stream
    published = stage.client.publish("noop", key="for-C", specific_worker_ids=["C"])
    stage.start("B")  # it is there already for this one's first scan
    for worker_id in "AB":
        stage.wait_heard(worker_id)
        passed = stage.client.publish("noop", key=f"sentinel/{worker_id}", specific_worker_ids=[worker_id])
        stage.wait_status(passed.task_id, "SUCCESS")
    document = stage.document(published.task_id)
    assert document["task_state"]["status"] == "INIT"
    assert runs_of(document) == []

    stage.start("C")
    document = stage.wait_status(published.task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("C", "SUCCESS")]
    assert [event.worker_id for event in stage.events.starts(published.task_id)] == ["C"]
    registered = stage.worker_document("C")
    assert registered is not None
    waited = runs_of(document)[0]["claim_time"] - registered["started_time"]
    report("named worker's registration to claim, ms", waited.total_seconds() * 1000)


def test_task_whose_named_workers_change_between_discovery_and_claim_is_refused_to_the_former(stage: Stage) -> None:
    stage.start("A")
    task_id, due = queued_and_then_moved(stage, "A", "B", timedelta(seconds=2))
    sentinel = stage.client.publish("noop", key="sentinel", start_time=due + timedelta(milliseconds=300))

    stage.wait_status(sentinel.task_id, "SUCCESS")  # A has gone past the other one's time
    assert runs_of(stage.document(task_id)) == []

    stage.start("B")
    document = stage.wait_status(task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("B", "SUCCESS")]
    assert [event.worker_id for event in stage.events.starts(task_id)] == ["B"]


def queued_and_then_moved(stage: Stage, former: str, named: str, ahead: timedelta) -> tuple[str, datetime]:
    """Let a worker queue a task that is due soon, and name another before it is; on a slow machine with more time."""
    due = stage.server_now() + ahead
    published = stage.client.publish("noop", key=f"moved-{ahead.seconds}", start_time=due)
    stage.wait_heard(former)
    moved = stage.client.tasks.update_one(
        {"_id": published.task_id, "$expr": {"$lt": ["$$NOW", due]}},
        {"$set": {"task_option.specific_worker_ids": [named]}},
    )
    return (published.task_id, due) if moved.modified_count else queued_and_then_moved(stage, former, named, 2 * ahead)


@pytest.mark.parametrize("how", ["by-the-client", "by-a-raw-update"])
@pytest.mark.parametrize("handler", ["hold", "hold_plain"])
def test_run_ends_when_its_worker_is_no_longer_admitted_and_the_named_one_takes_over(
    stage: Stage, report: Report, handler: str, how: str
) -> None:
    stage.start_all("AB")
    option: dict[str, Any] = {"specific_worker_ids": ["A"]}
    stage.client.publish(handler, {"gate": stage.gate()}, key="moved", **option)
    task_id = f"{handler}:moved"
    stage.wait_run(task_id, "A")

    excluded = stage.server_now()
    if how == "by-the-client":
        stage.client.update_option(handler, "moved", specific_worker_ids=["B"])
    else:
        stage.client.tasks.update_one({"_id": task_id}, {"$set": {"task_option.specific_worker_ids": ["B"]}})
    ended = stage.events.wait("cancelled", task_id=task_id, worker_id="A")[0]
    report(f"exclusion to the handler's end, {handler}, {how}, ms", (ended.time - excluded).total_seconds() * 1000)
    stage.wait_run(task_id, "B")
    stage.open_gate()

    document = stage.wait_status(task_id, "SUCCESS")
    assert [(run["worker_id"], run["status"]) for run in runs_of(document)] == [("A", "CANCELED"), ("B", "SUCCESS")]
    assert "no longer admits this worker" in runs_of(document)[0]["fail_reason"]
    assert document["task_state"]["failed_cnt"] == 0
    assert [event.worker_id for event in stage.events.all("end", task_id=task_id)] == ["B"]
