"""Flows under load and under faults: published once and whole, each step run once and in order, none lost.

MTASK_FLOWS=200 MTASK_FLOW_STEPS=50 gives the long form of the last test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import pytest
from pymongo.monitoring import CommandListener, CommandStartedEvent, CommandSucceededEvent

import mtask
from mtask import Flow
from mtask.kernel.document.options import TaskOptions
from mtask.local import ReplicaSet
from tests.acceptance.conftest import Report
from tests.chaos.nemeses import breaks
from tests.mongo import PATIENCE, Document, eventually
from tests.mongo import Client as Mongo
from tests.workers import Stage, open_stage, runs_of

DYING_APP, AFTER_THE_FINISH = "tests.acceptance.dying_app:app", {"MTASK_TEST_DIES": "after the finish"}
PUBLISHERS = 20
#: The finish of a step, and then the release of its dependents by another worker: at most this time lies in between.
MAX_RECOVERY = timedelta(seconds=10)
FLOWS = int(os.environ.get("MTASK_FLOWS", "12"))
STEPS = int(os.environ.get("MTASK_FLOW_STEPS", "20"))
#: A lease soon over, a retry at once, and enough of them for what kills and elections take away.
SHORT: TaskOptions = {
    "ping_interval": 0.5,
    "worker_timeout": 3,
    "retry_delay": 0,
    "max_retries": 50,
}


def steps_of(stage: Stage) -> dict[str, Document]:
    """Return all steps of all flows by `_id`."""
    return {found["_id"]: found for found in stage.mongo[stage.database]["tasks"].find({"flow": {"$exists": True}})}


def wait_ended(stage: Stage, timeout: float = PATIENCE) -> dict[str, Document]:
    """Wait until all steps have ended and nobody is owed anything; return the steps."""
    tasks = stage.mongo[stage.database]["tasks"]
    is_open = {"task_state.status": {"$in": ["WAITING", "INIT", "RUNNING"]}}
    left = {"$or": [is_open, {"owed_since": {"$exists": True}}]}
    try:
        eventually(lambda: tasks.find_one(left, {"_id": 1}) is None, timeout, interval=0.2)
    except AssertionError:
        examples = list(tasks.find(left).limit(3))
        raise AssertionError(f"{tasks.count_documents(left)} left after {timeout:g} s: {examples}") from None
    return steps_of(stage)


def assert_in_order(steps: dict[str, Document]) -> None:
    """Check by the server's times that no step was released before its dependencies had ended, or claimed before."""
    for step in steps.values():
        first: datetime | None = min((run["claim_time"] for run in runs_of(step)), default=None)
        if first is None:
            continue
        release: datetime = step["flow"]["release_time"]
        assert release <= first, step["_id"]
        for other in step["flow"]["after"]:
            assert steps[other]["task_state"]["finish_time"] <= release, (step["_id"], other)


# --- published once, and whole --------------------------------------------------------------------------------


def a_flow(key: str = "load") -> Flow:
    """Return a diamond, a chain of 50 and a fan-out of 300 into one, as one flow."""
    flow = Flow(key)
    top = flow.add("top", "noop")
    sides = [flow.add(side, "noop", after=[top]) for side in ("left", "right")]
    link = flow.add("bottom", "noop", after=sides)
    for number in range(50):
        link = flow.add(f"link-{number}", "noop", after=[link])
    parts = [flow.add(f"part-{number}", "noop", after=[link]) for number in range(300)]
    flow.add("all", "noop", after=parts)
    return flow


def publish(uri: str, database: str, start: Barrier, results: Any) -> None:
    try:
        with mtask.Client(uri, database=database) as client:
            start.wait(120)
            results.put(client.publish_flow(a_flow()).created)
    except BaseException as error:
        results.put(repr(error))
        raise


def test_a_flow_from_twenty_processes_runs_once_each_step_once_and_in_order(stage: Stage, report: Report) -> None:
    stage.set_up()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start, results = context.Barrier(PUBLISHERS), context.SimpleQueue()
    arguments = (stage.uri, stage.database, start, results)
    processes = [context.Process(target=publish, args=arguments) for _ in range(PUBLISHERS)]
    for process in processes:
        process.start()
    came_to = Counter(results.get() for _ in processes)
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
        process.close()
    results.close()
    assert came_to == {True: 1, False: PUBLISHERS - 1}

    began = time.monotonic()
    stage.start_all(["w1", "w2"])
    steps = wait_ended(stage, 180)
    report("seconds for a diamond, a chain of 50 and a fan-out of 300 into one", round(time.monotonic() - began, 1))
    assert len(steps) == 355
    assert {step["task_state"]["status"] for step in steps.values()} == {"SUCCESS"}
    assert {len(runs_of(step)) for step in steps.values()} == {1}
    assert Counter(event.task_id for event in stage.events.starts()) == dict.fromkeys(steps, 1)
    assert_in_order(steps)


class _Killer(CommandListener):
    """Kills its own process right before or right after a command of the publisher's transaction."""

    def __init__(self, command: str, *, is_before: bool) -> None:
        self._command, self._is_before = command, is_before

    def started(self, event: CommandStartedEvent) -> None:
        if self._is_before and event.command_name == self._command:
            os.kill(os.getpid(), signal.SIGKILL)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        if not self._is_before and event.command_name == self._command:
            os.kill(os.getpid(), signal.SIGKILL)

    def failed(self, event: Any) -> None: ...


def publish_and_die(uri: str, database: str, command: str, is_before: bool) -> None:
    from pymongo import monitoring

    monitoring.register(_Killer(command, is_before=is_before))
    with mtask.Client(uri, database=database, check=False) as client:
        client.publish_flow(a_flow())


