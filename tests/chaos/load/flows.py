"""The flows of the load, and what is done to their steps: pure functions of seed, publisher and batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mtask import Flow
from mtask.kernel.document.task import OnFailed
from tests.chaos.load.tasks import PATIENT, QUEUE, Operation

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
    """Return the flow that comes with this batch, and the ids of its steps; None for most batches.

    Its handlers add children to it, and tasks as which steps go on.
    """
    made = _made(seed, publisher, batch)
    return None if made is None else (made.flow, made.task_ids)


@dataclass(frozen=True, slots=True)
class _Made:
    flow: Flow
    task_ids: list[str]
    children: list[str]  #: the ids of those that handlers will add


def _made(seed: int, publisher: str, batch: int) -> _Made | None:
    random = Random(f"{seed}/{publisher}/flow/{batch}")
    if random.random() >= _SHARE:
        return None
    flow = Flow(f"{PREFIX}{publisher}/{batch}", queue=QUEUE, fail_fast=random.random() < 0.2, **PATIENT)
    names: list[str] = []
    task_ids: list[str] = []
    children: list[str] = []
    for number in range(random.randint(3, 25)):
        after = random.sample(names, min(len(names), random.choice((0, 1, 1, 2, 4, 8))))
        name, params, options = _handler(random, number)
        flow.add(f"s{number}", name, params, after=after, on_failed=random.choice(_ON_FAILED), **options)
        names.append(f"s{number}")
        task_ids.append(f"{name}:{flow.key}/s{number}")
        children += children_of(task_ids[-1], params.get("tree", ()))
    return _Made(flow, task_ids, children)


def _handler(random: Random, number: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    drawn = random.random()
    if drawn < 0.60:
        return random.choice(("quick", "plain")), {"value": number}, {}
    if drawn < 0.71:
        seconds = random.choice((0.0, 0.0, 0.5, 1.5))
        return random.choice(("split", "split", "split_plain")), {"tree": _tree(random), "seconds": seconds}, {}
    if drawn < 0.75:
        return "relay", {"left": random.choice((0, 1))}, {}
    if drawn < 0.90:
        return "slow", {"seconds": round(random.uniform(0.1, 2.0), 2)}, {}
    if drawn < 0.95:
        return "flaky", {"failures": 2, "seconds": 0.0}, {}
    # It fails, and a retry of it succeeds.
    return "flaky", {"failures": 1, "seconds": 0.0}, {"max_retries": 0}


def _tree(random: Random, level: int = 1) -> list[Any]:
    """Return the handlers of 1 to 6 children; a list in place of one is a child with children of its own."""
    return [
        _tree(random, level + 1)
        if level < 2 and random.random() < 0.12
        else random.choices(("quick", "plain", "flaky"), (70, 27, 3))[0]
        for _ in range(random.choices(range(1, 7), (6, 5, 4, 3, 2, 2))[0])
    ]


def children_of(step_id: str, tree: Sequence[Any]) -> Iterator[str]:
    """Yield the ids of the children that a step with this tree adds, and of theirs."""
    key = step_id.partition(":")[2]
    for number, part in enumerate(tree):
        child_id = f"{'split' if isinstance(part, list) else part}:{key}-{number}"
        yield child_id
        if isinstance(part, list):
            yield from children_of(child_id, part)


def deeds(seed: int, publisher: str, batch: int) -> list[StepDeed]:
    """Return what is done to steps of earlier flows after this batch: mostly retries of those that may have failed."""
    random = Random(f"{seed}/{publisher}/flow-deeds/{batch}")
    chosen: list[StepDeed] = []
    for earlier in range(max(0, batch - 12), batch):
        if random.random() >= 0.3 or (made := _made(seed, publisher, earlier)) is None:
            continue
        flaky = [task_id for task_id in (*made.task_ids, *made.children) if task_id.startswith("flaky:")]
        if flaky and random.random() < 0.8:
            chosen.append(_deed("retry", random.choice(flaky)))
        elif random.random() < 0.2:
            chosen.append(_deed("cancel", random.choice([*made.task_ids, *made.children])))
    return chosen


def _deed(operation: Operation, task_id: str) -> StepDeed:
    name, _, key = task_id.partition(":")
    return StepDeed(operation, name, key)
