"""The store's operations in any order, against a real server: after each, the documents are what the model says.

MTASK_TEST_FUZZ=50 takes fifty times as many sequences as a usual run, and makes one that fails as short as it can:
that takes minutes, so a usual run shows it as it was found. What failed once is tried first the next time.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from mtask.database import setup
from mtask.kernel.document.options import STORED_OPTIONS, TaskOption
from mtask.kernel.document.status import RunStatus
from mtask.kernel.driver.indexes import EXPIRY_INDEX
from mtask.kernel.driver.stores import SyncStore
from mtask.kernel.operations.publish import NewTask, Policy
from mtask.kernel.statements.finish import Outcome
from tests.mongo import Client
from tests.parity.cases import SCALE, WORKERS, Document, options
from tests.parity.machine import KEYS, QUEUES, World

#: Seconds in which sequences begin.
_LIMIT = 60 * SCALE
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if SCALE > 1 else [])]
#: Read as expressions, these would be something else.
_values = st.sampled_from([None, 1, "$name", {"$add": [1, 2]}, ["$$NOW", {"a": {"$literal": 1}}], {}])
_task_ids = st.sampled_from([f"task:{key}" for key in KEYS])
_workers = st.sampled_from(WORKERS)
_picks = st.integers(0, 31)


@st.composite
def task_options(draw: st.DrawFn) -> Document:
    """Draw options as a publisher may give them, with leases that do not lapse by themselves within a test."""
    drawn = draw(options())
    named = len(drawn["specific_worker_ids"]) or drawn["concurrent_worker_cnt"]
    ping = draw(st.sampled_from([60_000, 300_000]))
    return drawn | {
        "concurrent_worker_cnt": min(drawn["concurrent_worker_cnt"], named),
        "ping_interval_ms": ping,
        "worker_timeout_ms": ping + draw(st.sampled_from([1, 60_000, 600_000])),
        "unexpected_retry_delay_ms": draw(st.sampled_from([0, 0, 1, 1000, 60_000])),
    }


@st.composite
def new_tasks(draw: st.DrawFn) -> NewTask:
    """Draw a task to publish; a start_time is drawn as a wait."""
    start = draw(st.sampled_from([None, None, None, 0, 1, 60_000]))
    key = draw(st.sampled_from(KEYS))
    return NewTask(
        task_id=f"task:{key}",
        name="task",
        key=key,
        queue=draw(st.sampled_from(QUEUES)),
        params=draw(_values),
        task_option=TaskOption.model_validate(draw(task_options())).stored(),
        start=None if start is None else timedelta(milliseconds=start),
    )


policies = st.builds(
    Policy,
    if_exists=st.sampled_from(["keep", "update", "update", "update", "reject"]),
    clean_failed=st.booleans(),
    clean_success=st.booleans(),
    not_update_running=st.booleans(),
)
_ends = st.builds(
    Outcome,
    task_id=st.just(""),
    run_id=st.just(""),
    status=st.sampled_from([RunStatus.FAIL, RunStatus.FAIL, RunStatus.CANCELED]),
    reason=st.sampled_from(["broken", "$name"]),
    final=st.sampled_from([False, False, False, True]),
    delay_ms=st.sampled_from([None, None, None, 0, 60_000]),
    jitter=st.sampled_from([0.0, 0.3, 1.0]),
).map(lambda end: replace(end, final=end.final and end.status is RunStatus.FAIL))
_successes = st.builds(
    Outcome, task_id=st.just(""), run_id=st.just(""), status=st.just(RunStatus.SUCCESS), returns=_values
)
outcomes = st.one_of(_successes, _ends)

#: A step: the world's method and its arguments.
Step = tuple[str, dict[str, Any]]


def step(method: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(method), st.fixed_dictionaries(arguments))


def weighted(*choices: tuple[int, st.SearchStrategy[Step]]) -> st.SearchStrategy[Step]:
    return st.one_of([choice for weight, choice in choices for _ in range(weight)])


_some_picks = st.lists(_picks, min_size=1, max_size=3)
_takes = weighted(
    (2, step("claim", worker_id=_workers, task_ids=st.lists(_task_ids, min_size=1, max_size=1))),
    (2, step("claim", worker_id=_workers, task_ids=st.lists(_task_ids, min_size=2, max_size=3, unique=True))),
    (4, step("claim_what_can_be_taken", pick=_picks)),
    (1, step("discover", worker_id=_workers, horizon_ms=st.sampled_from([0, 10_000, 100_000]))),
)
_holds = weighted(
    (4, step("finish_some", picks=_some_picks, ends=st.lists(_ends, min_size=3, max_size=3))),
    (2, step("finish_some", picks=_some_picks, ends=st.lists(_successes, min_size=3, max_size=3))),
    (1, step("hand_back", picks=_some_picks)),
    (2, step("finish_what_is_lost", pick=_picks, end=outcomes)),
    (1, step("finish_under_the_name_of_another_task", task_id=_task_ids, pick=_picks, end=outcomes)),
    (1, step("finish_in_a_transaction", pick=_picks, is_live=st.booleans(), returns=_values)),
    (
        2,
        step(
            "ping",
            picks=_some_picks,
            lost=st.lists(_picks, max_size=1),
            lease_ms=st.sampled_from([1000, 60_000, 400_000]),
        ),
    ),
)
_times = weighted(
    (4, step("time_passes_to_a_deadline", pick=_picks, extra_ms=st.sampled_from([-2, 0, 0, 0, 1000]))),
    (2, step("time_passes", milliseconds=st.sampled_from([1, 1000, 30_000, 60_000, 600_000]))),
    (2, step("settle", task_ids=st.lists(_task_ids, min_size=1, max_size=3, unique=True))),
    (1, step("settle_lapsed", grace_ms=st.sampled_from([0, 30_000]))),
    (1, step("much_has_happened", task_id=_task_ids, times=st.sampled_from([7, 21]))),
)
_batches = st.lists(new_tasks(), min_size=2, max_size=3, unique_by=lambda new: new.task_id)
_asks = weighted(
    (3, step("publish", new=new_tasks(), policy=policies, start=st.sampled_from([None, None, -60_000, 0, 60_000]))),
    (1, step("publish_many", batch=_batches, policy=policies)),
    (2, step("cancel", task_id=_task_ids)),
    (4, step("run_again", pick=_picks, everything=st.booleans())),
    (
        2,
        step(
            "update_option",
            task_id=_task_ids,
            option=task_options(),
            names=st.sets(st.sampled_from(sorted(STORED_OPTIONS)), min_size=1),
        ),
    ),
    (1, step("remove", task_id=_task_ids)),
)


class Machine(RuleBasedStateMachine):
    """Workers, clients and time, in any order.

    What is drawn never depends on what the server did, or a sequence could not be run again.
    """

    world: World
    #: On a machine that is starved, sequences do nothing that begin when time is up, unless one is being looked into.
    is_idle = False

    @initialize(new=st.tuples(*(task_options() for _ in KEYS)))
    def begin(self, new: tuple[Document, ...]) -> None:
        if self.is_idle:
            return
        made = [TaskOption.model_validate(option).stored() for option in new]
        batch = [NewTask(f"task:{key}", "task", key, "default", None, m) for key, m in zip(KEYS, made, strict=True)]
        self.world.publish_many(batch, Policy())

    @rule(step=_takes)
    def take(self, step: Step) -> None:
        self.do(step)

    @rule(step=_holds)
    def hold(self, step: Step) -> None:
        self.do(step)

    @rule(step=_times)
    def wait(self, step: Step) -> None:
        self.do(step)

    @rule(step=_asks)
    def ask(self, step: Step) -> None:
        self.do(step)

    def do(self, step: Step) -> None:
        if self.is_idle:
            return
        method, arguments = step
        getattr(self.world, method)(**arguments)


@pytest.mark.timeout(300 if SCALE == 1 else 600 + 120 * SCALE)
def test_operations_in_any_order_leave_what_the_model_says(mongo_session_client: Client, database_name: str) -> None:
    store = SyncStore(mongo_session_client, database_name, timeout=timedelta(minutes=1))
    store.run(setup.ensure())
    # As time passes here, tasks expire: they must not vanish under the machine's hands.
    store.tasks.drop_index(EXPIRY_INDEX)

    end = monotonic() + _LIMIT
    failed: list[Step] = []

    class Connected(Machine):
        def __init__(self) -> None:
            super().__init__()
            self.is_idle = monotonic() > end and not failed
            if not self.is_idle:
                self.world = World(store)

        def do(self, step: Step) -> None:
            try:
                super().do(step)
            except BaseException:
                failed.append(step)
                raise

    run_state_machine_as_test(
        Connected,
        settings=settings(
            max_examples=10 * SCALE,
            stateful_step_count=50,
            deadline=None,
            print_blob=True,
            phases=_PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