@pytest.fixture
def abandoned_transactions_end_soon(mongo_session_client: Mongo) -> Iterator[None]:
    """Have the server abort what a killed publisher left open after 3 s, not 60."""
    admin, name = mongo_session_client.admin, "transactionLifetimeLimitSeconds"
    before = admin.command({"setParameter": 1, name: 3})["was"]
    yield
    admin.command({"setParameter": 1, name: before})


@pytest.mark.usefixtures("abandoned_transactions_end_soon")
@pytest.mark.parametrize(
    ("command", "is_before"), [("findAndModify", False), ("insert", False), ("commitTransaction", True)]
)
def test_a_publisher_that_is_killed_amid_its_transaction_leaves_nothing(
    stage: Stage, command: str, is_before: bool
) -> None:
    stage.set_up()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=publish_and_die, args=(stage.uri, stage.database, command, is_before))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert steps_of(stage) == {}
    # Whoever publishes the flow now waits for the server to undo the abandoned transaction, at most.
    assert stage.client.publish_flow(a_flow()).created
    assert len(steps_of(stage)) == 355


# --- finishers that die ---------------------------------------------------------------------------------------


def test_what_a_finisher_that_dies_before_the_release_owes_is_released_within_ten_seconds(
    stage: Stage, report: Report
) -> None:
    """The other worker has never seen a flow, and serves another queue: it learns of the mark by its scans alone."""
    stage.set_up()
    stage.start("rescuer", "--queues", "right")
    took = []
    for number in range(2):
        dying = stage.launch(f"dying-{number}", "--queues", "left", app=DYING_APP, environment=AFTER_THE_FINISH)
        stage.wait_running(dying)
        flow = Flow(f"f{number}")
        first = flow.add("first", "noop", queue="left")
        flow.add("second", "noop", after=[first], queue="right")
        stage.client.publish_flow(flow)
        assert dying.wait() == -signal.SIGKILL
        second = stage.wait_document(
            f"noop:f{number}/second", lambda found: "release_time" in found["flow"], "released", 60
        )
        finished: datetime = stage.document(f"noop:f{number}/first")["task_state"]["finish_time"]
        took.append(second["flow"]["release_time"] - finished)
    report("seconds from the finish to the release, finisher killed in between", [t.total_seconds() for t in took])
    assert max(took) < MAX_RECOVERY
    wait_ended(stage)


# --- everything at once ---------------------------------------------------------------------------------------


def random_flow(random: Random, key: str) -> Flow:
    """Return a flow of steps that wait for some of those before them; some fail, and a few flows fail fast."""
    flow = Flow(key, fail_fast=random.random() < 0.2, **SHORT)
    names: list[str] = []
    for number in range(STEPS):
        after = random.sample(names, min(len(names), random.choice((0, 1, 1, 2, 5))))
        name = f"s{number}"
        on_failed = random.choice(("cancel", "cancel", "run", "fail"))
        if random.random() < 0.03:
            flow.add(name, "fail", after=after, on_failed=on_failed, max_retries=0)  # type: ignore[call-overload]
        else:
            seconds = random.choice((0.0, 0.0, 0.05, 0.3))
            flow.add(name, "sleep", {"seconds": seconds}, after=after, on_failed=on_failed)  # type: ignore[call-overload]
        names.append(name)
    return flow


def releases(stage: Stage, since: datetime) -> Counter[str]:
    """Return how often each task was released since then, by the events."""
    stage.client.publish("noop", key="the-last", delay=3600)
    counted: Counter[str] = Counter()
    with stage.client.events(since=since) as events:
        for event in events:
            if event.key == "the-last":
                break
            counted[event.task_id] += event.kind == "released"
    return counted


@pytest.mark.long
@pytest.mark.timeout(3_000)  # for the long form
def test_flows_under_kills_elections_and_lost_streams_all_end_and_release_once(
    no_process_is_left: None, tmp_path: Path, report: Report, replica_set: ReplicaSet
) -> None:
    random = Random(17)
    with open_stage(replica_set.uri, "flows", tmp_path) as stage:
        stage.set_up()
        since = stage.server_now()
        for number in range(FLOWS):
            stage.client.publish_flow(random_flow(random, f"f{number}"))
        names = [f"w{number}" for number in range(5)]
        workers = {name: stage.launch(name) for name in names}
        began, round_cnt = time.monotonic(), 0
        tasks = stage.mongo[stage.database]["tasks"]
        while tasks.find_one({"task_state.status": {"$in": ["WAITING", "INIT", "RUNNING"]}}, {"_id": 1}) is not None:
            time.sleep(2)
            name = random.choice(names)
            workers[name].kill()
            workers[name] = stage.launch(name)
            round_cnt += 1
            if round_cnt % 4 == 2:
                breaks.kill_streams(replica_set, stage.database)
            if round_cnt % 6 == 4:
                breaks.step_down(replica_set)
            assert time.monotonic() < began + 60 + FLOWS * STEPS / 5, "the flows do not end"
        steps = wait_ended(stage, 60)
        took = time.monotonic() - began
        released = releases(stage, since)
    report("steps, kills of workers, seconds", [len(steps), round_cnt, round(took, 1)])
    assert len(steps) == FLOWS * STEPS
    assert_in_order(steps)
    for task_id, step in steps.items():
        waited = bool(step["flow"]["after"])
        assert released[task_id] == (waited and "release_time" in step["flow"]), (task_id, released[task_id])
        succeeded = [run for run in runs_of(step) if run["status"] == "SUCCESS"]
        assert len(succeeded) == (step["task_state"]["status"] == "SUCCESS"), task_id
        if "release_time" not in step["flow"]:
            assert step["task_state"]["status"] in ("CANCELED", "FAIL"), task_id
