"""The flows of the load, and what is done to their steps: pure functions of seed, publisher and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mtask import Flow
from mtask.model.documents import OnFailed
from tests.faults.load import PATIENT, Operation

#: The keys of flows begin so; those of other tasks do not.
PREFIX = "flow/"
#: How often a batch comes with a flow.
_SHARE = 0.2
_ON_FAILED: Sequence[OnFailed] = ("cancel", "cancel", "run", "fail")


@dataclass(frozen=True, slots=True)
class StepDeed:
    """Something that the publisher does to a step of a flow that it published."""

    operation: Operation
    name: str
    key: str


def flow_of(seed: int, publisher: str, batch: int) -> tuple[Flow, list[str]] | None:
    """Return the flow that comes with this batch, and the ids of its steps; None for most batches."""
    random = Random(f"{seed}/{publisher}/flow/{batch}")
    if random.random() >= _SHARE:
        return None
    flow = Flow(f"{PREFIX}{publisher}/{batch}", queue="load", fail_fast=random.random() < 0.2, **PATIENT)
    names: list[str] = []
    task_ids = []
    for number in range(random.randint(3, 25)):
        after = random.sample(names, min(len(names), random.choice((0, 1, 1, 2, 4, 8))))
        name, params, options = _handler(random, number)
        flow.add(f"s{number}", name, params, after=after, on_failed=random.choice(_ON_FAILED), **options)
        names.append(f"s{number}")
        task_ids.append(f"{name}:{flow.key}/s{number}")
    return flow, task_ids


def _handler(random: Random, number: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    drawn = random.random()
    if drawn < 0.75:
        return random.choice(("quick", "plain")), {"value": number}, {}
    if drawn < 0.90:
        return "slow", {"seconds": round(random.uniform(0.1, 2.0), 2)}, {}
    if drawn < 0.95:
        return "flaky", {"failures": 2, "seconds": 0.0}, {}
    # It fails, and a retry of it succeeds.
    return "flaky", {"failures": 1, "seconds": 0.0}, {"max_unexpected_retries": 0}


def deeds(seed: int, publisher: str, batch: int) -> list[StepDeed]:
    """Return what is done to steps of earlier flows after this batch: mostly retries of those that may have failed."""
    random = Random(f"{seed}/{publisher}/flow-deeds/{batch}")
    chosen: list[StepDeed] = []
    for earlier in range(max(0, batch - 12), batch):
        if random.random() >= 0.3 or (made := flow_of(seed, publisher, earlier)) is None:
            continue
        flaky = [task_id for task_id in made[1] if task_id.startswith("flaky:")]
        if flaky and random.random() < 0.8:
            chosen.append(_deed("retry", random.choice(flaky)))
        elif random.random() < 0.2:
            chosen.append(_deed("cancel", random.choice(made[1])))
    return chosen


def _deed(operation: Operation, task_id: str) -> StepDeed:
    name, _, key = task_id.partition(":")
    return StepDeed(operation, name, key)
