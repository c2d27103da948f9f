"""Anything in any order, against workers of two apps: the model finds no start that breaks the order.

MTASK_TEST_FUZZ=50 takes fifty times as many examples as a usual run, and MTASK_TEST_SEED=N repeats those of a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from mtask.local import ReplicaSet
from tests.order.app import OTHER, WORK
from tests.order.model import Judgement, judge
from tests.order.pace import PROBES, Pace, probes
from tests.order.theatre import SHORT, Theatre, open_theatre, spec
from tests.parity.cases import SCALE

#: The examples of one set of workers, each with two queues of its own: a worker of many queues scans them in parts.
_EXAMPLES = 2
_STEPS = 10
_MOST_TASKS = 150
_QUEUES = [f"example-{number}-{name}" for number in range(_EXAMPLES) for name in "xy"]
_APPS = {"w0": "first", "w1": "first", "w2": "second", "w3": "second"}
_LIMITS: list[dict[str, Any]] = [
    {},
    {"concurrency": 1},
    {"concurrency": 2},
    {"concurrency": 3, "key_concurrency": 1},
    {"concurrency": 4, "tenant_concurrency": 2},
    {"rate": (5, 0.5)},
    {"concurrency": 2, "rate": (5, 0.5)},
    {"key_concurrency": 1, "tenant_concurrency": 2},
]


class Example:
    """What happens in two queues."""

    def __init__(self, theatre: Theatre, number: int, random: Random) -> None:
        self._theatre = theatre
        self._queues = _QUEUES[2 * number : 2 * number + 2]
        self._number = number
        self._random = random
        self._published = 0

    def play(self) -> Judgement:
        """Take steps, let all finish, and judge it."""
        self._theatre.limit(self._queues[0], concurrency=2)
        self._limit(self._queues[1])
        if self._random.random() < 0.5:
            self._theatre.fair(self._queues[1])
        for queue, name, tenant in product(self._queues, (WORK, OTHER), "ab"):
            self._publish(queue, 10, name, tenant, seconds=0.05)
        steps: list[Callable[[], None]] = [
            *[self.publish] * 3, self.limit, self.limit_tenant, self.set_fair, self.kill, self.terminate, self.wait,
        ]  # fmt: skip
        for _ in range(_STEPS):
            self._random.choice(steps)()
        self._theatre.wait_running()
        self._theatre.wait_done(self._queues)
        tolerance = Pace(self._theatre.history(PROBES)).tolerance()
        return judge(self._theatre.history(*self._queues), tolerance)

    @property
    def _queue(self) -> str:
        return self._random.choice(self._queues)

    def publish(self) -> None:
        """Publish some tasks that are alike."""
        choice = self._random.choice
        named = choice([None, None, None, *sorted(_APPS)])
        name = choice([WORK, OTHER]) if named is None else {"first": WORK, "second": OTHER}[_APPS[named]]
        self._publish(
            self._queue,
            self._random.randint(1, 30),
            name,
            choice([None, "a", "b", "c"]),
            seconds=choice([0.0, 0.02, 0.1, 0.3]),
            limit_key=choice([None, None, "k", "l"]),
            priority=choice([0, 0, 0, 1, 5]),
            delay=choice([None, None, None, 0.5, 2.0]),
            fails=choice([0, 0, 0, 1]),
            retry_delay=choice([0, 0.4]),
            specific_worker_ids=[named] if named else [],
        )

    def _publish(self, queue: str, many: int, name: str, tenant: str | None, **rest: Any) -> None:
        own = None if tenant is None else f"{tenant}{self._number}"
        numbers = range(self._published, self._published + min(many, _MOST_TASKS - self._published))
        self._published += len(numbers)
        self._theatre.publish(*(spec(queue, f"{n}", name=name, tenant=own, **{**SHORT, **rest}) for n in numbers))

    def limit(self) -> None:
        """Change the limits of a queue."""
        self._limit(self._queue)

    def _limit(self, queue: str) -> None:
        self._theatre.limit(queue, **self._random.choice(_LIMITS))

    def limit_tenant(self) -> None:
        """Change the limit of a tenant."""
        self._theatre.limit(
            tenant=f"{self._random.choice('abc')}{self._number}", concurrency=self._random.choice([None, 1, 3])
        )

    def set_fair(self) -> None:
        """Let tenants take turns, or no longer."""
        self._theatre.fair(self._queue, is_fair=self._random.random() < 0.5)

    def kill(self) -> None:
        """Kill a worker."""
        self._theatre.kill(self._random.choice(sorted(_APPS)))

    def terminate(self) -> None:
        """End a worker in order."""
        self._theatre.terminate(self._random.choice(sorted(_APPS)))

    def wait(self) -> None:
        """Let the workers go on for a while: what they do meanwhile is what is tested."""
        time.sleep(self._random.choice([0.2, 0.5, 1.0, 1.5]))


def run_examples(server: ReplicaSet, folder: Path, random: Random) -> list[Judgement]:
    """Run some examples on one set of workers. Return what is thought of each."""
    with open_theatre(server, folder, [*_QUEUES, PROBES]) as theatre:
        for worker_id, app in _APPS.items():
            theatre.launch(worker_id, app, 5, "--shutdown-timeout", "0.2")
        theatre.wait_running()
        theatre.publish(*probes(WORK, OTHER))
        return [Example(theatre, number, random).play() for number in range(_EXAMPLES)]


def test_no_start_breaks_the_order_whatever_happens(mongo_server: ReplicaSet, tmp_path: Path) -> None:
    seed = int(os.environ.get("MTASK_TEST_SEED", Random().getrandbits(32)))
    print(f"MTASK_TEST_SEED={seed}")
    judgements: list[Judgement] = []
    for number in range(SCALE):
        folder = tmp_path / str(number)
        folder.mkdir()
        judgements += run_examples(mongo_server, folder, Random(seed + number))
    assert sum(judgement.starts for judgement in judgements) > 0
    assert not any(judgement.violations for judgement in judgements), "\n\n".join(map(str, judgements))
