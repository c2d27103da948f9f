"""Anything in any order, against workers of two apps: the model finds no start that breaks the order.

MTASK_TEST_FUZZ=50 takes fifty times as many examples as a usual run, and `--hypothesis-seed=N` repeats those of a run.
"""

from __future__ import annotations

import time
from itertools import count, product
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from mtask.local import ReplicaSet
from tests.order.app import OTHER, WORK
from tests.order.model import Judgement, judge
from tests.order.theatre import Theatre, open_theatre, spec
from tests.parity.cases import SCALE

#: The examples of one set of workers, each with two queues of its own: a worker of many queues scans them in parts.
_EXAMPLES = 2
_STEPS = 10
_MOST_TASKS = 250
_QUEUES = [f"example-{number}-{name}" for number in range(_EXAMPLES) for name in "xy"]
_APPS = {"w0": "first", "w1": "first", "w2": "second", "w3": "second"}

_workers = st.sampled_from(sorted(_APPS))
_places = st.integers(0, 1)
_tenants = st.sampled_from([None, "a", "b", "c"])
_limits = st.sampled_from(
    [
        {},
        {"concurrency": 1},
        {"concurrency": 2},
        {"concurrency": 3, "key_concurrency": 1},
        {"concurrency": 4, "tenant_concurrency": 2},
        {"rate": (5, 0.5)},
        {"concurrency": 2, "rate": (5, 0.5)},
        {"key_concurrency": 1, "tenant_concurrency": 2},
    ]
)


class Machine(RuleBasedStateMachine):
    """One example: what happens in two queues."""

    theatre: Theatre
    numbers: Any
    judgements: list[Judgement]

    def __init__(self) -> None:
        super().__init__()
        number = next(self.numbers)
        self._queues = _QUEUES[2 * number : 2 * number + 2]
        self._number = number
        self._published = 0

    @initialize(limits=_limits, is_fair=st.booleans())
    def begin(self, limits: dict[str, Any], is_fair: bool) -> None:
        self.theatre.limit(self._queues[0], concurrency=2)
        self.theatre.limit(self._queues[1], **limits)
        if is_fair:
            self.theatre.fair(self._queues[1])
        for place, name, tenant in product((0, 1), (WORK, OTHER), "ab"):
            self._publish(place, 10, name, tenant, seconds=0.05)

    @rule(
        place=_places,
        many=st.integers(1, 30),
        name=st.sampled_from([WORK, OTHER]),
        tenant=_tenants,
        key=st.sampled_from([None, None, "k", "l"]),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
        seconds=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
        delay=st.sampled_from([None, None, None, 0.5, 2.0]),
        fails=st.sampled_from([0, 0, 0, 1]),
        retry_delay_ms=st.sampled_from([0, 400]),
        named=st.sampled_from([None, None, None, *sorted(_APPS)]),
    )
    def publish(
        self, place: int, many: int, name: str, tenant: str | None, key: str | None, named: str | None,
        retry_delay_ms: int, **rest: Any,
    ) -> None:  # fmt: skip
        if named is not None:
            name = WORK if _APPS[named] == "first" else OTHER
        options = {"unexpected_retry_delay_ms": retry_delay_ms, "specific_worker_ids": [named] if named else []}
        self._publish(place, many, name, tenant, limit_key=key, **options, **rest)

    def _publish(self, place: int, many: int, name: str, tenant: str | None, **rest: Any) -> None:
        own = None if tenant is None else f"{tenant}{self._number}"
        numbers = range(self._published, self._published + min(many, _MOST_TASKS - self._published))
        self._published += len(numbers)
        queue = self._queues[place]
        self.theatre.publish(*(spec(queue, f"{n}", name=name, tenant=own, **rest) for n in numbers))

    @rule(place=_places, limits=_limits)
    def limit(self, place: int, limits: dict[str, Any]) -> None:
        self.theatre.limit(self._queues[place], **limits)

    @rule(tenant=st.sampled_from("abc"), most=st.sampled_from([None, 1, 3]))
    def limit_tenant(self, tenant: str, most: int | None) -> None:
        self.theatre.limit(tenant=f"{tenant}{self._number}", concurrency=most)

    @rule(place=_places, is_fair=st.booleans())
    def set_fair(self, place: int, is_fair: bool) -> None:
        self.theatre.fair(self._queues[place], is_fair=is_fair)

    @rule(worker_id=_workers)
    def kill(self, worker_id: str) -> None:
        self.theatre.kill(worker_id)

    @rule(worker_id=_workers)
    def terminate(self, worker_id: str) -> None:
        self.theatre.terminate(worker_id)

    @rule(seconds=st.sampled_from([0.2, 0.5, 1.0, 1.5]))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)  # what the workers do meanwhile is what is tested

    def teardown(self) -> None:
        """Let all finish, and judge it. What is wrong is told at the end, as it need not happen twice."""
        self.theatre.wait_running()
        self.theatre.wait_done()
        self.judgements.append(judge(self.theatre.history(*self._queues)))


def run_examples(server: ReplicaSet, folder: Path) -> list[Judgement]:
    """Run some examples on one set of workers. Return what is thought of each."""
    judgements: list[Judgement] = []
    with open_theatre(server, folder, _QUEUES) as theatre:
        for worker_id, app in _APPS.items():
            theatre.launch(worker_id, app, 5, "--shutdown-timeout", "0.2")
        theatre.wait_running()
        played = {"theatre": theatre, "numbers": count(), "judgements": judgements}
        run_state_machine_as_test(
            type("PlayedMachine", (Machine,), played),
            settings=settings(
                max_examples=_EXAMPLES,
                stateful_step_count=_STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    return judgements


def test_no_start_breaks_the_order_whatever_happens(mongo_server: ReplicaSet, tmp_path: Path) -> None:
    judgements: list[Judgement] = []
    for number in range(SCALE):
        folder = tmp_path / str(number)
        folder.mkdir()
        judgements += run_examples(mongo_server, folder)
    assert sum(judgement.starts for judgement in judgements) > 0
    assert not any(judgement.violations for judgement in judgements), "\n\n".join(map(str, judgements))
