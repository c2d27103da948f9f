"""A run: a database that the former version fills, and a fleet that is rolled to this version and back, under load."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mtask import Client, Flow
from mtask.errors import WorkersTooOld
from tests.faults.upgrade.app import NARROW, QUEUE
from tests.faults.upgrade.judging import Pause, Verdict, judge
from tests.faults.upgrade.rolling import Fleet, narrow_queue
from tests.faults.upgrade.versions import NEW, Version, former
from tests.mongo import PATIENCE, eventually

#: Tasks of the former version that are there before a worker of this version starts.
_FILLED = 30
#: The time for which the narrow queue is paused, in seconds.
_PAUSED = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """The lengths of a run."""

    folder: Path
    seed: int
    workers: int = 2
    rate: float = 20.0
    #: The least time of a run: while it is not over, the fleet is rolled there and back again.
    seconds: float = 0.0


def run(uri: str, database: str, plan: Plan, say: Callable[[str], object] = print) -> Verdict:
    """Roll a fleet there and back, as often as the plan's time allows, and judge what came of it."""
    old = former(plan.folder / "former")
    fleet = Fleet(uri, database, plan.folder, plan.seed, plan.rate, say)
    chance = Random(plan.seed)
    names = [f"w{number}" for number in range(plan.workers)]
    began = time.monotonic()
    try:
        _fill(fleet, old, names)
        with Client(uri, database=database) as client:
            client.init()  # as `mtask init`: first of all, while every worker is still an old one
            say("validators and indexes are those of this version")
            narrow_queue(client)
            limited_from = time.monotonic()
            assert _is_refused(client), "a flow was published while old workers live"
            fleet.start_publisher(NEW)
            turns, pauses = 0, list[Pause]()

            def pause_a_while() -> None:
                pauses.append(_pause(client))
                say("the narrow queue was paused for a while")

            while not turns or time.monotonic() - began < plan.seconds:
                turns += 1
                fleet.roll(NEW, chance, pause_a_while)
                _run_a_flow(client, turns)
                fleet.roll(old, chance, pause_a_while)
            fleet.stop_publishers()
            fleet.drain(client)
            for name in names:
                fleet.end_worker(name, is_killed=False)
            return judge(client, plan.folder, fleet.ended, pauses, limited_from)
    finally:
        fleet.reap()


def _fill(fleet: Fleet, old: Version, names: list[str]) -> None:
    """Let the former version make the database, and tasks in it, before anything of this version touches it."""
    fleet.start_publisher(old)
    fleet.start_worker(names[0], old)

    def notes() -> int:
        return sum(path.read_text().count("\n") for path in fleet.folder.glob("publisher-old-*.jsonl"))

    eventually(lambda: notes() >= _FILLED, message=f"{_FILLED} tasks of the former version")
    for name in names[1:]:
        fleet.start_worker(name, old)


def _pause(client: Client) -> Pause:
    """Pause the narrow queue; return from when until when nobody may claim from it, by the server's clock."""
    client.pause(queue=NARROW)
    paused = client.server_time()
    time.sleep(_PAUSED)  # the load goes on meanwhile
    resumed = client.server_time()
    client.resume(queue=NARROW)
    return paused, resumed


def _is_refused(client: Client) -> bool:
    try:
        client.publish_flow(_flow(0))
    except WorkersTooOld:
        return True
    return False


def _flow(turn: int) -> Flow:
    flow = Flow(f"after-the-upgrade-{turn}")
    first = flow.add("first", "quick", {"value": 1}, queue=QUEUE, priority=100)
    flow.add("second", "quick", {"value": 2}, queue=QUEUE, priority=100, after=[first])
    return flow


def _run_a_flow(client: Client, turn: int) -> None:
    """Do what the former version does not know, while no worker of it lives."""
    flow = _flow(turn)
    client.publish_flow(flow)
    client.wait_flow(flow.key, timeout=PATIENCE)
