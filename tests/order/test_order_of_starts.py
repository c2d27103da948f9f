"""A limit changes when tasks start, never in which order: with worker processes of two apps, kills and limits.

All scenes of a play run at the same time, each in a queue of its own, on the same workers. Each test judges one queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from mtask import TaskSpec
from mtask.local import ReplicaSet
from tests.mongo import PATIENCE, eventually
from tests.order.app import ISOLATED, OTHER, WORK
from tests.order.delays import Delay
from tests.order.history import History
from tests.order.model import Judgement, judge, share
from tests.order.pace import PROBES, Pace, probes
from tests.order.theatre import SHORT, Theatre, open_theatre, spec

#: The longest time from when a task is due and a permit is free to its start, in seconds, on a machine with room.
SOON = 1.0
#: The same for a task whose worker died.
RESCUE = 0.5
URGENT = 100


@dataclass(frozen=True, slots=True)
class Size:
    """How large a play is."""

    delayed: int  #: the tasks of the queue that waits for a retry
    backlog: int  #: the tasks of the others
    seconds: float  #: how long each of them takes
    rate: tuple[int, float]  #: the most starts in a window
    few: int  #: the tasks of a tenant with few tasks
    rounds: int  #: how often a worker is killed


SMALL = Size(80, 40, 0.15, (8, 1.0), few=8, rounds=3)
DEEP = Size(3000, 1500, 0.01, (50, 1.0), few=50, rounds=25)


class Play:
    """What happened, by queue."""

    def __init__(self, theatre: Theatre, queues: Sequence[str]) -> None:
        self._histories = {queue: theatre.history(queue) for queue in queues}
        self.pace = Pace(theatre.history(PROBES))

    def __getitem__(self, queue: str) -> History:
        return self._histories[queue]


# --- the plays --------------------------------------------------------------------------------------------------------

DELAYED, RATED = "delayed", "rated"
SHARED = {"shared-1": 1, "shared-2": 2}
FAIR, FAIR_KEYS, FAIR_RATE = "fair", "fair-keys", "fair-rate"
KEYS, WINDOW = "keys", "window"
QUIET = (DELAYED, RATED, *SHARED, FAIR, FAIR_KEYS, FAIR_RATE, KEYS, WINDOW)
#: Longer than the time by which workers look ahead.
_BEYOND_HORIZON_MS = 11_000
#: The gate at which the backlogs wait until all others have been published.
_LATER = "later"


def play_quietly(theatre: Theatre, size: Size) -> Play:
    """Let tasks of all kinds wait for permits of two apps. Nobody dies."""
    for number, app in enumerate(("first", "first", "second", "second")):
        theatre.launch(f"w{number}", app, 20, "--executors", "1")
    theatre.wait_running()
    theatre.limit(DELAYED, concurrency=2)
    theatre.limit(RATED, rate=size.rate)
    for queue, most in SHARED.items():
        theatre.limit(queue, concurrency=most)
    theatre.limit(FAIR, concurrency=2)
    theatre.limit(FAIR_KEYS, concurrency=2, key_concurrency=1)
    theatre.limit(FAIR_RATE, rate=size.rate)
    for queue in (FAIR, FAIR_KEYS, FAIR_RATE):
        theatre.fair(queue)
    theatre.limit(KEYS, key_concurrency=1)
    theatre.limit(WINDOW, rate=(2, 1.0))
    theatre.publish(*probes(WORK, OTHER))
    _begin(theatre, size)
    for queue, most in {**SHARED, FAIR: 2, FAIR_KEYS: 2}.items():
        theatre.wait_held(queue, _LATER, most)
    # Its tasks hold no permits at the gate, but slots.
    theatre.publish(*_of_tenant(FAIR_RATE, "a", size.backlog, size, gate=_LATER))
    theatre.wait_held(FAIR_RATE, _LATER, size.rate[0])
    _come_later(theatre, size)
    theatre.open(_LATER)
    theatre.wait_ended(KEYS, "equal")
    theatre.open(KEYS)
    theatre.wait_done(QUIET)
    return Play(theatre, QUIET)


def _begin(theatre: Theatre, size: Size) -> None:
    """Publish the backlogs, and what is due only amid them."""
    for queue, backlog in ((DELAYED, size.delayed), (RATED, size.backlog)):
        theatre.publish(
            *(spec(queue, f"{n}", 2 * size.seconds if queue == DELAYED else 0.0) for n in range(backlog)),
            spec(queue, "delayed", priority=URGENT, delay=3.0),
            spec(queue, "retried", priority=URGENT, fails=1, retry_delay=_BEYOND_HORIZON_MS / 1000),
        )
    for queue in SHARED:
        theatre.publish(*(spec(queue, f"{n}", size.seconds, name=OTHER, gate=_LATER) for n in range(size.backlog)))
    for queue in (FAIR, FAIR_KEYS):
        theatre.publish(*_of_tenant(queue, "a", size.backlog, size, gate=_LATER))
    long = spec(KEYS, "long", priority=1, tenant="a", limit_key="k", gate=KEYS)
    theatre.publish(long, spec(KEYS, "next", tenant="a", limit_key="k"))
    theatre.publish(*(spec(WINDOW, f"{n}", name=ISOLATED) for n in range(8)))


def _of_tenant(queue: str, tenant: str, count: int, size: Size, gate: str | None = None) -> list[TaskSpec]:
    keys = (f"k{n % 5}" if queue == FAIR_KEYS else None for n in range(count))
    return [
        spec(queue, f"{tenant}{n}", size.seconds, tenant=tenant, limit_key=key, gate=gate) for n, key in enumerate(keys)
    ]


def _come_later(theatre: Theatre, size: Size) -> None:
    """Publish what is to go before the backlogs, or take turns with them."""
    for queue in SHARED:
        theatre.publish(*(spec(queue, f"urgent-{n}", priority=URGENT) for n in range(10)))
        for worker_id in ("w1", "w3"):
            name = OTHER if worker_id == "w3" else WORK
            named = (
                spec(queue, f"{worker_id}-{n}", name=name, priority=URGENT, specific_worker_ids=[worker_id])
                for n in range(3)
            )
            theatre.publish(*named)
    for tenant in "bc":
        for queue in (FAIR, FAIR_KEYS, FAIR_RATE):
            theatre.publish(*_of_tenant(queue, tenant, size.few, size))
    theatre.publish(spec(KEYS, "equal", tenant="b", limit_key="k"))


KILLED = {"killed-1": 1, "killed-2": 2}
ALONE, BACK = "alone", "back"
DYING = (*KILLED, ALONE, BACK)
#: The permits that handlers hold at a gate, by queue, when one of their workers dies.
_HELD = {**KILLED, ALONE: 1}


def play_dying(theatre: Theatre, size: Size) -> Play:
    """Kill workers amid backlogs, again and again, and end some in order."""
    for number in range(3):
        theatre.launch(f"w{number}", "first", 20, "--shutdown-timeout", "0.2")
    theatre.wait_running()
    for queue, most in {**KILLED, ALONE: 2, BACK: 3}.items():
        theatre.limit(queue, concurrency=most)
    theatre.publish(*probes(WORK))
    for queue in KILLED:
        theatre.publish(*(spec(queue, f"{n}", size.seconds, **SHORT) for n in range(size.backlog)))
    for number in range(size.rounds):
        _kill_one(theatre, number)
    theatre.wait_judged()
    theatre.publish(*(spec(BACK, f"holds-{n}", gate=BACK, **SHORT) for n in range(2)))
    held = theatre.wait_held(BACK, BACK, 2)
    theatre.publish(*(spec(BACK, f"{n}", size.seconds, **SHORT) for n in range(size.backlog // 2)))
    for worker_id in set(held.values()):
        theatre.terminate(worker_id)
        theatre.wait_running()
    theatre.open(BACK)
    theatre.wait_done(DYING)
    return Play(theatre, DYING)


def _kill_one(theatre: Theatre, number: int) -> None:
    """Kill a worker that holds the permit of one of the queues, in turn, and wait until its tasks run again.

    Meanwhile handlers hold all permits of the queues with a backlog: a claim that came to nothing could hold a permit
    for long.
    """
    gate = f"round-{number}"
    for queue, most in _HELD.items():
        theatre.publish(*(spec(queue, f"{gate}-{n}", priority=1, gate=gate, **SHORT) for n in range(most)))
    held = {queue: theatre.wait_held(queue, gate, most) for queue, most in _HELD.items()}
    victim = next(iter(held[list(_HELD)[number % len(_HELD)]].values()))
    theatre.kill(victim)
    for task_id in [task_id for tasks in held.values() for task_id, worker in tasks.items() if worker == victim]:
        eventually(partial(_was_rescued, theatre, task_id), PATIENCE, f"{task_id} runs again")
    theatre.wait_running()
    theatre.open(gate)


def _was_rescued(theatre: Theatre, task_id: str) -> bool:
    return theatre.tasks.count_documents({"_id": task_id, "task_state.worker_states.1": {"$exists": True}}) == 1


# --- what must be -----------------------------------------------------------------------------------------------------


def judged(play: Play, queue: str) -> Judgement:
    judgement = judge(play[queue], play.pace.tolerance(), urgent=URGENT)
    assert not judgement.violations, str(judgement)
    assert judgement.starts
    return judgement


def delays_of(judgement: Judgement, *waits: str) -> list[Delay]:
    return [delay for delay in judgement.delays if delay.wait in waits]


def check_delayed(play: Play, queue: str) -> None:
    judgement = judged(play, queue)
    # The task that is tried again is urgent, too: its first start counts as well.
    assert (len(delays_of(judgement, "first")), len(delays_of(judgement, "again"))) == (2, 1)
    assert play.pace.beyond(judgement.delays)[-1] <= SOON, judgement.delays


def check_shared(play: Play, queue: str) -> None:
    judgement = judged(play, queue)
    assert len(delays_of(judgement, "first")) == 16
    assert play.pace.beyond(judgement.delays)[-1] <= SOON, judgement.delays


def check_turns(play: Play, queue: str) -> None:
    judged(play, queue)
    history = play[queue]
    last = {tenant: max(task.runs[-1].claimed for task in history.tasks if task.tenant == tenant) for tenant in "abc"}
    assert max(last["b"], last["c"]) < last["a"], "the tenant with the long backlog was done first"


def check_rescues(play: Play, queue: str, least: int) -> None:
    rescues = delays_of(judged(play, queue), "lapse")
    assert len(rescues) >= least
    assert share(play.pace.beyond(rescues), 0.99) <= RESCUE, rescues


@pytest.fixture(scope="module")
def quiet(mongo_server: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Play quietly, once for all tests of it."""
    with open_theatre(mongo_server, tmp_path_factory.mktemp("quiet"), (*QUIET, PROBES)) as theatre:
        return play_quietly(theatre, SMALL)


@pytest.fixture(scope="module")
def dying(mongo_server: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Play with deaths, once for all tests of it."""
    with open_theatre(mongo_server, tmp_path_factory.mktemp("dying"), (*DYING, PROBES)) as theatre:
        return play_dying(theatre, SMALL)


@pytest.mark.parametrize("queue", [DELAYED, RATED])
def test_urgent_task_takes_the_next_permit_when_its_delay_is_over(queue: str, quiet: Play) -> None:
    check_delayed(quiet, queue)


@pytest.mark.parametrize("queue", [*SHARED])
def test_urgent_tasks_of_one_app_take_the_next_permits_whoever_returns_them(queue: str, quiet: Play) -> None:
    check_shared(quiet, queue)


@pytest.mark.parametrize("queue", [FAIR, FAIR_KEYS, FAIR_RATE])
def test_tenant_waits_for_no_more_than_one_turn_of_each_other(queue: str, quiet: Play) -> None:
    check_turns(quiet, queue)


def test_equal_limit_keys_of_two_tenants_are_two_keys(quiet: Play) -> None:
    judged(quiet, KEYS)
    runs = {task.id.rpartition("/")[2]: task.runs[0] for task in quiet[KEYS].tasks}
    assert runs["equal"].ended < runs["long"].ended
    assert runs["next"].claimed >= runs["long"].ended


def test_handlers_in_executors_never_start_more_often_than_allowed(quiet: Play) -> None:
    assert judged(quiet, WINDOW).starts == 8


@pytest.mark.parametrize("queue", KILLED)
def test_tasks_of_a_killed_worker_take_the_next_permits(queue: str, dying: Play) -> None:
    check_rescues(dying, queue, SMALL.rounds // len(_HELD))


def test_task_of_a_killed_worker_is_rescued_at_once_where_permits_are_free(dying: Play) -> None:
    check_rescues(dying, ALONE, SMALL.rounds // len(_HELD))


def test_tasks_that_were_handed_back_keep_their_place(dying: Play) -> None:
    back = delays_of(judged(dying, BACK), "hand-back")
    assert {delay.task_id.rpartition("/")[2] for delay in back} >= {"holds-0", "holds-1"}
    assert not [delay for delay in back if delay.overtaken], back
    assert dying.pace.beyond(back)[-1] <= SOON, back


@pytest.mark.long
@pytest.mark.timeout(900)
def test_order_is_kept_amid_deep_backlogs(mongo_server: ReplicaSet, tmp_path: Path) -> None:
    with open_theatre(mongo_server, tmp_path, (*QUIET, PROBES)) as theatre:
        play = play_quietly(theatre, DEEP)
    for queue in (DELAYED, RATED):
        check_delayed(play, queue)
    for queue in SHARED:
        check_shared(play, queue)
    for queue in (FAIR, FAIR_KEYS, FAIR_RATE):
        check_turns(play, queue)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_order_is_kept_amid_many_deaths(mongo_server: ReplicaSet, tmp_path: Path) -> None:
    with open_theatre(mongo_server, tmp_path, (*DYING, PROBES)) as theatre:
        play = play_dying(theatre, DEEP)
    for queue in _HELD:
        check_rescues(play, queue, DEEP.rounds // len(_HELD))
